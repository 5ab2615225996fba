"""Memory of a part of a program, read at marks that the program sets.

On CUDA the caching allocator keeps count. On a CPU the profiler records every event of torch's allocator, those inside
an operator and of a backward pass included, so nothing is sampled or estimated there either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "mcore_patches.demo.mark:"


@dataclass(frozen=True)
class Reading:
    """At one mark. live: bytes held. peak: most bytes held at a time since the mark before."""

    label: str
    live: int
    peak: int


class Meter(Protocol):
    def mark(self, label: str) -> None:
        """Take a reading."""

    def readings(self) -> list[Reading]:
        """All of them in order of time, once measuring has ended. Only differences of their bytes mean anything."""


@contextmanager
def measured(device: torch.device) -> Iterator[Meter]:
    """Measure the memory of `device` inside the block. Not for nesting."""
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    meter = _CpuMeter()
    with meter.profiler:
        yield meter


class _CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readings: list[Reading] = []

    def mark(self, label: str) -> None:
        live = torch.cuda.memory_allocated(self._device)
        self._readings.append(Reading(label, live, torch.cuda.max_memory_allocated(self._device)))
        torch.cuda.reset_peak_memory_stats(self._device)

    def readings(self) -> list[Reading]:
        return self._readings


class _CpuMeter:
    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def mark(self, label: str) -> None:
        with record_function(_MARK + label):
            pass

    def readings(self) -> list[Reading]:
        readings, live, peak = [], 0, 0
        for event in sorted(self._events(), key=lambda event: event.start_ns()):
            name = event.name()
            if name.startswith(_MARK):
                readings.append(Reading(name.removeprefix(_MARK), live, peak))
                peak = live
            else:
                live += event.nbytes()
                peak = max(peak, live)
        return readings

    def _events(self) -> Iterator[Any]:
        # Only the raw events carry sizes in order of time; the public tables hold sums per operator.
        recorded: Any = self.profiler.profiler
        for event in recorded.kineto_results.events():
            on_cpu = event.device_type() == torch.autograd.DeviceType.CPU
            if (event.name() == "[memory]" and on_cpu) or event.name().startswith(_MARK):
                yield event
