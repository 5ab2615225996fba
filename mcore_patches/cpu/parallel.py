"""Gloo process groups and megatron's model parallelism on a CPU."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mcore_patches.cpu import shim
from mcore_patches.cpu.launch import INIT_METHOD_VARIABLE

__all__ = ["Layout", "destroy", "init_model_parallel", "model_parallel"]

_store: dist.Store | None = None
_generation = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups and this process's rank in each."""

    rank: int
    world: int
    tp: int
    cp: int
    pp: int
    dp: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int


def init_model_parallel(
    tp: int = 1, cp: int = 1, pp: int = 1, *, seed: int = 1234, timeout: float = 120.0, **groups: Any
) -> Layout:
    """Join the gloo world and build megatron's process groups and random tracker.

    The world comes from the environment: ``MCORE_CPU_INIT_METHOD`` with ``RANK`` and ``WORLD_SIZE`` (set by
    :mod:`mcore_patches.cpu.launch`), or torchrun's variables, or, without any, this process alone. What the
    product of the sizes leaves of the world is data parallel. Call :func:`destroy` before another layout.

    Args:
        tp, cp, pp: tensor-, context- and pipeline-parallel sizes.
        seed: for ``model_parallel_cuda_manual_seed``, which seeds torch too.
        timeout: seconds a collective may take.
        groups: passed on to ``megatron.core.parallel_state.initialize_model_parallel``.

    Raises:
        RuntimeError: the CPU shim is off, or model parallelism is initialised already.
        ValueError: a size is below 1, or the world is not a multiple of their product.
    """
    global _generation
    if not shim.is_enabled():
        raise RuntimeError("init_model_parallel needs the CPU shim: call it inside cpu_megatron() or after enable()")
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already: call destroy() first")
    for name, size in (("tp", tp), ("cp", cp), ("pp", pp)):
        if size < 1:
            raise ValueError(f"{name}={size}: a parallel size is at least 1")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world % (tp * cp * pp):
        raise ValueError(f"tp={tp} x cp={cp} x pp={pp} does not divide the world of {world} process(es)")

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # One rendezvous serves every layout of this process's life; the prefix keeps them apart.
    _generation += 1
    store = dist.PrefixStore(f"layout{_generation}", _rendezvous(rank, world, timeout))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, **groups
        )
        model_parallel_cuda_manual_seed(seed)
    except BaseException:
        destroy(synchronize=False)
        raise
    return Layout(
        rank=rank,
        world=world,
        tp=tp,
        cp=cp,
        pp=pp,
        dp=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def destroy(*, synchronize: bool = True) -> None:
    """Take down model parallelism and the gloo world; does nothing when there is none.

    Args:
        synchronize: first wait for all ranks, so that none leaves while another still receives from it.
            False after a failure, when other ranks may never come.
    """
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if synchronize:
        dist.barrier()
    parallel_state.destroy_model_parallel()
    get_cuda_rng_tracker().reset()
    dist.destroy_process_group()


@contextlib.contextmanager
def model_parallel(tp: int = 1, cp: int = 1, pp: int = 1, **options: Any) -> Iterator[Layout]:
    """:func:`init_model_parallel` for the block, :func:`destroy` after it, inside the CPU shim."""
    with shim.cpu_megatron():
        layout = init_model_parallel(tp, cp, pp, **options)
        try:
            yield layout
        except BaseException:
            destroy(synchronize=False)
            raise
        destroy()


def _rendezvous(rank: int, world: int, timeout: float) -> dist.Store:
    global _store
    if _store is None:
        init_method = os.environ.get(INIT_METHOD_VARIABLE)
        if init_method is None and "MASTER_ADDR" in os.environ:
            init_method = "env://"
        if init_method is not None:
            _store, _, _ = next(dist.rendezvous(init_method, rank, world, timeout=datetime.timedelta(seconds=timeout)))
        elif world == 1:
            _store = dist.HashStore()
        else:
            raise RuntimeError(
                f"WORLD_SIZE={world} but neither {INIT_METHOD_VARIABLE} nor MASTER_ADDR says where the ranks meet"
            )
    return _store
