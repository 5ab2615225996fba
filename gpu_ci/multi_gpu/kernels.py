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
    from mcore_patches.ops.block_topk import tilelang_backend as block_topk
    from mcore_patches.ops.indexer_kl import tilelang_backend as indexer_kl
    from mcore_patches.ops.sparse_gqa import tilelang_backend as sparse_gqa
    from mcore_patches.ops.sparse_mla import tilelang_kernels as sparse_mla

    qsa, channels = QSA["cuda"], QSA_INDEXER["cuda"]["qsa_indexer_head_dim"]
    topk = QSA_INDEXER["cuda"]["qsa_indexer_budget"] // RATIO
    block_topk.warmup(INDEX_HEADS, channels, topk=topk, device=device)
    for tp in (1, 2):
        heads = qsa["num_attention_heads"] // tp, KV_HEADS // tp, qsa["kv_channels"]
        sparse_gqa.warmup(*heads, block_size=RATIO, topk=topk, device=device)
        indexer_kl.warmup(INDEX_HEADS, channels, *heads, ratio=RATIO, topk=topk, ranks=tp > 1, device=device)
        sparse_mla.warmup(device, width=576, heads=DSA["cuda"]["num_attention_heads"] // tp)


def _failures() -> Iterator[tuple[str, str]]:
    for key, reason in CACHE.log.failures.items():
        yield str(key), reason
