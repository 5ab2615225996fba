from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mcore_patches.ops.block_topk import select_blocks
from mcore_patches.ops.packing import PackedRows
from mcore_patches.ops.sparse_gqa import resolve_backend, sparse_gqa, supports
from mcore_patches.ops.sparse_gqa.chunked import KEY_TILE, sparse_gqa_chunked
from mcore_patches.ops.sparse_gqa.naive import attended_keys
from tests.ops.assertions import assert_close, assert_identical
from tests.ops.memory import peak_extra_bytes
from tests.ops.qsa_helpers import PACKED, TINY, lengths_id, no_host_reads, random_block_ids, rows_of, strided

RATIOS = [1, 2, 4, 8, 16]
NAN = float("nan")


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def cast(self, dtype: torch.dtype) -> "Problem":
        return Problem(*(x.to(dtype) for x in self))


def problem(rows: PackedRows, group: int = 2, kv_heads: int = 2, channels: int = 8, num_keys: int | None = None):
    keys = len(rows.pos) if num_keys is None else num_keys
    queries = (len(rows.pos), group * kv_heads, channels)
    shapes = (queries, (keys, kv_heads, channels), (keys, kv_heads, channels), queries)
    return Problem(*(torch.randn(shape, dtype=torch.float64) for shape in shapes))


def run(p: Problem, ids: Tensor | None, rows: PackedRows, ratio: int, **settings) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in p[:3])
    settings = {"scale": 0.4, "block_size": ratio} | settings
    attend = sparse_gqa_chunked if "workspace" in settings else sparse_gqa
    out, lse = attend(q, k, v, ids, rows.pos, rows.start, **settings)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.dout)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_same(ref: dict[str, Tensor], got: dict[str, Tensor], tol: float, floor: float = 0.0) -> None:
    for name in ref:
        assert_close(name, ref[name], got[name], tol, floor=floor)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_equal_scores_average_the_values_of_the_attended_tokens(ratio, backend):
    """With q = 0 the output is a mean and lse the log of how many tokens: membership, token by token."""
    lengths = [13, 50, 33]
    rows = rows_of(lengths, ratio, padding=2)
    p = problem(rows)
    ids = random_block_ids(rows, 4, 8)
    out, lse = sparse_gqa(
        torch.zeros_like(p.q), p.k, p.v, ids, rows.pos, rows.start, scale=1.0, block_size=ratio, backend=backend
    )
    for row, (pos, start, _) in enumerate(zip(*(field.tolist() for field in rows))):
        complete = (pos + 1) // ratio
        tokens = [start + b * ratio + t for b in ids[row].tolist() if 0 <= b < complete for t in range(ratio)]
        tokens += [start + t for t in range(complete * ratio, pos + 1)]
        if not tokens:
            assert (out[row] == 0).all()
            assert (lse[row] == float("-inf")).all()
            continue
        mean = p.v[tokens].mean(dim=0).repeat_interleave(2, dim=0)
        torch.testing.assert_close(out[row], mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(lse[row], torch.full((4,), len(tokens)).double().log(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (2, 2), (12, 1)])
def test_dense_is_torch_attention_of_each_document(group, kv_heads, backend):
    lengths = [13, 50, 33]
    rows = rows_of(lengths, 4)
    p = problem(rows, group, kv_heads)
    got = run(p, None, rows, 4, backend=backend)
    q, k, v = (x.clone().requires_grad_() for x in p[:3])
    outs = []
    for query, key, value in zip(*(x.split(lengths) for x in (q, k, v))):
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    out = torch.cat(outs)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.dout)
    assert_same({"out": out, "dq": dq, "dk": dk, "dv": dv}, got, 1e-13)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", [*PACKED, *TINY], ids=lengths_id)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_chunked_equals_naive_in_float64(lengths, ratio, dense):
    rows = rows_of(lengths, ratio, padding=2)
    p = problem(rows)
    ids = None if dense else random_block_ids(rows, 4, 8)
    ref = run(p, ids, rows, ratio, backend="naive")
    for settings in ({"backend": "chunked", "checked": True}, {"workspace": 1}, {"workspace": 2**15}):
        assert_same(ref, run(p, ids, rows, ratio, **settings), 1e-11, floor=1.0)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (1, 3), (2, 2), (12, 2)])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_head_groups(group, kv_heads, dense):
    rows = rows_of([1, 3, 4, 41, 7, 40], 4)
    p = problem(rows, group, kv_heads)
    ids = None if dense else random_block_ids(rows, 4, 8)
    assert_same(run(p, ids, rows, 4, backend="naive"), run(p, ids, rows, 4), 1e-11)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)], ids=str
)
def test_reduced_precision_against_float64(dtype, tol, dense):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, group=12, kv_heads=2, channels=64).cast(dtype)
    ids = None if dense else random_block_ids(rows, 6, 12)
    ref = run(p.cast(torch.float64), ids, rows, 4, backend="naive", scale=0.125)
    for settings in ({"backend": "chunked"}, {"backend": "naive"}, {"workspace": 2**16}):
        got = run(p, ids, rows, 4, scale=0.125, **settings)
        assert got["lse"].dtype == torch.float32
        assert {got[name].dtype for name in ("out", "dq", "dk", "dv")} == {dtype}
        assert_close("lse", ref["lse"], got["lse"], 2e-6)
        assert_same({name: ref[name] for name in ("out", "dq", "dk", "dv")}, got, tol)


def test_dense_keys_longer_than_a_tile():
    lengths = [KEY_TILE - 3, KEY_TILE + 9, 2]
    rows = rows_of(lengths, 4)
    p = problem(rows, group=1, kv_heads=1, channels=4)
    assert_same(run(p, None, rows, 4, backend="naive"), run(p, None, rows, 4), 1e-11)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_gradients_by_finite_differences(dense):
    rows = rows_of([5, 9], 4, padding=1)
    p = problem(rows, channels=3)
    ids = None if dense else torch.tensor([[0, 7], [1, 0], [-1, 1]], dtype=torch.int32).repeat(5, 1)
    for backend in ("naive", "chunked"):

        def attend(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
            return sparse_gqa(q, k, v, ids, rows.pos, rows.start, scale=0.7, block_size=4, backend=backend)[0]

        assert torch.autograd.gradcheck(attend, [x.clone().requires_grad_() for x in p[:3]])


def test_naive_is_differentiable_twice():
    rows = rows_of([5], 2)
    p = problem(rows, group=1, kv_heads=1, channels=2)
    ids = random_block_ids(rows, 2, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_gqa(q, k, v, ids, rows.pos, rows.start, scale=0.7, block_size=2, backend="naive")[0]

    assert torch.autograd.gradgradcheck(attend, [x.clone().requires_grad_() for x in p[:3]])


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_released_model_sizes_dense_until_row_2050_then_not_even_itself(backend):
    """Hq 24, Hkv 2, D 256, 512 blocks of 4 tokens, rows 2047 to 2056."""
    ratio, length = 4, 2057
    positions = torch.arange(2047, 2057)
    rows = rows_of([length], ratio).take(positions)
    p = problem(rows, group=12, kv_heads=2, channels=256, num_keys=length).cast(torch.float32)
    q_idx = torch.rand(len(positions), 4, 128)
    k_blocks = torch.rand(length // ratio, 128)
    k_blocks[512:] = -1.0
    ids = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=ratio, topk=512)
    sparse = run(p, ids, rows, ratio, scale=1 / 16, backend=backend)
    dense = run(p, None, rows, ratio, scale=1 / 16, backend=backend)
    assert_close("out up to 2050", dense["out"][:4], sparse["out"][:4], 4e-6)
    assert_close("lse up to 2050", dense["lse"][:4], sparse["lse"][:4], 1e-6)
    assert_close("dq up to 2050", dense["dq"][:4], sparse["dq"][:4], 4e-6)
    # Row 2051 completes block 512, which lost to the other 512: it sees tokens 0 to 2047 and nothing of its own.
    keys, values = (x[:2048].repeat_interleave(12, dim=1) for x in (p.k, p.v))
    probabilities = (torch.einsum("hd,shd->hs", p.q[4], keys) / 16).softmax(dim=-1)
    assert_close("out of 2051", torch.einsum("hs,shd->hd", probabilities, values), sparse["out"][4], 4e-6)
    # Row 2052 has token 2052 in its tail and still lacks 2048 to 2051.
    attended = attended_keys(ids, rows.pos, rows.start, ratio, length)
    assert attended[5].nonzero().flatten().tolist() == [*range(2048), 2052]
    assert (dense["out"][4] - sparse["out"][4]).abs().max() > 1e-3


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_all_complete_blocks_are_dense_attention(ratio):
    rows = rows_of([13, 50, 33], ratio)
    p = problem(rows)
    ids = torch.arange(50 // ratio).flip(0).repeat(96, 1).int()
    for backend in ("naive", "chunked"):
        assert_same(
            run(p, None, rows, ratio, backend=backend), run(p, ids, rows, ratio, backend=backend), 1e-12, floor=1.0
        )


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_order_of_ids_and_ids_outside_do_not_matter(backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows)
    ids = random_block_ids(rows, 6, 9)
    complete = (rows.pos + 1)[:, None] // 4
    cleaned = torch.where((ids >= 0) & (ids < complete), ids, -1).sort(dim=1, descending=True).values
    wild = torch.where(cleaned < 0, torch.tensor([2**31 - 1, -(2**31), 500, -7, -1, 99], dtype=torch.int32), cleaned)
    ref = run(p, ids, rows, 4, backend=backend)
    assert_same(ref, run(p, cleaned, rows, 4, backend=backend), 1e-13)
    assert_same(ref, run(p, wild, rows, 4, backend=backend), 1e-13)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_padding_is_never_read_and_gets_zeros(dense, backend):
    lengths = [13, 50, 33]
    rows = rows_of(lengths, 4, padding=3)
    p = problem(rows)
    ids = None if dense else random_block_ids(rows, 4, 8)
    ref = run(Problem(*(x[:96] for x in p)), None if dense else ids[:96], rows_of(lengths, 4), 4, backend=backend)
    for x in p:
        x[96:] = NAN
    got = run(p, ids, rows, 4, backend=backend)
    for name in ref:
        assert_close(name, ref[name], got[name][:96], 1e-13)
        assert (got[name][96:] == (float("-inf") if name == "lse" else 0)).all()


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_rows_without_any_key(backend):
    """No id, no tail (position 3 of 4), and padding: output 0, lse -inf, gradients 0."""
    rows = rows_of([8], 4)
    p = problem(rows)
    ids = torch.full((8, 2), -1, dtype=torch.int32)
    got = run(p, ids, rows, 4, backend=backend)
    for row in (3, 7):
        assert (got["out"][row] == 0).all()
        assert (got["lse"][row] == float("-inf")).all()
        assert (got["dq"][row] == 0).all()
    assert (got["dk"][7] == 0).all()
    assert (got["dv"][[3, 7]] == 0).all()
    assert got["out"][[0, 1, 2, 4, 5, 6]].abs().sum(dim=(1, 2)).gt(0).all()


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_empty_shapes(backend):
    rows = rows_of([8], 4)
    p = problem(rows)
    no_ids = torch.empty(8, 0, dtype=torch.int32)
    got = run(p, no_ids, rows, 4, backend=backend)
    assert_close("tail of one token", p.v[4].repeat_interleave(2, dim=0), got["out"][4], 1e-14)
    got = run(p, no_ids, rows, 1, backend=backend)
    assert (got["out"] == 0).all()
    assert (got["lse"] == float("-inf")).all()
    none = rows.take(torch.arange(0))
    for ids in (None, no_ids[:0]):
        got = run(Problem(p.q[:0], p.k, p.v, p.dout[:0]), ids, none, 4, backend=backend)
        assert got["out"].shape == (0, 4, 8)
        assert (got["dk"] == 0).all()
    padding = PackedRows(*(torch.full((2,), value, dtype=torch.int32) for value in (-1, 0, 0)))
    for ids in (None, no_ids[:2]):
        got = run(Problem(p.q[:2], p.k[:0], p.v[:0], p.dout[:2]), ids, padding, 4, backend=backend)
        assert (got["out"] == 0).all()
        assert got["dk"].shape == (0, 2, 8)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_rows_of_one_rank_give_the_rows_and_their_share_of_the_key_gradients(dense):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows)
    ids = None if dense else random_block_ids(rows, 4, 8)
    ref = run(p, ids, rows, 4)
    shares = [torch.cat((torch.arange(0, 24), torch.arange(72, 96))), torch.arange(24, 72)]
    parts = []
    for index in shares:
        part = Problem(p.q[index], p.k, p.v, p.dout[index])
        parts.append(run(part, None if dense else ids[index], rows.take(index), 4))
    for index, part in zip(shares, parts):
        for name in ("out", "lse", "dq"):
            assert_close(name, ref[name][index], part[name], 1e-13)
    for name in ("dk", "dv"):
        assert_close(name, ref[name], parts[0][name] + parts[1][name], 1e-13)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_any_strides(dense, backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows)
    ids = None if dense else random_block_ids(rows, 4, 8)
    ref = run(p, ids, rows, 4, backend=backend)
    got = run(Problem(*(strided(x) for x in p)), ids, rows, 4, backend=backend)
    assert_same(ref, got, 1e-13)
    # Slices of one fused projection, as q, k and v often are.
    fused = torch.cat((p.q, p.k, p.v), dim=1)
    q, k, v = fused.split([4, 2, 2], dim=1)
    assert_same(ref, run(Problem(q, k, v, p.dout), ids, rows, 4, backend=backend), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_repeated_call_gives_the_same_bits(dense, dtype):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows, group=12).cast(dtype)
    ids = None if dense else random_block_ids(rows, 6, 8)
    first, second = (run(p, ids, rows, 4) for _ in range(2))
    for name in first:
        assert_identical(name, first[name], second[name])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_recomputation_gives_the_same_bits(dense, use_reentrant):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows).cast(torch.float32)
    ids = None if dense else random_block_ids(rows, 4, 8)
    ref = run(p, ids, rows, 4)
    q, k, v = (x.clone().requires_grad_() for x in p[:3])

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None) -> Tensor:
        return sparse_gqa(q, k, v, ids, rows.pos, rows.start, scale=0.4, block_size=4)[0]

    out = checkpoint(attend, q, k, v, ids, use_reentrant=use_reentrant)
    out.backward(p.dout)
    for name, got in (("out", out), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        assert_identical(name, ref[name], got)


def test_only_wanted_gradients_and_none_for_lse():
    rows = rows_of([13], 4)
    p = problem(rows)
    for ids in (None, random_block_ids(rows, 2, 3)):
        out, lse = sparse_gqa(
            p.q, p.k.clone().requires_grad_(), p.v, ids, rows.pos, rows.start, scale=0.4, block_size=4
        )
        assert out.requires_grad
        assert not lse.requires_grad
        out, lse = sparse_gqa(*p[:3], ids, rows.pos, rows.start, scale=0.4, block_size=4)
        assert not out.requires_grad
    q = p.q.clone().requires_grad_()
    out, _ = sparse_gqa(q, p.k, p.v, None, rows.pos, rows.start, scale=0.4, block_size=4)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_autocast_changes_nothing(dense, backend):
    rows = rows_of([13, 50, 33], 4)
    p = problem(rows).cast(torch.float32)
    ids = None if dense else random_block_ids(rows, 4, 8)
    ref = run(p, ids, rows, 4, backend=backend)
    q, k, v = (x.clone().requires_grad_() for x in p[:3])
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = sparse_gqa(q, k, v, ids, rows.pos, rows.start, scale=0.4, block_size=4, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.dout)
    assert_same(ref, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, 1e-6)
    if backend == "chunked":
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(ref, run(p, ids, rows, 4), 1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_nothing_waits_for_values(dense, deterministic):
    rows = rows_of([13, 50, 33], 4, padding=2)
    p = problem(rows)
    ids = None if dense else random_block_ids(rows, 4, 8)
    with no_host_reads():
        run(p, ids, rows, 4, deterministic=deterministic)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_memory_grows_with_tokens_not_with_their_square(dense):
    def peak(tokens: int) -> int:
        rows = rows_of([tokens], 4)
        p = problem(rows, group=1, kv_heads=1, channels=4).cast(torch.float32)
        ids = None if dense else random_block_ids(rows, 6, tokens // 4)

        def step() -> dict[str, Tensor]:
            return run(p, ids, rows, 4, workspace=2**19)

        step()
        return peak_extra_bytes(step)

    small, large = peak(2048), peak(4096)
    assert large <= 2.1 * small
    assert large < 4096 * 4096 * 4 / 16


def test_repeated_ids_are_an_error_when_checked():
    rows = rows_of([13, 50], 4)
    p = problem(rows)
    ids = random_block_ids(rows, 4, 8)
    ids[20] = torch.tensor([-1, 1, 0, -1])
    sparse_gqa(*p[:3], ids, rows.pos, rows.start, scale=1.0, block_size=4, checked=True)
    ids[20] = torch.tensor([1, 0, -1, 1])
    with pytest.raises(ValueError, match=r"distinct within a row; 1 rows break it, the first is row 20, repeated_id=1"):
        sparse_gqa(*p[:3], ids, rows.pos, rows.start, scale=1.0, block_size=4, checked=True)


@pytest.mark.parametrize("checked", [True, False])
def test_rows_outside_the_keys_are_found_on_a_cpu(checked):
    rows = rows_of([13, 50], 4)
    p = problem(rows, num_keys=60)
    with pytest.raises(ValueError, match=r"k, which has 60 tokens; 3 rows break it, the first is row 60, row_start=13"):
        sparse_gqa(*p[:3], None, rows.pos, rows.start, scale=1.0, block_size=4, checked=checked)
    rows.pos[5] = -2
    with pytest.raises(ValueError, match=r"row_pos must be -1 or more; .* row 5, row_pos=-2"):
        sparse_gqa(*p[:3], None, rows.pos, rows.start, scale=1.0, block_size=4, checked=checked)


def test_backends():
    rows = rows_of([13], 4)
    arguments = (*problem(rows)[:3], None, rows.pos, rows.start)
    settings = {"scale": 1.0, "block_size": 4}
    supported, reason = supports(*arguments, **settings)
    assert not supported
    assert reason
    assert resolve_backend(*arguments, **settings) == "chunked"
    with pytest.raises(ValueError, match=r"sparse_gqa: backend='tilelang' does not run these arguments: .+"):
        sparse_gqa(*arguments, **settings, backend="tilelang")
    with pytest.raises(ValueError, match=r"backend must be one of auto, naive, chunked, tilelang, got 'flash'"):
        sparse_gqa(*arguments, **settings, backend="flash")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(13, 8)}, ValueError, r"q must be \[Tq, Hq, D\], got \(13, 8\)"),
        ({"q": torch.zeros(13, 3, 8)}, ValueError, "q must have a multiple of k's 2 heads, got 3"),
        ({"k": torch.zeros(13, 2, 4)}, ValueError, r"k must be \[Tk, Hkv, D\] with D=8, got \(13, 2, 4\)"),
        ({"k": torch.zeros(13, 2, 8).half()}, TypeError, "k must be float32, got float16"),
        ({"v": torch.zeros(12, 2, 8)}, ValueError, r"v must be .* with Tk=13, Hkv=2, D=8, got \(12, 2, 8\)"),
        ({"block_ids": torch.zeros(13, 2)}, TypeError, "block_ids must be int32, got float32"),
        ({"block_ids": torch.zeros(12, 2).int()}, ValueError, r"block_ids must be \[Tq, K\] with Tq=13, got \(12, 2\)"),
        ({"row_pos": torch.zeros(13, 1).int()}, ValueError, r"row_pos must be \[Tq\] with Tq=13, got \(13, 1\)"),
        ({"row_start": torch.zeros(13).long()}, TypeError, "row_start must be int32, got int64"),
        ({"v": torch.zeros(13, 2, 8, device="meta")}, ValueError, "v must be on cpu, got meta"),
        ({"scale": float("nan")}, ValueError, "scale must be finite and above 0, got nan"),
        ({"scale": 10**400}, ValueError, "scale must be finite and above 0, got 1000"),
        ({"scale": 1e39}, ValueError, r"scale must be at most 1e\+38, got 1e\+39"),
        ({"scale": Fraction(1, 10**400)}, ValueError, "scale must be finite and above 0, got Fraction"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        (
            {"block_size": 2**31 - 1},
            ValueError,
            r"block_size must be at most \d+ on the chunked path, .* got 2147483647",
        ),
        ({"block_size": 2**32 + 4}, ValueError, "block_size must be at most 2147483647, got 4294967300"),
        ({"deterministic": 0}, TypeError, "deterministic must be a bool, got 0"),
    ],
)
def test_wrong_arguments(change, error, message):
    rows = rows_of([13], 4)
    arguments = {
        "q": torch.zeros(13, 4, 8),
        "k": torch.zeros(13, 2, 8),
        "v": torch.zeros(13, 2, 8),
        "block_ids": torch.zeros(13, 2, dtype=torch.int32),
        "row_pos": rows.pos,
        "row_start": rows.start,
        "scale": 1.0,
        "block_size": 4,
    }
    sparse_gqa(**arguments)
    sparse_gqa(**(arguments | {"scale": Fraction(1, 3)}))  # any real number
    with pytest.raises(error, match=f"sparse_gqa: .*{message}"):
        sparse_gqa(**(arguments | change))
