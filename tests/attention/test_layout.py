"""Placement of tokens on context-parallel ranks, without processes: every rank is asked in turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_patches.attention.common.layout import TokenLayout, batch_layout, packed_layout, zigzag_tokens
from mcore_patches.cpu.data import packed_batch, random_batch
from tests.attention.tiny import RATIO, packed_params
from tests.ops.qsa_helpers import lengths_id


class Rank:
    """Stands for a process group: only its size and this process's place in it are read."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _layouts(lengths: Sequence[int], padded: Sequence[int] | None, tail: int, ranks: int) -> list[TokenLayout]:
    rows = (sum(padded or lengths) + tail) // ranks
    return [packed_layout(packed_params(lengths, padded), rows, RATIO, Rank(r, ranks)) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[13, 50, 33], [1, 3, 4, 41, 7, 40], [5] * 6, [24]], ids=lengths_id)
def test_ranks_hold_what_the_harness_gives_them(lengths: list[int], ranks: int) -> None:
    """`Batch.context_parallel_shard` cuts documents into chunks with torch; ours must name the same tokens."""
    batch = packed_batch(lengths, multiple=2 * ranks, seed=1)
    padded = batch.packed.cu_seqlens_q_padded.diff().tolist()
    numbered = torch.arange(batch.tokens.shape[1])[None]
    for rank, layout in enumerate(_layouts(lengths, padded, 0, ranks)):
        shard = replace(batch, tokens=numbered).context_parallel_shard(rank, ranks)
        assert torch.equal(layout.tokens, shard.tokens[0])


@pytest.mark.parametrize("tail", [0, 4, 12], ids=lambda tail: f"tail{tail}")
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_rows_are_in_document_order(ranks: int, tail: int) -> None:
    lengths, padded = [13, 3, 33], [16, 8, 40]
    layouts = _layouts(lengths, padded, tail, ranks)
    total = sum(padded) + tail
    side_by_side = torch.cat([layout.tokens for layout in layouts])
    assert sorted(side_by_side.tolist()) == list(range(total))
    for layout in layouts:
        assert torch.equal(side_by_side[layout.source], torch.arange(total))
        assert layout.num_tokens == total
        assert int(layout.num_valid) == sum(lengths)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_know_their_documents(ranks: int) -> None:
    lengths, padded, tail = [13, 3, 33], [16, 8, 40], 8
    expected: list[tuple[int, int, int]] = []
    blocks = 0
    for length, room in zip(lengths, padded):
        start = len(expected)
        expected += [(pos, start, blocks) if pos < length else (-1, 0, 0) for pos in range(room)]
        blocks += length // RATIO
    expected += [(-1, 0, 0)] * tail
    for layout in _layouts(lengths, padded, tail, ranks):
        got = list(zip(*(field.tolist() for field in layout.rows)))
        assert got == [expected[token] for token in layout.tokens.tolist()]
        first = [at + RATIO * b for at, n in zip((0, 16, 24), lengths) for b in range(n // RATIO)]
        spare = layout.num_tokens // RATIO - len(first)
        assert layout.block_tokens.tolist() == first + [-1] * spare


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_batches_are_documents_of_one_length(batch: int, ranks: int) -> None:
    seq = 16
    tokens = random_batch(batch, seq)
    place = torch.arange(batch * seq).view(batch, seq)
    for rank in range(ranks):
        layout = batch_layout(seq // ranks, batch, RATIO, torch.device("cpu"), Rank(rank, ranks))
        shard = replace(tokens, tokens=place).context_parallel_shard(rank, ranks)
        assert torch.equal(layout.tokens, shard.tokens.flatten())
        x = torch.randn(seq // ranks, batch, 5)
        assert torch.equal(layout.to_rows(x), torch.cat(list(x.unbind(1))))
        assert torch.equal(layout.from_rows(layout.to_rows(x)), x)
        assert torch.equal(layout.rows.pos, (layout.tokens % seq).int())
        assert torch.equal(layout.rows.start, (layout.tokens // seq * seq).int())


def test_documents_that_do_not_cut_evenly_are_refused() -> None:
    with pytest.raises(RuntimeError, match="must be a multiple of 4 tokens with 2 context-parallel ranks"):
        packed_layout(packed_params([6, 10]), 8, RATIO, Rank(0, 2))


def test_boundaries_are_needed() -> None:
    params: Any = packed_params([8])
    params.cu_seqlens_q = None
    with pytest.raises(ValueError, match="cu_seqlens_q=None: the layer needs the cumulative lengths"):
        packed_layout(params, 8, RATIO, Rank(0, 1))


def test_zigzag_of_one_sequence() -> None:
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    assert zigzag_tokens(bounds, 4, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag_tokens(bounds, 4, 1, 2).tolist() == [2, 3, 4, 5]


def _bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cu_seqlens_q": _bounds(0, 30, 20, 40)}, "must ascend from 0"),
        ({"cu_seqlens_q": _bounds(5, 20, 40)}, "must ascend from 0"),
        ({"cu_seqlens_q": _bounds(0, -4, 40)}, "must ascend from 0"),
        ({"cu_seqlens_q": _bounds(0, 43)}, "end after the batch's 40 tokens"),
        (
            {"cu_seqlens_q": _bounds(0, 20, 40), "cu_seqlens_q_padded": _bounds(0, 10, 40)},
            "cu_seqlens_q_padded must start at 0 and hold every document",
        ),
        ({"cu_seqlens_q": _bounds(0, 20, 40), "cu_seqlens_kv": _bounds(0, 10, 40)}, "must equal cu_seqlens_q"),
        ({"cu_seqlens_q": _bounds(0, 20, 40), "cu_seqlens_kv": _bounds(0, 40)}, "differ: the layer is self-attention"),
        (
            {"cu_seqlens_q_padded": _bounds(0, 40), "cu_seqlens_kv_padded": _bounds(0, 44)},
            "cu_seqlens_kv_padded must equal cu_seqlens_q_padded",
        ),
        ({"cu_seqlens_kv_padded": _bounds(0, 20, 40)}, "cu_seqlens_kv_padded (3,) and cu_seqlens_q_padded (2,) differ"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_boundaries_that_describe_no_batch_are_refused(fields: dict[str, Any], message: str) -> None:
    fields = {"cu_seqlens_kv": None, **fields}
    packed = replace(packed_params([40]), **fields)
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
        packed_layout(packed, 40, RATIO, Rank(0, 1))
