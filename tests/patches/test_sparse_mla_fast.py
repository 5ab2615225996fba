"""sparse_mla_fast: what our kernels are handed, which calls go one layer down and why, and what the report counts."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

import mcore_patches
from mcore_patches.ops import sparse_mla as op
from mcore_patches.ops.jit import KernelBuildError
from mcore_patches.ops.sparse_mla import backends, chunked
from mcore_patches.overlay.errors import DeclinedError
from mcore_patches.overlay.patch import State
from mcore_patches.patches import sparse_mla_fast, sparse_mla_nope
from tests.overlay.isolation import isolated
from tests.overlay.stubs import Records
from tests.patches.test_sparse_mla_nope import DECLINES, call_with, check_against_dense, inputs
from tests.patches.upstream_dsa import RecordingKernel, dsa_module, edited, upstream_text

FAST, NOPE = "sparse_mla_fast", "sparse_mla_nope"


class Kernels(types.ModuleType):
    """Stands for ops.sparse_mla.tilelang_kernels: keeps the arguments, and computes by the chunked path."""

    def __init__(self) -> None:
        super().__init__(backends.KERNELS)
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        self.deterministic: list[bool] = []  # of forwards and backwards in turn
        self.reason = ""
        self.error: Exception | None = None
        self.long = False

    def supports(self, q, kv, indices, v_channels):
        return not self.reason, self.reason

    def takes_order(self, q, kv, indices, deterministic):
        assert (q.shape[0], q.shape[1]) == tuple(indices.shape[:2]) and kv.shape[0] == q.shape[0], "[B, S, ...]"
        return deterministic or self.long

    def forward(self, q, kv, indices, scale, v_channels, deterministic):
        if self.error:
            raise self.error
        self.deterministic.append(deterministic)
        self.calls.append((q.clone(), kv.clone(), indices.clone(), scale))
        return chunked.forward(q, kv, indices, scale, v_channels)

    def backward(self, q, kv, indices, out, lse, dout, scale, v_channels, deterministic):
        self.deterministic.append(deterministic)
        return chunked.backward(q, kv, indices, lse, dout, scale, True, True, deterministic)


def on_a_device(root, *patches):
    """The stub module with `patches`, where CPU tensors are taken for CUDA tensors; our kernels and upstream's."""
    module, kernels, theirs = dsa_module(root), Kernels(), RecordingKernel()
    module.SparseMLA = theirs
    sys.modules[backends.KERNELS] = op.tilelang_kernels = kernels
    backends.KERNELS_DEVICE = "cpu"
    sparse_mla_fast._on_device = sparse_mla_nope._runs_kernel = lambda query: True
    for patch_id in patches or (FAST,):
        assert mcore_patches.apply_patches(patch_id, strict=True)[patch_id].state is State.APPLIED
    return module, kernels, theirs


def counters(patch_id=FAST):
    return mcore_patches.status()[patch_id].counters


# What the kernels are handed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [512, 576])
@isolated("torch")
def test_arguments_reach_the_kernels_unpadded(tmp_path, width):
    module, kernels, theirs = on_a_device(tmp_path, NOPE, FAST)
    for heads, k, dtype in itertools.product((1, 7, 16, 48, 128), (1, 64, 127, 2051), (torch.int32, torch.int64)):
        query, key, topk = inputs(2, 2, heads, width, 5, k, ids=(-3, 8))
        kernels.calls.clear()
        out = module.run_fused_absorbed_sparse_attention(query, key, topk.to(dtype), 0.5, 512)
        ((q, kv, indices, scale),) = kernels.calls
        assert torch.equal(q, query.permute(1, 0, 2, 3))
        assert torch.equal(kv, key.permute(1, 0, 2, 3))
        assert torch.equal(indices, topk.to(dtype)), "ids outside [0, skv) are the op's business"
        assert (q.dtype, kv.dtype, indices.dtype, scale) == (torch.bfloat16, torch.bfloat16, dtype, 0.5)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 2, heads, 512), torch.bfloat16, True)
    assert theirs.calls == []
    assert counters()["calls"] == counters()["hits"] == 40
    assert counters()["routes"] == {"ours": 40}
    assert counters(NOPE)["calls"] == 0


@isolated("torch")
def test_a_scale_of_none_and_narrow_ids(tmp_path):
    module, kernels, _ = on_a_device(tmp_path)
    query, key, topk = inputs(2, 1, 3, 512, 5, 7)
    for scale, expected in ((None, 512**-0.5), (2, 2.0), (0.25, 0.25)):
        module.fused_sparse_mla_absorbed(query, key, topk.short(), scale, 512)
        assert kernels.calls[-1][3] == expected
        assert torch.equal(kernels.calls[-1][2], topk)


@pytest.mark.parametrize("patches", list(itertools.permutations((FAST, NOPE))), ids="-then-".join)
@isolated("torch")
def test_outputs_and_gradients_against_dense_attention_in_float64(tmp_path, patches):
    module, _, theirs = on_a_device(tmp_path, *patches)
    for heads, width, k in ((1, 512, 5), (48, 576, 65), (128, 512, 64)):
        check_against_dense(module, 3, 2, heads, width, 6, k, ids=(-4, 9), empty=1)
    assert theirs.calls == []
    assert counters()["routes"] == {"ours": 3}


@isolated("torch")
def test_deterministic_algorithms_ask_for_the_deterministic_backward(tmp_path):
    module, kernels, _ = on_a_device(tmp_path)
    query, key, topk = inputs(2, 1, 3, 512, 5, 7)
    query.requires_grad_()
    for wanted in (False, True, False):
        torch.use_deterministic_algorithms(wanted)
        module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512).sum().backward()
    assert kernels.deterministic == [False, False, True, True, False, False]


@isolated("torch")
def test_the_report_tells_which_backward_adds_up_in_order(tmp_path):
    module, kernels, _ = on_a_device(tmp_path)
    query, key, topk = inputs(2, 1, 3, 512, 5, 7)

    def route(query, key, *, long=False, deterministic=False):
        before, kernels.long = counters()["routes"], long
        torch.use_deterministic_algorithms(deterministic)
        module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512)
        ((name, _),) = counters()["routes"].items() - before.items()
        return name

    in_order = "ours with an ordered backward"
    for q, k in ((query.clone().requires_grad_(), key), (query, key.clone().requires_grad_())):
        assert route(q, k) == "ours"
        assert route(q, k, long=True) == route(q, k, deterministic=True) == in_order
        with torch.no_grad():
            assert route(q, k, long=True, deterministic=True) == "ours"
    assert route(query, key, long=True, deterministic=True) == "ours"


# Going one layer down -------------------------------------------------------------------------------------------------


@isolated("torch")
def test_cpu_tensors_are_left_to_the_layer_below(tmp_path):
    module = dsa_module(tmp_path)
    mcore_patches.apply_patches(FAST, strict=True)
    query, key, topk = inputs(2, 1, 3, 512, 5, 7)
    assert module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512) is None, "as upstream's function has it"
    mcore_patches.apply_patches(NOPE, strict=True)
    assert module.fused_sparse_mla_absorbed(query, key, topk, 0.5, 512).shape == (2, 1, 3, 512)
    assert counters()["calls"] == 0
    assert counters(NOPE)["routes"] == {"chunked": 1}


@pytest.mark.parametrize("with_nope", [False, True])
@isolated("torch")
def test_what_our_kernels_decline_runs_on_the_installed_one(tmp_path, with_nope):
    module, kernels, theirs = on_a_device(tmp_path, *((FAST, NOPE) if with_nope else (FAST,)))
    kernels.reason = "sm_75 has no bfloat16 matrix units"
    log = Records()
    for _ in range(3):
        assert call_with(module).shape == (2, 1, 16, 512)
    assert len(theirs.calls) == 3
    assert kernels.calls == []
    counted = counters()
    assert (counted["calls"], counted["hits"], counted["routes"]) == (3, 0, {"upstream": 3})
    assert counted["declines"] == {kernels.reason: 3}
    assert counters(NOPE)["hits"] == 3 * with_nope
    ((level, text),) = log.lines()
    assert level == "WARNING"
    assert f"{FAST}: fused call declined: {kernels.reason}" in text
    assert "the installed SparseMLA runs instead" in text
    assert "3 upstream; 3 declined: sm_75" in " ".join(str(mcore_patches.status()).split())


@isolated("torch")
def test_what_both_decline_is_dense(tmp_path):
    """Without sparse_mla_nope, width 512 that our kernels decline is megatron's own path: its bytes are told."""
    module, kernels, theirs = on_a_device(tmp_path)
    kernels.reason = "declined by the test"
    log = Records()
    assert call_with(module, width=512) is None
    assert theirs.calls == []
    counted = counters()
    assert (counted["routes"], counted["declines"]) == ({}, {"declined by the test": 1})
    assert counted["largest_fallback_bytes"] == 4 * 16 * 2 * 4
    assert "a dense fp32 softmax over [b, heads, sq, skv] runs instead" in log.lines()[0][1]


@pytest.mark.parametrize("kind", DECLINES)
@isolated("torch")
def test_malformed_calls_get_upstream_s_answer(tmp_path, kind):
    arguments, reason = DECLINES[kind]
    module, kernels, theirs = on_a_device(tmp_path)
    assert call_with(module, **arguments) is None
    (said,) = counters()["declines"]
    assert reason in said
    assert kernels.calls == theirs.calls == []


@pytest.mark.parametrize(
    ("changes", "scale", "reason"),
    [
        ({"k": 0}, 0.5, "there is nothing to attend to"),
        ({"skv": 0, "ids": (-1, 0)}, 0.5, "there is nothing to attend to"),
        ({"sq": 0}, 0.5, "there is nothing to attend to"),
        ({}, 0.0, "softmax_scale must be finite and above 0"),
        ({}, -1.0, "softmax_scale must be finite and above 0"),
        ({}, float("inf"), "softmax_scale must be finite and above 0"),
        ({}, float("nan"), "softmax_scale must be finite and above 0"),
        ({}, 1e39, "softmax_scale must be at most 1e38"),
        ({}, True, "softmax_scale must be a number"),
        ({}, "a tensor", "softmax_scale must be a number"),
        ({"v_channels": 512.0}, 0.5, "v_channels must be an int"),
    ],
)
@isolated("torch")
def test_calls_that_only_the_installed_kernel_takes(tmp_path, changes, scale, reason):
    module, kernels, theirs = on_a_device(tmp_path)
    shape = {"sq": 2, "b": 1, "heads": 16, "width": 576, "skv": 4, "k": 64} | changes
    v_channels = shape.pop("v_channels", 512)
    query, key, topk = inputs(**shape)
    scale = torch.tensor(0.5) if scale == "a tensor" else scale
    assert module.fused_sparse_mla_absorbed(query, key, topk, scale, v_channels) is not None
    (said,) = counters()["declines"]
    assert reason in said
    assert (len(theirs.calls), kernels.calls) == (1, [])


@isolated("torch")
def test_kernels_that_do_not_compile_are_a_decline(tmp_path):
    module, kernels, theirs = on_a_device(tmp_path)
    kernels.error = KernelBuildError("sparse_mla/sm_90a/576/forward does not compile: no nvcc")
    assert call_with(module) is not None
    assert counters()["declines"] == {str(kernels.error): 1}
    assert len(theirs.calls) == 1
    kernels.error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        call_with(module)


@isolated("torch", MCORE_PATCHES_ON_DECLINE="raise")
def test_on_decline_raise(tmp_path):
    module, kernels, theirs = on_a_device(tmp_path, NOPE, FAST)
    assert call_with(module).shape == (2, 1, 16, 512)
    kernels.reason = "declined by the test"
    with pytest.raises(DeclinedError, match=r"sparse_mla_fast.*declined by the test.*MCORE_PATCHES_ON_DECLINE=raise"):
        call_with(module)
    assert theirs.calls == [], "the layer below did not run"
    assert counters(NOPE)["calls"] == 0


# torch.compile --------------------------------------------------------------------------------------------------------


@isolated("torch")
def test_twenty_calls_compile_once(tmp_path):
    module, kernels, _ = on_a_device(tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(module.run_fused_absorbed_sparse_attention, fullgraph=True, backend="aot_eager")
    query, key, topk = inputs(4, 1, 3, 512, 8, 5)
    expected = module.run_fused_absorbed_sparse_attention(query, key, topk, 0.5, 512)
    for _ in range(20):
        assert torch.equal(compiled(query, key, topk, 0.5, 512), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(kernels.calls) == 21
    assert counters()["calls"] == 1, "a compiled call is not counted"


# The decision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@isolated("torch")
def test_text_that_pads_is_drift_and_says_what_it_calls(tmp_path, padded):
    module = dsa_module(tmp_path, edited(widens=padded, lengthens=padded))
    row = mcore_patches.status()[FAST]
    assert row.state is (State.DRIFTED if padded else State.NOT_APPLIED)
    assert ("it calls SparseMLA for width 576" in row.reason) == padded
    assert module.SparseMLA is None, "the probe leaves the module as it was"


@pytest.mark.parametrize(
    ("new", "state", "finding"),
    [
        ("out = query_bshd[..., :512]", State.UPSTREAM_FIXED, "it does not call SparseMLA for width 576"),
        ("return None", State.DRIFTED, "undecidable: it declines width 576"),
    ],
)
@isolated("torch")
def test_text_without_the_kernel(tmp_path, new, state, finding):
    call = "out, _ = SparseMLA.apply(query_bshd, key_bshd, indices_bsgk, softmax_scale)"
    text = upstream_text()
    assert text.count(call) == 1
    module = dsa_module(tmp_path, text.replace(call, new))
    before = module.fused_sparse_mla_absorbed
    row = mcore_patches.apply_patches(FAST)[FAST]
    assert row.state is state
    assert finding in row.reason
    assert module.fused_sparse_mla_absorbed is before


@pytest.mark.parametrize("devices", [0, 8])
@isolated("torch")
def test_inert_where_there_are_devices_and_no_tilelang(tmp_path, devices):
    torch.cuda.device_count = lambda: devices
    sys.modules["tilelang"] = None
    dsa_module(tmp_path)
    row = mcore_patches.apply_patches(FAST)[FAST]
    assert row.state is (State.INERT if devices else State.APPLIED)
    assert ("tilelang does not import" in row.reason) == bool(devices)


@pytest.mark.parametrize("order", list(itertools.permutations((FAST, NOPE))), ids="-then-".join)
@pytest.mark.parametrize("first_off", [FAST, NOPE])
@isolated("torch")
def test_either_order_on_and_off(tmp_path, order, first_off):
    """sparse_mla_fast sees the call first, whichever came first, and either can be taken off alone."""
    module, kernels, theirs = on_a_device(tmp_path, *order)
    report = mcore_patches.status()
    assert report[FAST].state is report[NOPE].state is State.APPLIED
    call_with(module, width=512, heads=48, k=65)
    assert (len(kernels.calls), len(theirs.calls)) == (1, 0)
    mcore_patches.revert(first_off)
    assert call_with(module, width=512, heads=48, k=65).shape == (2, 1, 48, 512)
    assert (len(kernels.calls), len(theirs.calls)) == ((1, 1) if first_off == FAST else (2, 0))
    mcore_patches.revert()
    assert call_with(module, width=512, heads=48, k=65) is None
