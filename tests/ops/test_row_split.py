"""What ranks of a tensor-parallel group share: rows of the indexer's KL and of the selection, in several processes."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mcore_patches.ops.block_topk import select_blocks
from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl import indexer_kl, tilelang_backend
from mcore_patches.ops.indexer_kl.chunked import indexer_kl_chunked
from mcore_patches.ops.indexer_kl.naive import indexer_kl_naive
from mcore_patches.ops.jit import KernelBuildError
from mcore_patches.ops.row_split import deal_rows, split_rows, sum_over_ranks_
from mcore_patches.ops.sparse_gqa import sparse_gqa
from tests.ops.assertions import assert_close, assert_identical
from tests.ops.kernels_in_torch import take_cpu_tensors
from tests.ops.qsa_helpers import num_blocks_of, random_block_ids, rows_of

HOPPER = Device("sm_90a", 227 * 1024, 132)
LENGTHS, RATIO, HEADS, KV_HEADS = [13, 20, 9], 4, 12, 6
LONG = [13, 150, 105]
RESULTS = ("loss", "dq_idx", "dk_blocks", "dweights")
Call = dict[str, Any]


def kl_call(
    stage: int, lengths: list[int], dtype: torch.dtype, channels: int, *, given_lse: bool = True, heads: int = 3
) -> Call:
    """Arguments of `indexer_kl`, with all heads, that one process takes."""
    rows = rows_of(lengths, RATIO, padding=2)
    number = len(rows.pos)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    q, k = normal(number, HEADS, channels), normal(sum(lengths), KV_HEADS, channels)
    ids = None if stage == 1 else random_block_ids(rows, 5, 9)
    scale = 0.7 * channels**-0.5
    wide = q.double(), k.double(), k.double()
    lse = sparse_gqa(*wide, ids, rows.pos, rows.start, scale=scale, block_size=RATIO)[1] if given_lse else None
    return {
        "q_idx": normal(number, heads, channels),
        "k_blocks": normal(num_blocks_of(lengths, RATIO), channels),
        "q": q,
        "k": k,
        "lse": lse if lse is None or dtype == torch.float64 else lse.float(),
        "block_ids": ids,
        "row_pos": rows.pos,
        "row_start": rows.start,
        "row_block_start": rows.block_start,
        "scale": scale,
        "ratio": RATIO,
        "weights": torch.rand(number, heads, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        "valid": torch.rand(number) > 0.2,
        "reduction": "mean",
    }


def heads_of_rank(call: Call, group: dist.ProcessGroup) -> Call:
    mine = {
        n: call[n] if call[n] is None else call[n].chunk(group.size(), dim=1)[group.rank()] for n in ("q", "k", "lse")
    }
    return call | mine | {"tp_group": group}


def differentiated(call: Call, **settings: Any) -> tuple[Tensor, ...]:
    """Loss and gradients of the op."""
    leaves = {name: call[name].clone().requires_grad_() for name in ("q_idx", "k_blocks", "weights")}
    loss = indexer_kl(**(call | leaves), **settings)
    return loss.detach(), *torch.autograd.grad(loss, tuple(leaves.values()))


def undispatched(run: Callable[..., Any], call: Call, **settings: Any) -> tuple[Tensor, ...]:
    """Loss and gradients of a path that takes settings which the op has not."""
    defaults = {"index_scale": 0.3, "relu": True, "tp_group": None}
    return tuple(run(**(defaults | call), **settings))


def test_pieces_cover_the_rows_without_overlap() -> None:
    for size in (1, 2, 3, 8):
        groups = [dist.ProcessGroup(rank, size) for rank in range(size)]
        for start, number, multiple in ((0, 1, 1), (5, 7, 1), (32, 98, 8), (0, 1000, 128), (0, 24, 8)):
            rows = slice(start, start + number)
            splits = [split_rows(rows, group, multiple=multiple) for group in groups]
            covered = [row for split in splits for row in range(split.own.start, split.own.stop)]
            assert covered == list(range(rows.start, rows.stop))
            for split in splits:
                assert split.own.stop - split.own.start <= split.each
                if split.own != rows:
                    assert split.each % multiple == 0
        for number, tile in ((1, 4), (98, 8), (1000, 128)):
            dealt = [deal_rows(number, group, tile=tile, device=torch.device("cpu")) for group in groups]
            assert len({len(d.places) for d in dealt}) == 1
            places = torch.cat([d.places[d.real] for d in dealt])
            assert sorted(places.tolist()) == list(range(number))
            for d in dealt:
                assert (d.places[~d.real] == number - 1).all()
    assert split_rows(slice(3, 9), None, multiple=4).own == slice(3, 9)


@pytest.mark.parametrize("heads", [3, 11])
@pytest.mark.parametrize("stage", [1, 2], ids=["stage1", "stage2"])
def test_calls_of_the_kernels_in_one_process(stage: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds up the same calls by several ranks below: chunks, gradients and their rows."""
    take_cpu_tensors(monkeypatch, HOPPER)
    call = kl_call(stage, LONG, torch.bfloat16, 64, heads=heads)
    settings = {"index_scale": 0.3, "relu": True, "tp_group": None}
    expected = undispatched(indexer_kl_chunked, in_double(call))
    for row_chunk in (None, 128):
        got = tilelang_backend.indexer_kl_tilelang(**call, **settings, row_chunk=row_chunk)
        for name, want, value in zip(RESULTS, expected, got):
            assert_close(name, want, value, 1e-6 if name == "loss" else 5e-3)


def in_double(call: Call) -> Call:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}


def collectives(group: dist.ProcessGroup) -> None:
    """Sums and parts land where they belong, also where pieces are short or empty."""
    ranks = range(group.size())
    for number, multiple in ((7, 1), (6, 1), (1, 1), (20, 8)):
        parts = [torch.arange(number * 3.0).view(number, 3) * (rank + 1) for rank in ranks]
        split = split_rows(slice(10, 10 + number), group, multiple=multiple)
        own = slice(split.own.start - 10, split.own.stop - 10)
        assert_identical("sum", sum(parts)[own], split.reduce_scatter(parts[group.rank()]))
        shared = torch.full((number, 2), torch.nan, dtype=torch.bfloat16)
        shared[own] = torch.arange(number)[own, None].bfloat16()
        split.share_(shared)
        assert_identical("rows", torch.arange(number)[:, None].bfloat16().expand(-1, 2).contiguous(), shared)
        dealt = deal_rows(number, group, tile=2, device=torch.device("cpu"))
        assert_identical("dealt", torch.arange(number), dealt.gather(dealt.places))
    total = torch.ones(4)
    sum_over_ranks_(total, group)
    assert_identical("total", torch.full((4,), float(len(ranks))), total)


def selection(group: dist.ProcessGroup) -> None:
    """Ids equal those of one rank, for numbers of rows that divide into nothing."""
    for lengths, weighted, dtype in (([600, 3, 111], True, torch.float32), ([9, 250], False, torch.bfloat16)):
        rows = rows_of(lengths, 2, padding=5)
        # Small integers: many scores are equal.
        q_idx, k_blocks = (
            torch.randint(-2, 3, (len(rows.pos), 2, 8)),
            torch.randint(-2, 3, (num_blocks_of(lengths, 2), 8)),
        )
        call = {
            "q_idx": q_idx.to(dtype),
            "k_blocks": k_blocks.to(dtype),
            "row_pos": rows.pos,
            "row_block_start": rows.block_start,
            "ratio": 2,
            "topk": 7,
            "weights": torch.randn(len(rows.pos), 2) if weighted else None,
            "relu": not weighted,
        }
        alone = select_blocks(**call)
        assert (alone[:, 0] >= 0).any()
        assert_identical("ids", alone, select_blocks(**call, tp_group=group))
        call["q_idx"][1] = torch.nan
        for settings in ({"checked": True}, {"backend": "naive"}):
            with pytest.raises(ValueError, match=r"must not be NaN.* row 1"):
                select_blocks(**call, **settings, tp_group=group)


def losses(group: dist.ProcessGroup, calls: list[Call]) -> list[tuple[Tensor, ...]]:
    """By every path, also in chunks of few rows: of one row, of which all ranks but one have none."""
    results = []
    for call in calls:
        mine = heads_of_rank(call, group)
        results += [differentiated(mine, backend="naive"), differentiated(mine, checked=True)]
        few_rows, fewer = (2**18, 2**17) if mine["block_ids"] is None else (2**15, 1)
        results += [undispatched(indexer_kl_chunked, mine, workspace=workspace) for workspace in (few_rows, fewer)]
        only_dk = undispatched(indexer_kl_chunked, mine, needs_grad=(False, True, False))
        assert only_dk[1] is only_dk[3] is None
        broken = mine | {"q": mine["q"].index_fill(0, torch.tensor([2, 41]), torch.nan if group.rank() == 1 else 0.0)}
        with pytest.raises(ValueError, match="must not be NaN; 1 rows break it, the first is row 41"):
            indexer_kl(**(broken | {"valid": torch.arange(len(mine["q"])) > 9}), checked=True)
    return results


def launches(group: dist.ProcessGroup, calls: list[Call]) -> list[tuple[Tensor, ...]]:
    """By the calls of the kernels."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_cpu_tensors(monkeypatch, HOPPER)
        run = tilelang_backend.indexer_kl_tilelang
        return [
            undispatched(run, heads_of_rank(call, group), row_chunk=chunk) for call in calls for chunk in (None, 128)
        ]


def disagreements(group: dist.ProcessGroup, calls: list[Call]) -> tuple[list[tuple[Tensor, ...]], list[str]]:
    """Where the kernels of rank 1 do not compile, or its TileLang does not import: results and what is warned of."""
    results, texts = [], []
    for fault in ("build", "import"):
        for call in calls:
            mine = heads_of_rank(call, group)
            with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                take_cpu_tensors(monkeypatch, HOPPER)
                monkeypatch.setattr(tilelang_backend, "_AGREED", WeakKeyDictionary())
                monkeypatch.setattr(tilelang_backend, "_build", lambda *_: None)
                if group.rank() == 1 and fault == "import":
                    monkeypatch.setattr(tilelang_backend, "import_fault", lambda: "tilelang cannot be imported: no")
                if group.rank() == 1 and fault == "build":
                    monkeypatch.setattr(tilelang_backend, "_build", _does_not_compile)
                before = differentiated(mine)  # all ranks take the chunked path, at once and from then on
                results += [before, differentiated(mine)]
                with pytest.raises(ValueError, match="backend='tilelang' does not run these arguments: "):
                    indexer_kl(**mine, backend="tilelang")
            texts.append("; ".join(str(w.message) for w in caught if w.category is RuntimeWarning))
            with pytest.MonkeyPatch.context() as monkeypatch:
                take_cpu_tensors(monkeypatch, HOPPER)
                monkeypatch.setattr(tilelang_backend, "_AGREED", WeakKeyDictionary())
                monkeypatch.setattr(tilelang_backend, "_build", _does_not_compile)
                with pytest.raises(KernelBuildError, match="out of registers"):
                    indexer_kl(**mine, backend="tilelang")
    return results, texts


def _does_not_compile(*_: Any) -> None:
    raise KernelBuildError("indexer_kl/teacher does not compile: out of registers")


def agreements(group: dist.ProcessGroup, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks hear of each other once for each shape; how often, after each of several calls."""
    take_cpu_tensors(monkeypatch, HOPPER)
    monkeypatch.setattr(tilelang_backend, "_AGREED", WeakKeyDictionary())
    monkeypatch.setattr(tilelang_backend, "_build", lambda *_: None)
    heard: list[int] = []
    sums = tilelang_backend.sum_over_ranks_
    monkeypatch.setattr(tilelang_backend, "sum_over_ranks_", lambda *a: (heard.append(1), sums(*a)))
    numbers = []
    for call in 3 * calls:
        loss = indexer_kl(**heads_of_rank(call, group), backend="tilelang")
        assert loss.isfinite()
        numbers.append(len(heard))
    return numbers


def _rank(rank: int, size: int, store: str, exact: list[Call], rough: list[Call], results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for ranks in range(2, size + 1):
        group = dist.new_group(range(ranks))
        if rank < ranks:
            torch.manual_seed(0)
            collectives(group)
            selection(group)
            torch.save((losses(group, exact), launches(group, rough)), f"{results}.{ranks}.{rank}")
            if ranks == 2:
                with pytest.MonkeyPatch.context() as monkeypatch:
                    numbers = agreements(group, rough, monkeypatch)
                torch.save((disagreements(group, rough), numbers), f"{results}.disagree.{rank}")
    dist.destroy_process_group()


def test_ranks_that_share_heads_and_rows_equal_one_process(tmp_path: Path) -> None:
    """Loss and gradients of two and of three ranks, in float64 to rounding, and bit for bit from rank to rank; and two
    ranks of which one cannot take the kernels.
    """
    exact = [kl_call(stage, LENGTHS, torch.float64, 8, given_lse=given) for stage, given in ((1, True), (2, False))]
    rough = [kl_call(stage, LONG, torch.bfloat16, 64) for stage in (1, 2)]
    store, results = str(tmp_path / "store"), str(tmp_path / "results")
    mp.spawn(_rank, (3, store, exact, rough, results), nprocs=3)
    oracles = [differentiated(call, backend="naive") for call in exact]
    direct = [undispatched(indexer_kl_chunked, call) for call in exact]
    expected = [want for pair in zip(oracles, direct) for want in (pair[0], pair[0], pair[1], pair[1])]
    expected_of_launches = [want for call in rough for want in 2 * [undispatched(indexer_kl_chunked, in_double(call))]]
    for ranks in (2, 3):
        (got, launched), *others = (torch.load(f"{results}.{ranks}.{rank}") for rank in range(ranks))
        for want, result in zip(expected, got, strict=True):
            for name, a, b in zip(RESULTS, want, result, strict=True):
                assert_close(name, a, b, 1e-11)
        for want, result in zip(expected_of_launches, launched, strict=True):
            for name, a, b in zip(RESULTS, want, result, strict=True):
                assert_close(name, a, b, 1e-6 if name == "loss" else 5e-3)
        for other in others:
            for mine, theirs in zip([*got, *launched], [*other[0], *other[1]], strict=True):
                for name, a, b in zip(RESULTS, mine, theirs, strict=True):
                    assert_identical(name, a, b)

    (first, numbers), (second, _) = (torch.load(f"{results}.disagree.{rank}") for rank in range(2))
    chunked = [undispatched(indexer_kl_chunked, in_double(call) | {"index_scale": 64**-0.5}) for call in rough]
    for want, mine, theirs in zip(
        [w for _ in range(2) for w in chunked for _ in range(2)], first[0], second[0], strict=True
    ):
        for name, a, b, c in zip(RESULTS, want, mine, theirs, strict=True):
            assert_close(name, a, b, 1e-6 if name == "loss" else 5e-3)
            assert_identical(name, b, c)
    here = "indexer_kl takes the chunked path: indexer_kl/teacher does not compile: out of registers"
    elsewhere = (
        "indexer_kl takes the chunked path: 1 of the 2 ranks of tp_group cannot take the kernels, each of them says why"
    )
    assert first[1] == [elsewhere] * 4
    assert second[1] == [here] * 2 + ["indexer_kl takes the chunked path: tilelang cannot be imported: no"] * 2
    assert numbers == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("stage", [1, 2])
def test_naive_and_chunked_agree_on_what_ranks_are_held_against(stage: int) -> None:
    call = kl_call(stage, LENGTHS, torch.float64, 8)
    loss = indexer_kl_naive(**call, index_scale=0.3, relu=True, tp_group=None)
    assert_close("loss", loss, undispatched(indexer_kl_chunked, call)[0], 1e-11)
