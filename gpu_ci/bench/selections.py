"""Block selections to time sparse attention on: document-local ids [T, topk] int32, ascending, -1 behind the last.

Two extremes of what neighbouring query rows share:

random      each row draws its blocks uniformly from those complete before it, independently of every other row
correlated  a block's score moves along straight lines between fresh draws `period` rows apart, and recent blocks get a
            bonus that decays with their age; neighbouring rows then share about 0.9 of their blocks, as on real text
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("random", "correlated")
AGE = 256.0  # blocks over which the recency bonus falls by a factor e


def block_selection(
    tokens: int,
    kind: str,
    *,
    topk: int = 512,
    block_size: int = 4,
    period: int = 32,
    bonus: float = 0.25,
    seed: int = 0,
    device: str | torch.device = "cuda",
    rows_at_once: int = 1024,
) -> Tensor:
    """Selection of one document of `tokens` tokens: int32 [tokens, topk]."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if rows_at_once % period:
        raise ValueError(f"rows_at_once must be a multiple of period {period}, got {rows_at_once}")
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = tokens // block_size
    block = torch.arange(blocks, device=device)
    selection = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)

    def draw(rows: int) -> Tensor:
        return torch.rand(rows, blocks, device=device, generator=generator)

    left = draw(1)
    for begin in range(0, tokens, rows_at_once):
        row = torch.arange(begin, min(begin + rows_at_once, tokens), device=device)
        complete = ((row + 1) // block_size)[:, None]
        if kind == "random":
            score = draw(len(row))
        else:
            knots = torch.cat((left, draw(-(-len(row) // period))))
            left = knots[-1:]
            knot, along = (row - begin) // period, ((row - begin) % period / period)[:, None]
            score = torch.lerp(knots[knot], knots[knot + 1], along)
            score += bonus * torch.exp(-(complete - block).clamp(min=0) / AGE)
        score.masked_fill_(block >= complete, -1.0)
        best, ids = score.topk(min(topk, blocks), dim=-1)
        ids = ids.masked_fill(best < 0, blocks).sort(dim=-1).values
        selection[row, : ids.shape[1]] = ids.masked_fill(ids == blocks, -1).int()
    return selection


def overlap(selection: Tensor, samples: int = 128) -> tuple[float, dict[int, float]]:
    """Mean Jaccard overlap of rows t and t+1, and the union of 4, 8, 10 and 16 rows in units of one row's selection."""
    tokens, topk = selection.shape
    starts = torch.linspace(tokens // 2, tokens - 17, samples).long().tolist()
    common = [int(torch.isin(selection[t], selection[t + 1]).sum()) for t in starts]
    jaccard = sum(c / (2 * topk - c) for c in common) / samples
    unions = {n: sum(selection[t : t + n].unique().numel() for t in starts) / samples / topk for n in (4, 8, 10, 16)}
    return jaccard, unions
