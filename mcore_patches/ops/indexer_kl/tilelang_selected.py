"""The KL over selected blocks (Stage 2) by chunks of rows: what its kernels hand each other.

union, teacher,      the blocks of every tile of rows; the attention's mass on them, for all rows of the tile; a
gather               row's own
mark, rank, locate   number the pairs of rows and blocks by block, then by row
student              a row's KL, its query's gradient, and what each of its pairs adds to its block's
blocks               adds that up, pair after pair
many_heads, sum      in the place of student and blocks, for more than 8 heads

Every sum has one order, so repeated calls give the same bits. The ranks of a tensor-parallel group run the first line
for all rows of a chunk, each with its own heads, and the others for the rows that are theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl.design import ROWS_PER_WORD, TEACHER_TOKENS, TILE_ROWS, Shape, rows_at_once
from mcore_patches.ops.indexer_kl.tilelang_kernels import kernels
from mcore_patches.ops.row_split import RowSplit, split_rows, sum_over_ranks_
from mcore_patches.ops.workspace import chunks

new_empty = torch.empty  # a name of its own, for tests that put guards around buffers


@dataclass(frozen=True)
class Rows:
    """Contiguous tensors [Tq, ...]: arguments of `indexer_kl` and what follows from them.

    first: number of the document's first block; count: blocks that the row sees, 0 for one that does not count; weight:
    fp32, what the row counts in gradients.
    """

    q_idx: Tensor
    weights: Tensor | None
    q: Tensor
    lse: Tensor
    block_ids: Tensor | None
    start: Tensor
    first: Tensor
    count: Tensor
    weight: Tensor

    def __getitem__(self, rows: slice) -> Rows:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        sliced: dict[str, Any] = {name: None if value is None else value[rows] for name, value in values.items()}
        return Rows(**sliced)


@dataclass(frozen=True)
class Sums:
    """KL [Tq] fp32 of each row, and the gradients of q_idx, k_blocks and weights."""

    kl: Tensor
    q_idx: Tensor
    k_blocks: Tensor
    weights: Tensor | None

    def share_(self, split: RowSplit) -> None:
        """Hand the other ranks what belongs to rows of this one, and take theirs. A collective."""
        for x in (self.kl, self.q_idx, self.weights):
            if x is not None:
                split.share_(x[split.rows])


def over_selected_blocks(
    device: Device,
    shape: Shape,
    rows: Rows,
    k_blocks: Tensor,
    k: Tensor,
    *,
    scale: float,
    index_scale: float,
    tp_group: dist.ProcessGroup | None = None,
    row_chunk: int | None = None,
) -> Sums:
    """KL of each row and all gradients; `row_chunk` rows at once, a multiple of 32, or as many as memory allows."""
    assert rows.block_ids is not None
    (num_rows, topk), num_blocks = rows.block_ids.shape, len(k_blocks)
    run = kernels(device, shape)
    new = functools.partial(new_empty, device=k.device)
    sums = new_sums(rows, k_blocks, new)
    at_once = row_chunk
    if at_once is None:
        at_once = rows_at_once(num_rows, topk, num_blocks, shape.masses_of_a_block, shape.part_bytes)
    teacher = _Teacher(run, shape, at_once, topk, new)
    most = split_rows(slice(0, at_once), tp_group, multiple=ROWS_PER_WORD).each
    pairs = _Pairs(run, shape, most, topk, num_blocks, new)
    # A kernel that leaves an argument alone wants one with an address all the same.
    no_weights = new(1, shape.heads, dtype=torch.float32)
    for chunk in chunks(num_rows, at_once):
        split = split_rows(chunk, tp_group, multiple=ROWS_PER_WORD)
        blocks, mass = teacher(rows[chunk], k, scale, split)
        if len(blocks):
            own = split.own
            here = rows[own]
            weights = no_weights if here.weights is None else here.weights
            numbers = pairs.number(blocks)
            run["many_heads" if shape.many_heads else "student"](
                here.q_idx,
                k_blocks,
                weights,
                here.weight,
                blocks,
                mass,
                numbers,
                sums.kl[own],
                sums.q_idx[own],
                no_weights if sums.weights is None else sums.weights[own],
                *pairs.contributions,
                index_scale,
            )
            pairs.add_up(here.q_idx, weights, sums.k_blocks)
        sums.share_(split)
    sum_over_ranks_(sums.k_blocks, tp_group)
    return sums


def new_sums(rows: Rows, k_blocks: Tensor, new: Callable[..., Tensor]) -> Sums:
    """Room for the results; the gradient of k_blocks is 0."""
    # bfloat16 has fp32's range; in fp16 the gradients of a mean over a long sequence would vanish.
    dq_dtype = torch.bfloat16 if rows.q_idx.dtype == torch.bfloat16 else torch.float32
    return Sums(
        new(len(rows.q_idx), dtype=torch.float32),
        new(*rows.q_idx.shape, dtype=dq_dtype),
        torch.zeros(k_blocks.shape, dtype=torch.float32, device=k_blocks.device),
        None if rows.weights is None else torch.empty_like(rows.weights),
    )


class _Teacher:
    """The attention's mass on what a chunk of rows selects."""

    def __init__(
        self,
        run: Mapping[str, Any],
        shape: Shape,
        rows: int,
        topk: int,
        new: Callable[..., Tensor],
    ) -> None:
        self._run, self._per_token = run, shape.ranks
        self._masses = shape.masses_of_a_block
        tiles, step = rows // TILE_ROWS, TEACHER_TOKENS // shape.ratio
        padded = -(-TILE_ROWS * topk // step) * step * self._masses
        self._count = new(tiles, dtype=torch.int32)
        self._begin = torch.arange(tiles, dtype=torch.int32, device=self._count.device) * (TILE_ROWS * topk)
        self._tokens = new(tiles, TILE_ROWS * topk, dtype=torch.int32)
        self._of_tiles = new(tiles, padded, TILE_ROWS, dtype=torch.float32)
        self._of_rows = new(rows, topk * self._masses, dtype=torch.float32)
        self._places, self._blocks = (new(rows, topk, dtype=torch.int32) for _ in range(2))

    def __call__(self, rows: Rows, k: Tensor, scale: float, split: RowSplit) -> tuple[Tensor, Tensor]:
        """Number [R, K] of each id's block, -1 for none, and its mass [R, K], for this rank's rows. A collective."""
        number = len(rows.q)
        tiles = slice(0, -(-number // TILE_ROWS))
        count, tokens, of_tiles = self._count[tiles], self._tokens[tiles], self._of_tiles[tiles]
        places, blocks, mass = self._places[:number], self._blocks[:number], self._of_rows[:number]
        self._run["union"](rows.block_ids, rows.first, rows.count, rows.start, count, tokens, places, blocks)
        self._run["teacher"](rows.q, k, rows.lse, self._begin[tiles], count, tokens.view(-1), of_tiles, scale, 1)
        self._run["gather"](of_tiles, places, mass)
        if not self._per_token:
            return blocks, mass
        mass = split.reduce_scatter(mass)
        own = blocks[split.own.start - split.rows.start :][: len(mass)]
        return own, mass.unflatten(1, (-1, self._masses)).amax(dim=2)


class _Pairs:
    """The pairs of a chunk's rows with the blocks that they select, in the order of blocks, then of rows.

    contributions: of each pair the row, a coefficient and heads, as `tilelang_blocks` reads them; for many heads what
    the pair adds to the block's gradient.
    """

    def __init__(
        self, run: Mapping[str, Any], shape: Shape, rows: int, topk: int, num_blocks: int, new: Callable[..., Tensor]
    ) -> None:
        self._run, self._whole = run, shape.many_heads
        ints = functools.partial(new, dtype=torch.int32)
        words = rows // ROWS_PER_WORD
        self._bits, self._before, self._times = ints(words, num_blocks), ints(words, num_blocks), ints(rows * topk)
        self._numbers = ints(rows, topk)
        # How many pairs a block has, and how many it and all before it.
        self._of_block = self._ends = ints(num_blocks)
        self.contributions: tuple[Tensor, ...]
        if self._whole:
            self.contributions = (new(rows * topk, shape.channels, dtype=torch.bfloat16),)
        else:
            self.contributions = ints(rows * topk), new(rows * topk, dtype=torch.float32), ints(rows * topk)

    def number(self, blocks: Tensor) -> Tensor:
        """The number of each pair of blocks [R, K], -1 where there is none."""
        words = slice(0, -(-len(blocks) // ROWS_PER_WORD))
        bits, before, numbers = self._bits[words].zero_(), self._before[words], self._numbers[: len(blocks)]
        self._run["mark"](blocks, bits, numbers)
        self._run["rank"](bits, before, self._of_block)
        self._ends = self._of_block.cumsum(0, dtype=torch.int32)
        self._run["locate"](blocks, bits, before, self._of_block, self._ends, numbers, self._times.fill_(1))
        return numbers

    def add_up(self, q_idx: Tensor, weights: Tensor, dk: Tensor) -> None:
        """Add to the blocks' gradients what the pairs contribute, pair after pair."""
        if self._whole:
            self._run["sum"](*self.contributions, self._of_block, self._ends, self._times, dk)
        else:
            self._run["blocks"](q_idx, weights, self._of_block, self._ends, *self.contributions, dk)
