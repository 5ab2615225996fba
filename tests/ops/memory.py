"""Peak memory of a function, measured at the allocator, for the tests of bounded memory."""

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """Largest number of CPU bytes that `function()` holds at one time beyond those held before it, its result included.

    The allocator's own events are summed, so temporaries inside an operator, a custom op or a backward pass are seen,
    which no dispatch mode would show. Call the function once before, where its first call allocates caches.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    # Only the raw events carry sizes in order of time; the public tables hold sums per operator.
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            peak = max(peak, live)
    return peak
