"""The TileLang kernels of `indexer_kl`: how they are built, once for each shape."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Mapping
from typing import Any

from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl.design import Shape, teacher_slots
from mcore_patches.ops.jit import CACHE, build_together, compile_kernel

OP = "indexer_kl"
_ORDER = "mcore_patches.ops.sparse_mla.tilelang_ordered"
# Kernels compile side by side, but are traced into TileLang's intermediate form one at a time.
_TRACING = threading.Lock()


def specifications(shape: Shape, shared_bytes: int) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Of each kernel its module, its builder and the builder's arguments."""
    index = {"heads": shape.heads, "channels": shape.channels, "dtype": shape.index_dtype, "weighted": shape.weighted}
    attention = {"heads": shape.q_heads, "kv_heads": shape.kv_heads, "dim": shape.dim, "dtype": shape.dtype}
    blocks = {"ratio": shape.ratio}
    slots = {"slots": teacher_slots(shared_bytes, shape.q_heads, shape.dim)}
    row = {"capacity": shape.capacity, "relu": shape.relu}
    return {
        "union": (f"{__package__}.tilelang_union", "union_kernel", blocks),
        "teacher": (f"{__package__}.tilelang_teacher", "teacher_kernel", attention | blocks | slots),
        "student": (f"{__package__}.tilelang_student", "student_kernel", index | row),
        "blocks": (f"{__package__}.tilelang_blocks", "blocks_kernel", index),
        **{name: (_ORDER, f"{name}_kernel", {}) for name in ("mark", "rank", "locate")},
    }


@functools.cache
def kernels(device: Device, shape: Shape) -> Mapping[str, Any]:
    """The compiled kernels by name, built side by side on the first call.

    Raises:
        KernelBuildError: one of them does not compile.
    """
    builds = {
        name: functools.partial(_get, (OP, device.arch, shape, name), *specification)
        for name, specification in specifications(shape, device.shared_bytes).items()
    }
    build_together(list(builds.values()))
    return {name: build() for name, build in builds.items()}


def failure(device: Device, shape: Shape) -> str:
    """Why a kernel of the shape did not compile, or nothing."""
    return CACHE.failure_of(OP, device.arch, shape) or ""


def _get(key: tuple[Any, ...], module: str, builder: str, arguments: dict[str, Any]) -> Any:
    return CACHE.get(key, functools.partial(_build, key, module, builder, arguments))


def _build(key: tuple[Any, ...], module: str, builder: str, arguments: dict[str, Any]) -> Any:
    source = importlib.import_module(module)
    with _TRACING:
        function = getattr(source, builder)(**arguments)
    return compile_kernel(key, function, arch=key[1], pass_configs=source.PASS_CONFIGS)
