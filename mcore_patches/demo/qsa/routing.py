"""Which blocks QSA layers attend, and which a dense attention over the same queries and keys would rate highest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_patches.attention.qsa.attention import QSASelfAttention


@dataclass(frozen=True)
class Routing:
    """One layer's routes of a batch, bool [B, S, S // ratio] each.

    selected: blocks that queries attend. top: as many blocks with the largest dense attention, the teacher's measure of
    it (head-summed probability, largest token of the block). free: rows that have more blocks than they may select.
    """

    selected: Tensor
    top: Tensor
    free: Tensor

    @property
    def overlap(self) -> float:
        """Share of the top blocks that are selected, over rows that cannot select everything."""
        both = (self.selected & self.top)[self.free].sum()
        return (both / self.top[self.free].sum()).item()

    @property
    def chance(self) -> float:
        """The overlap of a random selection."""
        visible = torch.arange(1, self.free.shape[1] + 1, device=self.free.device) // self._ratio
        share = self.top.sum(dim=-1) / visible.clamp(min=1)
        return share[self.free].mean().item()

    @property
    def _ratio(self) -> int:
        return self.selected.shape[1] // self.selected.shape[2]


@contextmanager
def observed(layers: list[QSASelfAttention], sequences: int) -> Iterator[list[Routing]]:
    """Routings of the layers, in order, of the one forward pass with `sequences` sequences inside the block."""
    routings: list[Routing] = []

    def look(core: Any, args: tuple[Any, ...]) -> None:
        query, key, _, block_ids, _ = args
        routings.append(routing(query, key, block_ids, sequences, core.scale, core.block_size))

    hooks = [layer.core_attention.register_forward_pre_hook(look) for layer in layers]
    try:
        yield routings
    finally:
        for hook in hooks:
            hook.remove()


def routing(query: Tensor, key: Tensor, block_ids: Tensor, sequences: int, scale: float, ratio: int) -> Routing:
    """Compare routes with dense attention, computed whole: for short sequences, a multiple of `ratio` long.

    Args:
        query [T, Hq, D], key [T, Hkv, D], block_ids [T, K]: of `sequences` equally long sequences, one after the other.
    """
    query, key, ids = (x.unflatten(0, (sequences, -1)) for x in (query, key, block_ids.long()))
    length, blocks = query.shape[1], query.shape[1] // ratio
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    scores = scale * torch.einsum("bshd,bthd->bhst", query.float(), key.float())
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    mass = scores.masked_fill(future, float("-inf")).softmax(dim=-1).sum(dim=1)
    mass = mass.unflatten(2, (blocks, ratio)).amax(dim=3)

    complete = (torch.arange(length, device=query.device) + 1) // ratio
    visible = torch.arange(blocks, device=query.device) < complete[:, None]
    selected = torch.zeros(sequences, length, blocks + 1, dtype=torch.bool, device=query.device)
    selected = selected.scatter(2, ids.masked_fill(ids < 0, blocks), True)[:, :, :blocks]
    best = mass.masked_fill(~visible, -1.0).topk(min(ids.shape[2], blocks), dim=2).indices
    top = torch.zeros_like(selected).scatter(2, best, True) & visible
    free = (complete > ids.shape[2]).expand(sequences, length)
    return Routing(selected, top, free)
