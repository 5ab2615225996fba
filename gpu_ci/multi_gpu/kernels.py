"""All ranks of a host ask for the same kernels at the same time: one compiles each, the others load it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_ci.multi_gpu import verdict, world
from gpu_ci.multi_gpu.models import DSA, QSA, QSA_INDEXER
from gpu_ci.multi_gpu.plan import Job
from mcore_patches.cpu.rebinding import RebindingLog
from mcore_patches.ops.jit import CACHE

RATIO, KV_HEADS, INDEX_HEADS = 4, 2, 4


def once_a_node(job: Job, device: torch.device, build: Callable[[torch.device], None] | None = None) -> dict[str, Any]:
    """The record of the job: who compiled how many of the kernels of the tiny models.

    build: in place of `build_all`, for tests; it compiles by `nvcc.compile_cuda` of tilelang.
    """
    with world.model_parallel(device), compiled() as codes:
        world.barrier()
        (build or build_all)(device)
        entry = {"codes": codes, "keys": sorted(map(str, CACHE.log.seconds)), "failed": dict(_failures())}
        ranks = world.gathered(entry)
    return {
        "name": job.name,
        "faults": verdict.build_faults(ranks),
        "compiled": [len(rank["codes"]) for rank in ranks],
        "kernels": len(ranks[0]["keys"]),
    }


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """Digests of the CUDA code that this process hands to nvcc inside. TileLang keeps results on disk and asks there
    first."""
    from tilelang.contrib import nvcc

    codes: list[str] = []
    lock, compile_cuda = threading.Lock(), nvcc.compile_cuda

    def counting(code: str, *args: Any, **settings: Any) -> Any:
        with lock:
            codes.append(hashlib.sha256(code.encode()).hexdigest()[:16])
        return compile_cuda(code, *args, **settings)

    log = RebindingLog()
    log.rebind(nvcc, "compile_cuda", counting, "tells what is compiled")
    try:
        yield codes
    finally:
        log.undo()


def build_all(device: torch.device) -> None:
    """Our kernels of the tiny models, undivided and for two tensor-parallel ranks."""
    from mcore_patches.ops import sparse_gqa, sparse_mla

    qsa, topk = QSA["cuda"], QSA_INDEXER["cuda"]["qsa_indexer_budget"] // RATIO
    for tp in (1, 2):
        sparse_gqa.tilelang_backend.warmup(
            qsa["num_attention_heads"] // tp,
            KV_HEADS // tp,
            qsa["kv_channels"],
            block_size=RATIO,
            topk=topk,
            device=device,
        )
        sparse_mla.tilelang_kernels.warmup(device, width=576, heads=DSA["cuda"]["num_attention_heads"] // tp)
    _select_and_compare(device, topk)


def _select_and_compare(device: torch.device, topk: int) -> None:
    """The indexer's kernels have no warmup; their first call builds them."""
    from mcore_patches.ops.block_topk import select_blocks
    from mcore_patches.ops.indexer_kl import indexer_kl

    heads, dim, channels = QSA["cuda"]["num_attention_heads"], QSA["cuda"]["kv_channels"], 128
    tokens = 4 * topk * RATIO
    pos = torch.arange(tokens, dtype=torch.int32, device=device)
    start = torch.zeros_like(pos)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    q_idx, k_blocks = normal(tokens, INDEX_HEADS, channels), normal(tokens // RATIO, channels)
    ids = select_blocks(q_idx, k_blocks, pos, start, ratio=RATIO, topk=topk, backend="tilelang")
    q, k = normal(tokens, heads, dim), normal(tokens, KV_HEADS, dim)
    lse = torch.zeros(tokens, heads, device=device)
    scale = dim**-0.5
    rows = (pos, start, start)
    indexer_kl(q_idx, k_blocks, q, k, lse, ids, *rows, scale=scale, ratio=RATIO, backend="tilelang").item()


def _failures() -> Iterator[tuple[str, str]]:
    for key, reason in CACHE.log.failures.items():
        yield str(key), reason
