"""What the overlay itself costs: import, apply_patches(), and host time added to a fused call.

    python -m gpu_ci.bench.overlay_cost [--save]

Import and apply are medians over fresh interpreters. Host time of a call is measured without waiting for the device:
megatron's function and the replacement alternate on the same inputs with the kernel replaced by a stand-in that returns
views, so that only what the overlay adds differs. One row: host time does not depend on how many there are, and on a
CPU, where the padding itself is host time too, little else is measured.
A CPU run masks ids by other operations than a CUDA run does: it says nothing of the launch that CUDA calls pay for.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from gpu_ci.bench import results

IMPORT = "import time; t = time.perf_counter(); import mcore_patches; print(time.perf_counter() - t)"
APPLY = """
import time
import torch, wrapt
import megatron.core.transformer.experimental_attention_variant.dsa_tilelang_kernels
import megatron.core.models.gpt.experimental_attention_variant_module_specs
t = time.perf_counter()
import mcore_patches
mcore_patches.apply_patches()
print(time.perf_counter() - t)
"""


def fresh(code: str, repeats: int) -> float:
    """Median seconds that `code` prints, over fresh interpreters; the first run warms the page cache and is dropped."""
    times = []
    for _ in range(repeats + 1):
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        times.append(float(out.split()[-1]))
    return statistics.median(times[1:])


def host_microseconds(width: int, topk: int, heads: int = 64, repeats: int = 2000) -> tuple[float, float]:
    """(megatron's own function, the replacement): microseconds of host time a call, medians of alternating batches."""
    import torch
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    import mcore_patches
    from mcore_patches.patches import sparse_mla_nope

    device = "cuda" if torch.cuda.is_available() else "cpu"

    class ViewOnly:
        @staticmethod
        def apply(q, kv, indices, scale):
            return q[..., :512], q[..., 0]

    q = torch.randn(1, 1, heads, width, device=device).bfloat16()
    k = torch.randn(128, 1, 1, width, device=device).bfloat16()
    ids = torch.randint(0, 128, (1, 1, topk), device=device, dtype=torch.int32)
    # The installed function sees the shape that it accepts; the replacement sees the one asked for.
    q0 = torch.randn(1, 1, heads, 576, device=device).bfloat16()
    k0 = torch.randn(128, 1, 1, 576, device=device).bfloat16()
    ids0 = torch.randint(0, 128, (1, 1, -(-topk // 64) * 64), device=device, dtype=torch.int32)
    original, runs_kernel = tilelang_dsa.fused_sparse_mla_absorbed, sparse_mla_nope._runs_kernel
    sparse_mla, tilelang_dsa.SparseMLA = tilelang_dsa.SparseMLA, ViewOnly
    sparse_mla_nope._runs_kernel = lambda query: True
    try:
        with mcore_patches.applied("sparse_mla_nope", strict=False):
            ours = tilelang_dsa.fused_sparse_mla_absorbed
            times: dict[str, list[float]] = {"original": [], "ours": []}
            for _ in range(repeats // 50):
                for name, f, args in (("original", original, (q0, k0, ids0)), ("ours", ours, (q, k, ids))):
                    t = time.perf_counter()
                    for _ in range(50):
                        f(*args, 0.1, 512)
                    times[name].append((time.perf_counter() - t) / 50 * 1e6)
                    if device == "cuda":
                        torch.cuda.synchronize()
    finally:
        tilelang_dsa.SparseMLA, sparse_mla_nope._runs_kernel = sparse_mla, runs_kernel
    return statistics.median(times["original"]), statistics.median(times["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures to results.csv")
    parser.add_argument("--repeats", type=int, default=7, help="fresh interpreters a figure")
    options = parser.parse_args()
    rows = [
        results.row("overlay_cost", "-", "import mcore_patches", fresh(IMPORT, options.repeats) * 1e3, "ms"),
        results.row(
            "overlay_cost", "-", "apply_patches() after megatron's imports", fresh(APPLY, options.repeats) * 1e3, "ms"
        ),
    ]
    for case, width, topk in (("D576-K2048", 576, 2048), ("D512-K2048", 512, 2048), ("D512-K2051", 512, 2051)):
        original, ours = host_microseconds(width, topk)
        rows.append(results.row("overlay_cost", case, "host time added to a fused call", ours - original, "us"))
    print(results.table(rows))
    if options.save:
        results.save(rows)


if __name__ == "__main__":
    main()
