"""Launches of the backward of sparse GQA on TileLang. No host synchronisation.

On Hopper tiles of rows that share blocks go to the union kernel, as in the forward but with tiles of its own. It leaves
partial sums of dK and dV in a scratch buffer, chunk by chunk of tiles, and a reduction adds them up.

The other rows are taken chunk by chunk. A row kernel gives dQ and stores P and dS; dK and dV come from windows of keys,
which gather Q and dO of the rows that attend them and multiply by what was stored.

Every sum has a fixed order: repeated calls give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_patches.ops.sparse_gqa.design import WINDOW, BackwardTiles, even_group
from mcore_patches.ops.sparse_gqa.tilelang_forward import Plan, Rows, make_plan
from mcore_patches.ops.sparse_gqa.tilelang_kernels import Kernels


@dataclass(frozen=True)
class Inputs:
    """Contiguous tensors of a call: q, dout [Tq, Hq, D], k, v [Tk, Hkv, D], lse, delta [Tq, Hq]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


def backward(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    *,
    limit: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv like q, k, v, which with `out` and `lse` are as in the forward; all contiguous.

    `limit` as in `make_plan`.
    """
    dim = q.shape[2]
    delta = torch.empty_like(lse)
    kernels["backward_delta"](out.view(-1, dim), dout.view(-1, dim), delta.view(-1))
    inputs = Inputs(q, k, v, dout, lse, delta)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    union = kernels.design.backward.union
    if kernels.design.plain is None:
        plan = make_plan(kernels, "backward_plan", rows, union, limit)
        _add_shared(kernels, inputs, rows, plan, scale, dq, dk, dv)
        count = plan.count
    else:
        count = torch.full((-(-len(q) // union.rows),), -1, dtype=torch.int32, device=q.device)
    _add_single(kernels, inputs, rows, count, scale, dq, dk, dv)
    return dq, dk.mul_(scale).to(k.dtype), dv.to(v.dtype)


def _add_shared(
    kernels: Kernels, inputs: Inputs, rows: Rows, plan: Plan, scale: float, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """dq of the tiles that share, and what they add to dk (without the scale) and dv."""
    tiles = kernels.design.backward
    (tokens, kv_heads, dim), dtype, device = inputs.k.shape, inputs.k.dtype, inputs.k.device
    chunks = deal_chunks(plan.count, tiles, rows.block_ids.shape[1], kernels.shape.block_size)
    partial = torch.empty((chunks.steps, kv_heads, 2, dim // 8, tiles.union.keys, 8), dtype=dtype, device=device)
    place = torch.zeros((tokens, tiles.slots), dtype=torch.int32, device=device)
    sources = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.lse, inputs.delta
    lists = plan.count, plan.first, plan.info, rows.pos, chunks.tile_of, chunks.offset
    for chunk in range(len(chunks.tile_of)):
        kernels["backward_union"](*sources, *lists, dq, partial, place, chunk, scale)
        kernels["backward_reduce"](partial, place, chunks.tiles, dk, dv, chunk)


def _add_single(
    kernels: Kernels, inputs: Inputs, rows: Rows, count: Tensor, scale: float, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """dq of the rows of tiles with a `count` below 0, and what they add to dk (without the scale) and dv."""
    tiles, shape, topk = kernels.design.backward, kernels.shape.row, rows.block_ids.shape[1]
    windows = -(-len(inputs.k) // WINDOW)
    size = tiles.chunk_rows(shape, len(inputs.q), len(inputs.k), topk, kernels.shape.multiprocessors)

    def new(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=dq.device)

    ordered, selected = new(size, topk), new(size)
    bits, ranks, entries, listed = (
        new(2 * windows, size).zero_(),
        new(windows, size),
        new(windows, size, 4),
        new(windows),
    )
    stored_size = 2, size, shape.kv_heads, shape.ranks(topk), even_group(shape.group)
    stored = torch.empty(stored_size, dtype=dq.dtype, device=dq.device)
    single = torch.nn.functional.pad(count < 0, (0, -len(count) % (size // tiles.union.rows)))
    singles = single.view(-1, size // tiles.union.rows).sum(1, dtype=torch.int32)
    sources = inputs.q, inputs.k, inputs.v, inputs.dout, ordered, selected, rows.pos, rows.start, count
    for chunk, row0 in enumerate(range(0, len(inputs.q), size)):
        selection = rows.block_ids, rows.pos, rows.start, count
        kernels["backward_order"](*selection, ordered, selected, bits, ranks, row0)
        kernels["backward_list"](bits, ranks, singles, listed, entries, chunk)
        kernels["backward_row"](*sources, inputs.lse, inputs.delta, dq, stored, row0, scale)
        kernels["backward_window"](inputs.q, inputs.dout, stored, listed, entries, dk, dv, row0)


@dataclass(frozen=True)
class Chunks:
    """Tiles that share, dealt to chunks whose partial sums fit the scratch.

    tile_of [chunks, slots]: the tile of every slot, -1 for none; tiles [chunks]: how many tiles a chunk has; offset
    [tiles]: a tile's first step in the scratch; steps: of the scratch.
    """

    tile_of: Tensor
    tiles: Tensor
    offset: Tensor
    steps: int


def deal_chunks(count: Tensor, tiles: BackwardTiles, topk: int, block_size: int) -> Chunks:
    """Deal tiles to chunks by a prefix sum of their steps. `count [tiles]`: entries of the union, -1 if not shared.

    A tile counts at least as many steps as give a chunk no more tiles than slots; its slot follows from its offset.
    """
    n_tiles, entries = len(count), tiles.union.keys // block_size
    most = tiles.union.capacity(topk, block_size) // entries
    budget = min(tiles.steps, n_tiles * most)
    least = -(-budget // tiles.slots)
    n_chunks = n_tiles * max(most, least) // budget + 1
    shared = count >= 0
    cost = torch.where(shared, ((count + entries - 1) // entries).clamp(min=least), 0).long()
    begin = cost.cumsum(0) - cost
    offset = begin % budget
    place = torch.where(shared, begin // budget * tiles.slots + offset // least, n_chunks * tiles.slots)
    tile_of = torch.full((n_chunks * tiles.slots + 1,), -1, dtype=torch.int32, device=count.device)
    tile_of.scatter_(0, place, torch.arange(n_tiles, dtype=torch.int32, device=count.device))
    tile_of = tile_of[:-1].view(n_chunks, tiles.slots)
    return Chunks(tile_of, (tile_of >= 0).sum(1, dtype=torch.int32), offset.int(), budget + most)
