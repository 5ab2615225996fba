"""`select_blocks` on TileLang: which arguments the kernels take, how they are built, and their launches."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.arguments import check_bool, check_dtype, check_sizes, verify_not_nan
from mcore_patches.ops.block_topk.design import (
    DTYPES,
    GROUP,
    INVISIBLE,
    ScoreTiles,
    rows_at_once,
    score_specification,
    score_tiles,
    select_tiles,
    splits_of_a_tile,
    topk_capacity,
)
from mcore_patches.ops.device import cuda_device, device_of
from mcore_patches.ops.jit import CACHE, TRACING, build_together, compile_kernel, import_fault
from mcore_patches.ops.packing import complete_blocks
from mcore_patches.ops.workspace import chunks, readable

KERNELS_DEVICE = "cuda"
_INFINITY = 0x7F800000  # the key of a score of +inf; a GPU's NaN lies above
new_empty = torch.empty  # a name of its own, for tests that put guards around buffers


def supports(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    ratio: int,
    topk: int,
    weights: Tensor | None = None,
    relu: bool = True,
) -> tuple[bool, str]:
    """Whether the kernels run these arguments of `select_blocks`, and why not. No value is read, nothing compiled."""
    if q_idx.device.type != KERNELS_DEVICE:
        return False, f"q_idx is on {q_idx.device}, the kernels need {KERNELS_DEVICE}"
    if missing := import_fault():
        return False, missing
    if q_idx.shape[0] == 0 or k_blocks.shape[0] == 0:
        return False, f"there is nothing to select: q_idx {tuple(q_idx.shape)}, k_blocks {tuple(k_blocks.shape)}"
    device = device_of(q_idx.device)
    tiles = score_tiles(device.arch, device.shared_bytes, q_idx.dtype, q_idx.shape[1], q_idx.shape[2], topk)
    if isinstance(tiles, str):
        return False, tiles
    fault = CACHE.failure_of("block_topk.score", device.arch, *q_idx.shape[1:], q_idx.dtype)
    fault = fault or CACHE.failure_of("block_topk.select", device.arch, topk_capacity(topk))
    return fault is None, fault or "the kernels take these arguments"


def score_kernel(
    arch: str, dtype: torch.dtype, heads: int, channels: int, tiles: ScoreTiles, weighted: bool, relu: bool
) -> Any:
    """The compiled scoring kernel, built on the first call.

    Raises:
        KernelBuildError: it does not compile.
    """
    key = ("block_topk.score", arch, heads, channels, dtype, tiles, weighted, relu)

    def build() -> Any:
        module, builder, arguments = score_specification(
            tiles, heads=heads, channels=channels, dtype=DTYPES[dtype], weighted=weighted, relu=relu
        )
        source = importlib.import_module(module)
        with TRACING:
            function = getattr(source, builder)(**arguments)
        return compile_kernel(key, function, arch=arch, pass_configs=source.PASS_CONFIGS)

    return CACHE.get(key, build)


def select_kernel(arch: str, capacity: int) -> Any:
    """The compiled selection, built on the first call.

    Raises:
        KernelBuildError: it does not compile.
    """
    key = ("block_topk.select", arch, capacity)

    def build() -> Any:
        from mcore_patches.ops.block_topk import tilelang_select

        with TRACING:
            function = tilelang_select.select_kernel(capacity=capacity, **asdict(select_tiles(capacity)))
        return compile_kernel(key, function, arch=arch, pass_configs=tilelang_select.PASS_CONFIGS)

    return CACHE.get(key, build)


@functools.cache
def _kernels(*scoring: Any, capacity: int) -> tuple[Any, Any]:
    """Both kernels, built side by side; `scoring` as in `score_kernel`."""
    builds = _builds(*scoring, capacity=capacity)
    build_together(builds)
    return builds[0](), builds[1]()


def _builds(*scoring: Any, capacity: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return functools.partial(score_kernel, *scoring), functools.partial(select_kernel, scoring[0], capacity)


def warmup(
    heads: int,
    channels: int,
    *,
    topk: int,
    weighted: bool = False,
    relu: bool = True,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Build both kernels of a shape side by side; seconds it took, 0 if both were built. The first call does the same.

    Of several processes on one host one compiles and the others load.

    Args:
        heads, channels, dtype: of q_idx. weighted: whether there are weights.

    Raises:
        TypeError, ValueError: a size is no int or below 1, a flag no bool, or there are no kernels for the shape or the
            device.
        KernelBuildError: one of them does not compile.
    """
    check_sizes("select_blocks", heads=heads, channels=channels, topk=topk)
    check_bool("select_blocks", "weighted", weighted)
    check_bool("select_blocks", "relu", relu)
    check_dtype("select_blocks", "dtype", dtype)
    described = device_of(cuda_device("select_blocks", device))
    tiles = score_tiles(described.arch, described.shared_bytes, dtype, heads, channels, topk)
    if isinstance(tiles, str):
        raise ValueError(f"select_blocks: {tiles}")
    before = CACHE.builds
    scoring = described.arch, dtype, heads, channels, tiles, weighted, relu
    seconds = build_together(_builds(*scoring, capacity=topk_capacity(topk)))
    return seconds if CACHE.builds > before else 0.0


@torch.compiler.disable
def select_blocks_tilelang(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    ratio: int,
    topk: int,
    weights: Tensor | None,
    relu: bool,
    checked: bool = False,
    row_chunk: int | None = None,
) -> Tensor:
    """Arguments and result as in `select_blocks`; `row_chunk` replaces the number of rows that are scored at once.

    Raises:
        KernelBuildError: a kernel does not compile; `supports` declines from then on.
    """
    (num_rows, heads, channels), num_blocks = q_idx.shape, k_blocks.shape[0]
    device = device_of(q_idx.device)
    tiles = score_tiles(device.arch, device.shared_bytes, q_idx.dtype, heads, channels, topk)
    assert isinstance(tiles, ScoreTiles)
    scoring = device.arch, q_idx.dtype, heads, channels, tiles, weights is not None, relu
    score, select = _kernels(*scoring, capacity=topk_capacity(topk))
    new = functools.partial(new_empty, dtype=torch.int32, device=q_idx.device)
    width = -(-num_blocks // tiles.blocks) * tiles.blocks
    at_once = rows_at_once(num_rows, tiles, width) if row_chunk is None else row_chunk
    keys, maxima, ids = new(at_once, width), new(at_once, width // GROUP), new(num_rows, topk)
    queries, index_keys = readable(q_idx), readable(k_blocks)
    # A kernel that leaves an argument alone wants one with an address all the same.
    no_weights = queries.new_empty(1, heads, dtype=torch.float32)
    head_weights = None if weights is None else weights.detach().contiguous()
    row_first, row_count = row_block_start.contiguous(), complete_blocks(row_pos, ratio).contiguous()
    nan_rows = []
    for rows in chunks(num_rows, at_once):
        number = rows.stop - rows.start
        placement = row_first[rows], row_count[rows]
        if checked:
            maxima.fill_(INVISIBLE)
        score(
            queries[rows],
            index_keys,
            no_weights if head_weights is None else head_weights[rows],
            *placement,
            keys[:number].view(number, -1, tiles.blocks),
            maxima[:number].view(number, -1, tiles.blocks // GROUP),
            0 if checked else topk,  # rows with fewer blocks take all of them unseen
            splits_of_a_tile(number, tiles, width, device.multiprocessors),
        )
        if checked:
            nan_rows.append((maxima[:number] > _INFINITY).any(dim=1))
        select(keys[:number], maxima[:number].view(-1), *placement, ids[rows])
    if checked:
        what = "scores of visible blocks (from q_idx, k_blocks, weights)"
        verify_not_nan("select_blocks", torch.cat(nan_rows), what)
    return ids
