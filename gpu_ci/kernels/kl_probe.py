"""Correctness, then times, of the kernels behind indexer_kl, in about 90 seconds on one H200.

    python gpu_ci/kernels/kl_probe.py [--tokens 16384,65536,262144] [--all-blocks 16384,65536] [--skip-checks]

The checks are a part of gpu_ci/test_indexer_kl_kernels.py. Times are of loss and all gradients over selected blocks, at
the sizes of the released model, on correlated and on random selections. RESULT lines come last again, together.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpu_ci.bench.selections import KINDS, block_selection  # noqa: E402
from gpu_ci.kernels.select_probe import LINES, kernel_times, milliseconds, result, run_tests  # noqa: E402

HEADS, CHANNELS, Q_HEADS, KV_HEADS, DIM, RATIO, TOPK = 4, 128, 24, 2, 256, 4, 512
CHECKS = "(equals and (D256 or H3)) or chunks or left_out or no_mass or inside or bit_for_bit"


def time_loss(tokens: int, kind: str) -> None:
    from mcore_patches.ops.indexer_kl.tilelang_backend import indexer_kl_tilelang

    ids = None
    if kind != "all":
        at_once = 1024 if tokens <= 65536 else 256
        ids = block_selection(tokens, kind, topk=TOPK, block_size=RATIO, rows_at_once=at_once)
    torch.cuda.empty_cache()
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q_idx, k_blocks = torch.randn(tokens, HEADS, CHANNELS, **bf16), torch.randn(tokens // RATIO, CHANNELS, **bf16)
    q, k = torch.randn(tokens, Q_HEADS, DIM, **bf16), torch.randn(tokens, KV_HEADS, DIM, **bf16)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    lse, zero = torch.full((tokens, Q_HEADS), 8.0, device="cuda"), torch.zeros_like(pos)

    def run() -> object:
        return indexer_kl_tilelang(
            q_idx, k_blocks, q, k, lse, ids, pos, zero, zero, scale=DIM**-0.5, index_scale=CHANNELS**-0.5, ratio=RATIO,
            weights=None, relu=True, valid=None, reduction="mean",
        )  # fmt: skip

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = milliseconds(run)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    result(f"time T {tokens} {kind}: {ms:.2f} ms, peak {peak:.2f} GiB")
    result(f"  by kernel: {kernel_times(run, 9)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16384,65536,262144")
    parser.add_argument("--all-blocks", default="16384,65536")
    parser.add_argument("--skip-checks", action="store_true")
    arguments = parser.parse_args()
    started = time.time()
    if not arguments.skip_checks:
        run_tests("gpu_ci/test_indexer_kl_kernels.py", CHECKS, 75)
    for tokens in map(int, arguments.tokens.split(",")):
        for kind in reversed(KINDS) if tokens <= 65536 else ("correlated",):
            time_loss(tokens, kind)
    for tokens in map(int, arguments.all_blocks.split(",")):
        time_loss(tokens, "all")
    print("\n=== " + "\n".join(["results", *LINES, f"[{time.time() - started:.0f} s]"]))
    sys.exit(any("FAIL" in line for line in LINES))


if __name__ == "__main__":
    main()
