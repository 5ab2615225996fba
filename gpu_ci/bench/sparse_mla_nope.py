"""NoPE layers at long context: time and peak memory of the fused call, beside the bytes of the dense fallback.

python -m gpu_ci.bench.sparse_mla_nope [--save] [--tokens 32768] [--heads 32]
"""

from __future__ import annotations

import argparse

import torch

import mcore_patches
from gpu_ci.bench import results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures to results.csv")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--topk", type=int, default=2048)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    mcore_patches.apply_patches("sparse_mla_nope", strict=True)
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    mcore_patches.require_applied("sparse_mla_nope")
    tokens, heads, topk = options.tokens, options.heads, options.topk
    query = torch.randn(tokens, 1, heads, 512, device="cuda").bfloat16().requires_grad_()
    key = torch.randn(tokens, 1, 1, 512, device="cuda").bfloat16().requires_grad_()
    visible = torch.arange(1, tokens + 1, device="cuda")[:, None]
    ids = (torch.rand(tokens, topk, device="cuda") * visible).to(torch.int32)[None]
    grad = torch.randn(tokens, 1, heads, 512, device="cuda").bfloat16()

    def step() -> tuple[float, float]:
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        query.grad = key.grad = None
        start.record()
        out = tilelang_dsa.fused_sparse_mla_absorbed(query, key, ids, 512**-0.5, 512)
        middle.record()
        out.backward(grad)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(middle), middle.elapsed_time(end)

    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    query.grad = key.grad = None
    base = torch.cuda.memory_allocated()
    times = sorted(step() for _ in range(5))
    peak = torch.cuda.max_memory_allocated() - base
    case = f"T{tokens}-H{heads}-D512-K{topk}"
    rows = [
        results.row("sparse_mla_nope", case, "forward", times[2][0], "ms"),
        results.row("sparse_mla_nope", case, "backward", sorted(t[1] for t in times)[2], "ms"),
        results.row("sparse_mla_nope", case, "peak memory above inputs, gradients included", peak / 2**30, "GiB"),
        results.row("sparse_mla_nope", case, "scores of the dense fallback", 4 * heads * tokens**2 / 2**30, "GiB"),
    ]
    print(results.table(rows))
    if options.save:
        results.save(rows)


if __name__ == "__main__":
    main()
