"""What test_compile_once_a_node.py runs in two processes."""

from __future__ import annotations

from typing import Any

import torch

from gpu_ci.multi_gpu import kernels, plan, world
from mcore_patches.ops.jit import CACHE, compile_kernel


def build(device: torch.device) -> None:
    from mcore_patches.ops.sparse_mla import tilelang_delta

    key = ("delta", device.type)
    configs = tilelang_delta.PASS_CONFIGS
    CACHE.get(key, lambda: compile_kernel(key, tilelang_delta.delta_kernel(512), arch="sm_90a", pass_configs=configs))


def twice() -> list[dict[str, Any]]:
    """Records of two rounds, the second with the first one's kernels on disk."""
    job = plan.Job("warmup", "warmup", 2)
    with world.joined("cpu") as device:
        first = kernels.once_a_node(job, device, build)
        CACHE.clear()
        return [first, kernels.once_a_node(job, device, build)]
