"""The TileLang kernels of indexer_kl against float64, loss and every gradient, and what they promise beside numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_ci.thread_ranks import run_ranks
from mcore_patches.ops.device import Device, describe
from mcore_patches.ops.indexer_kl import indexer_kl, supports, tilelang_backend
from mcore_patches.ops.indexer_kl.chunked import indexer_kl_chunked
from mcore_patches.ops.indexer_kl.design import PlainTiles, Shape
from mcore_patches.ops.indexer_kl.naive import indexer_kl_naive
from mcore_patches.ops.indexer_kl.tilelang_backend import indexer_kl_tilelang, warmup
from mcore_patches.ops.jit import CACHE
from mcore_patches.ops.packing import PackedRows, complete_blocks, packed_rows
from mcore_patches.ops.sparse_gqa import sparse_gqa

pytestmark = pytest.mark.h100
GRADIENT_TOLERANCE = 0.005  # of the norm: gradients are handed on in bfloat16, 2**-9 relative
PACKED = (13, 50, 233, 1, 3, 341, 7)


@dataclass(frozen=True)
class Case:
    """topk blocks of `ratio` tokens; heads x channels of the indexer; q_heads on kv_heads of width dim."""

    topk: int = 16
    ratio: int = 4
    heads: int = 4
    channels: int = 128
    q_heads: int = 24
    kv_heads: int = 2
    dim: int = 256
    scoring: str = "relu"
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = PACKED
    ordered: bool = False
    everywhere: bool = False  # all visible blocks, no selection

    def __str__(self) -> str:
        selected = "all" if self.everywhere else self.topk
        dtype = str(self.dtype).removeprefix("torch.")
        index = f"T{sum(self.lengths)}-r{self.ratio}-K{selected}-H{self.heads}-d{self.channels}"
        return f"{index}-Hq{self.q_heads}-Hkv{self.kv_heads}-D{self.dim}-{self.scoring}-{dtype}"

    @property
    def rows(self) -> PackedRows:
        """Of the documents and five rows of padding."""
        boundaries = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device="cuda")
        return packed_rows(boundaries, sum(self.lengths) + 5, self.ratio)


@dataclass
class Inputs:
    q_idx: Tensor
    k_blocks: Tensor
    q: Tensor
    k: Tensor
    lse: Tensor
    block_ids: Tensor | None
    rows: PackedRows
    settings: dict[str, Any]

    @classmethod
    def random(cls, case: Case, *, reduction: str = "mean", seed: int = 0) -> Inputs:
        """Neighbouring rows select alike, block 0 is everyone's, every 17th row selects nothing, some ids are wild; the
        ids' order is any unless the case says otherwise. Rows of padding and tokens behind the documents hold NaN."""
        g = torch.Generator("cuda").manual_seed(seed)
        rows, tokens = case.rows, sum(case.lengths)
        blocks = sum(length // case.ratio for length in case.lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=g).to(case.dtype)

        number = len(rows.pos)
        q_idx, k_blocks = normal(number, case.heads, case.channels), normal(blocks, case.channels)
        q, k = normal(number, case.q_heads, case.dim), normal(tokens + 3, case.kv_heads, case.dim)
        weights = torch.randn(number, case.heads, device="cuda", generator=g) if "weights" in case.scoring else None
        ids = None if case.everywhere else _selection(case, rows, g)
        scale = case.dim**-0.5
        _, lse = sparse_gqa(
            q.float(), k.float(), k.float(), ids, rows.pos, rows.start, scale=scale, block_size=case.ratio,
            backend="chunked",
        )  # fmt: skip
        for tensor in (q_idx, q, lse):
            tensor[rows.pos < 0] = torch.nan
        k[tokens:] = torch.nan
        settings = {
            "scale": scale,
            "index_scale": case.channels**-0.5,
            "ratio": case.ratio,
            "weights": weights,
            "relu": "relu" in case.scoring,
            "valid": torch.rand(number, device="cuda", generator=g) > 0.1,
            "reduction": reduction,
        }
        return cls(q_idx, k_blocks, q, k, lse, ids, rows, settings)

    @property
    def arguments(self) -> tuple[Any, ...]:
        rows = self.rows
        return (
            self.q_idx,
            self.k_blocks,
            self.q,
            self.k,
            self.lse,
            self.block_ids,
            rows.pos,
            rows.start,
            rows.block_start,
        )

    def run(self) -> tuple[Tensor, ...]:
        """Loss and gradients of the op."""
        weights = self.settings["weights"]
        leaves = [x.detach().requires_grad_() for x in (self.q_idx, self.k_blocks, weights) if x is not None]
        settings = self.settings | {"weights": leaves[2] if weights is not None else None}
        loss = indexer_kl(*leaves[:2], *self.arguments[2:], **settings, backend="tilelang")
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def reference(self) -> tuple[Tensor, ...]:
        """The same by the chunked path in float64, which a CPU test holds against the oracle."""
        doubles = (in_double(x) for x in self.arguments)
        weights = self.settings["weights"]
        settings = self.settings | {"weights": None if weights is None else weights.double()}
        result = indexer_kl_chunked(*doubles, **settings, tp_group=None)
        return tuple(x for x in result if x is not None)


def in_double(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def _selection(case: Case, rows: PackedRows, g: torch.Generator) -> Tensor:
    number, most = len(rows.pos), max(case.lengths) // case.ratio + 1
    complete = complete_blocks(rows.pos, case.ratio)[:, None]
    row, block = torch.arange(number, device="cuda"), torch.arange(most, device="cuda")
    score = torch.rand(1 + number // 32, most, device="cuda", generator=g)[row // 32]
    score = score + 0.05 * torch.rand(number, most, device="cuda", generator=g)
    score[:, 0] = 2
    score = score.masked_fill(block >= complete, -1.0)
    best, ids = score.topk(min(case.topk, most), dim=1)
    ids = torch.where(best >= 0, ids, -1).int()
    ids = torch.nn.functional.pad(ids, (0, case.topk - ids.shape[1]), value=-1)
    if case.ordered:
        ids = torch.where(ids >= 0, ids, 2**30).sort(dim=1).values
        ids = torch.where(ids < 2**30, ids, -1)
    ids[row % 17 == 5] = -1
    taken = (ids >= 0).sum(dim=1)
    wild = (row % 11 == 3) & (taken < case.topk)
    ids[wild, taken[wild]] = complete[wild, 0].int() + 5
    return ids


def check(ref: tuple[Tensor, ...], got: tuple[Tensor, ...], case: Case) -> None:
    names = ("loss", "dq_idx", "dk_blocks", "dweights")
    assert len(ref) == len(got)
    for name, a, b in zip(names, ref, got):
        assert torch.isfinite(b).all(), name
        if name == "loss":
            assert abs(a.item() - b.item()) < 1e-6 + 1e-5 * abs(a.item()), (name, a.item(), b.item())
        else:
            assert a.shape == b.shape
            error = ((a - b.double()).norm() / a.norm()).item()
            # Over all blocks the scores' gradient is rounded to bfloat16 for the matrix unit before anything is summed.
            exact = name == "dweights" and not case.everywhere
            assert error < (1e-4 if exact else GRADIENT_TOLERANCE), (name, error)


CASES = [
    Case(),
    Case(topk=512, lengths=(13, 50, 4133, 1, 3, 2341, 7), ordered=True),
    Case(topk=512, lengths=(1500, 700)),
    *(Case(scoring=scoring, heads=3, channels=64, dim=64) for scoring in ("relu-weights", "linear", "linear-weights")),
    *(Case(ratio=ratio, q_heads=8, dim=128) for ratio in (1, 2, 8, 16)),
    *(Case(q_heads=2 * group, dim=64, heads=1, channels=64) for group in (1, 2, 8, 16)),
    Case(topk=1024, q_heads=8, dim=128, lengths=(4301, 77)),
    Case(topk=4096, ratio=1, q_heads=8, dim=128, heads=2, channels=64, lengths=(4301, 77)),
    Case(q_heads=4, kv_heads=1, dim=256, heads=8, channels=256),
    Case(q_heads=12, kv_heads=3, dim=128, dtype=torch.float16, scoring="relu-weights"),
    Case(topk=2048, ratio=1, q_heads=8, dim=128, lengths=(3000, 2100)),
    *(
        Case(topk=topk, ratio=ratio, heads=heads, q_heads=8, dim=128, scoring=scoring, lengths=lengths)
        for topk, ratio, heads, scoring, lengths in (
            (16, 4, 9, "relu", PACKED),
            (300, 1, 64, "relu-weights", PACKED),
            (2048, 1, 64, "relu-weights", (3000, 1100)),
            (70, 2, 33, "linear-weights", PACKED),
        )
    ),
    Case(topk=40, heads=12, channels=64, dim=64, scoring="linear"),
    Case(everywhere=True, ratio=1, heads=64, q_heads=8, dim=128, scoring="relu-weights"),
    Case(everywhere=True),
    Case(everywhere=True, lengths=(1500, 2300, 3)),
    *(Case(everywhere=True, scoring=scoring, heads=3, channels=64, dim=64) for scoring in ("relu-weights", "linear")),
    *(Case(everywhere=True, ratio=ratio, q_heads=8, dim=128) for ratio in (1, 2, 8, 16)),
    *(Case(everywhere=True, q_heads=2 * group, dim=64, heads=1, channels=64) for group in (1, 2, 8, 16)),
    Case(everywhere=True, q_heads=4, kv_heads=1, heads=8, channels=256, scoring="linear-weights"),
]
EITHER = pytest.mark.parametrize("everywhere", [False, True], ids=["selected", "all"])
KINDS = pytest.mark.parametrize(
    "kind", [{}, {"heads": 20, "scoring": "relu"}, {"everywhere": True}], ids=["selected", "many-heads", "all"]
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64(case: Case) -> None:
    inputs = Inputs.random(case)
    check(inputs.reference(), inputs.run(), case)


@pytest.mark.parametrize("kib", [99, 163, 226])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(everywhere=True, lengths=(700, 300, 3)),
        Case(everywhere=True, scoring="linear-weights", heads=3, channels=64, q_heads=8, dim=128, ratio=1),
        Case(everywhere=True, scoring="relu-weights", heads=2, channels=256, q_heads=4, kv_heads=1, ratio=16),
        Case(everywhere=True, heads=20, q_heads=8, dim=64, scoring="linear"),
        Case(topk=300, ratio=1, heads=64, q_heads=8, dim=128, scoring="relu-weights"),
    ],
    ids=str,
)
def test_plain_kernels_equal_float64(case: Case, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of other GPUs, with as much shared memory as those have."""
    multiprocessors = describe(torch.device("cuda", torch.cuda.current_device())).multiprocessors
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: Device("sm_90a", kib * 1024, multiprocessors))
    inputs = Inputs.random(case)
    assert isinstance(plain_tiles(inputs, tilelang_backend.device_of(inputs.q.device)), PlainTiles)
    check(inputs.reference(), inputs.run(), case)


def plain_tiles(inputs: Inputs, device: Device) -> PlainTiles | None:
    settings = inputs.settings
    shape = tilelang_backend._shape(
        device, inputs.q_idx, inputs.q, inputs.k, inputs.block_ids, settings["ratio"], settings["weights"],
        settings["relu"], None,
    )  # fmt: skip
    assert isinstance(shape, Shape), shape
    return shape.plain


@EITHER
def test_equals_the_oracle(everywhere: bool) -> None:
    case = Case(lengths=(13, 50, 133), scoring="relu-weights", heads=3, channels=64, dim=64, everywhere=everywhere)
    inputs = Inputs.random(case)
    leaves = [x.double().requires_grad_() for x in (inputs.q_idx, inputs.k_blocks, inputs.settings["weights"])]
    doubles = (in_double(x) for x in inputs.arguments[2:])
    settings = inputs.settings | {"weights": leaves[2]}
    loss = indexer_kl_naive(*leaves[:2], *doubles, **settings, tp_group=None)
    grads = torch.autograd.grad(loss, leaves)
    check((loss.detach(), *(g.nan_to_num(0.0) for g in grads)), inputs.run(), case)


@EITHER
def test_a_row_without_blocks_may_hold_anything(everywhere: bool) -> None:
    inputs = Inputs.random(Case(everywhere=everywhere))
    before = inputs.run()
    without = (inputs.rows.pos >= 0) & (inputs.rows.pos + 1 < inputs.settings["ratio"])
    assert without.any()
    inputs.q_idx, inputs.q = (x.masked_fill(without[:, None, None], torch.nan) for x in (inputs.q_idx, inputs.q))
    for one, other in zip(before, inputs.run(), strict=True):
        assert torch.equal(one, other)


def test_sum_is_the_mean_times_the_number_that_counts() -> None:
    mean, total = (Inputs.random(Case(), reduction=reduction) for reduction in ("mean", "sum"))
    counted = (mean.rows.pos >= 0) & mean.settings["valid"]
    for a, b in zip(mean.run(), total.run()):
        torch.testing.assert_close(a.float() * counted.sum(), b.float(), rtol=1e-2, atol=1e-2)
    check(total.reference(), total.run(), Case())


@KINDS
def test_chunks_of_rows_do_not_matter_to_the_loss(kind: dict[str, Any]) -> None:
    inputs = Inputs.random(Case(topk=64, lengths=(900, 700), **kind))
    settings = inputs.settings
    want = indexer_kl_tilelang(*inputs.arguments, **settings)
    for row_chunk in (128, 512):
        got = indexer_kl_tilelang(*inputs.arguments, **settings, row_chunk=row_chunk)
        assert torch.equal(want.loss, got.loss)
        assert torch.equal(want.q_idx, got.q_idx)
        torch.testing.assert_close(want.k_blocks, got.k_blocks, rtol=1e-4, atol=1e-7)


@EITHER
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_heads_and_rows_equal_one(
    ranks: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of all rows, which three ranks share unevenly, and of so few that two of three have none."""
    case = Case(
        topk=64, lengths=(500, 41), q_heads=24, kv_heads=6, dim=64, scoring="relu-weights", everywhere=everywhere
    )
    inputs = Inputs.random(case)
    arguments = inputs.arguments
    for row_chunk in (None, 128):

        def work(group: dist.ProcessGroup, row_chunk: int | None = row_chunk) -> tuple[Tensor, ...]:
            heads = [x.chunk(ranks, dim=1)[group.rank()] for x in arguments[2:5]]
            mine = (*arguments[:2], *heads, *arguments[5:])
            return indexer_kl_tilelang(*mine, **inputs.settings, tp_group=group, row_chunk=row_chunk)

        first, *others = run_ranks(ranks, work, monkeypatch)
        check(inputs.reference(), first, case)
        for other in others:
            for a, b in zip(first, other):
                assert torch.equal(a, b)


@EITHER
def test_warmup_builds_what_a_call_takes(everywhere: bool) -> None:
    case = Case(topk=20, heads=2, channels=64, q_heads=6, kv_heads=3, dim=64, ratio=8, everywhere=everywhere)
    columns = None if everywhere else case.topk
    shape = {"q_heads": 6, "kv_heads": 3, "dim": 64, "ratio": 8, "topk": columns}
    warmup(2, 64, **shape)
    builds = CACHE.builds
    Inputs.random(case).run()
    assert CACHE.builds == builds
    assert warmup(2, 64, **shape) == 0.0


def test_order_of_ids_does_not_matter() -> None:
    inputs = Inputs.random(Case(topk=64, lengths=(900,), ordered=True))
    loss, dq, dk = inputs.run()
    assert inputs.block_ids is not None
    inputs.block_ids = inputs.block_ids[:, torch.randperm(64, device="cuda")].contiguous()
    for a, b in zip((loss, dq, dk), inputs.run()):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=1e-6)


@KINDS
def test_rows_that_do_not_count_are_left_out(kind: dict[str, Any]) -> None:
    inputs = Inputs.random(Case(**kind))
    out = ~inputs.settings["valid"]
    ref = inputs.run()
    inputs.q_idx[out] = torch.nan
    inputs.q[out] = torch.nan
    inputs.lse[out] = torch.nan
    got = inputs.run()
    for a, b in zip(ref, got):
        assert torch.equal(a, b)
    assert not got[1][out].any()
    assert not got[1][inputs.rows.pos < 0].any()


@KINDS
def test_no_blocks_and_no_mass_add_nothing(kind: dict[str, Any]) -> None:
    """Rows without blocks, and rows whose tail took everything: all exponentials are 0."""
    inputs = Inputs.random(Case(**kind), reduction="sum")
    inputs.settings["valid"] = None
    inputs.lse[::3] = 1e30
    loss, dq, dk = inputs.run()
    assert torch.isfinite(loss) and torch.isfinite(dk).all()
    assert not dq[::3].any()
    without = inputs.rows.pos < 3 if inputs.block_ids is None else (inputs.block_ids < 0).all(dim=1)
    assert not dq[without].any()
    inputs.lse.fill_(1e30)
    loss, dq, dk = inputs.run()
    assert loss == 0 and not dq.any() and not dk.any()


@KINDS
@pytest.mark.parametrize("name", ["q_idx", "q", "k", "lse"])
def test_checked_refuses_nan(name: str, kind: dict[str, Any]) -> None:
    inputs = Inputs.random(Case(lengths=(300,), **kind))
    inputs.settings["valid"] = None
    indexer_kl(*inputs.arguments, **inputs.settings, backend="tilelang", checked=True)
    getattr(inputs, name)[100] = torch.nan
    if name == "k":  # a token of a block that some row selects
        inputs.k[1] = torch.nan
    with pytest.raises(ValueError, match="must not be NaN"):
        indexer_kl(*inputs.arguments, **inputs.settings, backend="tilelang", checked=True)


def test_strided_arguments_give_the_same() -> None:
    inputs = Inputs.random(Case(scoring="relu-weights", heads=3, channels=64, dim=64))
    want = inputs.run()
    inputs.q = torch.cat((inputs.q, inputs.q), dim=2)[:, :, :64]
    inputs.k = torch.stack((inputs.k, inputs.k), dim=2)[:, :, 0]
    inputs.q_idx = torch.cat((inputs.q_idx, inputs.q_idx[:, :1]), dim=1)[:, :3]
    assert inputs.block_ids is not None
    inputs.block_ids = inputs.block_ids.T.contiguous().T
    inputs.lse = inputs.lse.T.contiguous().T
    for a, b in zip(want, inputs.run()):
        assert torch.equal(a, b)


@KINDS
def test_repeats_bit_for_bit_beside_other_work(kind: dict[str, Any]) -> None:
    inputs = Inputs.random(Case(topk=512, lengths=(6000, 2000), **kind))
    want = inputs.run()
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            a = a @ a * 1e-3
        for x, y in zip(want, inputs.run()):
            assert torch.equal(x, y)


@EITHER
def test_never_waits_for_the_device_and_never_builds_for_other_lengths(everywhere: bool) -> None:
    case = Case(heads=1, channels=64, q_heads=4, dim=64, everywhere=everywhere)
    inputs = Inputs.random(case)
    want = inputs.run()
    others = [Inputs.random(replace(case, lengths=n, topk=k)) for n, k in (((5,), 1), ((31,) * 30, 7), ((3999,), 100))]
    builds = CACHE.builds
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = inputs.run()
        for other in others:
            other.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert CACHE.builds == builds
    for a, b in zip(want, got):
        assert torch.equal(a, b)


@KINDS
def test_captured_in_a_graph(kind: dict[str, Any]) -> None:
    case = Case(topk=64, lengths=(900,), **kind)
    inputs, later = (Inputs.random(case, seed=seed) for seed in (0, 1))
    indexer_kl_tilelang(*inputs.arguments, **inputs.settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = indexer_kl_tilelang(*inputs.arguments, **inputs.settings)
    for target, source in zip(inputs.arguments, later.arguments):
        if target is not None:
            target.copy_(source)
    inputs.settings["valid"].copy_(later.settings["valid"])
    graph.replay()
    want = indexer_kl_tilelang(*later.arguments, **later.settings)
    assert torch.equal(want.loss, got.loss)
    assert torch.equal(want.q_idx, got.q_idx)
    assert torch.equal(want.k_blocks, got.k_blocks)


@KINDS
def test_writes_stay_inside_their_buffers(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the op allocates lies between guards, which are whole afterwards."""
    margin, sentinel, guarded = 4096, 77, []
    allocate = torch.empty

    def between_guards(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        everything = allocate(size + 2 * margin, dtype=dtype, device=device).fill_(sentinel)
        guarded.append((everything, size))
        return everything[margin : margin + size].view(shape)

    inputs = Inputs.random(Case(topk=64, lengths=(501, 300), **kind))
    want = inputs.run()
    monkeypatch.setattr("mcore_patches.ops.indexer_kl.tilelang_selected.new_empty", between_guards)
    for a, b in zip(want, inputs.run()):
        assert torch.equal(a, b)
    assert len(guarded) >= (7 if "everywhere" in kind else 10)
    for everything, size in guarded:
        assert (everything[:margin] == sentinel).all()
        assert (everything[margin + size :] == sentinel).all()


def test_quarter_of_a_million_tokens_in_bounded_memory() -> None:
    from gpu_ci.bench.selections import block_selection

    tokens, ratio, topk = 262144, 4, 512
    ids = block_selection(tokens, "correlated", topk=topk, block_size=ratio, rows_at_once=256)
    torch.cuda.empty_cache()
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q_idx, k_blocks = torch.randn(tokens, 4, 128, **bf16), torch.randn(tokens // ratio, 128, **bf16)
    q, k = torch.randn(tokens, 24, 256, **bf16), torch.randn(tokens, 2, 256, **bf16)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    lse, zero = torch.full((tokens, 24), 8.0, device="cuda"), torch.zeros_like(pos)
    settings: dict[str, Any] = {"scale": 1 / 16, "index_scale": 128**-0.5, "ratio": ratio, "weights": None}
    settings |= {"relu": True, "valid": None, "reduction": "mean"}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = indexer_kl_tilelang(q_idx, k_blocks, q, k, lse, ids, pos, zero, zero, **settings)
    torch.cuda.synchronize()
    outputs = got.q_idx.nbytes + got.k_blocks.nbytes
    assert torch.cuda.max_memory_allocated() - before - outputs < 1.5 * 2**30
    # The last rows alone, against float64.
    last = slice(tokens - 16, tokens)
    doubles = q_idx[last].double(), k_blocks.double(), q[last].double(), k.double(), lse[last].double()
    sums = settings | {"reduction": "sum", "tp_group": None}
    ref = indexer_kl_chunked(*doubles, ids[last], pos[last], zero[last], zero[last], **sums)
    assert ref.q_idx is not None and got.q_idx is not None
    error = (ref.q_idx / tokens - got.q_idx[last].double()).norm() / ref.q_idx.norm() * tokens
    assert error < GRADIENT_TOLERANCE


def test_declines_with_a_reason() -> None:
    inputs = Inputs.random(Case(lengths=(100,), dim=64, channels=64, heads=1))
    changes: tuple[tuple[int, Any, str], ...] = (
        (4, None, "lse is None"),
        (0, inputs.q_idx.float(), "q_idx must be bfloat16 or float16"),
        (0, inputs.q_idx.repeat(1, 65, 1), "heads of q_idx must be at most 64"),
    )
    for place, value, reason in changes:
        arguments = list(inputs.arguments)
        arguments[place] = value
        assert supports(*arguments, **inputs.settings)[0] is False
        assert reason in supports(*arguments, **inputs.settings)[1]
