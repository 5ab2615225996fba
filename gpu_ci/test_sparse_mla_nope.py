"""sparse_mla_nope on the real kernel: the installed SparseMLA, reached through the hook that the config selects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mcore_patches
from mcore_patches.overlay.errors import DeclinedError
from mcore_patches.patches import sparse_mla_nope

pytestmark = pytest.mark.h100
DV = 512


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with mcore_patches.applied("sparse_mla_nope", strict=True):
        mcore_patches.require_applied("sparse_mla_nope")
        yield


def config(backend: str = "tilelang"):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        num_layers=1, hidden_size=128, num_attention_heads=2, multi_latent_attention=True, q_lora_rank=32,
        kv_lora_rank=DV, qk_head_dim=16, qk_pos_emb_head_dim=0, v_head_dim=16, experimental_attention_variant="dsa",
        dsa_indexer_n_heads=4, dsa_indexer_head_dim=16, dsa_indexer_topk=64, dsa_kernel_backend=backend,
        add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip


def inputs(width: int, heads: int, topk: int, *, sq: int = 197, skv: int = 2200, batch: int = 2, seed: int = 0):
    g = torch.Generator("cuda").manual_seed(seed + 7919 * width + 31 * heads + topk)
    query = torch.randn(sq, batch, heads, width, device="cuda", generator=g).bfloat16().requires_grad_()
    key = torch.randn(skv, batch, 1, width, device="cuda", generator=g).bfloat16().requires_grad_()
    # Distinct ids a row, as a top-k gives, in no order; about a tenth masked, and one row without any key.
    ids = torch.rand(batch, sq, skv, device="cuda", generator=g).argsort(-1)[..., :topk].to(torch.int32)
    ids = torch.where(torch.rand(ids.shape, device="cuda", generator=g) < 0.1, -1, ids)
    ids[0, 5] = -1
    grad = torch.randn(sq, batch, heads, DV, device="cuda", generator=g).bfloat16()
    return query, key, ids, grad


def reference(query, key, ids, scale):
    """Dense softmax over the selected keys in fp32; autograd gives the gradients."""
    q, k = query.detach().float().requires_grad_(), key.detach().float().requires_grad_()
    sq, batch, skv = q.size(0), q.size(1), k.size(0)
    keep = torch.zeros(batch, sq, skv + 1, dtype=torch.bool, device="cuda")
    keep.scatter_(2, torch.where((ids >= 0) & (ids < skv), ids, skv).long(), True)
    keep = keep[..., :skv].unsqueeze(1)
    scores = torch.einsum("sbhd,tbd->bhst", q, k[:, :, 0]) * scale
    scores = scores.masked_fill(~keep, float("-inf"))
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp_min(-1e30)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return q, k, torch.einsum("bhst,tbd->sbhd", weights, k[:, :, 0, :DV])


def close(name: str, ref: torch.Tensor, got: torch.Tensor) -> None:
    assert got.isfinite().all(), f"{name} is not finite"
    error = ((got.float() - ref).norm() / ref.norm()).item()
    assert error < 0.02, f"{name}: relative norm error {error:.4f}"
    torch.testing.assert_close(
        got.float(), ref, rtol=0.05, atol=0.01 * max(1.0, ref.abs().max().item()), msg=lambda m: f"{name}: {m}"
    )


def run(query, key, ids, scale, backend: str = "tilelang"):
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    return dsa_kernels.run_fused_absorbed_sparse_attention(config(backend), query, key, ids, scale, DV)


def shapes():
    """Every width, head count and top-k; what shares a kernel goes to one worker, so that each is compiled once."""
    for heads in (8, 16, 24, 32, 48, 64, 96):
        for topk in (64, 65, 127, 2051):
            kernel = f"H{max(16, 1 << (heads - 1).bit_length())}-K{-(-topk // 64) * 64}"
            for width in (512, 576):
                group = pytest.mark.xdist_group(kernel)
                yield pytest.param(width, heads, topk, id=f"D{width}-H{heads}-K{topk}", marks=group)


@pytest.mark.parametrize(("width", "heads", "topk"), shapes())
def test_equals_fp32_reference(width, heads, topk):
    query, key, ids, grad = inputs(width, heads, topk)
    scale = 0.07
    out = run(query, key, ids, scale)
    assert out is not None, mcore_patches.status()["sparse_mla_nope"].counters
    out.backward(grad)
    q, k, ref = reference(query, key, ids, scale)
    ref.backward(grad.float())
    assert out.shape == ref.shape
    assert query.grad.shape == query.shape and key.grad.shape == key.shape
    close("out", ref, out)
    close("dq", q.grad, query.grad)
    close("dk", k.grad, key.grad)
    assert (out[5, 0] == 0).all() and (query.grad[5, 0] == 0).all()


def test_equals_dense_fallback():
    """The same call on the fallback that a declined hook would run."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    query, key, ids, grad = inputs(512, 24, 65, sq=150, skv=333)
    everywhere = {
        "varlen_starts": torch.zeros(150, dtype=torch.int64, device="cuda"),
        "varlen_ends": torch.full((150,), 333, dtype=torch.int64, device="cuda"),
        "key_positions": torch.arange(333, device="cuda"),
    }
    q, k = query.detach().clone().requires_grad_(), key.detach().clone().requires_grad_()
    dense = dsa._unfused_absorbed_dsa_fn(q, k, ids, 0.07, DV, **everywhere)
    dense.backward(grad)
    out = run(query, key, ids, 0.07)
    out.backward(grad)
    close("out", dense.float(), out)
    close("dq", q.grad.float(), query.grad)
    close("dk", k.grad.float(), key.grad)


@pytest.mark.parametrize("bad", [-2, -(2**31), 333, 2**31 - 1])
def test_ids_outside_are_masked(bad):
    query, key, ids, _ = inputs(512, 16, 64, sq=150, skv=333)
    ids[:, :, 3] = -1
    expected = run(query, key, ids, 0.07)
    ids[:, :, 3] = bad
    assert torch.equal(run(query, key, ids, 0.07), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_valid_ids_equals_eager(dtype):
    ids = torch.randint(-300, 2500, (2, 33, 130), device="cuda", dtype=dtype)[:, ::2, 1:]
    ids[0, 0, :3] = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2199], device="cuda", dtype=dtype)
    got = sparse_mla_nope.valid_ids(ids, 2200)
    assert got.dtype is torch.int32
    assert torch.equal(got.cpu(), sparse_mla_nope.valid_ids(ids.cpu(), 2200))
    assert torch.equal(got.cpu().long(), torch.where((ids >= 0) & (ids < 2200), ids, -1).cpu().long())


def test_forward_is_bit_exact_under_contention():
    query, key, ids, _ = inputs(512, 48, 2051, sq=1024, skv=4096)
    first = run(query, key, ids, 0.07)
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(side):
            noise @ noise
        assert torch.equal(run(query, key, ids, 0.07), first)
    torch.cuda.synchronize()


def test_backend_none_does_not_run_the_kernel():
    query, key, ids, _ = inputs(512, 16, 64, sq=150, skv=333)
    before = mcore_patches.status()["sparse_mla_nope"].counters["calls"]
    assert run(query, key, ids, 0.07, backend="none") is None
    assert mcore_patches.status()["sparse_mla_nope"].counters["calls"] == before


def test_declined_call_raises_when_told_to(monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES_ON_DECLINE", "raise")
    query, key, ids, _ = inputs(512, 16, 64, sq=150, skv=333)
    with pytest.raises(DeclinedError, match="bfloat16, not float16"):
        run(query.half(), key.half(), ids, 0.07)


def test_no_host_synchronisation():
    query, key, ids, grad = inputs(512, 24, 65)
    run(query, key, ids, 0.07).backward(grad)  # compiles; compiling may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(query, key, ids, 0.07).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.xdist_group("large")
def test_32k_tokens_32_heads():
    """The dense fallback would take 128 GiB for its scores alone."""
    tokens, heads = 32768, 32
    g = torch.Generator("cuda").manual_seed(1)
    query = torch.randn(tokens, 1, heads, DV, device="cuda", generator=g).bfloat16().requires_grad_()
    key = torch.randn(tokens, 1, 1, DV, device="cuda", generator=g).bfloat16().requires_grad_()
    # 2048 distinct ids a row, spread over the whole sequence
    slots = torch.arange(2048, device="cuda", dtype=torch.int32) * 15
    ids = ((torch.arange(tokens, device="cuda", dtype=torch.int32)[:, None] * 7 + slots) % tokens)[None]
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    out = run(query, key, ids, DV**-0.5)
    out.backward(torch.randn_like(out))
    peak = torch.cuda.max_memory_allocated() - base
    rows = torch.tensor([0, 1, 17, 16384, 32767], device="cuda")
    _, _, ref = reference(query.detach()[rows], key.detach(), ids[:, rows], DV**-0.5)
    close("out", ref, out[rows])
    assert query.grad.isfinite().all() and key.grad.isfinite().all()
    assert peak < 16 * 2**30, f"peak {peak / 2**30:.1f} GiB above the inputs"
