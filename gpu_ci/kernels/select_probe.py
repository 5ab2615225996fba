"""Correctness, then times, of the kernels behind select_blocks, in about 80 seconds on one H200.

    python gpu_ci/kernels/select_probe.py [--tokens 16384,65536,262144] [--skip-checks] [--attention]

The checks are a part of gpu_ci/test_block_topk_kernels.py. Keys are independent ("random"), alike over hundreds of
blocks ("clustered"), or all the same ("ties"). The floor is the scores' products alone at the rate of a large matrix
product measured in the same run. --attention adds the sparse attention's forward on correlated selections at 64k, whose
kernels take half a minute to build. RESULT lines come last again, together.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

HEADS, CHANNELS, RATIO, TOPK = 4, 128, 4, 512
CHECKS = "ties_equal or only_at_the_cut or chunks or all_scores or together_or_apart or graph or guards or inside"
LINES: list[str] = []


def result(line: str) -> None:
    LINES.append(f"RESULT {line}")
    print(LINES[-1], flush=True)


def run_tests(path: str, expression: str, seconds: float) -> None:
    """The tests of `path` that `expression` names, in at most `seconds`; their last lines."""
    command = [sys.executable, "-m", "pytest", path, "-m", "h100", "-q", "-k", expression, "-p", "no:cacheprovider"]
    try:
        import xdist  # noqa: F401

        command += ["-n", "8"]
    except ImportError:
        pass
    started = time.time()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as stopped:
        text, code = (stopped.stdout or b"").decode(), -1
    print("\n".join(text.splitlines()[-(60 if code else 3) :]), flush=True)
    last = text.strip().splitlines()[-1] if text.strip() else "no output"
    result(f"{'ok  ' if code == 0 else 'FAIL'} checks: {last} [{time.time() - started:.0f} s]")


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Median time of a call on the device, after one that is not timed."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernel_times(run: Callable[[], object], most: int = 6) -> str:
    """Device time by kernel of one call, the largest first, with the number of launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total.setdefault(event.name.removesuffix("_kernel")[:32], []).append(event.time_range.elapsed_us() / 1e3)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:most]
    return ", ".join(f"{name} {sum(times):.2f} ({len(times)})" for name, times in ranked)


def matrix_tflops() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / milliseconds(lambda: a @ a, 5) / 1e9


def inputs(tokens: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = tokens // RATIO
    q = torch.randn(tokens, HEADS, CHANNELS, device="cuda")
    k = torch.randn(blocks, CHANNELS, device="cuda")
    if kind == "clustered":
        k += 2 * torch.randn(blocks // 256 + 1, CHANNELS, device="cuda").repeat_interleave(256, dim=0)[:blocks]
    if kind == "ties":
        q, k = -torch.ones_like(q), torch.ones_like(k)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    return q.bfloat16(), k.bfloat16(), pos, torch.zeros_like(pos)


def time_selection(tokens: int, kind: str, tflops: float) -> None:
    from mcore_patches.ops.block_topk import select_blocks

    arguments = inputs(tokens, kind)

    def run() -> Tensor:
        return select_blocks(*arguments, ratio=RATIO, topk=TOPK, backend="tilelang")

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = milliseconds(run)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    pairs = tokens * (tokens // RATIO) / 2
    floor = 2 * pairs * HEADS * CHANNELS / tflops / 1e9
    result(
        f"time T {tokens} {kind}: {ms:.2f} ms, {ms / floor:.2f} x the floor of {floor:.2f} ms, "
        f"{2 * pairs * HEADS * CHANNELS / ms / 1e9:.0f} TFLOP/s, peak {peak:.2f} GiB"
    )
    result(f"  by kernel: {kernel_times(run)}")


def time_attention(tokens: int) -> None:
    from gpu_ci.bench.selections import block_selection
    from mcore_patches.ops.sparse_gqa import sparse_gqa

    ids = block_selection(tokens, "correlated", topk=TOPK, block_size=RATIO)
    q = torch.randn(tokens, 24, 256, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 2, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")

    def run() -> object:
        return sparse_gqa(q, k, v, ids, pos, torch.zeros_like(pos), scale=1 / 16, block_size=RATIO, backend="tilelang")

    result(f"time T {tokens} correlated: sparse attention forward {milliseconds(run):.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16384,65536,262144")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--attention", action="store_true")
    arguments = parser.parse_args()
    started = time.time()
    if not arguments.skip_checks:
        run_tests("gpu_ci/test_block_topk_kernels.py", CHECKS, 70)
    tflops = matrix_tflops()
    result(f"matrix product of 8192: {tflops:.0f} TFLOP/s")
    for tokens in map(int, arguments.tokens.split(",")):
        for kind in ("random", "clustered", "ties"):
            time_selection(tokens, kind, tflops)
    if arguments.attention:
        time_attention(65536)
    print("\n=== " + "\n".join(["results", *LINES, f"[{time.time() - started:.0f} s]"]))
    sys.exit(any("FAIL" in line for line in LINES))


if __name__ == "__main__":
    main()
