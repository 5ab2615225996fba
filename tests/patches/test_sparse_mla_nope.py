"""The replacement of fused_sparse_mla_absorbed: what it hands to the kernel, what it computes, when it declines."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mcore_patches
from mcore_patches.overlay.errors import DeclinedError, NotAppliedError
from mcore_patches.overlay.patch import State
from mcore_patches.patches import sparse_mla_nope
from tests.overlay.isolation import isolated
from tests.overlay.stubs import Records
from tests.patches.upstream_dsa import (
    DSA,
    EAV,
    KERNELS,
    DenseKernel,
    RecordingKernel,
    dense,
    dsa_module,
    edited,
    upstream_text,
)

ID = "sparse_mla_nope"


def patched(root, *, kernel=None):
    """The stub module with the patch applied; with a kernel, CPU tensors take it as CUDA tensors would."""
    module = dsa_module(root)
    upstream = module.fused_sparse_mla_absorbed
    assert mcore_patches.apply_patches(ID, strict=True)[ID].state is State.APPLIED
    if kernel is not None:
        module.SparseMLA = kernel
        sparse_mla_nope._runs_kernel = lambda query: True
    return module, upstream


def inputs(sq, b, heads, width, skv, k, *, seed=0, ids=None):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sq, b, heads, width, generator=generator).bfloat16()
    key = torch.randn(skv, b, 1, width, generator=generator).bfloat16()
    low, high = ids or (-1, skv)
    topk = torch.randint(low, high, (b, sq, k), generator=generator, dtype=torch.int64)
    return query, key, topk


def counters():
    return mcore_patches.status()[ID].counters


# What the kernel is handed --------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "batch first", "heads first", "sliced", "stepped", "repeated", "one of many")


def laid_out(tensor, layout):
    """The same values in another memory layout."""
    if layout == "batch first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "heads first":
        return tensor.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "sliced":
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 64, dtype=tensor.dtype)
        wide[..., 32:-32] = tensor
        return wide[..., 32:-32]
    if layout == "stepped":
        return torch.stack([tensor, tensor], dim=-2).flatten(-3, -2)[..., ::2, :]
    if layout == "repeated":
        return tensor[:1].expand(tensor.shape)
    if layout == "one of many":
        return torch.stack([tensor, tensor])[1]
    return tensor.contiguous()


class Accepted(NamedTuple):
    """Arguments that upstream's function accepts, with ids of -1 or in [0, skv)."""

    sq: int
    b: int
    heads: int
    skv: int
    k: int
    seed: int
    ids: torch.dtype
    layouts: tuple[str, str, str]
    scale: float | None

    def arguments(self):
        query, key, topk = inputs(self.sq, self.b, self.heads, 576, self.skv, self.k, seed=self.seed)
        tensors = (query, key, topk.to(self.ids))
        return [laid_out(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]


ACCEPTED = st.builds(
    Accepted,
    sq=st.integers(1, 5),
    b=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 7, 15, 16, 32, 128]),
    skv=st.integers(1, 9),
    k=st.sampled_from([0, 64, 128]),
    seed=st.integers(0, 2**31),
    ids=st.sampled_from([torch.int32, torch.int64, torch.int16]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    scale=st.sampled_from([None, 0.1, 1.0, 576**-0.5]),
)


@isolated("torch")
def test_arguments_to_the_kernel_are_upstream_s_on_every_input_that_it_accepts(tmp_path):
    kernel = RecordingKernel()
    module, upstream = patched(tmp_path, kernel=kernel)

    @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(ACCEPTED)
    def check(case):
        query, key, topk = case.arguments()
        copies = [t.clone() for t in (query, key, topk)]
        kernel.calls.clear()
        expected = upstream(query, key, topk, case.scale, 512)
        result = module.run_fused_absorbed_sparse_attention(query, key, topk, case.scale, 512)
        theirs, ours = kernel.calls
        assert expected is not None
        assert theirs[3] == ours[3]
        for name, left, right in zip(("q", "kv", "indices"), theirs, ours, strict=False):
            is_, should = [(t.shape, t.stride(), t.dtype) for t in (right, left)]
            assert is_ == should, name
            assert torch.equal(left, right), name
        assert (expected.shape, expected.stride()) == (result.shape, result.stride())
        assert torch.equal(expected, result)
        for tensor, copy in zip((query, key, topk), copies, strict=True):
            assert torch.equal(tensor, copy), "inputs are not modified"

    check()


@pytest.mark.parametrize("width", [512, 576])
@isolated("torch")
def test_arguments_to_the_kernel_where_upstream_declines(tmp_path, width):
    """Padding is the least that the kernel takes, of zeros and ids of -1; the caller's part is unchanged."""
    kernel = RecordingKernel()
    module, upstream = patched(tmp_path, kernel=kernel)
    for heads, k in itertools.product((1, 7, 16, 24, 48, 96, 128, 256), (0, 1, 64, 65, 127, 2051)):
        query, key, topk = inputs(2, 2, heads, width, 5, k, ids=(-1, 5))
        declined = width == 512 or k % 64 or (heads > 16 and heads & (heads - 1))
        kernel.calls.clear()
        assert (upstream(query, key, topk, 0.5, 512) is None) == bool(declined)
        kernel.calls.clear()
        result = module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512)
        ((q, kv, indices, scale),) = kernel.calls
        kernel_heads = max(16, 1 << (heads - 1).bit_length())
        assert q.shape == (2, 2, kernel_heads, 576)
        assert kv.shape == (2, 5, 1, 576)
        assert indices.shape == (2, 2, 1, -(-k // 64) * 64)
        assert (q.dtype, kv.dtype, indices.dtype, scale) == (torch.bfloat16, torch.bfloat16, torch.int32, 0.5)
        assert q.is_contiguous()
        assert kv.is_contiguous()
        assert indices.is_contiguous()
        assert torch.equal(q[:, :, :heads, :width], query.permute(1, 0, 2, 3))
        assert torch.equal(kv[..., :width], key.permute(1, 0, 2, 3))
        assert torch.equal(indices[:, :, 0, :k].long(), topk)
        assert not q[:, :, heads:].any()
        assert not q[..., width:].any()
        assert not kv[..., width:].any()
        assert (indices[..., k:] == -1).all()
        assert result.shape == (2, 2, heads, 512)
        assert result.is_contiguous()
        assert torch.equal(result, query[..., :512])


@isolated("torch")
def test_a_scale_of_none_is_that_of_the_caller_s_width(tmp_path):
    kernel = RecordingKernel()
    module, _ = patched(tmp_path, kernel=kernel)
    for width, expected in ((576, None), (512, 512**-0.5)):
        kernel.calls.clear()
        module.fused_sparse_mla_absorbed(*inputs(1, 1, 16, width, 2, 64), None, 512)
        assert kernel.calls[0][3] == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@isolated("torch")
def test_ids_that_are_out_of_range_reach_the_kernel_as_minus_one(tmp_path, dtype):
    kernel = RecordingKernel()
    module, _ = patched(tmp_path, kernel=kernel)
    query, key, topk = inputs(3, 2, 16, 576, 5, 64)
    topk = topk.to(dtype)
    info = torch.iinfo(dtype)
    odd = [-2, -1000, info.min, 5, 6, info.max, *([2**32, 2**32 + 1, -(2**32)] if dtype is torch.int64 else [])]
    topk[0, 0, : len(odd)] = torch.tensor(odd, dtype=dtype)
    before = topk.clone()
    module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512)
    indices = kernel.calls[0][2]
    assert (indices[0, 0, 0, : len(odd)] == -1).all()
    assert torch.equal(indices[0, 0, 0, len(odd) :].long(), topk[0, 0, len(odd) :].long())
    assert indices.min() >= -1
    assert indices.max() < 5
    assert torch.equal(topk, before), "the caller's ids are not modified"


# What comes out -------------------------------------------------------------------------------------------------------


def compare(name, got, expected, tolerance):
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < tolerance, f"{name}: relative error {error:.2e}"


def check_against_dense(module, sq, b, heads, width, skv, k, *, ids=None, scale=0.07, empty=None):
    query, key, topk = inputs(sq, b, heads, width, skv, k, ids=ids, seed=heads * 7 + k)
    if empty is not None:
        topk[:, empty] = -1
    ours = [t.clone().requires_grad_() for t in (query, key)]
    oracle = [t.double().requires_grad_() for t in (query, key)]
    out = module.fused_sparse_mla_absorbed(*ours, topk.int(), scale, 512)
    expected = dense(*oracle, topk, scale)
    assert out.shape == (sq, b, heads, 512)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad)
    expected.backward(grad.double())
    compare("out", out, expected.detach(), 5e-3)
    for name, left, right in zip(("dq", "dk"), ours, oracle, strict=True):
        assert left.grad.shape == right.shape
        compare(name, left.grad, right.grad, 1e-2)
        assert torch.isfinite(left.grad).all()
    if empty is not None:
        assert not out[empty].any()
        assert not ours[0].grad[empty].any()


@pytest.mark.parametrize("route", ["kernel", "chunked"])
@isolated("torch")
def test_outputs_and_gradients_against_dense_attention_in_float64(tmp_path, route):
    """The kernel's arithmetic is stood in for; what is tested is that padding, slicing and masking are exact."""
    module, _ = patched(tmp_path, kernel=DenseKernel if route == "kernel" else None)
    for heads in (1, 7, 24, 48, 96, 128, 256):
        check_against_dense(module, 3, 2, heads, 512, 6, 5)
    for k in (64, 65, 127, 2051):
        check_against_dense(module, 2, 1, 8, 576, 70, k)
        check_against_dense(module, 2, 1, 8, 512, 70, k)
    check_against_dense(module, 4, 2, 3, 512, 9, 33, ids=(-40, 40))
    check_against_dense(module, 4, 2, 3, 576, 9, 64, empty=1)
    counted = counters()
    assert counted["hits"] == counted["calls"] == 17
    assert set(counted["routes"]) <= {"padded", "kernel", "chunked"}
    assert ("chunked" in counted["routes"]) == (route == "chunked")


# Declines -------------------------------------------------------------------------------------------------------------


def call_with(module, *, sq=2, b=1, heads=16, width=576, skv=4, k=64, dtype=torch.bfloat16, v_channels=512, **changes):
    query, key, topk = inputs(sq, b, heads, width, skv, k)
    arguments = {"query": query.to(dtype), "key": key.to(dtype), "topk_indices": topk.int()} | {
        name: change({"query": query, "key": key, "topk_indices": topk}[name]) for name, change in changes.items()
    }
    return module.fused_sparse_mla_absorbed(**arguments, softmax_scale=0.5, v_channels=v_channels)


DECLINES = {
    "fp16": ({"dtype": torch.float16}, "must be bfloat16, not float16 and float16"),
    "fp32-key": ({"key": lambda t: t.float()}, "must be bfloat16, not bfloat16 and float32"),
    "width-320": ({"width": 320}, "width 320 with v_channels 512"),
    "width-640": ({"width": 640}, "width 640 with v_channels 512"),
    "v-256": ({"v_channels": 256}, "width 576 with v_channels 256"),
    "two-kv-heads": ({"key": lambda t: t.expand(-1, -1, 2, -1)}, "key must have one head (absorbed MLA), not 2"),
    "batch-of-key": ({"key": lambda t: t.expand(-1, 3, -1, -1)}, "differ in batch size"),
    "batch-of-ids": ({"topk_indices": lambda t: t.expand(3, -1, -1)}, "differ in batch size"),
    "rows": ({"topk_indices": lambda t: t[:, :1]}, "differ in rows"),
    "widths": ({"key": lambda t: t[..., :512]}, "differ in width: 576 and 512"),
    "no-heads": ({"heads": 0}, "query has no heads"),
    "rank-of-query": ({"query": lambda t: t[0]}, "query and key must have 4 dimensions"),
    "rank-of-key": ({"key": lambda t: t[0]}, "query and key must have 4 dimensions"),
    "rank-of-ids": ({"topk_indices": lambda t: t[0]}, "topk_indices 3 [b, sq, k]"),
}


@pytest.mark.parametrize("kind", DECLINES)
@isolated("torch")
def test_a_declined_call_has_a_reason_is_counted_and_warns_once(tmp_path, kind):
    arguments, reason = DECLINES[kind]
    module, upstream = patched(tmp_path, kernel=RecordingKernel())
    log = Records()
    for _ in range(3):
        assert call_with(module, **arguments) is None
    counted = counters()
    (said,) = counted["declines"]
    assert reason in said
    assert (counted["declines"][said], counted["calls"], counted["hits"]) == (3, 3, 0)
    ((level, text),) = log.lines()
    assert level == "WARNING"
    assert said in text
    assert "a dense fp32 softmax over [b, heads, sq, skv] runs instead" in text
    known = kind not in ("rank-of-query", "rank-of-key")
    assert ("allocates" in text) == known, "nothing is said of what is not known"
    module.fused_sparse_mla_absorbed = upstream
    assert call_with(module, **arguments) is None, "upstream declines it too"


@isolated("torch")
def test_every_decline_reason_is_tested():
    import inspect

    returns = inspect.getsource(sparse_mla_nope.declines).count('return "') + inspect.getsource(
        sparse_mla_nope.declines
    ).count('return f"')
    assert returns == 8
    assert len({reason.split(":")[0] for _, reason in DECLINES.values()}) >= returns


@isolated("torch")
def test_without_the_kernel_cuda_tensors_are_declined_and_cpu_tensors_are_not(tmp_path):
    module, _ = patched(tmp_path)
    assert module.SparseMLA is None
    assert call_with(module).shape == (2, 1, 16, 512)
    sparse_mla_nope._runs_kernel = lambda query: True
    assert call_with(module) is None
    assert counters()["declines"] == {"SparseMLA is not importable here (is tilelang installed?)": 1}


@pytest.mark.parametrize(("devices", "state"), [(0, State.APPLIED), (8, State.INERT)])
@isolated("torch")
def test_inert_where_there_are_devices_and_no_kernel(tmp_path, devices, state):
    torch.cuda.device_count = lambda: devices
    dsa_module(tmp_path)
    row = mcore_patches.apply_patches(ID)[ID]
    assert row.state is state
    assert ("SparseMLA did not import" in row.reason) == (devices > 0)


@isolated("torch")
def test_the_bytes_of_the_fallback(tmp_path):
    """32k tokens and 32 heads: 128 GiB. Tensors on the meta device have shapes and no memory."""
    module, _ = patched(tmp_path)
    log = Records()
    query = torch.empty(32768, 1, 32, 576, dtype=torch.float16, device="meta")
    key = torch.empty(32768, 1, 1, 576, dtype=torch.float16, device="meta")
    topk = torch.empty(1, 32768, 2048, dtype=torch.int32, device="meta")
    assert module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512) is None
    assert counters()["largest_fallback_bytes"] == 128 << 30
    assert "allocates 128.0 GiB" in log.lines()[0][1]
    assert "128.0 GiB" in str(mcore_patches.status())


@isolated("torch")
def test_one_warning_for_a_class_of_shapes(tmp_path):
    module, _ = patched(tmp_path)
    log = Records()
    for sq in range(33, 65):
        call_with(module, sq=sq, skv=sq, k=sq, dtype=torch.float16)
    assert len(log.lines()) == 1
    call_with(module, sq=65, skv=65, k=64, dtype=torch.float16)
    assert len(log.lines()) == 2
    call_with(module, sq=40, skv=40, k=40, width=320)
    assert len(log.lines()) == 3, "another reason"
    assert counters()["calls"] == 34


@isolated("torch", MCORE_PATCHES_ON_DECLINE="raise")
def test_on_decline_raise(tmp_path):
    module, _ = patched(tmp_path)
    with pytest.raises(DeclinedError, match=r"must be bfloat16.*MCORE_PATCHES_ON_DECLINE=raise"):
        call_with(module, dtype=torch.float16)
    assert call_with(module, width=512).shape == (2, 1, 16, 512)
    os.environ["MCORE_PATCHES_ON_DECLINE"] = "fallback"
    assert call_with(module, dtype=torch.float16) is None, "read at each decline"


@isolated("torch")
def test_counters_by_route(tmp_path):
    module, _ = patched(tmp_path, kernel=RecordingKernel())
    for width, heads, k in ((576, 16, 64), (512, 16, 64), (576, 24, 64), (576, 16, 65)):
        call_with(module, width=width, heads=heads, k=k)
    call_with(module, dtype=torch.float16)
    counted = counters()
    assert (counted["calls"], counted["hits"], counted["routes"]) == (5, 4, {"kernel": 1, "padded": 3})


# torch.compile --------------------------------------------------------------------------------------------------------


@isolated("torch")
def test_twenty_calls_compile_once(tmp_path):
    module, _ = patched(tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(module.run_fused_absorbed_sparse_attention, fullgraph=True, backend="aot_eager")
    query, key, topk = inputs(4, 1, 3, 512, 8, 5)
    expected = module.run_fused_absorbed_sparse_attention(query, key, topk, 0.5, 512)
    before = counters()["calls"]
    for _ in range(20):
        result = compiled(query, key, topk, 0.5, 512)
    torch.testing.assert_close(result, expected)
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 1
    assert counters()["calls"] == before, "a compiled call is not counted"


@isolated("torch")
def test_a_declined_call_compiles_once_too(tmp_path):
    module, _ = patched(tmp_path)
    torch._dynamo.reset()

    def attend(query, key, topk):
        out = module.run_fused_absorbed_sparse_attention(query, key, topk, 0.5, 512)
        return query[..., :512] if out is None else out

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    query, key, topk = inputs(4, 1, 3, 512, 8, 5)
    for _ in range(20):
        assert torch.equal(compiled(query.half(), key.half(), topk), query.half())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@isolated("torch", MCORE_PATCHES_ON_DECLINE="raise")
def test_on_decline_raise_raises_under_compile(tmp_path):
    module, _ = patched(tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(module.run_fused_absorbed_sparse_attention, fullgraph=True, backend="aot_eager")
    query, key, topk = inputs(4, 1, 3, 512, 8, 5)
    with pytest.raises(Exception, match="must be bfloat16"):
        compiled(query.half(), key.half(), topk, 0.5, 512)
    assert compiled(query, key, topk, 0.5, 512).shape == (4, 1, 3, 512)


# The decision ---------------------------------------------------------------------------------------------------------

VARIANTS = {
    "neither": (edited, {}, State.NOT_APPLIED, ""),
    "widens": (edited, {"widens": True}, State.DRIFTED, "it takes width 512 and declines an unaligned top-k of 65"),
    "lengthens": (
        edited,
        {"lengthens": True},
        State.DRIFTED,
        "it declines width 512 and takes an unaligned top-k of 65",
    ),
    "both": (edited, {"widens": True, "lengthens": True}, State.UPSTREAM_FIXED, "it takes width 512 and takes"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@isolated("torch")
def test_variants_of_upstream_s_text(tmp_path, variant):
    make, options, state, reason = VARIANTS[variant]
    module = dsa_module(tmp_path, make(**options))
    log = Records()
    row = mcore_patches.status()[ID]
    assert row.state is state
    assert reason in row.reason
    before = module.fused_sparse_mla_absorbed
    mcore_patches.apply_patches(ID)
    mcore_patches.apply_patches(ID)
    assert (module.fused_sparse_mla_absorbed is before) == (state is not State.NOT_APPLIED)
    expected = {State.NOT_APPLIED: [], State.DRIFTED: ["ERROR"], State.UPSTREAM_FIXED: ["WARNING"]}[state]
    assert [level for level, _ in log.lines()] == expected
    assert module.SparseMLA is None, "the probe leaves the module as it was"


ODD = {
    "declines everything": ("if SparseMLA is None:", "if True:", "undecidable: it declines width 576"),
    "raises": ("if SparseMLA is None:", "raise ValueError('not on a CPU')\n    if False:", "ValueError: not on a CPU"),
    "needs a GPU": ("query_heads = query.size(2)", "query_heads = query.cuda().size(2)", "it raised"),
}


@pytest.mark.parametrize("kind", ODD)
@isolated("torch")
def test_text_that_the_probe_cannot_judge_is_left_alone(tmp_path, kind):
    old, new, finding = ODD[kind]
    text = upstream_text()
    assert old in text
    start = text.index("def fused_sparse_mla_absorbed")
    module = dsa_module(tmp_path, text[:start] + text[start:].replace(old, new, 1))
    row = mcore_patches.apply_patches(ID)[ID]
    assert row.state is State.DRIFTED
    assert finding in row.reason
    assert "__mcore_patches__" not in vars(module.fused_sparse_mla_absorbed)


@isolated("torch")
def test_a_helper_that_pads_is_found_too(tmp_path):
    """The fix need not be in the function itself: the probe copies the module's functions with it."""
    text = edited(widens=True, lengthens=True)
    body = "def _widened_heads(heads):\n    return max(heads, 16)\n\n\ndef fused_sparse_mla_absorbed("
    text = text.replace("def fused_sparse_mla_absorbed(", body).replace(
        "max(query_heads, 16)", "_widened_heads(query_heads)"
    )
    dsa_module(tmp_path, text)
    assert mcore_patches.status()[ID].state is State.UPSTREAM_FIXED


@isolated("torch")
def test_a_fix_that_hands_more_to_the_kernel_is_found_too(tmp_path):
    text = edited(widens=True, lengthens=True)
    call = "SparseMLA.apply(query_bshd, key_bshd, indices_bsgk, softmax_scale)"
    assert text.count(call) == 1
    dsa_module(tmp_path, text.replace(call, call[:-1] + ", v_channels)"))
    assert mcore_patches.status()[ID].state is State.UPSTREAM_FIXED


@isolated("torch")
def test_a_caller_that_no_longer_finds_it_as_a_global_is_drift(tmp_path):
    text = upstream_text()
    call = "return fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels)"
    assert text.count(call) == 1
    dsa_module(tmp_path, text.replace(call, "return _KEPT(query, key, topk_indices, softmax_scale, v_channels)"))
    assert mcore_patches.status()[ID].state is State.DRIFTED


EDITED_KERNELS = {
    "scale": (f"{EAV}.ops.sparse_mla", "ctx.scaling = scaling", "ctx.scaling = scaling = scaling * 2"),
    "forward": (f"{EAV}.ops.tilelang_sparse_mla_fwd", "dim_plus_tail_dim == 576\n", "dim_plus_tail_dim == 640\n"),
    "backward": (f"{EAV}.ops.tilelang_sparse_mla_bwd", "    D = 512\n", "    D = 256\n"),
}


@pytest.mark.parametrize("kind", EDITED_KERNELS)
@isolated("torch")
def test_a_kernel_that_is_not_the_known_one_is_drift(tmp_path, kind):
    name, old, new = EDITED_KERNELS[kind]
    text = upstream_text(module=name)
    assert text.count(old) == 1
    module = dsa_module(tmp_path, kernels={name: text.replace(old, new)})
    row = mcore_patches.status()[ID]
    assert row.state is State.DRIFTED
    assert str(tmp_path.joinpath(*name.split("."))) in row.reason
    with pytest.raises(NotAppliedError, match="sparse_mla_nope is DRIFTED"):
        mcore_patches.apply_patches(ID, strict=True)
    assert "__mcore_patches__" not in vars(module.fused_sparse_mla_absorbed)


@pytest.mark.parametrize("release", ["0.19.0", "0.19.2"])
@isolated()
def test_every_release_has_the_known_texts(release):
    import sys

    from tests import releases

    sys.path.insert(0, str(releases.path(release)))
    row = mcore_patches.status()[ID]
    assert (row.decision, row.targets[0].verdict) == (State.PENDING, "needs")


@pytest.mark.parametrize("folder", ["ops", "kernels"])
@isolated("torch")
def test_main_s_new_layout_is_found(tmp_path, folder):
    """Later releases move the file; the same text there is the same target."""
    from tests.overlay.stubs import Tree

    package = f"megatron.core.ops.attention.dsa.{folder}"
    moved = f"{package}.tilelang_dsa"
    tree = Tree(tmp_path, "0.20.0").write(moved, upstream_text()).use()
    if folder == "kernels":
        tree.write(DSA, f"import sys\nfrom {package} import tilelang_dsa\nsys.modules[__name__] = tilelang_dsa\n")
    for name in KERNELS:
        tree.write(f"{package}.{name.rpartition('.')[2]}", upstream_text(module=name))
    row = mcore_patches.status()[ID]
    assert (row.state, row.decision, row.targets[0].module) == (State.NOT_APPLIED, State.PENDING, moved)


@isolated("torch")
def test_the_replacement_pickles_and_reaches_models_that_exist(tmp_path):
    module = dsa_module(tmp_path)
    caller = module.run_fused_absorbed_sparse_attention
    mcore_patches.apply_patches(ID, strict=True)
    replacement = module.fused_sparse_mla_absorbed
    assert pickle.loads(pickle.dumps(replacement)) is replacement
    assert replacement.__module__ == DSA
    query, key, topk = inputs(2, 1, 3, 512, 4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert caller(query, key, topk, 0.5, 512).shape == (2, 1, 3, 512)
    mcore_patches.revert()
    assert caller(query, key, topk, 0.5, 512) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.float32], ids=str)
@isolated("torch")
def test_cpu_tensors_take_ids_of_any_type_that_upstream_takes(tmp_path, dtype):
    module, _ = patched(tmp_path)
    query, key, topk = inputs(3, 2, 5, 512, 9, 7, ids=(0, 9))
    out = module.fused_sparse_mla_absorbed(query, key, topk.to(dtype), 0.5, 512)
    assert torch.equal(out, module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512))
    assert (counters()["calls"], counters()["routes"]) == (2, {"chunked": 2})


@isolated("torch")
def test_a_call_that_raises_is_no_hit(tmp_path):
    module, _ = patched(tmp_path)
    query, key, topk = inputs(3, 1, 5, 512, 9, 7)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        module.fused_sparse_mla_absorbed(query, key, topk, "wide", 512)
    assert counters()["hits"] == 0


@isolated("torch")
def test_status_says_what_is_not_counted(tmp_path):
    before = "under torch.compile"
    dsa_module(tmp_path)
    assert before not in str(mcore_patches.status())
    mcore_patches.apply_patches(ID, strict=True)
    assert "calls: those under torch.compile are neither counted nor logged" in str(mcore_patches.status())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64, torch.bool], ids=str)
def test_ids_of_any_integer_type_keep_their_values(dtype):
    skv = 40_000
    ids = torch.tensor([[[0, 1, 36, 86, 114, 9, 1, 0]]]).to(dtype)
    got = sparse_mla_nope.valid_ids(ids, skv)
    assert got.dtype is torch.int32
    assert got.tolist() == ids.to(torch.int32).tolist()


# Masking in one launch ------------------------------------------------------------------------------------------------


class OnCuda(torch.Tensor):
    """CPU memory that says it is on a CUDA device."""

    is_cuda = True


class OneLaunch:
    """Stands for the kernel that is compiled at its first call."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self, ids, *, skv):
        self.calls += 1
        if self.error:
            raise self.error
        return torch.where((ids >= 0) & (ids < skv), ids, -1)


def masked(kernel, *, dtype=torch.int32, capturing=False):
    """valid_ids of ids on a "CUDA device", with a stand-in for the kernel."""
    sparse_mla_nope._valid_ids_kernel = lambda: kernel
    torch.cuda.is_current_stream_capturing = lambda: capturing
    ids = torch.tensor([[[0, 4, -1, -2, 5, 2**31 - 1, 3]]], dtype=dtype).as_subclass(OnCuda)
    got = sparse_mla_nope.valid_ids(ids, 5)
    assert got.dtype is torch.int32
    assert got.tolist() == [[[0, 4, -1, -1, -1, -1, 3]]]


@isolated("torch")
def test_ids_on_a_device_are_masked_in_one_launch():
    kernel, log = OneLaunch(), Records()
    for _ in range(3):
        masked(kernel)
        masked(kernel, dtype=torch.int64)
    assert kernel.calls == 6
    assert log.lines() == []


@isolated("torch")
def test_a_kernel_that_cannot_be_built_is_told_once_and_not_tried_again():
    kernel, log = OneLaunch(RuntimeError("libnvrtc.so.13:\n\x1b[31mcannot open")), Records()
    for _ in range(3):
        masked(kernel)
    assert kernel.calls == 1
    ((level, text),) = log.lines()
    assert level == "WARNING"
    assert text == (
        "sparse_mla_nope: ids are masked in three launches instead of one, because "
        "RuntimeError: libnvrtc.so.13: \\x1b[31mcannot open"
    )
    masked(kernel, dtype=torch.int64)
    assert kernel.calls == 2, "another type is another kernel"


@isolated("torch")
def test_the_kernel_is_not_built_inside_a_graph_capture():
    kernel = OneLaunch()
    masked(kernel, capturing=True)
    assert kernel.calls == 0
    masked(kernel)
    masked(kernel, capturing=True)
    assert kernel.calls == 2, "once built, it is captured"
    masked(kernel, capturing=True, dtype=torch.int64)
    assert kernel.calls == 2


@isolated("torch")
def test_no_memory_is_not_taken_for_a_kernel_that_cannot_be_built():
    kernel = OneLaunch(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        masked(kernel)
    kernel.error = None
    masked(kernel)
    assert kernel.calls == 2
