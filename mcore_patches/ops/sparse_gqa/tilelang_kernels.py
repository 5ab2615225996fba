"""Sparse GQA on TileLang: chooses tiles, builds kernels once, launches them. No host synchronisation.

The forward is three kernels. The plan lists, for every tile of neighbouring rows, the union of their blocks. Where the
union is small against what the rows would read one by one, the union kernel attends the whole tile at once; the row
kernel attends the rest, one row at a time. Which of the two takes a tile is decided on the device.

The backward does the same with tiles of its own. The union kernel leaves partial sums of dK and dV in a scratch buffer,
chunk by chunk of tiles, and a reduction adds them up. For the other rows dQ comes from a row kernel, dK and dV from
windows of keys that gather the rows which attend them, chunk by chunk of rows. Every sum has a fixed order: repeated
calls give the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.jit import CACHE, compile_kernel

LOG2E = 1.4426950408889634
MASK_BITS = 16
# Tokens of a window of keys: two words of bits.
WINDOW = 64
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Every barrier is written out: those that TileLang would add sit inside the loops that gather.
_OWN_BARRIERS = {"tl.disable_thread_storage_sync": True, "tl.disable_warp_specialized": True}
_FAST_MATH = {**_OWN_BARRIERS, "tl.enable_fast_math": True}


@dataclass(frozen=True)
class Tiles:
    """How a shape is cut. rows: query rows of a tile; keys: tokens of a step; share: largest union worth sharing, in
    rows."""

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
class BackwardTiles:
    """How the backward cuts a shape.

    union: tiles of rows that share blocks; window_rows, window_stages: rows of a step of the window kernel, and steps
    in shared memory; steps: steps of 64 keys whose partial sums the scratch holds; slots: most tiles of a chunk;
    window_words: most words of the (window, row) bits held at once.
    """

    union: Tiles
    window_rows: int
    window_stages: int
    steps: int = 16384
    slots: int = 512
    window_words: int = 2**27


def choose_backward_tiles(heads: int, kv_heads: int) -> BackwardTiles:
    """Tiles of the backward for Hopper.

    A union step holds Q and dO of at most 96 vectors (48 KiB each at 256 channels) beside two stages of K and one of
    V; a window step at most 64, beside a window of K and V. Both counts are reduction widths: multiples of 16.
    """
    group = heads // kv_heads
    union_rows = max(r for r in range(1, MASK_BITS + 1) if r * group <= 96 and r * group % 16 == 0)
    window_rows = max(r for r in range(1, 65) if r * group <= 64 and r * group % 16 == 0)
    return BackwardTiles(
        union=Tiles(rows=union_rows), window_rows=window_rows, window_stages=3 if window_rows * group <= 48 else 2
    )


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


def _kernel(
    name: str, module: str, shape: Mapping[str, object], arch: str, pass_configs: Mapping[str, bool] = _FAST_MATH
) -> Any:
    """The kernel that `name` in `module` builds for `shape`."""
    key = (f"sparse_gqa.{name}", arch, *shape.values())

    def build() -> Any:
        builder = getattr(importlib.import_module(f"mcore_patches.ops.sparse_gqa.{module}"), name)
        return compile_kernel(key, builder(**shape), arch=arch, pass_configs=pass_configs)

    return CACHE.get(key, build)


def plan_kernel(topk: int, block_size: int, tiles: Tiles, arch: str) -> Any:
    """The kernel that lists what every tile reads."""
    shape = {
        "rows": tiles.rows,
        "block_size": block_size,
        "topk": topk,
        "keys": tiles.keys,
        "capacity": tiles.capacity(topk, block_size),
        "words": tiles.words,
    }
    return _kernel("plan", "tilelang_plan", shape, arch, _OWN_BARRIERS)


def union_forward_kernel(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, topk: int, block_size: int, tiles: Tiles, arch: str
) -> Any:
    """The forward kernel over the union of a tile's blocks."""
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
    return _kernel("union_forward", "tilelang_union_forward", shape, arch)


def row_forward_kernel(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, topk: int, block_size: int, tiles: Tiles, arch: str
) -> Any:
    """The forward kernel that attends one row at a time."""
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
    return _kernel("row_forward", "tilelang_row_forward", shape, arch)


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
    """Attend: `q [Tq, Hq, D]`, `k`, `v [Tk, Hkv, D]`, contiguous -> `out` like `q`, `lse [Tq, Hq]` fp32 (natural
    log)."""
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


def backward_kernels(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    topk: int,
    block_size: int,
    tiles: BackwardTiles,
    arch: str,
) -> dict[str, Callable[[], Any]]:
    """What builds (on the first call) and returns each kernel of the backward but the plan."""
    union, name = tiles.union, _DTYPES[dtype]
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    selection = {"rows": union.rows, "block_size": block_size, "topk": topk}
    return {
        "delta": lambda: _kernel("delta", "tilelang_delta", {"dim": dim, "dtype": name}, arch),
        "union": lambda: _kernel(
            "union_backward",
            "tilelang_union_backward",
            shape
            | {
                "rows": union.rows,
                "block_size": block_size,
                "capacity": union.capacity(topk, block_size),
                "dtype": name,
                "keys": union.keys,
                "slots": tiles.slots,
            },
            arch,
        ),
        "reduce": lambda: _kernel(
            "reduce_partials",
            "tilelang_reduce",
            {"kv_heads": kv_heads, "dim": dim, "keys": union.keys, "slots": tiles.slots, "dtype": name},
            arch,
        ),
        "row": lambda: _kernel(
            "row_backward",
            "tilelang_row_backward",
            shape | selection | {"dtype": name, "keys": union.keys},
            arch,
        ),
        "mark": lambda: _kernel("mark_windows", "tilelang_windows", selection, arch),
        "list": lambda: _kernel("list_windows", "tilelang_windows", {}, arch),
        "window": lambda: _kernel(
            "window_backward",
            "tilelang_window_backward",
            shape | {"rows": tiles.window_rows, "stages": tiles.window_stages, "dtype": name},
            arch,
        ),
    }


@dataclass(frozen=True)
class Chunks:
    """Tiles that share, dealt to chunks whose partial sums fit the scratch. tile_of [chunks, slots], offset [tiles]."""

    tile_of: Tensor
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
    return Chunks(tile_of[:-1].view(n_chunks, tiles.slots), offset.int(), budget + most)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    row_pos: Tensor,
    row_start: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    block_size: int,
    *,
    tiles: BackwardTiles | None = None,
    limit: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients `dq`, `dk`, `dv` like `q`, `k`, `v`. Arguments and `out`, `lse` as in `forward`; all contiguous.

    `limit` replaces the largest union (in entries) that `tiles` would share.
    """
    (rows, heads, dim), (tokens, kv_heads, _), topk = q.shape, k.shape, block_ids.shape[1]
    tiles = tiles or choose_backward_tiles(heads, kv_heads)
    kernels = backward_kernels(heads, kv_heads, dim, q.dtype, topk, block_size, tiles, _arch(q.device))
    plan = make_plan(block_ids, row_pos, row_start, block_size, tiles.union, limit)
    delta = torch.empty_like(lse)
    kernels["delta"]()(out.view(-1, dim), dout.view(-1, dim), delta.view(-1))
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))

    chunks = deal_chunks(plan.count, tiles, topk, block_size)
    partial = torch.empty((chunks.steps, kv_heads, 2, dim // 8, tiles.union.keys, 8), dtype=q.dtype, device=q.device)
    place = torch.zeros((tokens, tiles.slots), dtype=torch.int32, device=q.device)
    for chunk in range(len(chunks.tile_of)):
        kernels["union"]()(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            plan.count,
            plan.first,
            plan.info,
            row_pos,
            chunks.tile_of,
            chunks.offset,
            dq,
            partial,
            place,
            chunk,
            scale,
        )
        kernels["reduce"]()(partial, place, dk, dv, scale)

    kernels["row"]()(q, k, v, dout, block_ids, row_pos, row_start, plan.row_count, plan.count, lse, delta, dq, scale)
    windows = -(-tokens // WINDOW)
    rows_at_once = min(rows, max(tiles.window_words // (2 * windows), 1))
    bits = torch.empty((2 * windows, rows_at_once), dtype=torch.int32, device=q.device)
    lists = torch.empty((windows, rows_at_once), dtype=torch.int32, device=q.device)
    listed = torch.empty(windows, dtype=torch.int32, device=q.device)
    for row0 in range(0, rows, rows_at_once):
        bits.zero_()
        kernels["mark"]()(block_ids, row_pos, row_start, plan.row_count, plan.count, bits, row0)
        kernels["list"]()(bits, listed, lists)
        kernels["window"]()(q, k, v, dout, lse, delta, bits, listed, lists, dk, dv, row0, scale)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
