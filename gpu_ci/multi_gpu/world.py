"""The processes of a job: on CUDA each with a GPU and NCCL, on a CPU with gloo and megatron's CPU harness."""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mcore_patches.cpu import parallel, shim
from mcore_patches.cpu.launch import INIT_METHOD_VARIABLE

# Seconds that a collective may take. Ranks build kernels while others wait for them.
COLLECTIVE_SECONDS = 150.0


@contextlib.contextmanager
def joined(device: str) -> Iterator[torch.device]:
    """This process ready for :func:`model_parallel` on "cuda" or "cpu"; yields its device.

    With more ranks than GPUs several share one, which NCCL refuses: such a job must not open a layout of CUDA.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # What should run on kernels must not pass on the path beside them.
    warnings.filterwarnings("error", message=".*takes the chunked path", category=RuntimeWarning)
    if device == "cpu":
        with shim.cpu_megatron(allow_cuda=True):
            yield torch.device("cpu")
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    with shim.package_stand_ins():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=os.environ[INIT_METHOD_VARIABLE],
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
        )
        yield torch.device("cuda", index)
        # Only after success: a rank that failed must end at once, so that the launcher ends the others.
        barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def model_parallel(device: torch.device, tp: int = 1, cp: int = 1, pp: int = 1) -> Iterator[parallel.Layout]:
    """Megatron's process groups of a layout, any number of times one after the other."""
    if device.type == "cpu":
        with parallel.model_parallel(tp, cp, pp, timeout=COLLECTIVE_SECONDS) as layout:
            yield layout
        return
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
    )
    model_parallel_cuda_manual_seed(1234)
    yield parallel.Layout(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tp=tp,
        cp=cp,
        pp=pp,
        dp=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )
    barrier()
    parallel_state.destroy_model_parallel()
    get_cuda_rng_tracker().reset()


def barrier() -> None:
    """Wait for all ranks, on the host."""
    dist.all_reduce(torch.zeros(1))


def gathered(value: Any) -> list[Any]:
    """What each rank passes, in order of rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Most memory that torch's tensors of this rank took since `reset_peak`, GiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
