"""Rows shared out over the ranks of a group: who works on which, and the collectives that put the parts together.

All ranks call alike, with tensors of the same shapes: who owns what follows from the number of rows alone. Without a
group, or in a group of one, a rank owns every row and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class RowSplit:
    """Neighbouring rows in pieces of `each`, one a rank: the last pieces may be shorter, or empty.

    rows: all of them, as a slice of some tensor. own: this rank's, of the same tensor.
    """

    rows: slice
    own: slice
    each: int
    group: dist.ProcessGroup | None

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of `x` [rows, ...]; `x` itself with one rank. A collective."""
        if self.group is None:
            return x
        own = x.new_empty(self.each, *x.shape[1:])
        _reduce_scatter(own, _padded(x, self.group.size() * self.each), self.group)
        return own[: self.own.stop - self.own.start]

    def share_(self, x: Tensor) -> None:
        """Fill in the rows of the other ranks in `x` [rows, ...], where each has written its own. A collective."""
        if self.group is None:
            return
        mine = x[self.own.start - self.rows.start : self.own.stop - self.rows.start]
        everyones = x.new_empty(self.group.size() * self.each, *x.shape[1:])
        _all_gather(everyones, _padded(mine, self.each), self.group)
        x.copy_(everyones[: len(x)])


def split_rows(rows: slice, group: dist.ProcessGroup | None, *, multiple: int = 1) -> RowSplit:
    """Split `rows` evenly over `group`, in pieces of a multiple of so many rows."""
    if group is None or group.size() == 1:
        return RowSplit(rows, rows, rows.stop - rows.start, None)
    each = -(-(rows.stop - rows.start) // (group.size() * multiple)) * multiple
    first, last = (min(rows.start + rank * each, rows.stop) for rank in (group.rank(), group.rank() + 1))
    return RowSplit(rows, slice(first, last), each, group)


@dataclass(frozen=True)
class DealtRows:
    """Rows in tiles of `tile` neighbours, dealt to the ranks in turn: under causality later rows cost more.

    number: of all rows. places: int64 [n], numbers of this rank's rows, whole tiles and for every rank as many; real:
    bool [n], false for places behind the last row, which name the last row.
    """

    number: int
    tile: int
    places: Tensor
    real: Tensor
    group: dist.ProcessGroup

    def gather(self, x: Tensor) -> Tensor:
        """`x` [n, ...] of all ranks put together in the order of rows, [number, ...]. A collective."""
        everyones = x.new_empty(self.group.size() * len(x), *x.shape[1:])
        _all_gather(everyones, x.contiguous(), self.group)
        tiles = everyones.unflatten(0, (self.group.size(), -1, self.tile))
        return tiles.transpose(0, 1).flatten(0, 2)[: self.number]


def deal_rows(number: int, group: dist.ProcessGroup, *, tile: int, device: torch.device) -> DealtRows:
    """Deal `number` rows, at least one, in tiles of `tile`."""
    rounds = torch.arange(-(-number // (group.size() * tile)), device=device)
    first = (rounds * group.size() + group.rank()) * tile
    places = (first[:, None] + torch.arange(tile, device=device)).flatten()
    return DealtRows(number, tile, places.clamp(max=number - 1), places < number, group)


def sum_over_ranks_(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up `x`, contiguous, of all ranks in place. A collective."""
    if group is not None and group.size() > 1:
        dist.all_reduce(x, group=group)


def _padded(x: Tensor, number: int) -> Tensor:
    """`x`, contiguous, with rows of zeros behind it up to so many."""
    return x.contiguous() if len(x) == number else pad(x, (*(0,) * (2 * x.dim() - 1), number - len(x)))


# From 2.13 on torch warns of the older names.
def _reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(out, x, group=group)


def _all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(out, x, group=group)
