"""Atomic and ordered backward of sparse MLA side by side, by length, and where the ordered one spends its time.

    python -m gpu_ci.kernels.order_probe [--save] [--heads 64,16,128] [--widths 576,512] [--rows 16384,32768,49152]

`mcore_patches.ops.sparse_mla.ordering` takes its limits from this. Prints milliseconds of both, their ratio, the size
of the fp32 dKV, and milliseconds of the ordered one's kernels. Under two minutes on one H200 with kernels built.
"""

import argparse
import functools
import itertools

from gpu_ci.bench import results
from gpu_ci.bench.options import whole_numbers
from gpu_ci.kernels.sparse_mla_probe import inputs, median_ms, random_causal

SCALE, TOPK = 0.04, 2048


def by_kernel(function):
    """Milliseconds of each kernel of one call, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    took = {e.key.removeprefix("sparse_mla_"): e.device_time_total / 1e3 for e in record.key_averages()}
    return {name[:24]: ms for name, ms in sorted(took.items(), key=lambda item: -item[1]) if ms > 0.05}


def measure(rows, heads, width, ids):
    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    q, kv, _, dout = inputs(1, rows, rows, heads, TOPK, width)
    out, lse = kernels.forward(q, kv, ids, SCALE, 512, deterministic=True)
    backward = functools.partial(kernels.backward, q, kv, ids, out, lse, dout, SCALE, 512, False)
    atomic = median_ms(lambda: backward(ordered=False), 5)
    ordered = median_ms(lambda: backward(ordered=True), 5)
    mib = 4 * rows * width / 2**20
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in by_kernel(lambda: backward(ordered=True)).items())
    print(f"T{rows} H{heads} D{width}: atomic {atomic:.2f}, ordered {ordered:.2f}, {ordered / atomic:.3f}", end="")
    print(f" ({mib:.0f} MiB)  {parts}", flush=True)
    case = f"T{rows}-H{heads}-D{width}-K{TOPK}"
    return [
        results.row("order_probe", case, "ours, atomic: backward", atomic, "ms"),
        results.row("order_probe", case, "ours, deterministic: backward", ordered, "ms"),
        results.row("order_probe", case, "backward, deterministic / atomic", ordered / atomic, ""),
    ]


def main():
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="write the figures to results.csv")
    parser.add_argument("--heads", type=whole_numbers(1), default="64,16,128")
    parser.add_argument("--widths", type=whole_numbers(512), default="576,512")
    parser.add_argument("--rows", type=whole_numbers(TOPK), default="16384,32768,49152")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this probe needs a CUDA device")
    shapes = list(itertools.product(options.widths, options.heads))
    for rows in options.rows:
        ids = random_causal(rows, TOPK)[None]
        for width, heads in shapes:
            figures = measure(rows, heads, width, ids)
            if options.save:
                results.save(figures)


if __name__ == "__main__":
    main()
