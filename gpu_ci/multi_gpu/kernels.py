"""All ranks of a host ask for the same kernels at the same time: one compiles each, the others load it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_ci.multi_gpu import verdict, world
from gpu_ci.multi_gpu.models import DSA, QSA, QSA_INDEXER
from gpu_ci.multi_gpu.plan import Job
from mcore_patches.cpu.rebinding import RebindingLog
from mcore_patches.ops import jit

RATIO, KV_HEADS, INDEX_HEADS = 4, 2, 4


def once_a_node(job: Job, device: torch.device, build: Callable[[torch.device], None] | None = None) -> dict[str, Any]:
    """The record of the job: who compiled how many of the kernels of the tiny models.

    build: in place of `build_all`, for tests; it compiles by `nvcc.compile_cuda` of tilelang.
    """
    with world.model_parallel(device), compiled() as names:
        world.barrier()
        (build or build_all)(device)
        entry = {"compiled": names, "keys": sorted(map(str, jit.CACHE.log.seconds)), "failed": dict(_failures())}
        ranks = world.gathered(entry)
    return {
        "name": job.name,
        "faults": verdict.build_faults(ranks),
        "compiled": [len(rank["compiled"]) for rank in ranks],
        "kernels": len(ranks[0]["keys"]),
    }


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """Names of the kernels whose CUDA code this process hands to nvcc inside: of the locks that they are built under.

    TileLang keeps results on disk and asks there first. Two kernels may have the same code: names tell them apart.
    """
    from tilelang.contrib import nvcc

    names: list[str] = []
    building = threading.local()
    host_lock, compile_cuda = jit.host_lock, nvcc.compile_cuda

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        with host_lock(name):
            building.name = name
            try:
                yield
            finally:
                building.name = None

    def counting(*args: Any, **settings: Any) -> Any:
        names.append(getattr(building, "name", None) or "outside our kernels")
        return compile_cuda(*args, **settings)

    log = RebindingLog()
    log.rebind(jit, "host_lock", named, "tells which kernel is being built")
    log.rebind(nvcc, "compile_cuda", counting, "tells what is compiled")
    try:
        yield names
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
    for key, reason in jit.CACHE.log.failures.items():
        yield str(key), reason
