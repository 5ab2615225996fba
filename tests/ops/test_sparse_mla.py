import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mcore_patches.ops import sparse_mla as package
from mcore_patches.ops.sparse_mla import autograd, backends, chunked, resolve_backend, sparse_mla, supports
from tests.ops.assertions import assert_close, assert_identical
from tests.ops.memory import peak_extra_bytes

TORCH_BACKENDS = ["naive", "chunked"]
INF = float("inf")


@dataclass(frozen=True)
class Case:
    batch: int
    rows: int
    keys: int
    heads: int
    topk: int
    channels: int = 24
    v_channels: int = 16

    def __str__(self) -> str:
        return (
            f"B{self.batch}-S{self.rows}-Skv{self.keys}-H{self.heads}-K{self.topk}-D{self.channels}-Dv{self.v_channels}"
        )


@dataclass
class Inputs:
    q: Tensor
    kv: Tensor
    indices: Tensor
    dout: Tensor
    scale: float
    v_channels: int

    @classmethod
    def random(cls, case: Case, dtype: torch.dtype = torch.float64) -> "Inputs":
        """Every fifth row, the first included, selects no key; the others repeat ids and hold some outside [0, Skv)."""
        q = torch.randn(case.batch, case.rows, case.heads, case.channels, dtype=torch.float64)
        kv = torch.randn(case.batch, case.keys, 1, case.channels, dtype=torch.float64)
        dout = torch.randn(case.batch, case.rows, case.heads, case.v_channels, dtype=torch.float64)
        ids = torch.randint(-2, case.keys + 2, (case.batch, case.rows, case.topk), dtype=torch.int32)
        if case.rows > 1:
            ids[:, ::5] = torch.where(ids[:, ::5] % 2 == 0, -1, case.keys + 7)
        return cls(q.to(dtype), kv.to(dtype), ids, dout.to(dtype), case.channels**-0.5, case.v_channels)

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(
            self.q.to(dtype), self.kv.to(dtype), self.indices, self.dout.to(dtype), self.scale, self.v_channels
        )

    def run(self, backend: str, **options: Any) -> "Results":
        return self.run_with(lambda *a, **k: sparse_mla(*a, backend=backend, **options, **k))

    def run_with(self, op: Callable[..., tuple[Tensor, Tensor]]) -> "Results":
        q, kv = (t.detach().requires_grad_() for t in (self.q, self.kv))
        out, lse = op(q, kv, self.indices, scale=self.scale, v_channels=self.v_channels)
        dq, dkv = torch.autograd.grad(out, (q, kv), self.dout)
        return Results(out.detach(), lse, dq, dkv)

    def alone(self, tensor: str) -> Tensor:
        return getattr(self, tensor).detach().requires_grad_()


@dataclass
class Results:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dkv: Tensor

    def check(self, ref: "Results", tol: float, **options: float) -> None:
        for name in ("out", "lse", "dq", "dkv"):
            assert_close(name, getattr(ref, name), getattr(self, name), tol, **options)

    def check_identical(self, ref: "Results") -> None:
        for name in ("out", "lse", "dq", "dkv"):
            assert_identical(name, getattr(ref, name), getattr(self, name))


def softmax_row_by_row(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, v_channels: int
) -> tuple[Tensor, Tensor]:
    """The definition, one row and one head at a time, on the list of the ids that count."""
    out = q.new_zeros(*q.shape[:3], v_channels) + 0.0 * (q.sum() + kv.sum())
    lse = q.new_full(q.shape[:3], -INF)
    for b, ids_of_rows in enumerate(indices.tolist()):
        for s, ids in enumerate(ids_of_rows):
            ids = [i for i in ids if 0 <= i < kv.shape[1]]
            if not ids:
                continue
            keys = torch.stack([kv[b, i, 0] for i in ids])
            for h in range(q.shape[2]):
                scores = scale * (keys @ q[b, s, h])
                out = out.index_put(
                    tuple(torch.tensor(i) for i in (b, s, h)), torch.softmax(scores, 0) @ keys[:, :v_channels]
                )
                lse[b, s, h] = scores.detach().logsumexp(0)
    return out, lse


def rows_at_a_time(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(chunked, "rows_per_chunk", lambda bytes_per_row, budget: rows)


SMALL = [
    Case(1, 1, 1, 1, 1),
    Case(1, 1, 5, 2, 3),
    Case(2, 7, 4, 3, 9),
    Case(2, 3, 11, 2, 0),
    Case(1, 6, 13, 1, 5, channels=8, v_channels=8),
    Case(1, 3, 4, 2, 5, channels=3, v_channels=1),
]

CASES = [
    Case(1, 1, 1, 1, 1),
    Case(1, 1, 37, 16, 64),
    Case(2, 5, 9, 7, 0),
    Case(2, 5, 9, 7, 1),
    Case(3, 13, 29, 7, 63),
    Case(2, 33, 17, 24, 65),
    Case(1, 19, 200, 16, 127),
    Case(1, 3, 3000, 1, 2051),
    Case(1, 7, 67, 16, 64, channels=576, v_channels=512),
    Case(2, 3, 31, 24, 65, channels=576, v_channels=512),
    Case(1, 5, 130, 7, 127, channels=512, v_channels=512),
    Case(1, 1, 64, 1, 63, channels=512, v_channels=512),
]


# --- against the definition and between backends


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_equals_the_definition(backend: str, case: Case) -> None:
    inputs = Inputs.random(case)
    inputs.run(backend).check(inputs.run_with(softmax_row_by_row), 1e-13, floor=1.0)


@pytest.mark.parametrize("rows", [1, 3, 10**9], ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_equals_naive_float64(case: Case, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_at_a_time(monkeypatch, rows)
    inputs = Inputs.random(case)
    inputs.run("chunked").check(inputs.run("naive"), 1e-12, floor=1.0)


@pytest.mark.parametrize("draw", range(20))
def test_chunked_equals_naive_on_any_shape(draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def up_to(most: int) -> int:
        return int(torch.randint(1, most + 1, ()))

    channels = up_to(40)
    case = Case(up_to(3), up_to(20), up_to(40), up_to(9), up_to(50), channels=channels, v_channels=up_to(channels))
    rows_at_a_time(monkeypatch, up_to(case.rows))
    inputs = Inputs.random(case)
    inputs.run("chunked").check(inputs.run("naive"), 1e-12, floor=1.0)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_float32(backend: str, case: Case) -> None:
    inputs = Inputs.random(case, torch.float32)
    got = inputs.run(backend)
    assert {t.dtype for t in vars(got).values()} == {torch.float32}
    got.check(inputs.to(torch.float64).run("naive"), 2e-6, floor=1.0)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_half_precision_rounds_results_only(backend: str, case: Case, dtype: torch.dtype, tol: float) -> None:
    """The tolerance is the rounding of out, dq and dkv; lse is float32 and has none."""
    inputs = Inputs.random(case, dtype)
    got = inputs.run(backend)
    assert (got.out.dtype, got.dq.dtype, got.dkv.dtype) == (dtype, dtype, dtype)
    assert got.lse.dtype == torch.float32
    ref = inputs.to(torch.float64).run("naive")
    got.check(ref, tol, floor=1.0)
    assert_close("lse", ref.lse, got.lse, 1e-6)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradcheck(backend: str) -> None:
    inputs = Inputs.random(Case(2, 3, 5, 2, 4, channels=5, v_channels=3))
    inputs.indices[:, 1] = torch.tensor([3, 0, 3, -1])

    def out(q: Tensor, kv: Tensor) -> Tensor:
        return sparse_mla(q, kv, inputs.indices, scale=0.7, v_channels=3, backend=backend)[0]

    assert torch.autograd.gradcheck(out, (inputs.alone("q"), inputs.alone("kv")), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_auto_runs_on_a_cpu(backend: str) -> None:
    inputs = Inputs.random(Case(1, 6, 8, 2, 5))
    inputs.run("auto").check(inputs.run(backend), 1e-13)


# --- which keys count


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_rows_without_keys_are_zero_whatever_the_gradient(backend: str) -> None:
    inputs = Inputs.random(Case(2, 6, 9, 3, 4))
    empty = [0, 5]
    inputs.dout[:, empty] = float("nan")
    got = inputs.run(backend)
    assert (got.lse[:, empty] == -INF).all()
    for name in ("out", "dq"):
        assert (getattr(got, name)[:, empty] == 0).all(), name
    inputs.dout[:, empty] = 0.0
    got.check(inputs.run(backend), 0.0)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize(
    "case",
    [Case(2, 3, 5, 2, 0), Case(2, 3, 0, 2, 4), Case(2, 0, 5, 2, 4), Case(0, 3, 5, 2, 4), Case(2, 3, 5, 0, 4)],
    ids=str,
)
def test_empty_dimensions(backend: str, case: Case) -> None:
    inputs = Inputs.random(case)
    got = inputs.run(backend)
    assert got.out.shape == (case.batch, case.rows, case.heads, case.v_channels)
    assert got.lse.shape == (case.batch, case.rows, case.heads)
    assert got.dq.shape == inputs.q.shape
    assert got.dkv.shape == inputs.kv.shape
    assert (got.lse == -INF).all()
    for name in ("out", "dq", "dkv"):
        assert (getattr(got, name) == 0).all(), name


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_duplicates_count_as_often_as_they_occur(backend: str) -> None:
    inputs = Inputs.random(Case(1, 2, 3, 4, 6))
    inputs.indices[:] = torch.tensor([2, 0, 2, 2, 1, 0])
    got = inputs.run(backend)
    times = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    scores = inputs.scale * torch.einsum("bshd,bkd->bshk", inputs.q, inputs.kv[:, :, 0]) + times.log()
    assert_close("lse", scores.logsumexp(-1), got.lse, 1e-13)
    out = torch.einsum("bshk,bkv->bshv", scores.softmax(-1), inputs.kv[:, :, 0, : inputs.v_channels])
    assert_close("out", out, got.out, 1e-13)

    inputs.indices[:] = 1
    assert_close("out", inputs.kv[:, 1:2, :, : inputs.v_channels].expand_as(out), inputs.run(backend).out, 1e-13)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_ids_outside_the_keys_are_ignored(backend: str, dtype: torch.dtype) -> None:
    inputs = Inputs.random(Case(2, 6, 9, 3, 5))
    inputs.indices = inputs.indices.to(dtype)
    limits = torch.iinfo(dtype)
    outside = torch.tensor([-1, 9, limits.min, limits.max, limits.min + 3, -9, 2**31 - 1], dtype=dtype)
    ref = inputs.run(backend)
    inputs.indices = torch.cat([outside.expand(2, 6, 7), inputs.indices], dim=-1)
    inputs.run(backend).check(ref, 1e-13)
    if dtype == torch.int64:
        # Ids that would be valid if only their lower 32 bits were looked at.
        inputs.indices = torch.cat([torch.arange(9).expand(2, 6, 9) + 2**32, inputs.indices], dim=-1)
        inputs.run(backend).check(ref, 1e-13)


@pytest.mark.parametrize("poison", [float("nan"), INF], ids=["nan", "inf"])
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_keys_that_no_row_selects_are_never_used(backend: str, poison: float) -> None:
    inputs = Inputs.random(Case(2, 11, 12, 3, 7))
    # Key 0, the last key and one between are unused, while slots without a key abound.
    unused = torch.tensor([0, 4, 11])
    inputs.indices[torch.isin(inputs.indices, unused.int())] = -1
    ref = inputs.run(backend)
    inputs.kv[:, unused] = poison
    got = inputs.run(backend)
    got.check(ref, 0.0)
    assert (got.dkv[:, unused] == 0).all()


def test_chunked_keeps_a_nan_key_to_the_rows_that_select_it() -> None:
    inputs = Inputs.random(Case(1, 6, 8, 3, 4))
    inputs.indices[:] = torch.randint(0, 7, inputs.indices.shape, dtype=torch.int32)
    inputs.indices[0, 2, 1] = 7
    clean = inputs.run("chunked")
    inputs.kv[0, 7] = float("nan")
    got = inputs.run("chunked")
    others = [0, 1, 3, 4, 5]
    for name in ("out", "lse", "dq"):
        dirty = getattr(got, name)
        assert dirty[:, 2].isnan().all(), name
        assert_close(name, getattr(clean, name)[:, others], dirty[:, others], 0.0)


def test_chunked_keeps_a_nan_query_out_of_keys_that_its_row_does_not_select() -> None:
    inputs = Inputs.random(Case(1, 4, 8, 3, 4))
    inputs.indices[0, 1:] = torch.tensor([5, 3, -1, 99])
    inputs.indices[0, 2] = torch.tensor([6, -1, 0, 0])
    inputs.q[0, 1] = float("nan")
    got = inputs.run("chunked")
    assert got.dkv[0, [3, 5]].isnan().all()
    assert not got.dkv[0, [0, 1, 2, 4, 6, 7]].isnan().any()


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_equal_keys_share_the_probability(backend: str) -> None:
    inputs = Inputs.random(Case(1, 2, 8, 2, 8))
    inputs.indices[:] = torch.arange(8, dtype=torch.int32)
    inputs.kv[..., inputs.v_channels :] = inputs.kv[:, :1, :, inputs.v_channels :]
    inputs.q[..., : inputs.v_channels] = 0.0  # scores then see only the channels that all keys share
    got = inputs.run(backend)
    mean = inputs.kv[..., : inputs.v_channels].mean(dim=1, keepdim=True).expand_as(got.out)
    assert_close("out", mean, got.out, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [-1e4, 1e4, -1e30], ids=str)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_scores_far_from_zero(backend: str, offset: float, dtype: torch.dtype) -> None:
    """All scores of a row share an offset at which exp under- or overflows, and float32 keeps only part of the rest."""
    inputs = Inputs.random(Case(1, 6, 9, 3, 8), dtype)
    inputs.scale = 1.0
    inputs.q[..., -1] = 1.0
    inputs.kv[..., -1] = offset
    got, ref = inputs.run(backend), inputs.to(torch.float64).run("naive")
    assert_close("lse", ref.lse, got.lse, 1e-6)
    if abs(offset) < 1e10:
        assert_close("out", ref.out, got.out, 5e-3)
        assert_close("dq", ref.dq[..., :-1], got.dq[..., :-1], 2e-2)
    else:
        # float32 cannot tell the scores apart: every key weighs the same, and nothing overflows.
        assert_close("out", ref.out, got.out, 2.0)
        assert got.dkv.isfinite().all()


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_scores_that_all_overflow_downwards_are_as_no_keys(backend: str) -> None:
    inputs = Inputs.random(Case(1, 4, 5, 2, 3), torch.float32)
    inputs.indices[:] = torch.tensor([0, 1, 2])
    inputs.q[0, 2] = 1e30
    inputs.kv[0, :3] = -1e30
    got = inputs.run(backend)
    assert (got.lse[0, 2] == -INF).all()
    assert (got.out[0, 2] == 0).all()
    assert (got.dq[0, 2] == 0).all()
    assert got.dkv.isfinite().all()


# --- layouts, dtypes and what autograd asks for


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_strided_inputs(backend: str) -> None:
    case = Case(3, 5, 7, 4, 6)
    plain = Inputs.random(case)
    ref = plain.run(backend)
    spread = Inputs(
        q=plain.q.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        kv=torch.cat([plain.kv, plain.kv], dim=-1)[..., : case.channels],
        indices=torch.stack([plain.indices, plain.indices], dim=-1).flatten(-2)[..., ::2],
        dout=plain.dout.transpose(1, 2).contiguous().transpose(1, 2),
        scale=plain.scale,
        v_channels=plain.v_channels,
    )
    for name in ("q", "kv", "indices", "dout"):
        assert not getattr(spread, name).is_contiguous(), name
    spread.run(backend).check(ref, 1e-14)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_expanded_inputs(backend: str) -> None:
    case = Case(3, 5, 7, 4, 6)
    inputs = Inputs.random(case)
    q, kv = inputs.q[:, :, :1].detach().requires_grad_(), inputs.kv[:1].detach().requires_grad_()
    indices = inputs.indices[:, 1:2].expand(3, 5, 6)

    def gradients(expand: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out, _ = sparse_mla(
            expand(q, 3, 5, 4, 24), expand(kv, 3, 7, 1, 24), indices, scale=0.2, v_channels=16, backend=backend
        )
        return out, *torch.autograd.grad(out.sum(), (q, kv))  # sum() hands back a dout of stride 0

    views = gradients(lambda t, *shape: t.expand(*shape))
    copies = gradients(lambda t, *shape: t.expand(*shape).contiguous())
    for name, view, copy in zip(("out", "dq", "dkv"), views, copies, strict=True):
        assert_close(name, copy, view, 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("wanted", ["q", "kv"])
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradient_of_one_input_only(backend: str, wanted: str, dtype: torch.dtype) -> None:
    inputs = Inputs.random(Case(2, 6, 9, 3, 5), dtype)
    both = inputs.run(backend)
    leaf = inputs.alone(wanted)
    arguments = {"q": inputs.q, "kv": inputs.kv, wanted: leaf}
    out, _ = sparse_mla(**arguments, indices=inputs.indices, scale=inputs.scale, v_channels=16, backend=backend)
    (grad,) = torch.autograd.grad(out, leaf, inputs.dout)
    assert_identical(f"d{wanted}", getattr(both, f"d{wanted}"), grad)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_lse_is_not_differentiable(backend: str) -> None:
    inputs = Inputs.random(Case(1, 6, 9, 3, 5))
    out, lse = sparse_mla(
        inputs.alone("q"), inputs.alone("kv"), inputs.indices, scale=1.0, v_channels=16, backend=backend
    )
    assert out.requires_grad
    assert not lse.requires_grad
    out, lse = sparse_mla(inputs.q, inputs.kv, inputs.indices, scale=1.0, v_channels=16, backend=backend)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_chunked_refuses_a_second_derivative() -> None:
    inputs = Inputs.random(Case(1, 6, 9, 3, 5))
    q = inputs.alone("q")
    out, _ = sparse_mla(q, inputs.kv, inputs.indices, scale=1.0, v_channels=16, backend="chunked")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    # dout carries no gradient here: only q connects dq to the graph.
    with pytest.raises(RuntimeError, match=r"gradients of sparse_mla cannot be differentiated again.*backend='naive'"):
        torch.autograd.grad(dq.square().sum(), q)


def test_naive_has_second_derivatives() -> None:
    inputs = Inputs.random(Case(1, 2, 3, 1, 4, channels=3, v_channels=2))

    def out(q: Tensor, kv: Tensor) -> Tensor:
        return sparse_mla(q, kv, inputs.indices, scale=1.0, v_channels=2, backend="naive")[0]

    assert torch.autograd.gradgradcheck(out, (inputs.alone("q"), inputs.alone("kv")))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_autocast_does_not_lower_the_precision(backend: str) -> None:
    inputs = Inputs.random(Case(1, 6, 9, 3, 5), torch.float32)

    def op(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sparse_mla(*tensors, backend=backend, **options)

    ref = inputs.run(backend)
    inputs.run_with(op).check_identical(ref)
    if backend == "chunked":  # torch advises against it, and lowers what it differentiates itself
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs.run(backend).check_identical(ref)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    inputs = Inputs.random(Case(2, 6, 9, 3, 5))
    q, kv = inputs.alone("q"), inputs.alone("kv")

    def attend(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_mla(q, kv, inputs.indices, scale=inputs.scale, v_channels=16, backend=backend)

    out, lse = checkpoint(attend, q, kv, use_reentrant=reentrant)
    out.backward(inputs.dout)
    assert q.grad is not None
    assert kv.grad is not None
    Results(out.detach(), lse.detach(), q.grad, kv.grad).check_identical(inputs.run(backend))


# --- torch.compile


@pytest.fixture
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_compiles_once_for_twenty_calls(backend: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(sparse_mla, fullgraph=True, backend=counter)
    for _ in range(20):
        inputs = Inputs.random(Case(2, 6, 9, 3, 5))
        got = inputs.run_with(lambda *a, **k: compiled(*a, backend=backend, **k))
        got.check(inputs.run(backend), 1e-14)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_backward_of_chunked_serves_every_length() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def op(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_mla(q, kv, indices, scale=0.2, v_channels=16, backend="chunked")

    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 6, 11, 23):
        inputs = Inputs.random(Case(2, rows, rows + 2, 3, 4), torch.float32)
        got, ref = (inputs.run_with(lambda q, kv, i, f=f, **_: f(q, kv, i)) for f in (compiled, op))
        got.check_identical(ref)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_auto_asks_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "KERNELS_DEVICE", "cpu")
    replace_kernels(monkeypatch, None)
    counter = CompileCounter()
    compiled = torch.compile(sparse_mla, fullgraph=True, backend=counter)
    inputs = Inputs.random(Case(1, 4, 5, 2, 3))
    for _ in range(2):
        inputs.run_with(compiled).check(inputs.run("chunked"), 1e-14)
    assert counter.frame_count == 1


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["dq+dkv", "dq", "dkv"])
def test_operators_keep_torchs_rules(needs: tuple[bool, bool]) -> None:
    """Schema, aliasing, and shapes, strides and dtypes of the traced against the real results."""
    x = Inputs.random(Case(2, 6, 9, 3, 5), torch.bfloat16)
    forward = (x.q, x.kv, x.indices, x.scale, x.v_channels, False, "chunked")
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(autograd.forward_op, forward, test_utils=tests)
    _, lse = autograd.forward_op(*forward)
    backward = (x.q, x.kv, x.indices, None, lse, x.dout, x.scale, *needs, False, "chunked")
    torch.library.opcheck(autograd.backward_op, backward, test_utils=tests)


# --- memory, order of sums, host waits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("heads", [2, 64], ids=lambda h: f"H{h}")
def test_peak_memory_is_the_results_and_a_fixed_workspace(
    heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 2**20
    monkeypatch.setattr(chunked, "workspace_bytes", lambda device: budget)
    sum_size = 8 if dtype == torch.float64 else 4
    temporaries = []
    for rows in (256, 512):
        case = Case(1, rows, rows, heads, 64, channels=48, v_channels=32)
        inputs = Inputs.random(case, dtype)
        gathered = rows * case.topk * case.channels * sum_size
        assert gathered > 2 * budget
        q, kv = inputs.alone("q"), inputs.alone("kv")

        def forward() -> Tensor:
            return sparse_mla(q, kv, inputs.indices, scale=1.0, v_channels=32, backend="chunked")[0]  # noqa: B023

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, kv), inputs.dout, retain_graph=True)  # noqa: B023

        out = forward()
        results = out.nbytes + rows * heads * sum_size
        gradients = q.nbytes + kv.nbytes + (rows + 1) * case.channels * sum_size
        extra = peak_extra_bytes(forward) - results, peak_extra_bytes(backward) - gradients
        assert max(extra) < budget
        assert min(extra) > budget // 3, "the workspace is counted too generously to be of use"
        temporaries.append(extra)
    # Twice the rows: as much memory beyond results and gradients, which themselves are linear.
    for once, twice in zip(*temporaries, strict=True):
        assert abs(twice - once) < budget // 16


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_same_bits_in_every_run(dtype: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_at_a_time(monkeypatch, 5)
    # Few keys and many slots: each key's gradient is a sum over hundreds.
    inputs = Inputs.random(Case(2, 37, 6, 16, 64), dtype)
    first = inputs.run("chunked", deterministic=deterministic)
    for _ in range(4):
        inputs.run("chunked", deterministic=deterministic).check_identical(first)


def test_nothing_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values: reading one on the host, or a result whose shape depends on values, raises."""
    rows_at_a_time(monkeypatch, 2)
    with FakeTensorMode():
        q = torch.empty(2, 5, 7, 24, device="cuda", requires_grad=True)
        kv = torch.empty(2, 9, 1, 24, device="cuda", requires_grad=True)
        indices = torch.empty(2, 5, 6, device="cuda", dtype=torch.int32)
        for backend in TORCH_BACKENDS:
            out, lse = sparse_mla(q, kv, indices, scale=1.0, v_channels=16, backend=backend)
            assert {out.device.type, lse.device.type} == {"cuda"}
        # Tracing stops at the operators: their bodies too.
        with torch.no_grad():
            out, lse = chunked.forward(q, kv, indices, 1.0, 16)
            for deterministic in (False, True):
                grads = chunked.backward(q, kv, indices, lse, out, 1.0, True, True, deterministic)
                assert [g.shape for g in grads] == [q.shape, kv.shape]


# --- errors


def arguments(**changes: Any) -> dict[str, Any]:
    valid = {
        "q": torch.zeros(2, 3, 4, 24),
        "kv": torch.zeros(2, 5, 1, 24),
        "indices": torch.zeros(2, 3, 6, dtype=torch.int32),
        "scale": 1.0,
        "v_channels": 16,
    }
    return valid | changes


FAULTS = {
    "q-list": ({"q": [1.0]}, TypeError, r"q must be a tensor \[B, S, H, Dqk\], got list"),
    "q-sparse": ({"q": torch.zeros(2, 3, 4, 24).to_sparse()}, TypeError, "q must be a dense tensor, .*sparse_coo"),
    "q-int": ({"q": torch.zeros(2, 3, 4, 24, dtype=torch.int32)}, TypeError, "q must be bfloat16, .*, got int32"),
    "q-3d": ({"q": torch.zeros(2, 3, 24)}, ValueError, r"q must be \[B, S, H, Dqk\], got \(2, 3, 24\)"),
    "kv-none": ({"kv": None}, TypeError, r"kv must be a tensor \[B, Skv, 1, Dqk\], got NoneType"),
    "kv-dtype": ({"kv": torch.zeros(2, 5, 1, 24).double()}, TypeError, "kv must be float32, got float64"),
    "kv-3d": ({"kv": torch.zeros(2, 5, 24)}, ValueError, r"kv must be \[B, Skv, 1, Dqk\].*, got \(2, 5, 24\)"),
    "kv-heads": ({"kv": torch.zeros(2, 5, 2, 24)}, ValueError, r"kv must be .*1=1.*, got \(2, 5, 2, 24\)"),
    "kv-batch": ({"kv": torch.zeros(1, 5, 1, 24)}, ValueError, r"kv must be .*B=2.*, got \(1, 5, 1, 24\)"),
    "kv-width": ({"kv": torch.zeros(2, 5, 1, 16)}, ValueError, r"kv must be .*Dqk=24.*, got \(2, 5, 1, 16\)"),
    "kv-device": ({"kv": torch.zeros(2, 5, 1, 24, device="meta")}, ValueError, "kv must be on cpu, got meta"),
    "indices-float": ({"indices": torch.zeros(2, 3, 6)}, TypeError, "indices must be int32, int64, got float32"),
    "indices-int16": ({"indices": torch.zeros(2, 3, 6).short()}, TypeError, "indices must be .*, got int16"),
    "indices-4d": ({"indices": torch.zeros(2, 3, 1, 6).int()}, ValueError, r"indices must be \[B, S, K\]"),
    "indices-rows": ({"indices": torch.zeros(2, 4, 6).int()}, ValueError, r"indices must be .*S=3.*, got \(2, 4, 6\)"),
    "indices-batch": ({"indices": torch.zeros(1, 3, 6).int()}, ValueError, r"indices must be .*B=2.*, got \(1, 3, 6\)"),
    "indices-device": (
        {"indices": torch.zeros(2, 3, 6, dtype=torch.int32, device="meta")},
        ValueError,
        "indices must be on cpu, got meta",
    ),
    "v_channels-float": ({"v_channels": 16.0}, TypeError, "v_channels must be an int, got 16.0"),
    "v_channels-zero": ({"v_channels": 0}, ValueError, "v_channels must be at least 1, got 0"),
    "v_channels-wide": ({"v_channels": 25}, ValueError, "v_channels must be at most the 24 channels of q, got 25"),
    "scale-none": ({"scale": None}, TypeError, "scale must be a number, got None"),
    "scale-tensor": ({"scale": torch.ones(())}, TypeError, "scale must be a number, got tensor"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale must be finite and above 0, got nan"),
    "scale-large": ({"scale": 1e39}, ValueError, r"scale must be at most 1e38, got 1e\+39"),
    "scale-beyond-float": ({"scale": 10**400}, ValueError, "scale must be at most 1e38, got 1000"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic must be a bool, got 1"),
    "backend": ({"backend": "triton"}, ValueError, "backend must be one of auto, naive, chunked, tilelang, got 'trit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_arguments_are_named(fault: str) -> None:
    changes, error, message = FAULTS[fault]
    with pytest.raises(error, match="^sparse_mla: " + message):
        sparse_mla(**arguments(**changes))


def test_the_valid_arguments_are_valid() -> None:
    out, lse = sparse_mla(**arguments())
    assert out.shape == (2, 3, 4, 16)
    assert lse.shape == (2, 3, 4)


# --- the TileLang backend


def replace_kernels(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    """Let `module` be what an import of the kernels finds; None: nothing, as in a build without them."""
    monkeypatch.setitem(sys.modules, backends.KERNELS, module)
    monkeypatch.setattr(package, "tilelang_kernels", module, raising=False)
    monkeypatch.setattr(backends, "_import_once", backends._import_once.__wrapped__)  # forgets nothing of the real ones


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Kernels that take v_channels 16 and return constants."""
    module = types.ModuleType("kernels_of_a_test")
    calls: list[tuple[Any, ...]] = []

    def forward(q: Tensor, kv: Tensor, indices: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        calls.append(("forward", *options))
        v_channels = options[1]
        return q.new_full((*q.shape[:3], v_channels), 1.0), q.new_full(q.shape[:3], 2.0)

    def backward(
        q: Tensor, kv: Tensor, indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        assert (out == 1.0).all()
        assert (lse == 2.0).all()
        calls.append(("backward", dout.mean().item(), *options))
        return torch.full_like(q, 4.0), torch.full_like(kv, 5.0)

    module.supports = lambda q, kv, indices, v_channels: (
        (True, "") if v_channels == 16 else (False, f"v_channels is {v_channels}")
    )
    module.forward = forward
    module.backward = backward
    module.calls = calls
    replace_kernels(monkeypatch, module)
    monkeypatch.setattr(backends, "KERNELS_DEVICE", "cpu")
    return module


@pytest.mark.parametrize("backend", ["auto", "tilelang"])
def test_kernels_run_where_they_support_the_arguments(kernels: types.ModuleType, backend: str) -> None:
    a = arguments()
    tensors = a["q"], a["kv"], a["indices"]
    assert supports(*tensors, v_channels=16) == (True, "")
    resolved = resolve_backend(*tensors, v_channels=16, backend=backend)
    assert resolved == ("tilelang", "the kernels take these arguments")
    out, lse = sparse_mla(**a, backend=backend)
    assert_identical("out", torch.ones(2, 3, 4, 16), out)
    assert_identical("lse", torch.full((2, 3, 4), 2.0), lse)
    assert kernels.calls == [("forward", 1.0, 16, False)]


@pytest.mark.parametrize("wanted", [["q"], ["kv"], ["q", "kv"]], ids="+".join)
def test_gradients_of_the_kernels(kernels: types.ModuleType, wanted: list[str]) -> None:
    a = arguments()
    for name in wanted:
        a[name].requires_grad_()
    out, lse = sparse_mla(**a, deterministic=True)
    assert not lse.requires_grad
    out.backward(torch.full_like(out, 3.0))
    for name, value in (("q", 4.0), ("kv", 5.0)):
        if name in wanted:
            assert_identical(f"d{name}", torch.full_like(a[name], value), a[name].grad)
        else:
            assert a[name].grad is None
    assert kernels.calls == [("forward", 1.0, 16, True), ("backward", 3.0, 1.0, 16, True)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_graph_calls_the_kernels(kernels: types.ModuleType) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparse_mla, fullgraph=True, backend=counter)
    for _ in range(3):
        a = arguments(q=torch.zeros(2, 3, 4, 24, requires_grad=True))
        out, _ = compiled(**a)
        out.backward(torch.full_like(out, 3.0))
        assert (a["q"].grad == 4.0).all()
    assert counter.frame_count == 1
    assert kernels.calls == [("forward", 1.0, 16, False), ("backward", 3.0, 1.0, 16, False)] * 3


def test_declined_arguments_run_chunked_or_raise_the_reason(kernels: types.ModuleType) -> None:
    a = arguments(v_channels=8)
    tensors = a["q"], a["kv"], a["indices"]
    assert supports(*tensors, v_channels=8) == (False, "v_channels is 8")
    assert resolve_backend(*tensors, v_channels=8) == ("chunked", "v_channels is 8")
    assert sparse_mla(**a)[0].shape == (2, 3, 4, 8)
    with pytest.raises(ValueError, match=r"sparse_mla: backend='tilelang' .*: v_channels is 8"):
        sparse_mla(**a, backend="tilelang")
    assert kernels.calls == []


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_a_backend_by_name_does_not_ask_the_kernels(kernels: types.ModuleType, backend: str) -> None:
    a = arguments()
    del kernels.supports
    assert resolve_backend(a["q"], a["kv"], a["indices"], backend=backend) == (backend, "asked for by name")
    assert sparse_mla(**a, backend=backend)[0].shape == (2, 3, 4, 16)
    assert kernels.calls == []


def test_cpu_tensors_are_declined_without_importing_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_import_fault", lambda: pytest.fail("the kernels were looked up"))
    a = arguments()
    reason = "q is on cpu, the TileLang kernels need cuda"
    assert resolve_backend(a["q"], a["kv"], a["indices"], v_channels=16) == ("chunked", reason)
    with pytest.raises(ValueError, match=f"sparse_mla: backend='tilelang' .*: {reason}"):
        sparse_mla(**a, backend="tilelang")


def test_a_build_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch, None)
    with FakeTensorMode():
        a = {k: v.to("cuda") if isinstance(v, Tensor) else v for k, v in arguments().items()}
        assert supports(a["q"], a["kv"], a["indices"]) == (False, "there are no TileLang kernels in this build")
        assert sparse_mla(**a)[0].device.type == "cuda"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_compiler", "No module named 'no_such_compiler'"),
        (
            "raise OSError('libcuda.so.1: cannot open shared object file')",
            "libcuda.so.1: cannot open shared object file",
        ),
    ],
    ids=["missing-module", "missing-library"],
)
def test_kernels_that_cannot_be_imported_say_why(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tilelang_kernels.py").write_text(source)
    replace_kernels(monkeypatch, None)
    monkeypatch.delitem(sys.modules, backends.KERNELS)
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    monkeypatch.setattr(backends, "KERNELS_DEVICE", "cpu")
    a = arguments()
    assert supports(a["q"], a["kv"], a["indices"]) == (False, f"the TileLang kernels cannot be imported: {reason}")
