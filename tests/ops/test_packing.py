import pytest
import torch

from mcore_patches.ops.packing import (
    block_first_tokens,
    bshd_cu_seqlens,
    complete_blocks,
    first_tokens_of_visible_blocks,
    packed_rows,
    token_support,
)
from tests.ops.qsa_helpers import (
    PACKED,
    TINY,
    HostRead,
    lengths_id,
    no_host_reads,
    num_blocks_of,
    random_block_ids,
    rows_of,
)

RATIOS = [1, 2, 4, 8, 16]


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


def by_hand(lengths: list[int], ratio: int, room: list[int] | None = None) -> list[tuple[int, int, int]]:
    """(pos, start, block_start) of every token, document after document; `room` is what each takes in the layout."""
    placed, start, block_start = [], 0, 0
    for length, taken in zip(lengths, room or lengths):
        placed += [(pos, start, block_start) for pos in range(length)]
        placed += [(-1, 0, 0)] * (taken - length)
        start += taken
        block_start += length // ratio
    return placed


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", [*PACKED, *TINY, [0, 5, 0, 0, 7, 0]], ids=lengths_id)
def test_rows_of_packed_documents_and_padding_after_them(lengths, ratio):
    rows = packed_rows(cumulative(lengths), sum(lengths) + 3, ratio)
    expected = by_hand(lengths, ratio) + [(-1, 0, 0)] * 3
    assert list(zip(*(field.tolist() for field in rows))) == expected
    assert {field.dtype for field in rows} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ratio", [1, 4])
def test_rows_of_documents_padded_one_by_one(ratio, dtype):
    lengths, room = [5, 8, 0, 3], [8, 8, 4, 4]
    rows = packed_rows(cumulative(lengths, dtype), sum(room) + 2, ratio, cu_seqlens_padded=cumulative(room, dtype))
    expected = by_hand(lengths, ratio, room) + [(-1, 0, 0)] * 2
    assert list(zip(*(field.tolist() for field in rows))) == expected


def test_a_padded_batch_is_packed_documents_of_one_length():
    boundaries = bshd_cu_seqlens(3, 10)
    assert boundaries.tolist() == [0, 10, 20, 30]
    rows = packed_rows(boundaries, 30, 4)
    assert rows.pos.view(3, 10).eq(torch.arange(10)).all()
    assert rows.start.view(3, 10).eq(torch.tensor([[0], [10], [20]])).all()
    assert rows.block_start.view(3, 10).eq(torch.tensor([[0], [2], [4]])).all()


def test_take_picks_the_rows_of_one_rank():
    rows = rows_of([13, 50, 33], 4)
    index = torch.tensor([95, 0, 13, 62])
    taken = rows.take(index)
    assert taken.pos.tolist() == [32, 0, 0, 49]
    assert taken.start.tolist() == [63, 0, 13, 13]
    assert taken.block_start.tolist() == [15, 0, 3, 3]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", [*PACKED, *TINY, [0, 9, 0, 4]], ids=lengths_id)
def test_first_tokens_of_blocks(lengths, ratio):
    total = sum(lengths) + 3
    got = block_first_tokens(cumulative(lengths), total, ratio)
    expected, start = [], 0
    for length in lengths:
        expected += [start + block * ratio for block in range(length // ratio)]
        start += length
    assert got.dtype == torch.int32
    assert got.tolist() == expected + [-1] * (total // ratio - len(expected))


def test_first_tokens_of_blocks_of_documents_padded_one_by_one():
    got = block_first_tokens(cumulative([5, 8, 3]), 20, 4, cu_seqlens_padded=cumulative([8, 8, 4]))
    assert got.tolist() == [0, 8, 12, -1, -1]


def test_complete_blocks_of_padding_and_around_a_boundary():
    assert complete_blocks(torch.tensor([-1, 0, 2, 3, 4, 7], dtype=torch.int32), 4).tolist() == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", [*PACKED, *TINY], ids=lengths_id)
def test_token_support_is_the_named_complete_blocks_and_the_tail(lengths, ratio):
    rows = rows_of(lengths, ratio, padding=2)
    ids = random_block_ids(rows, 4, 8)
    tokens, seen = token_support(ids, rows.pos, rows.start, ratio, spare=777)
    assert tokens.dtype == torch.int64
    assert tokens.shape == seen.shape == (len(rows.pos), 4 * ratio + ratio - 1)
    for row, (pos, start, _) in enumerate(zip(*(field.tolist() for field in rows))):
        complete = (pos + 1) // ratio
        expected = {start + b * ratio + t for b in ids[row].tolist() if 0 <= b < complete for t in range(ratio)}
        expected |= {start + t for t in range(complete * ratio, pos + 1)}
        got = tokens[row][seen[row]].tolist()
        assert len(got) == len(expected)
        assert set(got) == expected
        assert (tokens[row][~seen[row]] == 777).all()


@pytest.mark.parametrize("ratio", [1, 4, 16])
@pytest.mark.parametrize("lengths", [*PACKED, *TINY], ids=lengths_id)
@pytest.mark.parametrize("share", [1.0, 0.2], ids=["all-rows", "some-rows"])
def test_first_tokens_from_rows_alone(lengths, ratio, share):
    every = rows_of(lengths, ratio, padding=2)
    rows = every.take(torch.arange(len(every.pos))[torch.rand(len(every.pos)) <= share].flip(0))
    num_blocks = num_blocks_of(lengths, ratio) + 2
    got = first_tokens_of_visible_blocks(rows.pos, rows.start, rows.block_start, ratio, num_blocks)
    assert got.shape == (num_blocks,)
    seen_blocks = 0
    for pos, start, block_start in zip(*(field.tolist() for field in rows)):
        complete = (pos + 1) // ratio
        expected = [start + b * ratio for b in range(complete)]
        assert got[block_start : block_start + complete].tolist() == expected
        seen_blocks += complete
    assert seen_blocks > 0 or max(lengths) < ratio or share < 1


def test_no_rows_and_no_blocks():
    rows = rows_of([3], 4).take(torch.arange(0))
    assert first_tokens_of_visible_blocks(*rows, 4, 5).shape == (5,)
    assert first_tokens_of_visible_blocks(*rows_of([3], 4), 4, 0).shape == (0,)


def test_nothing_waits_for_values():
    boundaries = cumulative([13, 50, 33])
    with no_host_reads():
        rows = packed_rows(boundaries, 100, 4, cu_seqlens_padded=boundaries)
        block_first_tokens(boundaries, 100, 4)
        first_tokens_of_visible_blocks(*rows, 4, 25)
        token_support(torch.zeros(100, 3, dtype=torch.int32), rows.pos, rows.start, 4, spare=100)
        rows.take(torch.arange(5))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.__setitem__(x > 0, torch.ones(1)),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_tripwire_sees_host_reads(read):
    with pytest.raises(HostRead), no_host_reads():
        read(torch.ones(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed_rows(torch.zeros(2), 4, 4), "cu_seqlens must be int32 or int64"),
        (lambda: packed_rows(torch.zeros(1, dtype=torch.int32), 4, 4), "at least one document"),
        (lambda: packed_rows(cumulative([4]), 4, 0), "ratio must be at least 1, got 0"),
        (lambda: packed_rows(cumulative([4]), -1, 4), "total_tokens must be at least 0, got -1"),
        (
            lambda: packed_rows(cumulative([4]), 4, 4, cu_seqlens_padded=cumulative([4, 4])),
            r"cu_seqlens_padded must have the shape, dtype and device of cu_seqlens",
        ),
        (lambda: block_first_tokens(cumulative([4]).double(), 4, 4), "cu_seqlens must be int32 or int64"),
        (lambda: bshd_cu_seqlens(0, 4), "batch=0"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
