"""One process, ready to train megatron models on CUDA if there is any and else, through the CPU harness, on the CPU."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist

import mcore_patches
from mcore_patches.demo.outcome import DemoError


@contextlib.contextmanager
def training_device() -> Iterator[torch.device]:
    """Megatron's model parallelism of size 1 on the device to train on, taken down afterwards. One thread on a CPU."""
    if not torch.cuda.is_available():
        from mcore_patches.cpu.parallel import model_parallel

        with model_parallel(), _one_thread():
            yield torch.device("cpu")
        return
    from mcore_patches.cpu.shim import package_stand_ins

    with package_stand_ins(), _cuda_model_parallel():
        yield torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """For people: the GPU's name, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # In models so small more threads mostly wait for each other: on two busy cores that took four times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _cuda_model_parallel() -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        get_cuda_rng_tracker().reset()
        dist.destroy_process_group()


@contextlib.contextmanager
def patched(patch_id: str) -> Iterator[None]:
    """With the patch in place, taken off afterwards.

    Raises:
        DemoError: it cannot be put in place, or has nothing to do here, as without the kernels that it feeds.
    """
    with mcore_patches.applied(patch_id, strict=False) as report:
        row = report[patch_id]
        if row in report.errors:
            raise DemoError(f"demo {patch_id}: its patch is {row.state} here: {row.reason}")
        mcore_patches.require_applied(patch_id)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the notices of optional packages that megatron and torch give on import; errors still show."""
    loggers = [logging.getLogger(name) for name in ("megatron", "torch.utils.cpp_extension")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
