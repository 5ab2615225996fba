"""Check the sparse GQA kernels on the GPU at hand against the oracle, then time them beside dense cuDNN attention.

    python -m gpu_ci.kernels.sparse_gqa_probe [--check] [--time] [--tokens 16384 65536]

Every check draws fresh inputs; a variant that fails is reported and the others go on. The table comes last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from gpu_ci.bench.selections import block_selection, overlap
from mcore_patches.ops.sparse_gqa import tilelang_kernels as kernels
from mcore_patches.ops.sparse_gqa.naive import sparse_gqa_naive

HEADS, KV_HEADS, DIM, TOPK, RATIO = 24, 2, 256, 512, 4
TABLE: list[str] = []


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    say(line)
    TABLE.append(line)


def attempt(name: str, run: Callable[[], None]) -> None:
    started = time.perf_counter()
    try:
        run()
    except Exception as error:
        traceback.print_exc(limit=-4)
        note(f"FAILED {name}: {type(error).__name__} {str(error).strip().splitlines()[-1][:200] if str(error) else ''}")
    say(f"  [{name}: {time.perf_counter() - started:.1f} s]")


def packed_case(lengths: list[int], topk: int, ratio: int, heads: int, kv_heads: int, dim: int, seed: int):
    """Packed documents with padding rows inside and behind, empty rows, wild ids, a sink that most rows pick."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    pos, start, at = [], [], 0
    for i, n in enumerate(lengths):
        pos += list(range(n))
        start += [at] * n
        at += n
        if i % 2:
            pos += [-1] * 3
            start += [0] * 3
    row_pos = torch.tensor(pos, dtype=torch.int32, device="cuda")
    row_start = torch.tensor(start, dtype=torch.int32, device="cuda")
    rows = len(pos)
    ids = torch.full((rows, topk), -1, dtype=torch.int32, device="cuda")
    for i in range(rows):
        complete = (pos[i] + 1) // ratio
        take = min(topk, complete)
        if i % 17 == 5:
            continue
        chosen = torch.randperm(max(complete, 1), device="cuda", generator=g)[:take]
        if take and i % 3:
            chosen = torch.cat((chosen[chosen != 0], chosen.new_zeros(1)))[-take:]
        ids[i, : len(chosen) if complete else 0] = chosen.sort().values.int() if complete else chosen[:0].int()
        if i % 11 == 3 and take < topk:
            ids[i, take] = complete + 5
    normal = lambda *size: torch.randn(size, device="cuda", generator=g).bfloat16()  # noqa: E731
    return (
        normal(rows, heads, dim),
        normal(at + 3, kv_heads, dim),
        normal(at + 3, kv_heads, dim),
        ids,
        row_pos,
        row_start,
    )


def worst(name: str, got: Tensor, want: Tensor) -> str:
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return f"{name} FINITE-MISMATCH {int((finite != torch.isfinite(got)).sum())}"
    got, want = got[finite].double(), want[finite].double()
    return f"{name} rel {float((got - want).norm() / want.norm()):.2e} max {float((got - want).abs().max()):.2e}"


def check_forward(
    label: str, tiles: kernels.Tiles, share: float, heads: int, kv_heads: int, dim: int, ratio: int
) -> None:
    q, k, v, ids, pos, start = packed_case(
        [1, 3, 4, 41, 7, 130, 2, 400, 61, 33], 16, ratio, heads, kv_heads, dim, seed=int(time.time()) % 2**20
    )
    k[-3:] = v[-3:] = float("nan")
    q[pos < 0] = float("nan")
    scale = dim**-0.5
    plan = kernels.make_plan(ids, pos, start, ratio, tiles, limit=int(share * (ids.shape[1] + 1)))
    out, lse = kernels.forward(q, k, v, ids, pos, start, scale, ratio, tiles=tiles, plan=plan)
    torch.cuda.synchronize()
    want_out, want_lse = sparse_gqa_naive(
        q.double(), k.double(), v.double(), ids, pos, start, scale=scale, block_size=ratio
    )
    shared = float((plan.count >= 0).float().mean())
    errors = f"{worst('out', out, want_out)} {worst('lse', lse, want_lse)}"
    note(f"check {label} share<={share}: tiles shared {shared:.2f} {errors}")
    again, _ = kernels.forward(q, k, v, ids, pos, start, scale, ratio, tiles=tiles, plan=plan)
    if not torch.equal(out, again):
        note(f"check {label}: two runs differ")


def milliseconds(run: Callable[[], object], repeats: int = 5) -> float:
    run()
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


def dense_forward(tokens: int) -> float:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, KV_HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        try:
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            run()
        except RuntimeError:
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return milliseconds(run, 3)


def time_forward(tokens: int, kind: str, dense: float, variants: dict[str, tuple[kernels.Tiles, list[float]]]) -> None:
    ids = block_selection(tokens, kind, topk=TOPK, block_size=RATIO)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    start = torch.zeros_like(pos)
    q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    jaccard, unions = overlap(ids, 32)
    note(f"T {tokens} {kind}: overlap {jaccard:.3f}, union { ({n: round(u, 2) for n, u in unions.items()}) }")

    def one(name: str, tiles: kernels.Tiles, share: float) -> None:
        limit = int(share * (TOPK + 1))
        plan_ms = milliseconds(lambda: kernels.make_plan(ids, pos, start, RATIO, tiles, limit=limit))
        plan = kernels.make_plan(ids, pos, start, RATIO, tiles, limit=limit)
        ms = milliseconds(
            lambda: kernels.forward(q, k, v, ids, pos, start, DIM**-0.5, RATIO, tiles=tiles, plan=plan), 3
        )
        shared = plan.count >= 0
        load = float(plan.count.clamp(min=0).sum() / shared.sum().clamp(min=1) / (TOPK + 1))
        note(
            f"  {name:<8} share<={share:<4} shared {float(shared.float().mean()):.2f} of load {load:.2f}:"
            f" plan {plan_ms:.2f} ms, forward {ms:.2f} ms, together {(ms + plan_ms) / dense:.3f} of dense"
        )

    for name, (tiles, shares) in variants.items():
        for share in shares:
            attempt(f"time {tokens} {kind} {name} {share}", lambda n=name, t=tiles, s=share: one(n, t, s))


def inverse_gather(tokens: int, group_blocks: int) -> None:
    """Rate of reading the rows that picked one of `group_blocks` neighbouring blocks: the floor of dK and dV."""
    from gpu_ci.kernels.gather_rows import build, kernel_source_bytes

    ids = block_selection(tokens, "random", topk=TOPK, block_size=RATIO)
    row = torch.arange(tokens, device="cuda")[:, None].expand_as(ids)
    valid = ids >= 0
    pairs = torch.unique((ids[valid].long() // group_blocks) * tokens + row[valid])
    groups = tokens // RATIO // group_blocks
    bounds = torch.searchsorted(pairs, torch.arange(groups + 1, device="cuda") * tokens).int()
    rows = (pairs % tokens).int()
    q, do = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sink = torch.zeros(groups, KV_HEADS, device="cuda", dtype=torch.float32)
    kernel = build(HEADS, KV_HEADS, DIM)
    ms = milliseconds(lambda: kernel(q, do, rows, bounds, sink), 3)
    moved = len(rows) * kernel_source_bytes(HEADS, DIM)
    rate = f"{len(rows) / 1e6:.1f} M rows, {moved / ms / 1e9:.2f} TB/s"
    note(f"gather Q,dO T {tokens} blocks {group_blocks}: {ms:.1f} ms, {rate}")


def build_ahead(cases: list[tuple[int, int, int, int, int, kernels.Tiles]]) -> None:
    """Compile at once what the checks and timings need; failures show again, with their case, when it runs."""
    arch = "sm_90a"
    jobs = []
    for heads, kv_heads, dim, topk, ratio, tiles in cases:
        shape = (heads, kv_heads, dim, torch.bfloat16, topk, ratio, tiles, arch)
        jobs += [
            lambda t=topk, r=ratio, ts=tiles: kernels.plan_kernel(t, r, ts, arch),
            lambda s=shape: kernels.union_forward_kernel(*s),
            lambda s=shape: kernels.row_forward_kernel(*s),
        ]
    with ThreadPoolExecutor(8) as pool:
        for outcome in [pool.submit(job) for job in jobs]:
            if outcome.exception() is not None:
                note(f"FAILED build: {str(outcome.exception())[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="checks only")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 65536, 131072])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    base = kernels.choose_tiles(HEADS, KV_HEADS)
    checks = [
        ("H24-2 D256 r4", replace(base, share=20.0), 24, 2, 256, 4),
        ("H24-2 D256 r4 k1v1", replace(base, share=20.0, k_stages=1, v_stages=1, blocks_per_sm=3), 24, 2, 256, 4),
        ("H8-2 D128 r2", replace(kernels.choose_tiles(8, 2), share=20.0), 8, 2, 128, 2),
    ]
    roomy = replace(base, share=7.0)
    timed = [
        roomy,
        replace(roomy, k_stages=1, v_stages=1, blocks_per_sm=3),
        replace(roomy, k_stages=3, v_stages=3, blocks_per_sm=1),
    ]
    cases = [(h, g, d, 16, r, t) for _, t, h, g, d, r in checks]
    if not arguments.check:
        cases += [(HEADS, KV_HEADS, DIM, TOPK, RATIO, t) for t in timed]
    attempt("build", lambda: build_ahead(cases))
    for label, tiles, heads, kv_heads, dim, ratio in checks:
        for share in (0.0, 3.0, 20.0):
            attempt(
                f"check {label} {share}",
                lambda n=label, t=tiles, s=share, a=(heads, kv_heads, dim, ratio): check_forward(n, t, s, *a),
            )
    if not arguments.check:
        for tokens in arguments.tokens:
            dense = dense_forward(tokens)
            note(f"T {tokens}: dense cuDNN forward {dense:.2f} ms")
            main_shares = [4.0] if tokens != 65536 else [0.0, 4.0, 6.0]
            random_variants = {"k2v1x2": (roomy, main_shares)}
            if tokens == 65536:
                random_variants["k1v1x3"] = (timed[1], [4.0])
                random_variants["k3v3x1"] = (timed[2], [4.0])
            time_forward(tokens, "random", dense, random_variants)
            time_forward(tokens, "correlated", dense, {"k2v1x2": (roomy, [4.0])})
        for blocks in (1, 4):
            attempt(f"gather {blocks}", lambda b=blocks: inverse_gather(65536, b))
    print("\n=== " + torch.cuda.get_device_name() + "\n" + "\n".join(TABLE))
    sys.exit(any("FAILED" in line or "MISMATCH" in line or "differ" in line for line in TABLE))


if __name__ == "__main__":
    main()
