"""Launches of the forward of sparse GQA on TileLang. No host synchronisation.

Three kernels on Hopper. The plan lists, for every tile of neighbouring rows, the union of their blocks. Where the union
is small against what the rows would read one by one, the union kernel attends the whole tile at once; the row kernel
attends the rest, one row at a time. Which of the two takes a tile is decided on the device. Other GPUs attend row by
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_patches.ops.sparse_gqa.design import Tiles
from mcore_patches.ops.sparse_gqa.tilelang_kernels import Kernels

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Rows:
    """What each query row selects, all int32 and contiguous: block_ids [Tq, K], row_pos [Tq], row_start [Tq]."""

    block_ids: Tensor
    pos: Tensor
    start: Tensor


@dataclass(frozen=True)
class Plan:
    """Lists of a selection, on the device. See `tilelang_plan`."""

    row_count: Tensor
    count: Tensor
    first: Tensor
    info: Tensor


def make_plan(kernels: Kernels, name: str, rows: Rows, tiles: Tiles, limit: int | None = None) -> Plan:
    """List what every tile reads, by the plan kernel called `name`.

    `limit` replaces the largest union (in entries) that `tiles` would share.
    """
    tq, topk = rows.block_ids.shape
    n_tiles, capacity = -(-tq // tiles.rows), tiles.capacity(topk, kernels.shape.block_size)
    limit = tiles.limit(topk) if limit is None else limit
    assert limit <= capacity

    def new(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=rows.pos.device)

    plan = Plan(new(tq), new(n_tiles), new(n_tiles, capacity), new(n_tiles, capacity))
    kernels[name](rows.block_ids, rows.pos, rows.start, plan.row_count, plan.count, plan.first, plan.info, limit)
    return plan


def forward(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, *, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attend: q [Tq, Hq, D], k and v [Tk, Hkv, D], bf16, contiguous -> out like q, lse [Tq, Hq] fp32 (natural log).

    `limit` as in `make_plan`.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if kernels.design.plain is not None:
        kernels["row_forward"](q, k, v, rows.block_ids, rows.pos, rows.start, out, lse, scale)
        return out, lse
    plan = make_plan(kernels, "plan", rows, kernels.design.forward, limit)
    lists = plan.count, plan.first, plan.info
    kernels["union_forward"](q, k, v, *lists, rows.pos, out, lse, scale * LOG2E)
    selection = rows.block_ids, rows.pos, rows.start, plan.row_count, plan.count
    kernels["row_forward"](q, k, v, *selection, out, lse, scale * LOG2E)
    return out, lse
