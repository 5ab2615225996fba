"""Sparse GQA on TileLang: chooses tiles, builds kernels once, launches them. No host synchronisation.

The forward is three kernels. The plan lists, for every tile of neighbouring rows, the union of their blocks. Where the
union is small against what the rows would read one by one, the union kernel attends the whole tile at once; the row
kernel attends the rest, one row at a time. Which of the two takes a tile is decided on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_patches.ops.jit import CACHE, compile_kernel

LOG2E = 1.4426950408889634
MASK_BITS = 16
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Every barrier is written out: those that TileLang would add sit inside the loops that gather.
_OWN_BARRIERS = {"tl.disable_thread_storage_sync": True, "tl.disable_warp_specialized": True}
_FAST_MATH = {**_OWN_BARRIERS, "tl.enable_fast_math": True}


@dataclass(frozen=True)
class Tiles:
    """How a shape is cut. rows: query rows of a tile; keys: tokens of a step; share: largest union worth sharing, in rows."""

    rows: int
    keys: int = 64
    stages: int = 2
    k_stages: int = 2
    v_stages: int = 1
    blocks_per_sm: int = 2
    share: float = 4.0
    words: int = 8192

    def limit(self, topk: int) -> int:
        """Entries of the largest union that is shared."""
        return int(self.share * (topk + 1))

    def capacity(self, topk: int, block_size: int) -> int:
        """Entries that a tile's list can hold: the limit, rounded up to whole steps."""
        step = self.keys // block_size
        return -(-self.limit(topk) // step) * step


def choose_tiles(heads: int, kv_heads: int) -> Tiles:
    """Tiles for Hopper: as many rows as fit 128 matrix rows, at most one mask bit each."""
    return Tiles(rows=min(MASK_BITS, 128 // (heads // kv_heads)))


@dataclass(frozen=True)
class Plan:
    """Lists of a selection, on the device. See `tilelang_plan`."""

    row_count: Tensor
    count: Tensor
    first: Tensor
    info: Tensor


def _arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def plan_kernel(topk: int, block_size: int, tiles: Tiles, arch: str):
    """The kernel that lists what every tile reads."""
    from mcore_patches.ops.sparse_gqa.tilelang_plan import plan

    shape = {
        "rows": tiles.rows,
        "block_size": block_size,
        "topk": topk,
        "keys": tiles.keys,
        "capacity": tiles.capacity(topk, block_size),
        "words": tiles.words,
    }
    key = ("sparse_gqa.plan", arch, *shape.values())
    return CACHE.get(key, lambda: compile_kernel(key, plan(**shape), arch=arch, pass_configs=_OWN_BARRIERS))


def union_forward_kernel(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, topk: int, block_size: int, tiles: Tiles, arch: str
):
    """The forward kernel over the union of a tile's blocks."""
    from mcore_patches.ops.sparse_gqa.tilelang_union_forward import union_forward

    shape = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "rows": tiles.rows,
        "block_size": block_size,
        "capacity": tiles.capacity(topk, block_size),
        "dtype": _DTYPES[dtype],
        "keys": tiles.keys,
        "stages": tiles.stages,
    }
    key = ("sparse_gqa.union_forward", arch, *shape.values())
    return CACHE.get(key, lambda: compile_kernel(key, union_forward(**shape), arch=arch, pass_configs=_FAST_MATH))


def row_forward_kernel(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, topk: int, block_size: int, tiles: Tiles, arch: str
):
    """The forward kernel that attends one row at a time."""
    from mcore_patches.ops.sparse_gqa.tilelang_row_forward import row_forward

    shape = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "rows": tiles.rows,
        "block_size": block_size,
        "topk": topk,
        "dtype": _DTYPES[dtype],
        "keys": tiles.keys,
        "k_stages": tiles.k_stages,
        "v_stages": tiles.v_stages,
        "blocks_per_sm": tiles.blocks_per_sm,
    }
    key = ("sparse_gqa.row_forward", arch, *shape.values())
    return CACHE.get(key, lambda: compile_kernel(key, row_forward(**shape), arch=arch, pass_configs=_FAST_MATH))


def make_plan(
    block_ids: Tensor, row_pos: Tensor, row_start: Tensor, block_size: int, tiles: Tiles, limit: int | None = None
) -> Plan:
    """List what every tile reads. `block_ids [Tq, K]`, `row_pos [Tq]`, `row_start [Tq]`, all int32.

    `limit` replaces the largest union (in entries) that `tiles` would share.
    """
    tq, topk = block_ids.shape
    n_tiles = -(-tq // tiles.rows)
    capacity = tiles.capacity(topk, block_size)
    limit = tiles.limit(topk) if limit is None else limit
    empty = lambda *size: torch.empty(size, dtype=torch.int32, device=block_ids.device)  # noqa: E731
    result = Plan(empty(tq), empty(n_tiles), empty(n_tiles, capacity), empty(n_tiles, capacity))
    kernel = plan_kernel(topk, block_size, tiles, _arch(block_ids.device))
    kernel(block_ids, row_pos, row_start, result.row_count, result.count, result.first, result.info, limit)
    return result


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    row_pos: Tensor,
    row_start: Tensor,
    scale: float,
    block_size: int,
    *,
    tiles: Tiles | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend: `q [Tq, Hq, D]`, `k`, `v [Tk, Hkv, D]`, contiguous -> `out` like `q`, `lse [Tq, Hq]` fp32 (natural log)."""
    heads, kv_heads, dim, topk = q.shape[1], k.shape[1], q.shape[2], block_ids.shape[1]
    tiles = tiles or choose_tiles(heads, kv_heads)
    plan = plan or make_plan(block_ids, row_pos, row_start, block_size, tiles)
    shape = (heads, kv_heads, dim, q.dtype, topk, block_size, tiles, _arch(q.device))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    scale_log2e = scale * LOG2E
    union_forward_kernel(*shape)(q, k, v, plan.count, plan.first, plan.info, row_pos, out, lse, scale_log2e)
    row_forward_kernel(*shape)(
        q, k, v, block_ids, row_pos, row_start, plan.row_count, plan.count, out, lse, scale_log2e
    )
    return out, lse
