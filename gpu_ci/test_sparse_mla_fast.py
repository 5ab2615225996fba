"""sparse_mla_fast on a GPU: our kernels through megatron's hooks, beside the installed SparseMLA through the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import mcore_patches
from gpu_ci.test_sparse_mla_nope import DV, close, inputs, run
from mcore_patches.ops.sparse_mla import tilelang_kernels
from mcore_patches.overlay.errors import DeclinedError

pytestmark = pytest.mark.h100
NOPE, FAST = "sparse_mla_nope", "sparse_mla_fast"
SCALE = 0.07


@dataclasses.dataclass
class Result:
    """What a call gave, and by how much the counters of sparse_mla_fast and sparse_mla_nope rose."""

    out: Tensor
    dq: Tensor
    dkv: Tensor
    fast: dict[str, int]
    nope: dict[str, int]


def counted(patch_id: str) -> dict[str, int]:
    counters = mcore_patches.status()[patch_id].counters
    return {"hits": counters["hits"], **counters["routes"], **counters["declines"]}


def rise(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def through(patches: tuple[str, ...], query: Tensor, key: Tensor, ids: Tensor, grad: Tensor) -> Result:
    """Forward and backward of one call with these patches in place."""
    q, k = query.detach().clone().requires_grad_(), key.detach().clone().requires_grad_()
    with mcore_patches.applied(patches, strict=True):
        for patch_id in patches:
            mcore_patches.require_applied(patch_id)
        before = counted(FAST), counted(NOPE)
        out = run(q, k, ids, SCALE)
        assert out is not None, mcore_patches.status()
        after = counted(FAST), counted(NOPE)
        dq, dkv = torch.autograd.grad(out, (q, k), grad)
    return Result(out.detach(), dq, dkv, rise(before[0], after[0]), rise(before[1], after[1]))


def shapes():
    """What shares an installed kernel goes to one worker, so that each of those is compiled once."""
    for heads in (8, 16, 48, 64, 128):
        for topk in (64, 127, 2048, 2051):
            kernel = f"H{max(16, 1 << (heads - 1).bit_length())}-K{-(-topk // 64) * 64}"
            for width in (512, 576):
                group = pytest.mark.xdist_group(kernel)
                yield pytest.param(width, heads, topk, id=f"D{width}-H{heads}-K{topk}", marks=group)


@pytest.mark.parametrize(("width", "heads", "topk"), shapes())
def test_equals_the_installed_kernel(width, heads, topk):
    arguments = inputs(width, heads, topk)  # row 5 of batch 0 has no keys
    theirs = through((NOPE,), *arguments)
    ours = through((NOPE, FAST), *arguments)
    assert ours.fast == {"hits": 1, "ours": 1} and ours.nope == {}
    assert theirs.fast == {} and theirs.nope["hits"] == 1
    for name in ("out", "dq", "dkv"):
        reference, got = getattr(theirs, name), getattr(ours, name)
        assert (got.shape, got.dtype) == (reference.shape, reference.dtype), name
        close(name, reference.float(), got)
    assert ours.out.is_contiguous() and theirs.out.is_contiguous()
    assert (ours.out[5, 0] == 0).all() and (ours.dq[5, 0] == 0).all()


@pytest.mark.xdist_group("ours")
def test_the_function_itself_and_without_the_other_patch():
    query, key, ids, grad = inputs(512, 48, 2051)
    both, alone = (through(patches, query, key, ids, grad) for patches in ((FAST, NOPE), (FAST,)))
    assert alone.fast == {"hits": 1, "ours": 1}
    assert torch.equal(both.out, alone.out) and torch.equal(both.dq, alone.dq)
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    with mcore_patches.applied(FAST, strict=True):
        assert torch.equal(tilelang_dsa.fused_sparse_mla_absorbed(query, key, ids, SCALE, DV), both.out)
        default = tilelang_dsa.fused_sparse_mla_absorbed(query, key, ids, None, DV)
        assert torch.equal(default, tilelang_dsa.fused_sparse_mla_absorbed(query, key, ids, 512**-0.5, DV))


@pytest.mark.xdist_group("ours")
def test_topk_length_and_ids_outside_are_masked():
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    from gpu_ci.test_sparse_mla_nope import config

    query, key, ids, grad = inputs(576, 16, 127)
    lengths = torch.randint(0, 128, ids.shape[:2], device="cuda")
    cut = torch.where(torch.arange(127, device="cuda") < lengths[..., None], ids, -1)
    expected = through((FAST,), query, key, cut, grad).out
    with mcore_patches.applied(FAST, strict=True):
        hook = dsa_kernels.run_fused_absorbed_sparse_attention
        assert torch.equal(hook(config(), query, key, ids, SCALE, DV, topk_length=lengths), expected)
        for outside in (-2, key.size(0), 2**31 - 1):
            odd = torch.where(cut < 0, outside, cut)
            assert torch.equal(run(query, key, odd, SCALE), expected)
            assert torch.equal(run(query, key, odd.long(), SCALE), expected)


@pytest.mark.xdist_group("deterministic")
def test_gradients_repeat_in_deterministic_mode():
    query, key, ids, grad = inputs(576, 64, 2048, sq=512)
    atomic = through((FAST,), query, key, ids, grad)
    torch.use_deterministic_algorithms(True)
    try:
        first = through((FAST,), query, key, ids, grad)
        assert (atomic.fast, first.fast) == ({"hits": 1, "ours": 1}, {"hits": 1, "ours with an ordered backward": 1})
        side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
        for _ in range(5):
            with torch.cuda.stream(side):
                noise.mul_(1.0)
            again = through((FAST,), query, key, ids, grad)
            assert torch.equal(again.dkv, first.dkv) and torch.equal(again.dq, first.dq)
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    close("dkv", atomic.dkv.float(), first.dkv)
    close("dq", atomic.dq.float(), first.dq)


@pytest.mark.xdist_group("H64-K128")
def test_a_call_that_our_kernels_decline_runs_on_the_installed_one(monkeypatch):
    arguments = inputs(512, 48, 127)
    theirs = through((NOPE,), *arguments)
    monkeypatch.setattr(tilelang_kernels, "supports", lambda *_: (False, "declined by the test"))
    got = through((NOPE, FAST), *arguments)
    assert got.fast == {"upstream": 1, "declined by the test": 1}
    assert got.nope == {"hits": 1, "padded": 1}
    assert torch.equal(got.out, theirs.out)


@pytest.mark.xdist_group("ours")
def test_declined_call_raises_when_told_to(monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES_ON_DECLINE", "raise")
    query, key, ids, grad = inputs(512, 16, 64)
    assert through((NOPE, FAST), query, key, ids, grad).fast == {"hits": 1, "ours": 1}
    with (
        mcore_patches.applied((NOPE, FAST), strict=True),
        pytest.raises(DeclinedError, match=r"sparse_mla_fast.*bfloat16, not float16"),
    ):
        run(query.half(), key.half(), ids, SCALE)


@pytest.mark.xdist_group("ours")
def test_no_host_synchronisation():
    query, key, ids, grad = inputs(512, 24, 65)
    with mcore_patches.applied((NOPE, FAST), strict=True):
        run(query, key, ids, SCALE).backward(grad)  # compiles; compiling may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(query, key, ids, SCALE).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@pytest.mark.xdist_group("ours")
def test_one_graph_under_compile():
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    query, key, ids, grad = inputs(576, 16, 64)
    eager = through((FAST,), query, key, ids, grad)
    with mcore_patches.applied(FAST, strict=True):
        compiled = torch.compile(tilelang_dsa.fused_sparse_mla_absorbed, fullgraph=True, backend="aot_eager")
        out = compiled(query, key, ids, SCALE, DV)
        dq, _ = torch.autograd.grad(out, (query, key), grad)
    assert torch.equal(out, eager.out) and torch.equal(dq, eager.dq)
