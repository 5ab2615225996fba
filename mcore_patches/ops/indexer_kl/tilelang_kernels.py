"""The TileLang kernels of `indexer_kl`: how they are built, once for each shape."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl.design import Shape, gradient_tiles, student_blocks_per_sm
from mcore_patches.ops.jit import CACHE, TRACING, build_together, compile_kernel

OP = "indexer_kl"
_ORDER = "mcore_patches.ops.sparse_mla.tilelang_ordered"


Specification = tuple[str, str, dict[str, Any]]


def specifications(shape: Shape) -> dict[str, Specification]:
    """Of each kernel its module, its builder and the builder's arguments.

    Those of all visible blocks are there where capacity is 0, those of selected blocks elsewhere.
    """
    index = {"heads": shape.heads, "channels": shape.channels, "weighted": shape.weighted}
    attention: dict[str, Any] = {
        "heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "dim": shape.dim,
        "dtype": shape.dtype,
    }
    attention |= {"ratio": shape.ratio, "per_token": shape.ranks}
    plain = shape.plain
    if plain is None:
        found = {"teacher": _specification("teacher", attention | {"slots": shape.slots})}
    else:
        attention |= {"keys": plain.keys, "stages": plain.stages, "resident": plain.resident}
        found = {"teacher": _specification("plain_teacher", attention)}
    if shape.capacity:
        row = {"capacity": shape.capacity, "relu": shape.relu}
        return found | {
            "union": _specification("union", {"ratio": shape.ratio}),
            "gather": _specification("gather", {"width": shape.masses_of_a_block}),
            **{name: (_ORDER, f"{name}_kernel", {}) for name in ("mark", "rank", "locate")},
            **(_many_heads(shape, index | row) if shape.many_heads else _few_heads(shape, index, row)),
        }
    found["rows"] = _specification("rows", {})
    return found | _gradients(shape, index | {"relu": shape.relu})


def _gradients(shape: Shape, index: dict[str, Any]) -> dict[str, Specification]:
    """Those of all visible blocks."""
    tiles, plain = gradient_tiles(shape.channels), shape.plain
    if plain is None:
        query = {"tile_blocks": tiles.blocks, "stages": tiles.stages}
        return {
            "query_gradient": _specification("query_gradient", index | query),
            "key_gradient": _specification("key_gradient", index | {"slots": tiles.slots}),
        }
    query = {"rows": plain.query_rows, "tile_blocks": plain.query_blocks, "stages": plain.query_stages}
    key = {"tile_blocks": plain.key_blocks, "slots": plain.key_slots}
    return {
        "query_gradient": _specification("plain_query_gradient", index | query),
        "key_gradient": _specification("plain_key_gradient", index | key),
    }


def _few_heads(shape: Shape, index: dict[str, Any], row: dict[str, Any]) -> dict[str, Specification]:
    typed = index | {"dtype": shape.index_dtype}
    return {
        "student": _specification("student", typed | row | {"blocks_per_sm": student_blocks_per_sm(shape)}),
        "blocks": _specification("blocks", typed),
    }


def _many_heads(shape: Shape, arguments: dict[str, Any]) -> dict[str, Specification]:
    return {
        "many_heads": _specification("many_heads" if shape.plain is None else "plain_many_heads", arguments),
        "sum": (_ORDER, "sum_kernel", {"width": shape.channels, "parts_of_entry": 1}),
    }


def _specification(name: str, arguments: dict[str, Any]) -> Specification:
    return f"{__package__}.tilelang_{name}", f"{name}_kernel", arguments


@functools.cache
def kernels(device: Device, shape: Shape) -> Mapping[str, Any]:
    """The compiled kernels by name, built side by side on the first call.

    Raises:
        KernelBuildError: one of them does not compile.
    """
    builds = named_builds(device, shape)
    build_together(list(builds.values()))
    return {name: build() for name, build in builds.items()}


def named_builds(device: Device, shape: Shape) -> dict[str, Callable[[], Any]]:
    """What builds each kernel, by its name."""
    return {
        name: functools.partial(_get, (OP, device.arch, shape, name), *specification)
        for name, specification in specifications(shape).items()
    }


def failure(device: Device, shape: Shape) -> str:
    """Why a kernel of the shape did not compile, or nothing."""
    fault = CACHE.failure_of(OP, device.arch, shape)
    if fault is None and not shape.capacity:
        fault = CACHE.failure_of("block_topk.score", device.arch, shape.heads, shape.channels, torch.bfloat16)
    return fault or ""


def _get(key: tuple[Any, ...], module: str, builder: str, arguments: dict[str, Any]) -> Any:
    return CACHE.get(key, functools.partial(_build, key, module, builder, arguments))


def _build(key: tuple[Any, ...], module: str, builder: str, arguments: dict[str, Any]) -> Any:
    source = importlib.import_module(module)
    with TRACING:
        function = getattr(source, builder)(**arguments)
    return compile_kernel(key, function, arch=key[1], pass_configs=source.PASS_CONFIGS)
