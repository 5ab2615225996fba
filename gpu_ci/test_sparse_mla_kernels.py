"""The TileLang kernels of sparse MLA against the float64 oracle, and what they promise beside the numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.device import Device, describe
from mcore_patches.ops.jit import CACHE
from mcore_patches.ops.sparse_mla import ordering, sparse_mla, supports
from mcore_patches.ops.sparse_mla.naive import sparse_mla_naive

pytestmark = pytest.mark.h100
DV = 512
TOLERANCE = 0.006  # of the norm: P and dS are rounded to bf16, 2**-9 relative


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    rows: int
    keys: int
    heads: int
    topk: int
    width: int = 576

    def __str__(self) -> str:
        return f"B{self.batch}-S{self.rows}-Skv{self.keys}-H{self.heads}-K{self.topk}-D{self.width}"


@dataclasses.dataclass
class Inputs:
    q: Tensor
    kv: Tensor
    indices: Tensor
    dout: Tensor
    scale: float

    @classmethod
    def random(cls, case: Case, seed: int = 0) -> Inputs:
        """Ids in no order with repeats, a tenth outside [0, Skv); every fifth row has no keys, row 2 few, in front."""
        g = torch.Generator("cuda").manual_seed(seed + hash(case) % 2**31)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=g).bfloat16()

        q = normal(case.batch, case.rows, case.heads, case.width)
        kv, dout = normal(case.batch, case.keys, 1, case.width), normal(case.batch, case.rows, case.heads, DV)
        margin = max(1, case.keys // 20)
        ids = torch.randint(
            -margin, case.keys + margin, (case.batch, case.rows, case.topk), device="cuda", generator=g
        ).int()
        ids[:, ::5] = torch.where(ids[:, ::5] % 2 == 0, -1, 2**31 - 1)
        if case.rows > 2:
            ids[:, 2, case.topk // 3 + 1 :] = -1
        return cls(q, kv, ids, dout, case.width**-0.5)

    def run(self, *, deterministic: bool = False) -> tuple[Tensor, ...]:
        """(out, lse, dq, dkv) of the kernels."""
        q, kv = (t.detach().requires_grad_() for t in (self.q, self.kv))
        out, lse = sparse_mla(q, kv, self.indices, scale=self.scale, deterministic=deterministic, backend="tilelang")
        dq, dkv = torch.autograd.grad(out, (q, kv), self.dout)
        return out.detach(), lse, dq, dkv

    def reference(self) -> tuple[Tensor, ...]:
        q, kv = (t.detach().double().requires_grad_() for t in (self.q, self.kv))
        out, lse = sparse_mla_naive(q, kv, self.indices, scale=self.scale, v_channels=DV)
        dq, dkv = torch.autograd.grad(out, (q, kv), self.dout.double())
        return out.detach(), lse.detach(), dq, dkv


def relative(ref: Tensor, got: Tensor) -> float:
    """Norm of the difference over the reference's, where a reference near zero counts as rounding of 1e-2 a value."""
    assert got.shape == ref.shape
    assert torch.equal(torch.isinf(ref), torch.isinf(got))
    ref, got = (t.double().masked_fill(torch.isinf(t), 0.0) for t in (ref, got))
    return ((got - ref).norm() / ref.norm().clamp_min(1e-2 * ref.numel() ** 0.5)).item()


def check(ref: tuple[Tensor, ...], got: tuple[Tensor, ...], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative(a, b) for name, a, b in zip(("out", "lse", "dq", "dkv"), ref, got)}
    assert all(error < tolerance for error in errors.values()), errors
    assert errors["lse"] < 1e-5, errors


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["atomic", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> bool:
    return request.param == "deterministic"


HEADS = (1, 2, 7, 16, 17, 24, 32, 33, 63, 64, 65, 100, 128)
TOPK = (1, 63, 64, 65, 127, 2048, 2051, 4096)
CASES = [
    *(Case(1 + heads % 2, 11, 300, heads, 127, width) for heads, width in itertools.product(HEADS, (512, 576))),
    # One head count for each of the backward kernels, and one for two of its blocks.
    *(
        Case(1, 6, 1 + 2 * topk, heads, topk, width)
        for topk, heads, width in itertools.product(TOPK, (8, 24, 64, 128), (512, 576))
    ),
    Case(3, 1, 1, 1, 1),
    Case(1, 1, 5, 128, 2),
    Case(2, 131, 67, 16, 64),  # few keys, many rows: every key is in most rows, several times
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: Case, deterministic: bool) -> None:
    inputs = Inputs.random(case)
    check(inputs.reference(), inputs.run(deterministic=deterministic))


@pytest.mark.parametrize("case", [Case(1, 300, 700, 64, 200), Case(2, 150, 300, 128, 65, 512)], ids=str)
def test_deterministic_in_several_chunks_equals_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = -(-case.heads // 64)
    monkeypatch.setattr(ordering, "PARTS_BYTES", 37 * 2 * case.topk * case.width * blocks)
    assert ordering.rows_in_order(case.rows, case.topk, case.keys, case.width, blocks, 132) == 37
    inputs = Inputs.random(case)
    check(inputs.reference(), inputs.run(deterministic=True))


def as_on_other_gpus(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernels, with as much shared memory as GPUs have that are no Hopper."""
    from mcore_patches.ops.sparse_mla import tilelang_builds, tilelang_kernels

    multiprocessors = describe(torch.device("cuda", torch.cuda.current_device())).multiprocessors
    # One name for each amount: kernels are kept by architecture, not by shared memory.
    monkeypatch.setattr(tilelang_kernels, "_device", lambda _: Device("sm_90a", kib * 1024, multiprocessors))
    cache = type(CACHE)()
    for module in (tilelang_builds, tilelang_kernels):
        monkeypatch.setattr(module, "CACHE", cache)
    tilelang_builds.build_first.cache_clear()


@pytest.mark.parametrize("kib", [99, 163, 226])
def test_plain_kernels_equal_the_oracle(kib: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_other_gpus(kib, monkeypatch)
    for case in (Case(2, 9, 200, 40, 127), Case(1, 7, 90, 1, 65, 512), Case(1, 9, 500, 16, 640)):
        inputs = Inputs.random(case)
        check(inputs.reference(), inputs.run(deterministic=deterministic))


def test_rows_without_keys_are_zero_and_finite(deterministic: bool) -> None:
    inputs = Inputs.random(Case(2, 10, 100, 16, 64))
    out, lse, dq, dkv = inputs.run(deterministic=deterministic)
    empty = slice(None, None, 5)
    assert not out[:, empty].any()
    assert not dq[:, empty].any()
    assert (lse[:, empty] == -torch.inf).all()
    assert torch.isfinite(dkv).all()
    inputs.indices.fill_(-1)
    out, lse, dq, dkv = inputs.run(deterministic=deterministic)
    assert not out.any() and not dq.any() and not dkv.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("kib", [None, 99, 226], ids=["hopper", "plain99", "plain226"])
def test_nan_reaches_the_rows_that_hold_it_and_no_others(kib: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of NaN in row 1, a key of NaN that only row 3 selects: no result of theirs may look sound."""
    if kib is not None:
        as_on_other_gpus(kib, monkeypatch)
    inputs = Inputs.random(Case(1, 9, 200, 24, 130))
    inputs.indices[inputs.indices == 199] = 198
    clean = inputs.run()
    inputs.indices[0, 3, 70] = 199
    inputs.q[0, 1], inputs.kv[0, 199] = torch.nan, torch.nan
    got = inputs.run()
    others = [row for row in range(9) if row not in (1, 3)]
    for name, ref, value in zip(("out", "lse", "dq"), clean, got):
        assert value[:, [1, 3]].isnan().all(), name
        assert torch.equal(value[:, others], ref[:, others]), name


def test_keys_that_no_row_selects_are_never_read(deterministic: bool) -> None:
    inputs = Inputs.random(Case(1, 9, 200, 24, 65))
    inputs.indices[inputs.indices == 0] = 1
    unused = torch.ones(200, dtype=torch.bool, device="cuda")
    ids = inputs.indices[(inputs.indices >= 0) & (inputs.indices < 200)].long()
    unused[ids] = False
    assert unused.any()
    ref = inputs.run(deterministic=deterministic)
    inputs.kv[:, unused] = torch.nan
    out, lse, dq, dkv = inputs.run(deterministic=deterministic)
    check(ref, (out, lse, dq, dkv), 1e-3)
    assert not dkv[:, unused].any()


def test_strided_inputs_give_the_same(deterministic: bool) -> None:
    """q and dout as [S, B, H, D] seen from [B, S, H, D] with heads cut off, kv a slice of wider rows, ids int64."""
    case = Case(2, 9, 200, 24, 65)
    inputs = Inputs.random(case)
    ref = inputs.run(deterministic=deterministic)

    def cut(t: Tensor) -> Tensor:
        wide = torch.full((t.shape[1], t.shape[0], t.shape[2] + 3, t.shape[3]), torch.nan, device="cuda", dtype=t.dtype)
        wide[:, :, : t.shape[2]] = t.transpose(0, 1)
        return wide[:, :, : t.shape[2]].transpose(0, 1)

    wide = torch.full((*inputs.kv.shape[:3], case.width + 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[..., : case.width] = inputs.kv
    strided = Inputs(cut(inputs.q), wide[..., : case.width], inputs.indices.long(), cut(inputs.dout), inputs.scale)
    assert not strided.q.is_contiguous() and not strided.kv.is_contiguous()
    check(ref, strided.run(deterministic=deterministic), 1e-3)


def guarded(*shape: int, dtype: torch.dtype, value: float) -> tuple[Tensor, Tensor]:
    """A tensor of `value` in the middle of a buffer of 77, and the buffer."""
    size, margin = torch.Size(shape).numel(), 1 << 16
    buffer = torch.full((size + 2 * margin,), 77.0, dtype=dtype, device="cuda")
    inside = buffer[margin : margin + size].view(shape)
    return inside.fill_(value), buffer


@pytest.mark.parametrize("heads", [1, 24, 65, 128])
def test_nothing_is_written_outside_the_results(heads: int) -> None:
    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels
    from mcore_patches.ops.sparse_mla.tilelang_builds import head_rows

    case = Case(2, 9, 200, heads, 65)
    inputs = Inputs.random(case)
    device = describe(torch.device("cuda", torch.cuda.current_device()))
    kv, extent = inputs.kv.squeeze(2), kernels._extent(inputs.indices, case.keys, device, case.width)
    out, out_buffer = guarded(2, 9, heads, DV, dtype=torch.bfloat16, value=0.0)
    lse, lse_buffer = guarded(2, 9, heads, dtype=torch.float32, value=0.0)
    dq, dq_buffer = guarded(2, 9, heads, case.width, dtype=torch.bfloat16, value=0.0)
    dkv, dkv_buffer = guarded(2, 200, case.width, dtype=torch.float32, value=0.0)
    forward = kernels.kernel("forward", device, case.width, strided=False)
    forward(inputs.q, kv, inputs.indices, extent, inputs.scale, out, lse)
    backward = kernels.kernel("backward", device, case.width, reduction="atomic", **head_rows(heads), strided=False)
    delta = (out.float() * inputs.dout.float()).sum(-1)
    arguments = (inputs.q, kv, inputs.dout, inputs.indices, inputs.indices, extent, lse, delta, inputs.scale)
    backward(*arguments, dq, dkv)
    for inside, buffer in ((out, out_buffer), (lse, lse_buffer), (dq, dq_buffer), (dkv, dkv_buffer)):
        margin = (buffer.numel() - inside.numel()) // 2
        assert (buffer[:margin] == 77).all() and (buffer[margin + inside.numel() :] == 77).all()
    check(inputs.reference()[:3], (out, lse, dq))

    parts, parts_buffer = guarded(1, 2 * 9 * 65 * -(-heads // 64), case.width, dtype=torch.bfloat16, value=0.0)
    slots = torch.arange(2 * 9 * 65, dtype=torch.int32, device="cuda").view(2, 9, 65)
    store = kernels.kernel("backward", device, case.width, reduction="store", **head_rows(heads), strided=False)
    for b in range(2):
        one = tuple(t[b : b + 1] for t in (inputs.q, kv, inputs.dout, inputs.indices, slots, extent, lse, delta))
        store(*one, inputs.scale, dq[b : b + 1].fill_(77.0), parts)
    for inside, buffer in ((dq, dq_buffer), (parts, parts_buffer)):
        margin = (buffer.numel() - inside.numel()) // 2
        assert (buffer[:margin] == 77).all() and (buffer[margin + inside.numel() :] == 77).all()
    assert relative(inputs.reference()[2], dq) < TOLERANCE


def sample_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    return Inputs(inputs.q[:, rows], inputs.kv, inputs.indices[:, rows], inputs.dout[:, rows], inputs.scale)


def test_more_than_2_31_elements_of_q() -> None:
    """32800 x 128 x 576 = 2.4e9 elements; rows on both sides of element 2**31 against the oracle."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    case = Case(1, 32800, 3000, 128, 64)
    inputs = Inputs.random(case)
    assert inputs.q.numel() > 2**31 and inputs.dout.numel() > 2**31
    out, lse, dq, _ = inputs.run()
    rows = torch.tensor([1, 29126, 29127, 29128, 32766, 32767, 32768, 32799], device="cuda")
    ref = sample_rows(inputs, rows).reference()
    check(ref[:3], (out[:, rows], lse[:, rows], dq[:, rows]))


def test_more_than_2_31_elements_of_kv(deterministic: bool) -> None:
    """4e6 keys x 576 = 2.3e9 elements: ids and gradients beyond element 2**31."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    keys = 4_000_000
    kv = torch.zeros(1, keys, 1, 576, dtype=torch.bfloat16, device="cuda")
    inputs = Inputs.random(Case(1, 40, 300, 16, 64))
    used = torch.cat((torch.arange(150), torch.arange(keys - 150, keys))).cuda()
    kv[:, used] = inputs.kv
    ids = torch.where((inputs.indices >= 0) & (inputs.indices < 300), inputs.indices, -1)
    far = torch.where(ids >= 0, used[ids.clamp_min(0).long()], -1).int()
    big = Inputs(inputs.q, kv, far, inputs.dout, inputs.scale)
    small = Inputs(inputs.q, inputs.kv, ids, inputs.dout, inputs.scale)
    out, lse, dq, dkv = big.run(deterministic=deterministic)
    check(small.reference(), (out, lse, dq, dkv[:, used]))


def test_deterministic_repeats_bit_for_bit_under_contention() -> None:
    inputs = Inputs.random(Case(1, 700, 900, 64, 512))
    first = inputs.run(deterministic=True)
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(8):
                noise = (noise @ noise).tanh()
        again = inputs.run(deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_a_dkv_larger_than_the_cache_is_added_up_in_order() -> None:
    """115 MB in fp32: a call that asks for no order takes the one that is faster here, and gets the same bits."""
    inputs = Inputs.random(Case(1, 1024, 50_000, 16, 256))
    for a, b in zip(inputs.run(), inputs.run(deterministic=True)):
        assert torch.equal(a, b)


def test_forward_repeats_bit_for_bit() -> None:
    inputs = Inputs.random(Case(1, 400, 900, 128, 512))
    first, again = inputs.run(), inputs.run()
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])


def test_host_never_waits(deterministic: bool) -> None:
    inputs = Inputs.random(Case(2, 9, 200, 24, 65))
    inputs.run(deterministic=deterministic)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.run(deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_length_builds_a_kernel_twice(deterministic: bool) -> None:
    Inputs.random(Case(1, 9, 200, 24, 65)).run(deterministic=deterministic)
    before = CACHE.builds
    for case in (Case(2, 17, 333, 24, 65), Case(1, 9, 200, 24, 129), Case(1, 3, 50, 30, 7)):
        Inputs.random(case).run(deterministic=deterministic)
    assert CACHE.builds == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "q and kv must be bfloat16, got float16"),
        ({"width": 640}, "512 or 576"),
        ({"topk": 0}, "nothing to attend to"),
        ({"batch": 65536}, "q must have at most 65535 batch entries, got 65536"),
    ],
)
def test_what_the_kernels_decline_has_a_reason(change: dict[str, Any], reason: str) -> None:
    width, topk = change.get("width", 576), change.get("topk", 8)
    dtype = change.get("dtype", torch.bfloat16)
    batch = change.get("batch", 1)
    q, kv = (torch.zeros(1, n, h, width, dtype=dtype, device="cuda") for n, h in ((4, 16), (9, 1)))
    indices = torch.zeros(1, 4, topk, dtype=torch.int32, device="cuda")
    q, kv, indices = (t.expand(batch, *t.shape[1:]) for t in (q, kv, indices))
    supported, text = supports(q, kv, indices)
    assert not supported
    assert reason in text
