"""The TileLang kernels of select_blocks: exact where sums are, elsewhere apart at the cut alone; and their promises."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_ci.thread_ranks import run_ranks
from mcore_patches.ops.block_topk import select_blocks, supports, tilelang_backend
from mcore_patches.ops.block_topk.design import ScoreTiles, score_tiles
from mcore_patches.ops.block_topk.naive import block_scores_naive, select_blocks_naive
from mcore_patches.ops.block_topk.tilelang_backend import select_blocks_tilelang, warmup
from mcore_patches.ops.device import Device, describe
from mcore_patches.ops.jit import CACHE
from mcore_patches.ops.packing import PackedRows, complete_blocks, packed_rows

pytestmark = pytest.mark.h100
ULP = torch.finfo(torch.float32).eps
PACKED = (13, 50, 533, 1, 3, 1041, 7)


@dataclass(frozen=True)
class Case:
    """topk blocks of `ratio` tokens, heads x channels, scoring "relu", "linear" or either with "-weights"."""

    topk: int = 16
    ratio: int = 1
    heads: int = 4
    channels: int = 128
    scoring: str = "relu"
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = PACKED

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"T{sum(self.lengths)}-r{self.ratio}-k{self.topk}-H{self.heads}-D{self.channels}-{self.scoring}-{dtype}"

    @property
    def rows(self) -> PackedRows:
        """Of the documents and five rows of padding."""
        boundaries = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device="cuda")
        return packed_rows(boundaries, sum(self.lengths) + 5, self.ratio)

    def inputs(self, *, whole: bool, seed: int = 0) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Arguments of `select_blocks`, of small integers if `whole`: exact sums, most of them equal to others."""
        g = torch.Generator("cuda").manual_seed(seed)
        rows = self.rows
        blocks = sum(length // self.ratio for length in self.lengths)
        shapes = (len(rows.pos), self.heads, self.channels), (blocks, self.channels), (len(rows.pos), self.heads)
        if whole:
            q, k, w = (torch.randint(-2, 3, shape, device="cuda", generator=g).float() for shape in shapes)
            q[:, :, 8:] = 0
        else:
            q, k, w = (torch.randn(shape, device="cuda", generator=g) for shape in shapes)
        settings = {
            "ratio": self.ratio,
            "topk": self.topk,
            "weights": w if "weights" in self.scoring else None,
            "relu": "relu" in self.scoring,
        }
        return (q.to(self.dtype), k.to(self.dtype), rows.pos, rows.block_start), settings


def assert_apart_at_the_cut_alone(case: Case, arguments: tuple[Tensor, ...], settings: dict[str, Any], ids: Tensor):
    """Ids ascend, are visible and as many as they should be, and those that a float64 top-k would not take, or would
    take in their place, score within 4 ulps of its last one. An ulp is that of the sum of the heads' magnitudes."""
    q, k, pos, first = arguments
    weights, relu = settings["weights"], settings["relu"]
    weights = None if weights is None else weights.double()
    scores = block_scores_naive(q.double(), k.double(), weights=weights, relu=relu)
    size = scores
    if weights is not None or not relu:
        products = torch.einsum("thd,bd->thb", q.double(), k.double())
        products = products.relu() if relu else products.abs()
        size = (products if weights is None else products * weights.abs()[:, :, None]).sum(dim=1)
    count = complete_blocks(pos, case.ratio)[:, None]
    local = torch.arange(len(k), device=k.device) - first[:, None]
    visible = (local >= 0) & (local < count)
    wanted = count.clamp(max=case.topk)
    column = torch.arange(case.topk, device=k.device)
    assert torch.equal(ids >= 0, column < wanted)
    assert (ids < count.clamp(min=1)).all()
    assert ((ids.diff(dim=1) > 0) | (ids[:, 1:] < 0)).all()

    chosen = torch.zeros(len(q), len(k) + 1, dtype=torch.bool, device=k.device)
    chosen.scatter_(1, torch.where(ids >= 0, ids + first[:, None], len(k)).long(), True)
    chosen = chosen[:, :-1]
    ranked = scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True).values
    cut = ranked.gather(1, (wanted - 1).clamp(min=0).long())
    slack = 4 * ULP * torch.maximum(size, cut.abs())
    assert not (chosen & (scores < cut - slack)).any()
    assert not (visible & ~chosen & (wanted > 0) & (scores > cut + slack)).any()


SCORING = ("relu", "relu-weights", "linear", "linear-weights")
CASES = [
    Case(topk=512, ratio=4, lengths=(13, 50, 4133, 1, 3, 9041, 7)),
    *(Case(heads=3, channels=64, scoring=scoring) for scoring in SCORING),
    *(Case(heads=heads, scoring="relu-weights") for heads in (1, 9, 64)),
    *(Case(ratio=ratio, topk=64) for ratio in (1, 2, 4, 8, 16)),
    Case(channels=256, heads=2),
    Case(dtype=torch.float16),
    Case(topk=2048, lengths=(5000, 2049, 2048, 77)),
    Case(topk=4096, lengths=(9000, 4097, 77)),
    Case(topk=1, lengths=(300,)),
    Case(topk=100, lengths=(12000, 41)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ties_equal_the_oracle(case: Case) -> None:
    arguments, settings = case.inputs(whole=True)
    got = select_blocks(*arguments, **settings, backend="tilelang")
    if sum(case.lengths) < 4000:  # the oracle sorts every row in Python
        assert torch.equal(got, select_blocks_naive(*arguments, **settings))
    assert torch.equal(got, select_blocks(*arguments, **settings, backend="chunked"))


PLAIN_CASES = [
    Case(),
    *(Case(heads=3, channels=64, scoring=scoring) for scoring in SCORING),
    Case(heads=64, scoring="relu-weights"),
    Case(heads=9, channels=256),
    Case(topk=1000, lengths=(5000, 2049, 77)),
]


@pytest.mark.parametrize("kib", [99, 163, 226])
@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_plain_kernels_of_other_gpus(case: Case, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much shared memory as those have."""
    multiprocessors = describe(torch.device("cuda", torch.cuda.current_device())).multiprocessors
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: Device("sm_90a", kib * 1024, multiprocessors))
    arguments, settings = case.inputs(whole=True)
    q_idx = arguments[0]
    tiles = score_tiles("sm_90a", kib * 1024, q_idx.dtype, *q_idx.shape[1:], settings["topk"])
    assert isinstance(tiles, ScoreTiles) and tiles.plain
    got = select_blocks(*arguments, **settings, backend="tilelang")
    assert torch.equal(got, select_blocks(*arguments, **settings, backend="chunked"))
    arguments, settings = case.inputs(whole=False)
    got = select_blocks(*arguments, **settings, backend="tilelang")
    assert_apart_at_the_cut_alone(case, arguments, settings, got)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_differs_from_float64_only_at_the_cut(case: Case) -> None:
    arguments, settings = case.inputs(whole=False)
    got = select_blocks(*arguments, **settings, backend="tilelang")
    assert_apart_at_the_cut_alone(case, arguments, settings, got)


@pytest.mark.parametrize("whole", [True, False], ids=["ties", "random"])
def test_chunks_of_rows_do_not_matter(whole: bool) -> None:
    arguments, settings = Case(topk=64, lengths=(3000, 1500)).inputs(whole=whole)
    want = select_blocks_tilelang(*arguments, **settings)
    for row_chunk in (128, 384, 2048):
        assert torch.equal(want, select_blocks_tilelang(*arguments, **settings, row_chunk=row_chunk))


@pytest.mark.parametrize("whole", [True, False], ids=["ties", "random"])
def test_ranks_that_share_the_rows_select_what_one_does(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, settings = Case(scoring="linear-weights", lengths=(1700, 3, 333)).inputs(whole=whole)
    want = select_blocks(*arguments, **settings, backend="tilelang")
    for ranks in (2, 3):

        def work(group: dist.ProcessGroup) -> Tensor:
            return select_blocks(*arguments, **settings, tp_group=group, backend="tilelang")

        for got in run_ranks(ranks, work, monkeypatch):
            assert torch.equal(want, got)


def test_warmup_builds_what_a_call_takes() -> None:
    warmup(5, 64, topk=16)
    builds = CACHE.builds
    arguments, settings = Case(heads=5, channels=64).inputs(whole=True)
    select_blocks(*arguments, **settings, backend="tilelang")
    assert CACHE.builds == builds
    assert warmup(5, 64, topk=16) == 0.0


def test_all_scores_equal_takes_the_first_blocks() -> None:
    case = Case(topk=512, ratio=4, lengths=(20000,))
    (q, k, pos, first), settings = case.inputs(whole=False)
    k.fill_(1)
    q.fill_(-1)
    got = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    want = torch.arange(512, device="cuda", dtype=torch.int32).expand(len(q), -1)
    assert torch.equal(got, torch.where(want < complete_blocks(pos, 4)[:, None], want, -1))


def test_the_best_blocks_may_lie_together_or_apart() -> None:
    """One channel says where: all of the best in a few groups, one in each group, or ascending to the end."""
    blocks, topk = 20000, 64
    place = torch.arange(blocks, device="cuda")
    for score in (place // 64 % 2 * 2.0, place % 8 * 1.0, place // 128 * 1.0, -(place // 128) * 1.0):
        case = Case(topk=topk, heads=1, scoring="linear", lengths=(blocks,))
        (q, k, pos, first), settings = case.inputs(whole=True)
        q.zero_()[:, :, 0] = 1
        k.zero_()[:, 0] = score.to(k.dtype)
        got = select_blocks(q, k, pos, first, **settings, backend="tilelang")
        assert torch.equal(got, select_blocks(q, k, pos, first, **settings, backend="chunked"))


def test_signed_zeros_and_infinities() -> None:
    case = Case(topk=3, heads=1, scoring="linear", lengths=(6,))
    (q, k, pos, first), settings = case.inputs(whole=True)
    q.zero_()[:, :, 0] = 1
    k.zero_()[:, 0] = torch.tensor([-torch.inf, -0.0, 0.0, -0.0, -torch.inf, 3.0])
    got = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    # The first channel alone would do; the others are 0 * 0.
    assert got[5].tolist() == [1, 2, 5]
    assert got[4].tolist() == [1, 2, 3]
    assert got[3].tolist() == [1, 2, 3]


def test_what_no_row_sees_may_be_nan() -> None:
    """Padding rows, blocks past the documents, and what torch.empty returns."""
    case = Case(topk=16, ratio=4, lengths=(1500, 999))
    (q, k, pos, first), settings = case.inputs(whole=False)
    want = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    q[pos < 0] = torch.nan
    k = torch.cat((k, k.new_full((300, k.shape[1]), torch.nan)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.equal(want, select_blocks(q, k, pos, first, **settings, backend="tilelang"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("row", [3, 700])
def test_checked_refuses_nan(row: int) -> None:
    """In rows that see few blocks too, which are not scored otherwise."""
    case = Case(topk=16, lengths=(1000,))
    (q, k, pos, first), settings = case.inputs(whole=False)
    select_blocks(q, k, pos, first, **settings, backend="tilelang", checked=True)
    q[row, 1, 5] = torch.nan
    with pytest.raises(ValueError, match=f"must not be NaN.*{row}"):
        select_blocks(q, k, pos, first, **settings, backend="tilelang", checked=True)


def test_strided_arguments_give_the_same() -> None:
    case = Case(topk=16, scoring="linear-weights", lengths=(700, 300))
    (q, k, pos, first), settings = case.inputs(whole=False)
    want = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    wide_q = torch.cat((q, q[:, :1]), dim=1)[:, : q.shape[1]]
    wide_k = torch.cat((k, k), dim=1)[:, : k.shape[1]]
    odd_q = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view_as(q).copy_(q)
    settings["weights"] = settings["weights"].T.contiguous().T
    positions = torch.stack((pos, pos), dim=1)[:, 0], torch.stack((first, first), dim=1)[:, 0]
    assert torch.equal(want, select_blocks(wide_q, wide_k, *positions, **settings, backend="tilelang"))
    assert torch.equal(want, select_blocks(odd_q, k, pos, first, **settings, backend="tilelang"))


def test_rows_of_a_shuffled_batch_give_the_same() -> None:
    """As context parallelism deals them: any rows in any order."""
    case = Case(topk=16, ratio=2, lengths=(3000, 40, 500))
    (q, k, pos, first), settings = case.inputs(whole=False)
    want = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    order = torch.randperm(len(q), device="cuda")
    got = select_blocks(q[order], k, pos[order], first[order], **settings, backend="tilelang")
    assert torch.equal(want[order], got)


def test_repeats_bit_for_bit_beside_other_work() -> None:
    arguments, settings = Case(topk=512, ratio=4, lengths=(30000, 2000)).inputs(whole=False)
    want = select_blocks(*arguments, **settings, backend="tilelang")
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            a = a @ a * 1e-3
        assert torch.equal(want, select_blocks(*arguments, **settings, backend="tilelang"))


def test_never_waits_for_the_device_and_never_builds_for_other_lengths() -> None:
    case = Case(topk=16, ratio=2, lengths=(700, 40))
    arguments, settings = case.inputs(whole=False)
    want = select_blocks(*arguments, **settings, backend="tilelang")
    others = [Case(topk=16, ratio=2, lengths=lengths).inputs(whole=False) for lengths in ((5,), (31,) * 90, (9999,))]
    builds = CACHE.builds
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = select_blocks(*arguments, **settings, backend="tilelang")
        for other, other_settings in others:
            select_blocks(*other, **other_settings, backend="tilelang")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert CACHE.builds == builds
    assert torch.equal(want, got)


def test_captured_in_a_graph() -> None:
    case = Case(topk=64, ratio=4, lengths=(5000,))
    arguments, settings = case.inputs(whole=False)
    select_blocks(*arguments, **settings, backend="tilelang")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = select_blocks(*arguments, **settings, backend="tilelang")
    later, _ = case.inputs(whole=False, seed=1)
    for target, source in zip(arguments, later):
        target.copy_(source)
    graph.replay()
    assert torch.equal(got, select_blocks(*later, **settings, backend="tilelang"))


def test_writes_stay_inside_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the op allocates lies between guards, which are whole afterwards."""
    margin, sentinel, guarded = 4096, -123456789, []
    allocate = torch.empty

    def between_guards(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        everything = allocate(size + 2 * margin, dtype=dtype, device=device).fill_(sentinel)
        guarded.append((everything, size))
        return everything[margin : margin + size].view(shape)

    arguments, settings = Case(topk=64, ratio=4, lengths=(1999, 3001)).inputs(whole=False)
    want = select_blocks(*arguments, **settings, backend="tilelang")
    monkeypatch.setattr("mcore_patches.ops.block_topk.tilelang_backend.new_empty", between_guards)
    assert torch.equal(want, select_blocks(*arguments, **settings, backend="tilelang"))
    assert len(guarded) == 3
    for everything, size in guarded:
        assert (everything[:margin] == sentinel).all()
        assert (everything[margin + size :] == sentinel).all()


def test_quarter_of_a_million_tokens_in_bounded_memory() -> None:
    tokens, ratio, topk = 262144, 4, 512
    case = Case(topk=topk, ratio=ratio, lengths=(tokens - 5,))
    (q, k, pos, first), settings = case.inputs(whole=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - ids.nbytes
    assert extra < 700 * 2**20
    sample = torch.randint(0, len(q), (128,), device="cuda")
    assert_apart_at_the_cut_alone(case, (q[sample], k, pos[sample], first[sample]), settings, ids[sample])


def test_more_than_two_to_the_31_elements() -> None:
    case = Case(topk=16, heads=64, scoring="relu-weights", lengths=(1000,) * 270)
    (q, k, pos, first), settings = case.inputs(whole=False)
    assert q.numel() > 2**31
    ids = select_blocks(q, k, pos, first, **settings, backend="tilelang")
    for start in (0, 269000):
        document = slice(start, start + 1000)
        sliced = settings | {"weights": settings["weights"][document]}
        arguments = q[document], k[document], pos[document], first[document] - start
        assert_apart_at_the_cut_alone(case, arguments, sliced, ids[document])


def test_declines_with_a_reason() -> None:
    for change, reason in (
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"channels": 96}, "channels"),
        ({"topk": 5000}, "topk must be at most 4096"),
    ):
        arguments, settings = Case(lengths=(50,), **change).inputs(whole=False)
        assert supports(*arguments, **settings)[0] is False
        assert reason in supports(*arguments, **settings)[1]
        with pytest.raises(ValueError, match=reason):
            select_blocks(*arguments, **settings, backend="tilelang")
        select_blocks(*arguments, **settings)
