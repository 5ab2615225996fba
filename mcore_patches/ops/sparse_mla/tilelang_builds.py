"""The TileLang kernels of sparse MLA by name, and what a first call builds of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mcore_patches.ops.device import Device, SparseMLADesign, sparse_mla_design
from mcore_patches.ops.jit import CACHE, TRACING, Key, build_together, compile_kernel

VALUE_WIDTH = 512


def design_of(device: Device, width: int, heads: int) -> SparseMLADesign:
    design = sparse_mla_design(device.arch, device.shared_bytes, torch.bfloat16, width, VALUE_WIDTH, heads)
    if isinstance(design, str):
        raise ValueError(f"sparse_mla: {design}")
    return design


def kernel(name: str, device: Device, width: int, **shape: Any) -> Any:
    """The compiled kernel called `name`, built on the first call; `shape` is what its builder takes besides widths.

    With `tiles` it is the plain forward or backward, else that for Hopper.

    Raises:
        KernelBuildError: it does not compile for the device's architecture.
    """
    key = ("sparse_mla", device.arch, width, name, *shape.values())
    return CACHE.get(key, functools.partial(_build, key, name, device.arch, width, shape))


def _build(key: Key, name: str, arch: str, width: int, shape: dict[str, Any]) -> Any:
    from mcore_patches.ops.sparse_mla import (
        tilelang_backward,
        tilelang_delta,
        tilelang_extent,
        tilelang_few_heads,
        tilelang_forward,
        tilelang_ordered,
        tilelang_plain_backward,
        tilelang_plain_forward,
    )

    plain = "tiles" in shape
    source: Any
    build: Callable[..., Any]
    if name == "forward":
        source = tilelang_plain_forward if plain else tilelang_forward
        build = functools.partial(source.forward_kernel, width, VALUE_WIDTH)
    elif name == "backward" and plain:
        source = tilelang_plain_backward
        build = functools.partial(source.backward_kernel, width, VALUE_WIDTH)
    elif name == "backward" and shape["head_rows"] == tilelang_few_heads.HEAD_ROWS:
        source, shape = tilelang_few_heads, {n: v for n, v in shape.items() if n != "head_rows"}
        build = functools.partial(source.backward_kernel, width, VALUE_WIDTH)
    elif name == "backward":
        source, build = tilelang_backward, functools.partial(tilelang_backward.backward_kernel, width, VALUE_WIDTH)
    elif name == "delta":
        source, build = tilelang_delta, functools.partial(tilelang_delta.delta_kernel, VALUE_WIDTH)
    elif name == "extent":
        source, build = tilelang_extent, tilelang_extent.extent_kernel
    elif name == "sum":
        source, build = tilelang_ordered, functools.partial(tilelang_ordered.sum_kernel, width)
    else:
        source, build = tilelang_ordered, getattr(tilelang_ordered, f"{name}_kernel")
    with TRACING:
        function = build(**shape)
    return compile_kernel(key, function, arch=arch, pass_configs=source.PASS_CONFIGS)


@functools.cache
def build_first(device: Device, width: int, heads: int, strided: bool, ordered: bool, forward: bool) -> None:
    build_together(first_builds(device, width, heads, strided, ordered, forward))


def first_builds(
    device: Device, width: int, heads: int, strided: bool, ordered: bool, forward: bool
) -> list[Callable[[], Any]]:
    """All that a backward of this kind takes, and where `forward` its forward, those that take longest first."""
    design = design_of(device, width, heads)
    names: list[tuple[str, dict[str, Any]]] = [
        ("backward", {"reduction": reduction_of(ordered), **backward_shape(design, heads, strided)})
    ]
    if forward:
        names.append(("forward", forward_shape(design, strided)))
    names += [("delta", {}), ("extent", {})]
    if ordered:
        names += [("mark", {}), ("rank", {}), ("locate", {})]
        names.append(("sum", {"parts_of_entry": head_blocks_of(heads, device, width)}))
    return [functools.partial(kernel, name, device, width, **values) for name, values in names]


def reduction_of(ordered: bool) -> str:
    return "store" if ordered else "atomic"


def head_blocks_of(heads: int, device: Device, width: int) -> int:
    return -(-heads // design_of(device, width, heads).backward_heads)


def forward_shape(design: SparseMLADesign, strided: bool) -> dict[str, Any]:
    """What the forward is built for. strided: Q is not contiguous, which the Hopper kernels take as it is."""
    return {"strided": strided} if design.forward is None else {"tiles": design.forward}


def backward_shape(design: SparseMLADesign, heads: int, strided: bool) -> dict[str, Any]:
    """What the backward is built for besides `reduction`."""
    return head_rows(heads) | {"strided": strided} if design.backward is None else {"tiles": design.backward}


def head_rows(heads: int) -> dict[str, int]:
    """How many heads the Hopper backward is built for. Up to 16 it is another kernel."""
    return {"head_rows": 16 if heads <= 16 else 32 if heads <= 32 else 64}
