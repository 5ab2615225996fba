import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_patches.ops.indexer_kl import indexer_kl, resolve_backend, supports
from mcore_patches.ops.indexer_kl.chunked import indexer_kl_chunked
from mcore_patches.ops.packing import PackedRows
from mcore_patches.ops.sparse_gqa import sparse_gqa
from mcore_patches.ops.sparse_gqa.chunked import KEY_TILE
from tests.ops.assertions import assert_close, assert_identical
from tests.ops.memory import peak_extra_bytes
from tests.ops.qsa_helpers import (
    PACKED,
    TINY,
    lengths_id,
    no_host_reads,
    num_blocks_of,
    random_block_ids,
    rows_of,
    strided,
)

RATIOS = [1, 2, 4, 8, 16]
NAN = float("nan")
STAGES = pytest.mark.parametrize("stage", [1, 2], ids=["stage1", "stage2"])
BACKENDS = pytest.mark.parametrize("backend", ["naive", "chunked"])


class Problem(NamedTuple):
    q_idx: Tensor
    k_blocks: Tensor
    weights: Tensor
    q: Tensor
    k: Tensor

    def cast(self, dtype: torch.dtype) -> "Problem":
        weights = self.weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
        return Problem(self.q_idx.to(dtype), self.k_blocks.to(dtype), weights, self.q.to(dtype), self.k.to(dtype))


def problem(
    rows: PackedRows, num_blocks: int, group: int = 2, kv_heads: int = 2, channels: int = 8, heads: int = 3
) -> Problem:
    tokens = len(rows.pos)
    shapes = (
        (tokens, heads, channels),
        (num_blocks, channels),
        (tokens, heads),
        (tokens, group * kv_heads, channels),
        (tokens, kv_heads, channels),
    )
    return Problem(*(torch.randn(shape, dtype=torch.float64) for shape in shapes))


def selection(stage: int, rows: PackedRows) -> Tensor | None:
    return None if stage == 1 else random_block_ids(rows, 5, 9)


def run(
    p: Problem, ids: Tensor | None, rows: PackedRows, ratio: int, *, weighted: bool = True, lse: Tensor | None = None,
    upstream: float = 1.0, **settings,
) -> dict[str, Tensor]:  # fmt: skip
    q_idx, k_blocks, weights = (x.detach().requires_grad_() for x in p[:3])
    settings = {"scale": 0.7, "weights": weights if weighted else None} | settings
    loss = indexer_kl(q_idx, k_blocks, p.q, p.k, lse, ids, *rows, ratio=ratio, **settings)
    result = {"loss": loss.detach()}
    leaves = {"dq_idx": q_idx, "dk_blocks": k_blocks} | ({"dweights": weights} if weighted else {})
    grads = [None] * len(leaves)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, tuple(leaves.values()), loss.new_tensor(upstream), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads):
        result[name] = torch.zeros_like(leaf) if grad is None else grad
    return result


def assert_same(ref: dict[str, Tensor], got: dict[str, Tensor], tol: float, floor: float = 0.0) -> None:
    assert ref.keys() == got.keys()
    for name in ref:
        assert_close(name, ref[name], got[name], tol, floor=floor)


@BACKENDS
def test_uniform_teacher_against_given_scores(backend):
    """q = 0 spreads the mass evenly; one head with q_idx = 1 makes the score of a block its key: all by hand."""
    scores = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64)
    rows = rows_of([11], 2)
    q, k = torch.zeros(11, 2, 3, dtype=torch.float64), torch.randn(11, 1, 3, dtype=torch.float64)
    q_idx = torch.ones(11, 1, 1, dtype=torch.float64)
    k_blocks = scores[:, None].clone().requires_grad_()
    loss = indexer_kl(
        q_idx, k_blocks, q, k, None, None, *rows, scale=1.0, index_scale=0.5, ratio=2, relu=False, backend=backend
    )
    expected, gradient = 0.0, torch.zeros(5, dtype=torch.float64)
    for pos in range(11):
        count = (pos + 1) // 2
        if count:
            visible = 0.5 * scores[:count]
            expected += (visible.logsumexp(0) - visible.mean() - math.log(count)).item()
            # dL/dI = softmax(I) - t
            gradient[:count] += 0.5 * (visible.softmax(0) - 1 / count)
    assert loss.item() == pytest.approx(expected, abs=1e-13)
    (got,) = torch.autograd.grad(loss, k_blocks)
    torch.testing.assert_close(got[:, 0], gradient, rtol=0, atol=1e-13)


@BACKENDS
@STAGES
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
def test_gradient_of_scores_is_student_less_teacher(relu, reduction, stage, backend):
    """dL/dI = coefficient (softmax(I) - t) / N on the support and 0 elsewhere, with a teacher that is not uniform."""
    lengths, coefficient, index_scale = [13, 6, 33], 0.3, 0.5
    rows = rows_of(lengths, 4, padding=3)
    blocks = num_blocks_of(lengths, 4)
    # One head and a channel for each block: the score of a block is an entry of q_idx.
    p = problem(rows, blocks, heads=1, channels=blocks)._replace(k_blocks=torch.eye(blocks, dtype=torch.float64))
    ids = selection(stage, rows)
    settings = {"weighted": False, "relu": relu, "reduction": reduction, "index_scale": index_scale, "backend": backend}
    got = run(p, ids, rows, 4, upstream=coefficient, **settings)["dq_idx"][:, 0] / index_scale

    factor = coefficient / (sum(lengths) if reduction == "mean" else 1)
    expected, unlike = torch.zeros_like(got), 0
    for row, (pos, start, block_start) in enumerate(zip(*(field.tolist() for field in rows))):
        count = (pos + 1) // 4
        support = list(range(count)) if ids is None else [b for b in ids[row].tolist() if 0 <= b < count]
        if not support:
            continue
        tokens = [4 * b + j for b in support for j in range(4)] + list(range(4 * count, pos + 1))
        keys = p.k[start + torch.tensor(tokens)].repeat_interleave(2, dim=1)
        mass = torch.einsum("hd,thd->ht", 0.7 * p.q[row], keys).softmax(dim=1).sum(dim=0)
        mass = mass[: 4 * len(support)].view(-1, 4).amax(dim=1)
        teacher, places = mass / mass.sum(), block_start + torch.tensor(support)
        entries = p.q_idx[row, 0, places]
        student = (index_scale * (entries.relu() if relu else entries)).softmax(dim=0)
        expected[row, places] = factor * (student - teacher) * (entries > 0 if relu else 1)
        unlike += bool(teacher.max() > 2 * teacher.min())
    assert unlike > 5, "the teacher is uniform almost everywhere"
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-13)


@BACKENDS
def test_the_maximum_is_taken_after_the_sum_over_heads(backend):
    """Two heads that look at different tokens of block 0: sum then max is 1, max then sum would be 2."""
    rows = PackedRows(*(torch.tensor([x], dtype=torch.int32) for x in (3, 0, 0)))
    q = torch.tensor([[[40.0, 0.0], [0.0, 40.0]]], dtype=torch.float64)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.9], [-9.0, -9.0]], dtype=torch.float64)[:, None]
    probabilities = torch.stack([(40 * k[:, 0, head]).softmax(0) for head in range(2)])
    mass = probabilities.sum(0).view(2, 2).amax(1)
    teacher = mass / mass.sum()
    k_blocks = torch.tensor([[0.2], [1.1]], dtype=torch.float64)
    expected = (teacher * (teacher.log() - k_blocks[:, 0].log_softmax(0))).sum()
    q_idx = torch.ones(1, 1, 1, dtype=torch.float64)
    loss = indexer_kl(q_idx, k_blocks, q, k, None, None, *rows, scale=1.0, ratio=2, backend=backend)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-13)
    wrong = probabilities.view(2, 2, 2).amax(2).sum(0)
    assert not torch.allclose(wrong / wrong.sum(), teacher, atol=0.01)


@BACKENDS
@STAGES
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(stage, backend):
    """Blocks of one token and a student whose scores are the log of the teacher's mass."""
    rows = rows_of([6, 7], 1)
    p = problem(rows, 13, group=1, kv_heads=1)
    ids = selection(stage, rows)
    # With one attention head, log mass = scale q . k - lse: the same scores up to a constant of the row.
    student = p._replace(q_idx=p.q, k_blocks=p.k[:, 0])
    got = run(student, ids, rows, 1, weighted=False, relu=False, index_scale=0.7, backend=backend)
    for name, value in got.items():
        assert value.abs().max() < 1e-13, name


@STAGES
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", [*PACKED, *TINY], ids=lengths_id)
def test_chunked_equals_naive_in_float64(lengths, ratio, stage):
    rows = rows_of(lengths, ratio, padding=2)
    p = problem(rows, num_blocks_of(lengths, ratio))
    ids = selection(stage, rows)
    ref = run(p, ids, rows, ratio, backend="naive", upstream=-1.7)
    assert_same(ref, run(p, ids, rows, ratio, checked=True, upstream=-1.7), 1e-11, floor=1e-2)


@STAGES
@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("weighted", [False, True], ids=["ones", "weights"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("given_lse", [False, True], ids=["own-lse", "given-lse"])
def test_settings(given_lse, reduction, weighted, relu, stage):
    rows = rows_of([1, 3, 4, 41, 7, 40], 4, padding=2)
    p = problem(rows, num_blocks_of([1, 3, 4, 41, 7, 40], 4), group=3)
    ids = selection(stage, rows)
    # Half a unit above the true one, to tell a given lse from a computed one.
    lse = sparse_gqa(p.q, p.k, p.k, ids, rows.pos, rows.start, scale=0.7, block_size=4)[1] + 0.5 if given_lse else None
    settings = {"weighted": weighted, "relu": relu, "reduction": reduction, "lse": lse, "index_scale": 0.3}
    settings["valid"] = torch.rand(len(rows.pos)) > 0.3
    ref = run(p, ids, rows, 4, backend="naive", **settings)
    assert_same(ref, run(p, ids, rows, 4, **settings), 1e-11)
    assert ref["loss"] > 0


@STAGES
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (2, 3), (12, 2)])
@pytest.mark.parametrize("heads", [1, 4])
def test_head_groups(heads, group, kv_heads, stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23, group, kv_heads, heads=heads)
    ids = selection(stage, rows)
    assert_same(run(p, ids, rows, 4, backend="naive"), run(p, ids, rows, 4), 1e-11)


def test_released_model_sizes_until_a_block_is_left_out():
    """Hq 24, Hkv 2, D 256, 4 index heads of 128, 512 blocks of 4 tokens: up to row 2050 both stages are one loss."""
    ratio, length, positions = 4, 2057, torch.arange(2047, 2057)
    every = rows_of([length], ratio)
    rows = every.take(positions)
    p = Problem(
        torch.randn(10, 4, 128),
        torch.randn(length // ratio, 128),
        torch.ones(10, 4),
        2 * torch.randn(10, 24, 256),
        torch.randn(length, 2, 256),
    )
    ids = torch.arange(512, dtype=torch.int32).repeat(10, 1)
    settings = {"scale": 1 / 16, "weighted": False}
    for valid, same in ((positions <= 2050, True), (positions > 2050, False)):
        stage1, stage2 = (run(p, blocks, rows, ratio, valid=valid, **settings) for blocks in (None, ids))
        for got, blocks in ((stage1, None), (stage2, ids)):
            ref = run(p.cast(torch.float64), blocks, rows, ratio, valid=valid, backend="naive", **settings)
            assert_close("loss", ref["loss"], got["loss"], 1e-5)
            assert_close("dq_idx", ref["dq_idx"], got["dq_idx"], 1e-5)
            assert_close("dk_blocks", ref["dk_blocks"], got["dk_blocks"], 1e-5)
        assert bool((stage1["dk_blocks"][512] == 0).all()) == same
        difference = (stage1["dq_idx"] - stage2["dq_idx"]).norm() / stage1["dq_idx"].norm()
        assert (difference < 1e-5) == same


@STAGES
def test_the_indexer_may_have_another_dtype_than_the_attention(stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    mixed = p.cast(torch.float32)._replace(q=p.q.bfloat16(), k=p.k.bfloat16())
    ref = run(p.cast(torch.float32)._replace(q=mixed.q.float(), k=mixed.k.float()), ids, rows, 4)
    for backend in ("naive", "chunked"):
        assert_same(ref, run(mixed, ids, rows, 4, backend=backend), 1e-5)


@STAGES
def test_the_sizes_of_chunks_do_not_matter(stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    arguments = (p.q_idx, p.k_blocks, p.q, p.k, None, ids, *rows)
    settings = {
        "scale": 0.7,
        "index_scale": 0.3,
        "ratio": 4,
        "weights": p.weights,
        "relu": True,
        "valid": None,
        "reduction": "mean",
        "tp_group": None,
    }
    ref, *others = (indexer_kl_chunked(*arguments, **settings, workspace=workspace) for workspace in (2**24, 2**15, 1))
    for other in others:
        for name, want, got in zip(ref._fields, ref, other):
            assert_close(name, want, got, 1e-12)


def test_stage1_over_more_blocks_than_a_tile():
    """The largest score keeps growing from tile to tile, so that the running scalars must be rescaled."""
    tokens = 2 * KEY_TILE + 40
    rows = rows_of([tokens], 1).take(torch.arange(tokens - 5, tokens))
    p = problem(rows_of([tokens], 1), tokens, group=1, kv_heads=1, channels=4, heads=2)
    p = p._replace(q_idx=p.q_idx[-5:].abs(), q=p.q[-5:], weights=p.weights[-5:].abs())
    p = p._replace(k_blocks=p.k_blocks.abs() * torch.linspace(0, 20, tokens)[:, None])
    assert_same(run(p, None, rows, 1, backend="naive"), run(p, None, rows, 1), 1e-11)


@STAGES
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_by_finite_differences(reduction, stage):
    rows = rows_of([5, 9], 2, padding=1)
    p = problem(rows, num_blocks_of([5, 9], 2), channels=3)
    ids = None if stage == 1 else random_block_ids(rows, 3, 4)
    for backend in ("naive", "chunked"):

        def loss(q_idx: Tensor, k_blocks: Tensor, weights: Tensor, backend: str = backend) -> Tensor:
            return indexer_kl(
                q_idx, k_blocks, p.q, p.k, None, ids, *rows, scale=0.7, ratio=2, weights=weights, reduction=reduction,
                backend=backend,
            )  # fmt: skip

        assert torch.autograd.gradcheck(loss, [x.clone().requires_grad_() for x in p[:3]])


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reduced_precision_against_float64(dtype, stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23, group=12, channels=64, heads=4).cast(dtype)
    ids = selection(stage, rows)
    # The inputs are exact in float64: what is left is the rounding of the result, 2^-9 twice for bfloat16.
    tol = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 6e-3}[dtype]
    ref = run(p.cast(torch.float64), ids, rows, 4, scale=0.125, backend="naive")
    for backend in ("naive", "chunked"):
        got = run(p, ids, rows, 4, scale=0.125, backend=backend)
        assert got["loss"].dtype == torch.float32
        assert {got["dq_idx"].dtype, got["dk_blocks"].dtype} == {dtype}
        assert got["dweights"].dtype == torch.float32
        assert abs(got["loss"] - ref["loss"]) < 1e-6 * 96
        assert_close("dweights", ref["dweights"], got["dweights"], 1e-5)
        for name in ("dq_idx", "dk_blocks"):
            assert_close(name, ref[name], got[name], tol)


@STAGES
def test_large_scores_neither_overflow_nor_drift(stage):
    """Scores near 1000, which fp32 holds to 6e-5; their exponentials overflow."""
    rows = rows_of([40], 2)
    p = problem(rows, 20).cast(torch.float32)
    p = p._replace(q_idx=torch.ones_like(p.q_idx), k_blocks=torch.rand_like(p.k_blocks) + 1000 / 3 / 8**0.5)
    ids = selection(stage, rows)
    ref = run(p.cast(torch.float64), ids, rows, 2, weighted=False, backend="naive")
    got = run(p, ids, rows, 2, weighted=False)
    assert abs(got["loss"] - ref["loss"]) < 40 * 2e-4
    assert ref["loss"] > 1
    assert_close("dq_idx", ref["dq_idx"], got["dq_idx"], 1e-3)


@STAGES
def test_fp16_gradients_of_a_mean_survive_until_the_loss_scale(stage):
    """They lie below fp16's smallest number until the upstream gradient multiplies them."""
    rows = rows_of([96], 4)
    p = problem(rows, 24).cast(torch.float16)
    p = p._replace(k_blocks=p.k_blocks * 1e-4, weights=p.weights * 1e-2)
    ids = selection(stage, rows)
    ref = run(p.cast(torch.float64), ids, rows, 4, reduction="mean", upstream=2.0**20, backend="naive")
    got = run(p, ids, rows, 4, reduction="mean", upstream=2.0**20)
    assert ref["dq_idx"].abs().max() / 2**20 < 2**-24
    assert_close("dq_idx", ref["dq_idx"], got["dq_idx"], 2e-3)


@BACKENDS
@STAGES
def test_what_counts_in_the_mean(stage, backend):
    """Valid rows of documents, those without a complete block included; not padding, not invalid rows."""
    rows = rows_of([13, 50, 33], 4, padding=5)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    valid = torch.ones(101, dtype=torch.bool)
    valid[::7] = False
    total = run(p, ids, rows, 4, valid=valid, reduction="sum", backend=backend)
    mean = run(p, ids, rows, 4, valid=valid, reduction="mean", backend=backend)
    number = int(valid[:96].sum())
    for name in total:
        assert_close(name, total[name] / number, mean[name], 1e-12)
    assert (total["dq_idx"][::7] == 0).all()
    # Rows add up: the loss over all is the loss over the valid ones and over the others.
    rest = run(p, ids, rows, 4, valid=~valid, backend=backend)
    whole = run(p, ids, rows, 4, backend=backend)
    for name in whole:
        assert_close(name, whole[name], total[name] + rest[name], 1e-12)


@BACKENDS
@STAGES
def test_no_row_counts(stage, backend):
    rows = rows_of([13], 4)
    p = problem(rows, 3)
    nobody = torch.zeros(13, dtype=torch.bool)
    for reduction in ("sum", "mean"):
        got = run(p, selection(stage, rows), rows, 4, valid=nobody, reduction=reduction, backend=backend)
        for name, value in got.items():
            assert (value == 0).all(), name
    short = rows_of([3, 2], 4)
    got = run(problem(short, 0), selection(stage, short), short, 4, reduction="mean", backend=backend)
    assert got["loss"] == 0
    none = short.take(torch.arange(0))
    empty = problem(short, 0)
    empty = empty._replace(q_idx=empty.q_idx[:0], weights=empty.weights[:0], q=empty.q[:0])
    assert run(empty, selection(stage, none), none, 4, reduction="mean", backend=backend)["loss"] == 0


@BACKENDS
@STAGES
def test_padding_is_never_read(stage, backend):
    lengths = [13, 50, 33]
    rows = rows_of(lengths, 4, padding=3)
    p = problem(rows, num_blocks_of(lengths, 4) + 2)
    ids = selection(stage, rows)
    ref = run(p, ids, rows, 4, backend=backend)
    for x in (p.q_idx, p.q, p.k, p.weights):
        x[96:] = NAN
    p.k_blocks[23:] = NAN
    lse = sparse_gqa(p.q, p.k, p.k, ids, rows.pos, rows.start, scale=0.7, block_size=4)[1]
    for settings in ({}, {"lse": lse}):
        got = run(p, ids, rows, 4, backend=backend, **settings)
        assert_same(ref, got, 1e-12)
        for name in ("dq_idx", "dweights"):
            assert (got[name][96:] == 0).all()
        assert (got["dk_blocks"][23:] == 0).all()


@BACKENDS
@STAGES
def test_a_tail_that_takes_all_mass_adds_nothing(stage, backend):
    """fp32 rounds exp(-200) to 0: such a row has no teacher, hence no loss and no gradient, and no NaN."""
    rows = rows_of([23], 4)
    p = problem(rows, 5, group=1, kv_heads=1, channels=4).cast(torch.float32)
    q, k = torch.zeros_like(p.q), torch.zeros_like(p.k)
    q[..., 0] = 1.0
    k[21, :, 0] = 200.0  # in the tail of rows 21 and 22, and in no block
    p = p._replace(q=q, k=k)
    ids = None if stage == 1 else torch.arange(5, dtype=torch.int32).repeat(23, 1)
    got = run(p, ids, rows, 4, scale=1.0, backend=backend)
    for name in ("dq_idx", "dweights"):
        assert (got[name][21:] == 0).all()
        assert (got[name][8:21] != 0).any()
    first = torch.arange(23) < 21
    assert_same(run(p, ids, rows, 4, scale=1.0, valid=first, backend=backend), got, 1e-6)


@BACKENDS
def test_a_block_without_mass_keeps_its_student_gradient(backend):
    """0 log 0 is 0, and the student is pushed away from the block."""
    rows = PackedRows(*(torch.tensor([x], dtype=torch.int32) for x in (3, 0, 0)))
    q, k = torch.ones(1, 1, 1), torch.tensor([0.0, 0.0, -300.0, -300.0])[:, None, None]
    k_blocks = torch.tensor([[1.0], [1.0]], requires_grad=True)
    loss = indexer_kl(
        torch.ones(1, 1, 1), k_blocks, q, k, None, None, *rows, scale=1.0, index_scale=1.0, ratio=2, backend=backend
    )
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    (grad,) = torch.autograd.grad(loss, k_blocks)
    torch.testing.assert_close(grad, torch.tensor([[-0.5], [0.5]]))


@BACKENDS
@STAGES
def test_relu_has_gradient_zero_at_zero(stage, backend):
    rows = rows_of([12], 4)
    p = problem(rows, 3)
    p = p._replace(q_idx=torch.zeros_like(p.q_idx))
    got = run(p, selection(stage, rows), rows, 4, backend=backend)
    for name in ("dq_idx", "dk_blocks", "dweights"):
        assert (got[name] == 0).all(), name
    linear = run(p, selection(stage, rows), rows, 4, relu=False, backend=backend)
    assert linear["dq_idx"].abs().max() > 0


@BACKENDS
@STAGES
def test_the_teacher_gets_no_gradient(stage, backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    q, k = p.q.clone().requires_grad_(), p.k.clone().requires_grad_()
    lse = torch.zeros(96, 4, dtype=torch.float64, requires_grad=True)
    q_idx = p.q_idx.clone().requires_grad_()
    loss = indexer_kl(q_idx, p.k_blocks, q, k, lse, ids, *rows, scale=0.1, ratio=4, backend=backend)
    assert torch.autograd.grad(loss, (q_idx,), retain_graph=True)[0].abs().max() > 0
    for leaf in (q, k, lse):
        assert torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True) == (None,)
    frozen = indexer_kl(p.q_idx, p.k_blocks, q, k, lse, ids, *rows, scale=0.1, ratio=4, backend=backend)
    assert not frozen.requires_grad
    assert_close("loss", loss, frozen, 1e-13)


@STAGES
def test_only_wanted_gradients_and_once(stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    ref = run(p, ids, rows, 4)
    for position, name in enumerate(("dq_idx", "dk_blocks", "dweights")):
        leaves = [x.clone().requires_grad_(position == i) for i, x in enumerate(p[:3])]
        loss = indexer_kl(*leaves[:2], p.q, p.k, None, ids, *rows, scale=0.7, ratio=4, weights=leaves[2])
        (got,) = torch.autograd.grad(loss, leaves[position])
        assert_identical(name, ref[name], got)
    q_idx = p.q_idx.clone().requires_grad_()
    loss = indexer_kl(q_idx, p.k_blocks, p.q, p.k, None, ids, *rows, scale=0.7, ratio=4)
    (dq_idx,) = torch.autograd.grad(loss.square(), q_idx, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq_idx.sum().backward()


@STAGES
def test_rows_of_one_rank_add_up(stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    ref = run(p, ids, rows, 4)
    parts = []
    for index in (torch.cat((torch.arange(0, 24), torch.arange(72, 96))), torch.arange(24, 72)):
        part = p._replace(q_idx=p.q_idx[index], weights=p.weights[index], q=p.q[index])
        parts.append(run(part, None if ids is None else ids[index], rows.take(index), 4))
        assert_close("dq_idx", ref["dq_idx"][index], parts[-1]["dq_idx"], 1e-12)
    for name in ("loss", "dk_blocks"):
        assert_close(name, ref[name], parts[0][name] + parts[1][name], 1e-12)


@BACKENDS
@STAGES
def test_any_strides(stage, backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = selection(stage, rows)
    ref = run(p, ids, rows, 4, backend=backend)
    assert_same(ref, run(Problem(*(strided(x) for x in p)), ids, rows, 4, backend=backend), 1e-13)


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_repeated_call_gives_the_same_bits(dtype, stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23, group=12).cast(dtype)
    ids = selection(stage, rows)
    first, second = (run(p, ids, rows, 4) for _ in range(2))
    for name in first:
        assert_identical(name, first[name], second[name])


@STAGES
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gives_the_same_bits(use_reentrant, stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23).cast(torch.float32)
    ids = selection(stage, rows)
    ref = run(p, ids, rows, 4)
    q_idx, k_blocks, weights = (x.clone().requires_grad_() for x in p[:3])

    def loss_of(q_idx: Tensor, k_blocks: Tensor, weights: Tensor, ids: Tensor | None) -> Tensor:
        return indexer_kl(q_idx, k_blocks, p.q, p.k, None, ids, *rows, scale=0.7, ratio=4, weights=weights)

    loss = checkpoint(loss_of, q_idx, k_blocks, weights, ids, use_reentrant=use_reentrant)
    loss.backward()
    results = {"loss": loss, "dq_idx": q_idx.grad, "dk_blocks": k_blocks.grad, "dweights": weights.grad}
    for name, got in results.items():
        assert_identical(name, ref[name], got.detach())


@BACKENDS
@STAGES
def test_autocast_changes_nothing(stage, backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23).cast(torch.float32)
    ids = selection(stage, rows)
    ref = run(p, ids, rows, 4, backend=backend)
    leaves = [x.clone().requires_grad_() for x in p[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        loss = indexer_kl(
            *leaves[:2], p.q, p.k, None, ids, *rows, scale=0.7, ratio=4, weights=leaves[2], backend=backend
        )
    grads = torch.autograd.grad(loss, leaves)
    assert_same(ref, dict(zip(ref, (loss.detach(), *grads))), 1e-6)


@STAGES
def test_nothing_waits_for_values(stage):
    rows = rows_of([13, 50, 33], 4, padding=2)
    p = problem(rows, 23)
    valid = torch.rand(98) > 0.5
    with no_host_reads():
        for reduction in ("sum", "mean"):
            run(p, selection(stage, rows), rows, 4, valid=valid, reduction=reduction)


@STAGES
def test_memory_grows_with_tokens_not_with_their_square(stage):
    def peak(tokens: int) -> int:
        rows = rows_of([tokens], 2)
        p = problem(rows, tokens // 2, group=1, kv_heads=1, channels=4, heads=1).cast(torch.float32)
        ids = None if stage == 1 else random_block_ids(rows, 6, tokens // 2)

        def step() -> object:
            return indexer_kl_chunked(
                p.q_idx,
                p.k_blocks,
                p.q,
                p.k,
                None,
                ids,
                *rows,
                scale=0.7,
                index_scale=0.3,
                ratio=2,
                weights=p.weights,
                relu=True,
                valid=None,
                reduction="sum",
                tp_group=None,
                workspace=2**19,
            )

        step()
        return peak_extra_bytes(step)

    small, large = peak(2048), peak(4096)
    assert large <= 2.1 * small
    assert large < 4096 * 2048 * 4 / 8


@BACKENDS
@STAGES
@pytest.mark.parametrize("where", ["q_idx", "k_blocks", "q", "k", "lse", "weights"])
def test_nan_is_an_error_when_checked(where, stage, backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    ids = None if stage == 1 else torch.arange(12, dtype=torch.int32).repeat(96, 1)
    lse = torch.zeros(96, 4, dtype=torch.float64)
    tensors = p._asdict() | {"lse": lse}
    index = {"k_blocks": 22, "k": 94}.get(where, 95)
    tensors[where][index] = NAN
    with pytest.raises(ValueError, match=r"must not be NaN.* row 9[45]"):
        run(p, ids, rows, 4, lse=lse, backend=backend, checked=True)


@STAGES
def test_unchecked_nan_shows_in_the_loss(stage):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    p.q[95] = NAN
    assert run(p, selection(stage, rows), rows, 4)["loss"].isnan()


@BACKENDS
@STAGES
def test_a_row_without_blocks_may_hold_anything(stage, backend):
    rows = rows_of([13, 7, 33], 4)
    p, ids = problem(rows, 12), selection(stage, rows)
    ref = run(p, ids, rows, 4, backend=backend)
    q_idx, q, weights = p.q_idx.clone(), p.q.clone(), p.weights.clone()
    for row in (1, 13, 22):  # the second, first and third of the documents
        q_idx[row], q[row], weights[row] = NAN, NAN, math.inf
    got = run(p._replace(q_idx=q_idx, q=q, weights=weights), ids, rows, 4, backend=backend)
    assert_same(ref, got, 1e-12)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@STAGES
def test_checked_finds_an_lse_of_no_keys(stage, backend):
    rows = rows_of([13, 50, 33], 4)
    p, ids = problem(rows, 23), None if stage == 1 else torch.arange(12, dtype=torch.int32).repeat(96, 1)
    lse = torch.zeros(96, 4, dtype=torch.float64)
    lse[1] = -math.inf  # a row without blocks
    run(p, ids, rows, 4, lse=lse, backend=backend, checked=True)
    if ids is not None:
        ids[40], lse[40] = -1, -math.inf
        run(p, ids, rows, 4, lse=lse, backend=backend, checked=True)
    lse[95, 3] = -math.inf
    with pytest.raises(ValueError, match=r"lse must not be -inf in a row that has blocks; 1 rows .* is row 95"):
        run(p, ids, rows, 4, lse=lse, backend=backend, checked=True)
    run(p, ids, rows, 4, lse=lse, backend=backend, checked=True, valid=torch.arange(96) < 95)


def test_checked_finds_rows_that_disagree_on_their_document():
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    run(p, None, rows, 4, checked=True)
    wrong = rows._replace(block_start=torch.zeros_like(rows.block_start))
    with pytest.raises(ValueError, match=r"agree on row_start and row_block_start .*; 77 rows break it.* is row 16"):
        run(p, None, wrong, 4, checked=True)
    start = rows.start.clone()
    start[80] -= 1
    with pytest.raises(ValueError, match=r"row_start and row_block_start.*, row_start=\d+, row_block_start=15"):
        run(p, None, rows._replace(start=start), 4, checked=True)


def test_checked_finds_repeated_ids():
    rows = rows_of([13, 50, 33], 4)
    ids = random_block_ids(rows, 4, 8)
    ids[20] = torch.tensor([1, 0, -1, 1])
    with pytest.raises(ValueError, match=r"distinct within a row; 1 rows break it, the first is row 20, repeated_id=1"):
        run(problem(rows, 23), ids, rows, 4, checked=True)


@pytest.mark.parametrize("checked", [True, False])
def test_rows_outside_keys_and_blocks_are_found_on_a_cpu(checked):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, 23)
    with pytest.raises(ValueError, match=r"end of k_blocks, which has 22 blocks"):
        run(p._replace(k_blocks=p.k_blocks[:22]), None, rows, 4, checked=checked)
    with pytest.raises(ValueError, match=r"must lie in k, which has 90 tokens; 6 rows break it"):
        run(p._replace(k=p.k[:90]), None, rows, 4, checked=checked)
    rows.pos[5] = -2
    with pytest.raises(ValueError, match=r"row_pos must be -1 or more; .* row 5, row_pos=-2"):
        run(p, None, rows, 4, checked=checked)


def test_backends():
    rows = rows_of([13], 4)
    p = problem(rows, 3)
    arguments = (p.q_idx, p.k_blocks, p.q, p.k, None, None, *rows)
    supported, reason = supports(*arguments, scale=1.0, ratio=4)
    assert not supported
    assert reason
    assert resolve_backend(*arguments, scale=1.0, ratio=4) == "chunked"
    with pytest.raises(ValueError, match=r"indexer_kl: backend='tilelang' does not run these arguments: .+"):
        indexer_kl(*arguments, scale=1.0, ratio=4, backend="tilelang")
    with pytest.raises(ValueError, match=r"backend must be one of auto, naive, chunked, tilelang, got 'eager'"):
        indexer_kl(*arguments, scale=1.0, ratio=4, backend="eager")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_idx": torch.zeros(13, 8)}, ValueError, r"q_idx must be \[Tq, H, d\], got \(13, 8\)"),
        ({"q_idx": torch.zeros(13, 0, 8)}, ValueError, "at least one head"),
        ({"k_blocks": torch.zeros(3, 7)}, ValueError, r"k_blocks must be \[Nb, d\] with d=8, got \(3, 7\)"),
        ({"k_blocks": torch.zeros(3, 8).half()}, TypeError, "k_blocks must be float32, got float16"),
        ({"q": torch.zeros(12, 4, 8)}, ValueError, r"q must be \[Tq, Hq, D\] with Tq=13, got \(12, 4, 8\)"),
        ({"q": torch.zeros(13, 3, 8)}, ValueError, "q must have a multiple of k's 2 heads, got 3"),
        ({"k": torch.zeros(13, 2, 8).half()}, TypeError, "k must be float32, got float16"),
        ({"lse": torch.zeros(13, 3)}, ValueError, r"lse must be \[Tq, Hq\] with Tq=13, Hq=4, got \(13, 3\)"),
        ({"lse": torch.zeros(13, 4).half()}, TypeError, "lse must be float32, got float16"),
        ({"block_ids": torch.zeros(13, 2)}, TypeError, "block_ids must be int32, got float32"),
        (
            {"block_ids": torch.zeros(13, 0).int()},
            ValueError,
            r"block_ids must have at least one column, got \(13, 0\)",
        ),
        ({"row_pos": torch.zeros(12).int()}, ValueError, r"row_pos must be \[Tq\] with Tq=13"),
        ({"row_start": torch.zeros(13).long()}, TypeError, "row_start must be int32, got int64"),
        ({"row_block_start": torch.zeros(13)}, TypeError, "row_block_start must be int32, got float32"),
        ({"weights": torch.zeros(13, 2)}, ValueError, r"weights must be \[Tq, H\] with Tq=13, H=3, got \(13, 2\)"),
        ({"valid": torch.zeros(13)}, TypeError, "valid must be bool, got float32"),
        ({"scale": 0.0}, ValueError, r"scale must be finite and above 0, got 0\.0"),
        ({"index_scale": float("inf")}, ValueError, "index_scale must be finite and above 0, got inf"),
        ({"ratio": 0}, ValueError, "ratio must be at least 1, got 0"),
        ({"ratio": 2**31 - 1}, ValueError, r"ratio must be at most \d+ on the chunked path, .* got 2147483647"),
        (
            {"ratio": 2**31 - 1, "block_ids": None},
            ValueError,
            r"ratio must be at most \d+ on the chunked path, .* got 2147483647",
        ),
        ({"ratio": 2**32 + 4}, ValueError, "ratio must be at most 2147483647, got 4294967300"),
        ({"index_scale": 10**400}, ValueError, "index_scale must be finite and above 0, got 1000"),
        ({"scale": 1e39}, ValueError, r"scale must be at most 1e\+38, got 1e\+39"),
        ({"relu": None}, TypeError, "relu must be a bool, got None"),
        ({"reduction": "none"}, ValueError, "reduction must be one of sum, mean, got 'none'"),
        ({"tp_group": "tp"}, TypeError, "tp_group must be a torch.distributed.ProcessGroup, got str"),
    ],
)
def test_wrong_arguments(change, error, message):
    rows = rows_of([13], 4)
    arguments = {
        "q_idx": torch.zeros(13, 3, 8),
        "k_blocks": torch.zeros(3, 8),
        "q": torch.zeros(13, 4, 8),
        "k": torch.zeros(13, 2, 8),
        "lse": None,
        "block_ids": None,
        "row_pos": rows.pos,
        "row_start": rows.start,
        "row_block_start": rows.block_start,
        "scale": 1.0,
        "ratio": 4,
    }
    indexer_kl(**arguments)
    with pytest.raises(error, match=f"indexer_kl: .*{message}"):
        indexer_kl(**(arguments | change))
