"""Builds each TileLang kernel of sparse GQA once. No length of a call is in a key: other lengths build nothing anew."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_patches.ops.jit import CACHE, TRACING, compile_kernel
from mcore_patches.ops.sparse_gqa.design import BackwardTiles, Design, RowShape, Tiles

OP = "sparse_gqa"
DTYPE = "bfloat16"
# Every barrier is written out: those that TileLang would add sit inside the loops that gather.
OWN_BARRIERS = {"tl.disable_thread_storage_sync": True, "tl.disable_warp_specialized": True}
FAST_MATH = {**OWN_BARRIERS, "tl.enable_fast_math": True}
# Every access is guarded by hand.
GUARDED = {**FAST_MATH, "tl.disable_safe_memory_legalize": True}
PLAIN = {**FAST_MATH, "tl.disable_tma_lower": True}
# Blocks that are put in order in one pass over a row's ids, in words of 32.
ORDER_WORDS = 2048


@dataclass(frozen=True)
class Shape:
    """What the code of the kernels depends on. topk_class: a bound on the blocks of a row, see the function."""

    arch: str
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    topk_class: int
    multiprocessors: int = 132  # of the device; in no key

    @property
    def row(self) -> RowShape:
        return RowShape(self.kv_heads, self.heads // self.kv_heads, self.dim, self.block_size)

    @property
    def heads_of_kernel(self) -> dict[str, Any]:
        """Arguments that most builders take."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "dtype": DTYPE}

    @property
    def key(self) -> tuple[Any, ...]:
        """What the keys of all kernels of this shape begin with."""
        return (OP, self.arch, self.heads, self.kv_heads, self.dim, self.block_size)


def topk_class(topk: int) -> int:
    """A bound on `topk` that takes few values: 512 times a power of two.

    Selections of short documents have fewer columns than the budget; kernels serve all up to the bound.
    """
    return 512 << max(0, (topk - 1).bit_length() - 9)


@dataclass(frozen=True)
class Specification:
    """A kernel to build: the module of its builder, the builder and its arguments."""

    module: str
    builder: str
    arguments: Mapping[str, Any]
    pass_configs: Mapping[str, bool]


def specifications(shape: Shape, design: Design) -> dict[str, Specification]:
    """The kernels of a shape by name. Those of the backward have names that begin with "backward"."""
    if design.plain is None:
        hopper = _forward_specifications(shape, design.forward) | _backward_specifications(shape, design.backward)
        return hopper | _shared_specifications(shape, design.backward)
    return _plain_specifications(shape, design) | _shared_specifications(shape, design.backward)


def _plan_specification(shape: Shape, tiles: Tiles) -> Specification:
    arguments = {
        "rows": tiles.rows,
        "block_size": shape.block_size,
        "keys": tiles.keys,
        "entries": tiles.capacity(shape.topk_class, shape.block_size),
        "words": tiles.words,
    }
    return Specification("tilelang_plan", "plan", arguments, OWN_BARRIERS)


def _forward_specifications(shape: Shape, tiles: Tiles) -> dict[str, Specification]:
    common = shape.heads_of_kernel | {"rows": tiles.rows, "block_size": shape.block_size, "keys": tiles.keys}
    row = {"k_stages": tiles.k_stages, "v_stages": tiles.v_stages, "blocks_per_sm": tiles.blocks_per_sm}
    return {
        "plan": _plan_specification(shape, tiles),
        "union_forward": Specification(
            "tilelang_union_forward", "union_forward", common | {"stages": tiles.stages}, FAST_MATH
        ),
        "row_forward": Specification("tilelang_row_forward", "row_forward", common | row, FAST_MATH),
    }


def _backward_specifications(shape: Shape, tiles: BackwardTiles) -> dict[str, Specification]:
    union, heads = tiles.union, shape.heads_of_kernel
    selection = {"rows": union.rows, "block_size": shape.block_size, "keys": union.keys}
    partial = {"kv_heads": shape.kv_heads, "dim": shape.dim, "dtype": DTYPE, "keys": union.keys, "slots": tiles.slots}
    window = {"rows": tiles.window_rows, "stages": tiles.window_stages}
    return {
        "backward_plan": _plan_specification(shape, union),
        "backward_union": Specification(
            "tilelang_union_backward", "union_backward", heads | selection | {"slots": tiles.slots}, FAST_MATH
        ),
        "backward_reduce": Specification("tilelang_reduce", "reduce_partials", partial, FAST_MATH),
        "backward_row": Specification("tilelang_row_backward", "row_backward", heads | selection, FAST_MATH),
        "backward_window": Specification("tilelang_window_backward", "window_backward", heads | window, GUARDED),
    }


def _shared_specifications(shape: Shape, tiles: BackwardTiles) -> dict[str, Specification]:
    """What the backward of every GPU takes."""
    order = {"rows": tiles.union.rows, "block_size": shape.block_size, "words": ORDER_WORDS}
    return {
        "backward_delta": Specification("tilelang_delta", "delta", {"dim": shape.dim, "dtype": DTYPE}, FAST_MATH),
        "backward_order": Specification("tilelang_windows", "order_rows", order, OWN_BARRIERS),
        "backward_list": Specification("tilelang_windows", "list_windows", {}, OWN_BARRIERS),
    }


def _plain_specifications(shape: Shape, design: Design) -> dict[str, Specification]:
    plain, backward, heads = design.plain, design.backward, shape.heads_of_kernel
    assert plain is not None
    block, threads = {"block_size": shape.block_size}, {"threads": plain.threads}
    forward = block | threads | {"keys": plain.forward_keys}
    row = block | threads | {"rows": backward.union.rows, "keys": plain.row_keys}
    window = {"rows": backward.window_rows, "stages": plain.window_stages, "threads": plain.window_threads}
    module = "tilelang_plain_backward"
    return {
        "row_forward": Specification("tilelang_plain_forward", "plain_forward", heads | forward, PLAIN),
        "backward_row": Specification(module, "plain_row_backward", heads | row, PLAIN),
        "backward_window": Specification(module, "plain_window_backward", heads | window, PLAIN),
    }


class Kernels:
    """The kernels of one shape, each built when first asked for."""

    def __init__(self, shape: Shape, design: Design) -> None:
        self.shape = shape
        self.design = design
        self._specifications = specifications(shape, design)

    def __getitem__(self, name: str) -> Any:
        """The kernel called `name`.

        Raises:
            KernelBuildError: it does not compile.
        """
        specification = self._specifications[name]
        key = (*self.shape.key, name, *specification.arguments.values())
        return CACHE.get(key, lambda: _build(key, specification, self.shape.arch))

    def named_builds(self) -> dict[str, Callable[[], Any]]:
        """What builds each kernel, by its name."""
        return {name: functools.partial(self.__getitem__, name) for name in self._specifications}

    def builds(self, *, backward: bool) -> list[Callable[[], Any]]:
        """What builds each kernel of the forward, and of the backward if asked for."""
        return [build for name, build in self.named_builds().items() if backward or not name.startswith("backward")]


def _build(key: tuple[Any, ...], specification: Specification, arch: str) -> Any:
    builder = getattr(importlib.import_module(f"{__package__}.{specification.module}"), specification.builder)
    with TRACING:
        function = builder(**specification.arguments)
    return compile_kernel(key, function, arch=arch, pass_configs=specification.pass_configs)
