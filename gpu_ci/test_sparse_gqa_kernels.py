"""The TileLang kernels of sparse GQA against the float64 oracle, and what they promise beside the numbers."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.device import Device, describe
from mcore_patches.ops.jit import CACHE
from mcore_patches.ops.sparse_gqa import sparse_gqa, supports, tilelang_backend, tilelang_backward, tilelang_forward
from mcore_patches.ops.sparse_gqa.naive import sparse_gqa_naive
from mcore_patches.ops.sparse_gqa.tilelang_forward import Rows

pytestmark = pytest.mark.h100
TOLERANCE = 0.006  # of the norm: P and dS are rounded to bf16, 2**-9 relative
NAMES = ("out", "lse", "dq", "dk", "dv")
SHORT = (1, 3, 4, 41, 7, 130, 2, 300, 61, 33)


@dataclasses.dataclass(frozen=True)
class Case:
    """kind: what neighbouring rows share, see `select`. lengths: tokens of the packed documents."""

    heads: int = 24
    kv_heads: int = 2
    dim: int = 256
    block_size: int = 4
    budget: int = 64
    lengths: tuple[int, ...] = SHORT
    kind: str = "mixed"

    @property
    def topk(self) -> int:
        return self.budget // self.block_size

    def __str__(self) -> str:
        shape = f"H{self.heads}-{self.kv_heads}-D{self.dim}-r{self.block_size}"
        return f"{shape}-budget{self.budget}-T{sum(self.lengths)}-{self.kind}"

    def param(self) -> Any:
        """Cases of one shape share their kernels, so they run in one worker."""
        group = f"H{self.heads}-{self.kv_heads}-D{self.dim}-r{self.block_size}"
        return pytest.param(self, id=str(self), marks=pytest.mark.xdist_group(group))


@dataclasses.dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rows: Rows
    case: Case

    @property
    def settings(self) -> dict[str, Any]:
        return {"scale": self.case.dim**-0.5, "block_size": self.case.block_size}

    @classmethod
    def random(cls, case: Case, seed: int = 0) -> Inputs:
        """Padding rows inside and behind; NaN in them and in keys of no document."""
        g = torch.Generator("cuda").manual_seed(seed + zlib.crc32(str(case).encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=g).bfloat16()

        pos, start, at = [], [], 0
        for n, length in enumerate(case.lengths):
            padding = 3 * (n % 2)
            pos += [torch.arange(length), torch.full((padding,), -1)]
            start += [torch.full((length,), at), torch.zeros(padding, dtype=torch.long)]
            at += length
        row_pos, row_start = (torch.cat(x).int().cuda() for x in (pos, start))
        ids = select(row_pos, case, max(case.lengths), g)
        q, dout = (normal(len(row_pos), case.heads, case.dim) for _ in range(2))
        k, v = (normal(at + 3, case.kv_heads, case.dim) for _ in range(2))
        q[row_pos < 0] = dout[row_pos < 0] = torch.nan
        k[at:] = v[at:] = torch.nan
        return cls(q, k, v, dout, Rows(ids, row_pos, row_start), case)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.q, self.k, self.v)]

    def run(self) -> tuple[Tensor, ...]:
        """(out, lse, dq, dk, dv) of the op."""
        leaves, rows = self.leaves(), self.rows
        out, lse = sparse_gqa(*leaves, rows.block_ids, rows.pos, rows.start, **self.settings, backend="tilelang")
        return out.detach(), lse, *torch.autograd.grad(out, leaves, self.dout)

    def launch(self, limit: int | None) -> tuple[Tensor, ...]:
        """The same from the launches, with a limit of their own on the unions that are shared."""
        tensors = self.q, self.k, self.v
        kernels = tilelang_backend._kernels(self.q, self.k, self.rows.block_ids, self.case.block_size)
        scale = self.settings["scale"]
        out, lse = tilelang_forward.forward(kernels, *tensors, self.rows, scale, limit=limit)
        grads = tilelang_backward.backward(kernels, *tensors, self.rows, out, lse, self.dout, scale, limit=limit)
        return out, lse, *grads

    def reference(self) -> tuple[Tensor, ...]:
        leaves, rows = self.leaves(torch.float64), self.rows
        out, lse = sparse_gqa_naive(*leaves, rows.block_ids, rows.pos, rows.start, **self.settings)
        dout = self.dout.double().masked_fill((rows.pos < 0)[:, None, None], 0.0)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    def of_rows(self, rows: Tensor) -> Inputs:
        """Those query rows alone."""
        mine = Rows(self.rows.block_ids[rows], self.rows.pos[rows], self.rows.start[rows])
        return dataclasses.replace(self, q=self.q[rows], dout=self.dout[rows], rows=mine)

    def of_last_document(self, length: int) -> Inputs:
        """The last `length` rows and keys, which are a document."""
        last = slice(-length, None)
        rows = Rows(self.rows.block_ids[last], self.rows.pos[last], torch.zeros_like(self.rows.start[last]))
        return dataclasses.replace(self, **{n: getattr(self, n)[last] for n in ("q", "k", "v", "dout")}, rows=rows)

    def of_row(self, row: int) -> Inputs:
        """One row beside the keys that it attends, in their order."""
        r, pos, start = self.case.block_size, int(self.rows.pos[row]), int(self.rows.start[row])
        complete = (pos + 1) // r
        ids = self.rows.block_ids[row]
        ids = ids[(ids >= 0) & (ids < complete)].sort().values.long()
        place = torch.arange(r, device="cuda")
        tail = torch.arange(complete * r, pos + 1, device="cuda")
        tokens = start + torch.cat(((ids[:, None] * r + place).flatten(), tail))
        new = torch.zeros(1, dtype=torch.int32, device="cuda")
        rows = Rows(torch.arange(len(ids), device="cuda")[None].int(), new + len(tokens) - 1, new)
        one = slice(row, row + 1)
        return dataclasses.replace(
            self, q=self.q[one], dout=self.dout[one], k=self.k[tokens], v=self.v[tokens], rows=rows
        )


def tensors_of(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.block_ids, rows.pos, rows.start


def select(row_pos: Tensor, case: Case, longest: int, g: torch.Generator) -> Tensor:
    """Distinct ids in no order: a sink, ids that lie ahead, ids of -1 between others, rows with no id at all.

    "random": every row draws its own blocks, so that few are shared; "correlated": 32 rows draw nearly the same;
    "mixed": one half is like this, the other like that.
    """
    rows, blocks = len(row_pos), max(longest // case.block_size + 1, 1)
    row = torch.arange(rows, device="cuda")
    complete = torch.div(row_pos + 1, case.block_size, rounding_mode="floor")[:, None]
    common = torch.rand(1 + rows // 32, blocks, device="cuda", generator=g)[row // 32]
    own = torch.rand(rows, blocks, device="cuda", generator=g)
    amount = torch.full((rows, 1), {"random": 1.0, "correlated": 0.05, "mixed": 0.05}[case.kind], device="cuda")
    if case.kind == "mixed":
        amount[: rows // 2] = 1.0
    score = torch.lerp(common, own, amount)
    score[row % 3 != 0, 0] = 2.0
    score.masked_fill_(torch.arange(blocks, device="cuda") >= complete, -1.0)
    best, ids = score.topk(min(case.topk, blocks), dim=1)
    ids = torch.nn.functional.pad(ids.masked_fill(best < 0, -1).int(), (0, case.topk - ids.shape[1]), value=-1)
    unused = (row % 11 == 3) & (ids[:, -1] < 0)
    ids[unused, -1] = complete[unused, 0].int() + 5
    ids[row % 13 == 4, case.topk // 2] = -1
    ids[row % 17 == 5] = -1
    return ids.contiguous()


def relative(ref: Tensor, got: Tensor) -> float:
    """Norm of the difference over the reference's, where a reference near zero counts as rounding of 1e-2 a value."""
    assert got.shape == ref.shape
    assert torch.equal(torch.isinf(ref), torch.isinf(got))
    assert not torch.isnan(got).any()
    ref, got = (t.double().masked_fill(torch.isinf(t), 0.0) for t in (ref, got))
    return ((got - ref).norm() / ref.norm().clamp_min(1e-2 * ref.numel() ** 0.5)).item()


def check(ref: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    errors = {name: relative(a, b) for name, a, b in zip(NAMES, ref, got)}
    assert all(error < TOLERANCE for error in errors.values()), errors
    assert errors["lse"] < 1e-5, errors


def assert_same_bits(ref: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    same = {name: torch.equal(a, b) for name, a, b in zip(NAMES, ref, got)}
    assert all(same.values()), same


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


# Every head width, group, block size and budget, and each with several of the others.
SHAPES = [
    Case(),
    Case(budget=2048, lengths=(13, 2300, 50)),
    Case(8, 8, 64, 1),
    Case(8, 8, 64, 1, 4096, (4200, 5)),
    Case(4, 2, 128, 2, 4096, (4301, 77)),
    Case(3, 1, 256, 8, 2048, (2100, 61, 9)),
    Case(8, 2, 64, 16, 4096, (4500, 100)),
    Case(12, 2, 128, 4),
    Case(8, 1, 256, 2, 2048, (1, 2200, 31)),
    Case(24, 2, 64, 8),
    Case(16, 1, 128, 1, 2048, (2300, 3)),
    Case(32, 2, 256, 16, 64, (*SHORT, 500)),
    Case(2, 2, 256, 4),
    Case(24, 2, 256, 4, 4096, (700, 1500)),
]


@pytest.mark.parametrize("case", [case.param() for case in SHAPES])
def test_equals_the_oracle(case: Case) -> None:
    """As the plan decides, with all tiles shared whose union fits, and with none."""
    inputs = Inputs.random(case)
    reference = inputs.reference()
    check(reference, inputs.run())
    check(reference, inputs.launch(limit=0))
    check(reference, inputs.launch(limit=2 * (case.topk + 1)))


@pytest.mark.parametrize("kib", [99, 163])
@pytest.mark.parametrize("case", [c.param() for c in (Case(), Case(8, 8, 64, 1, 1024), Case(3, 1, 128, 16, 512))])
def test_plain_kernels_equal_the_oracle(case: Case, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of other GPUs, with as much shared memory as those have."""
    multiprocessors = describe(torch.device("cuda", torch.cuda.current_device())).multiprocessors
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: Device("sm_90a", kib * 1024, multiprocessors))
    inputs = Inputs.random(case)
    kernels = tilelang_backend._kernels(inputs.q, inputs.k, inputs.rows.block_ids, case.block_size)
    assert kernels.design.plain is not None
    first = inputs.run()
    check(inputs.reference(), first)
    assert_same_bits(first, inputs.run())


@pytest.mark.parametrize("kind", ["random", "correlated"])
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 127, 259])
def test_one_document_of_any_length(length: int, kind: str) -> None:
    inputs = Inputs.random(Case(lengths=(length,), kind=kind))
    check(inputs.reference(), inputs.run())


@pytest.mark.parametrize("limit", [None, 0])
def test_a_block_that_every_query_picks(limit: int | None) -> None:
    """The sink is in every list; its own keys sum gradients of all rows."""
    inputs = Inputs.random(Case(lengths=(3000,), budget=8, kind="random"))
    ids = inputs.rows.block_ids
    ids[:, 0] = 3
    ids[:, 1] = torch.where(ids[:, 1] == 3, -1, ids[:, 1])
    check(inputs.reference(), inputs.launch(limit))


@pytest.mark.parametrize("falling", [False, True])
def test_scores_that_rise_along_a_row(falling: bool) -> None:
    """What probabilities are relative to follows, by another step for every head, and the keys before still count."""
    inputs = Inputs.random(Case(budget=2048, lengths=(2300,), kind="random"))
    q, k, scale = inputs.q.clone(), inputs.k.clone(), inputs.settings["scale"]
    # In one channel: up to two doublings every 64 tokens, falling for some heads. Large in q, else dq would cancel out.
    q[..., 0] = torch.linspace(-1, 2, q.shape[1], device="cuda") / scale**2
    doublings = torch.arange(len(k), device="cuda") / 64
    k[..., 0] = (doublings * math.log(2) * scale)[:, None]
    ids = inputs.rows.block_ids.sort(dim=1, descending=falling).values
    rows = dataclasses.replace(inputs.rows, block_ids=ids.contiguous())
    inputs = dataclasses.replace(inputs, q=q, k=k, rows=rows)
    reference = inputs.reference()
    check(reference, inputs.launch(limit=0))
    check(reference, inputs.launch(limit=2 * (inputs.case.topk + 1)))


def test_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.random(Case(budget=256, lengths=(900, 61)))
    kernels = tilelang_backend._kernels(inputs.q, inputs.k, inputs.rows.block_ids, 4)
    few = dataclasses.replace(kernels.design.backward, steps=150, stored_bytes=2**20)
    monkeypatch.setattr(kernels, "design", dataclasses.replace(kernels.design, backward=few))
    reference = inputs.reference()
    for limit in (None, 0):
        check(reference, inputs.launch(limit))


@pytest.mark.parametrize("limit", [None, 0])
def test_rows_without_keys_are_zero_and_finite(limit: int | None) -> None:
    inputs = Inputs.random(Case())
    inputs.rows.block_ids[inputs.rows.pos % 4 == 3] = -1
    out, lse, dq, dk, dv = inputs.launch(limit)
    empty = (inputs.rows.pos < 0) | (inputs.rows.pos % 4 == 3)
    assert empty.any() and not empty.all()
    assert not out[empty].any() and not dq[empty].any()
    assert (lse[empty] == -torch.inf).all() and torch.isfinite(lse[~empty]).all()
    assert torch.isfinite(dk).all() and torch.isfinite(dv).all()
    inputs.rows.pos.fill_(-1)
    out, lse, dq, dk, dv = inputs.launch(limit)
    assert not any(x.any() for x in (out, dq, dk, dv))
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("limit", [None, 0])
def test_keys_that_no_row_attends_are_never_read(limit: int | None) -> None:
    """The second half of a document is attended by few rows, and block 7 of it by none."""
    inputs = Inputs.random(Case(lengths=(400,), kind="correlated"))
    ids, pos = inputs.rows.block_ids, inputs.rows.pos
    ids[ids == 7] = -1
    keep = (pos < 28) | (pos >= 32)
    few = inputs.of_rows(keep.nonzero().flatten())
    ref = few.launch(limit)
    few.k[28:32] = few.v[28:32] = torch.nan
    got = few.launch(limit)
    assert_same_bits(ref, got)
    assert not got[3][28:32].any() and not got[4][28:32].any()


def test_strided_inputs_give_the_same_bits() -> None:
    inputs = Inputs.random(Case())
    ref = inputs.run()

    def cut(x: Tensor) -> Tensor:
        wide = torch.full((x.shape[1] + 3, x.shape[0], x.shape[2] + 8), torch.nan, device="cuda", dtype=x.dtype)
        wide[: x.shape[1], :, : x.shape[2]] = x.transpose(0, 1)
        return wide[: x.shape[1], :, : x.shape[2]].transpose(0, 1)

    rows = Rows(*(x.repeat_interleave(2, -1)[..., ::2] for x in tensors_of(inputs.rows)))
    sources = {name: cut(getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    strided = dataclasses.replace(inputs, rows=rows, **sources)
    assert not any(x.is_contiguous() for x in (strided.q, strided.k, strided.v, strided.dout, rows.block_ids))
    assert_same_bits(ref, strided.run())


class Guards:
    """torch for the launches, whose new tensors lie between margins of NaN or large numbers."""

    MARGIN = 1 << 14

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def place(self, value: Tensor) -> Tensor:
        """A copy of `value` with margins around it."""
        size = value.numel()
        buffer = torch.full(
            (size + 2 * self.MARGIN,),
            torch.nan if value.is_floating_point() else 0x7F7F7F7F,
            dtype=value.dtype,
            device=value.device,
        )
        inside = buffer[self.MARGIN : self.MARGIN + size].view(value.shape)
        inside.copy_(value)
        self.buffers.append((buffer, buffer.clone()))
        return inside

    def empty(self, *size: Any, **options: Any) -> Tensor:
        return self.place(torch.empty(*size, **options))

    def zeros(self, *size: Any, **options: Any) -> Tensor:
        return self.place(torch.zeros(*size, **options))

    def empty_like(self, like: Tensor) -> Tensor:
        return self.place(torch.empty_like(like))

    def intact(self) -> bool:
        def margins(x: Tensor) -> Tensor:
            words = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
            return torch.cat((words[: self.MARGIN], words[-self.MARGIN :]))

        return all(torch.equal(margins(now), margins(before)) for now, before in self.buffers)


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize(
    "case", [c.param() for c in (Case(), Case(8, 8, 64, 1), Case(32, 2, 256, 16, lengths=(*SHORT, 500)))]
)
def test_nothing_is_touched_outside_the_tensors(case: Case, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads outside would bring in NaN or wild ids, writes outside would show."""
    inputs = Inputs.random(case)
    ref = inputs.launch(limit)
    guards = Guards()
    for module in (tilelang_forward, tilelang_backward):
        monkeypatch.setattr(module, "torch", guards)
    rows = Rows(*(guards.place(x) for x in tensors_of(inputs.rows)))
    sources = {name: guards.place(getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    got = dataclasses.replace(inputs, rows=rows, **sources).launch(limit)
    assert len(guards.buffers) > 20
    assert guards.intact()
    assert_same_bits(ref, got)


def test_repeats_bit_for_bit_under_contention() -> None:
    inputs = Inputs.random(Case(budget=512, lengths=(1500, 333)))
    first = inputs.run(), inputs.launch(limit=0)
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(4):
                noise = (noise @ noise).tanh()
        assert_same_bits(first[0], inputs.run())
        assert_same_bits(first[1], inputs.launch(limit=0))


def test_host_never_waits() -> None:
    inputs = Inputs.random(Case())
    inputs.run()
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_gives_what_a_call_gives() -> None:
    """Captured once, replayed with other values, other lengths and other selections of one size."""
    inputs, others = (Inputs.random(Case(lengths=lengths), seed=1) for lengths in ((200, 61), (61, 200)))
    torch.use_deterministic_algorithms(False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        inputs.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = inputs.run()
    for other in (others, Inputs.random(Case(lengths=(200, 61)), seed=2)):
        for name in ("q", "k", "v", "dout"):
            getattr(inputs, name).copy_(getattr(other, name))
        for name in ("block_ids", "pos", "start"):
            getattr(inputs.rows, name).copy_(getattr(other.rows, name))
        graph.replay()
        assert_same_bits(other.run(), results)


def test_no_length_builds_a_kernel_twice() -> None:
    Inputs.random(Case()).run()
    before = CACHE.builds
    for lengths, budget in (((7,), 4), ((300, 5, 411), 64), ((2300,), 2048)):
        Inputs.random(Case(lengths=lengths, budget=budget)).run()
    assert CACHE.builds == before


@pytest.mark.xdist_group("large")
def test_256k_tokens() -> None:
    """One long document and a short one behind it, whose gradients of k and v the oracle gives as well."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    short, tokens = 1501, 2**18
    inputs = long_documents((tokens - short, short), topk=512)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = inputs.run()
    results = sum(x.numel() * x.element_size() for x in got)
    assert torch.cuda.max_memory_allocated() - before - results < 8 * 2**30
    check_rows(inputs, got, [0, 3, 2050, 100_003, 200_002, tokens - short - 1])
    check(inputs.of_last_document(short).reference(), tuple(x[-short:] for x in got))
    # Probabilities of a row add up to 1, so dv summed over keys is dout summed over rows and heads.
    summed = inputs.dout.double().unflatten(1, (2, 12)).sum((0, 2))
    assert relative(summed, got[4].double().sum(0)) < 0.02


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("limit", [None, 0])
def test_more_than_2_31_elements_of_q(limit: int | None) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    inputs = long_documents((2001,) * 176, topk=16)
    assert inputs.q.numel() > 2**31
    got = inputs.launch(limit)
    edge = 2**31 // (24 * 256)
    check_rows(inputs, got, [1, 4001, edge - 1, edge, edge + 1])
    check(inputs.of_last_document(2001).reference(), tuple(x[-2001:] for x in got))


@pytest.mark.xdist_group("large")
def test_more_than_2_31_elements_of_k() -> None:
    """A short document behind 4.2 million tokens that nobody attends."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    tokens, short = 4_200_000, 300
    small = Inputs.random(Case(lengths=(short,)))
    k, v = (torch.zeros(tokens, 2, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert k.numel() > 2**31
    k[-short:], v[-short:] = small.k[:short], small.v[:short]
    rows = Rows(small.rows.block_ids, small.rows.pos, small.rows.start + tokens - short)
    want = small.reference()
    for limit in (None, 0):
        got = dataclasses.replace(small, k=k, v=v, rows=rows).launch(limit)
        check((*want[:3], want[3][:short], want[4][:short]), (*got[:3], got[3][-short:], got[4][-short:]))
        assert not got[3][:-short].any() and not got[4][:-short].any()


def long_documents(lengths: tuple[int, ...], topk: int) -> Inputs:
    """Random ids, distinct within a row: one of each of `topk` intervals of equal length."""
    g = torch.Generator("cuda").manual_seed(3)
    tokens = sum(lengths)
    pos = torch.cat([torch.arange(n, dtype=torch.int32, device="cuda") for n in lengths])
    sizes = torch.tensor(lengths, device="cuda")
    start = (sizes.cumsum(0) - sizes).repeat_interleave(sizes).int()
    edges = ((pos + 1) // 4)[:, None] * torch.arange(topk + 1, dtype=torch.int32, device="cuda") // topk
    width = edges.diff(dim=1)
    ids = torch.rand(tokens, topk, device="cuda", generator=g).mul_(width).int().clamp_(max=width - 1)
    ids = torch.where(width > 0, ids + edges[:, :-1], -1)
    q, dout = (torch.randn(tokens, 24, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, 2, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Inputs(q, k, v, dout, Rows(ids, pos, start), Case(budget=4 * topk, lengths=lengths))


def check_rows(inputs: Inputs, got: tuple[Tensor, ...], rows: list[int]) -> None:
    """out, lse and dq of some rows against the oracle, together: one row's rounding alone may exceed the tolerance."""
    want = [inputs.of_row(row).reference()[:3] for row in rows]
    check(tuple(torch.cat(x) for x in zip(*want)), tuple(x[rows] for x in got[:3]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "q, k and v must be bfloat16, got float16"),
        ({"dim": 80}, "the head width must be one of 64, 128, 256, got 80"),
        ({"heads": 10}, "query heads a KV head must be one of .*, got 5"),
        ({"block_size": 3}, "block_size must be one of"),
        ({"topk": 0}, "nothing to attend to"),
    ],
)
def test_what_the_kernels_decline_has_a_reason(change: dict[str, Any], reason: str) -> None:
    size = {"heads": 4, "dim": 64, "topk": 8, "block_size": 4, "dtype": torch.bfloat16} | change
    q, k = (torch.zeros(9, h, size["dim"], dtype=size["dtype"], device="cuda") for h in (size["heads"], 2))
    ids = torch.zeros(9, size["topk"], dtype=torch.int32, device="cuda")
    pos = torch.zeros(9, dtype=torch.int32, device="cuda")
    supported, text = supports(q, k, k, ids, pos, pos, scale=1.0, block_size=size["block_size"])
    assert not supported
    with pytest.raises(ValueError, match=reason):
        raise ValueError(text)
