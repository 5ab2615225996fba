"""DSA of this package on a release without it, in processes of its own: functions that assert, and yield what they
measured. `expected` is what `dsa_tiny.reference` gave."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.package_info import __version__
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

import mcore_patches
from mcore_patches.attention.common.passes import discard_saved_routes
from mcore_patches.attention.dsa import AbsorbedMLASelfAttention, dsa_layers, with_dsa_attention
from mcore_patches.cpu import parallel, shim
from mcore_patches.cpu.checkpoint import load_checkpoint, save_checkpoint
from mcore_patches.cpu.models import CpuBackend, block_spec, build_gpt, gqa_attention_spec, mla_attention_spec
from mcore_patches.cpu.models import dsa_config as stock_config
from mcore_patches.cpu.parameters import full_parameters, seed_parameters
from mcore_patches.cpu.training import schedule_step, wrap_with_ddp
from tests.attention.cases import Outcome, assert_equal, tracked
from tests.attention.dsa_tiny import CASES, FEW, SPARSE, batches, dsa_config, dsa_spec, no_ties
from tests.attention.tiny import RECOMPUTE

Expected = Mapping[str, tuple[float, dict[str, Any], list[float]]]
TP2, CP2 = {"tp": 2, "sp": True}, {"cp": 2}


def build(
    fields: Mapping[str, Any], layout: Mapping[str, Any] | None = None, *, mtp: bool = False
) -> list[torch.nn.Module]:
    """This rank's chunks of a tiny GPT of DSA layers with seeded weights; `layout` holds tp, cp, pp, sp and vp."""
    layout = layout or {}
    stages = layout.get("vp", 1)
    if stages > 1:
        fields = {
            **fields,
            "virtual_pipeline_model_parallel_size": stages,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    config = dsa_config(fields, layout)
    chunks = []
    for stage in range(stages):
        vp_stage = stage if stages > 1 else None
        block = block_spec(config, dsa_spec(config), vp_stage=vp_stage)
        options = {"mtp_block_spec": get_gpt_mtp_block_spec_for_backend(config, block, CpuBackend())} if mtp else {}
        chunks.append(build_gpt(config, block, vp_stage=vp_stage, **options))
    seed_parameters(chunks)
    return chunks


def step(chunks: list[torch.nn.Module], packed: bool, count: int = 2, form: str = "mean") -> Outcome:
    wrapped = wrap_with_ddp(chunks)
    result = schedule_step(wrapped, batches(packed, count), loss_form=form)  # type: ignore[arg-type]
    assert all(len(layer.routes) == 0 for chunk in wrapped for layer in dsa_layers(chunk)), "passes left over"
    return Outcome(result.loss, result.gradients, tracked())


def train(
    fields: Mapping[str, Any],
    layout: Mapping[str, Any] | None = None,
    *,
    packed: bool = False,
    count: int = 2,
    form: str = "mean",
    mtp: bool = False,
) -> Outcome:
    """One step in a layout of its own. Ranks beyond the layout are data-parallel copies with the same batches."""
    layout = layout or {}
    sizes = {name: layout.get(name, 1) for name in ("tp", "cp", "pp")}
    groups = {"virtual_pipeline_model_parallel_size": layout["vp"]} if layout.get("vp", 1) > 1 else {}
    with parallel.model_parallel(**sizes, **groups):
        return step(build(fields, layout, mtp=mtp), packed, count, form)


def outcome(expected: Expected, name: str) -> Outcome:
    loss, gradients, losses = expected[name]
    # Without a loss our indexer requires no gradients; the reference's are zeros.
    trains = CASES[name][0].get("dsa_indexer_loss_coeff") != 0.0
    return Outcome(
        loss, {n: torch.from_numpy(g) for n, g in gradients.items() if trains or ".indexer." not in n}, losses
    )


def as_reference(expected: Expected, name: str, layout: Mapping[str, Any] | None = None, **more: Any) -> float:
    """Run a case in some layout, with `more` fields, and compare it with the reference."""
    fields, packed, count, form = CASES[name]
    with no_ties() as cut:
        got = train({**fields, **more}, layout, packed=packed, count=count, form=form)
    assert sum(cut) > 0, "every key is selected, so that the selection is not put to the test"
    return assert_equal(outcome(expected, name), got)


def _apply() -> None:
    row = mcore_patches.apply_patches("dsa_parallel", strict=True)["dsa_parallel"]
    assert row.state == "APPLIED", row


# --- one process ------------------------------------------------------------------------------------------------------


def one_process(expected: Expected, full: bool) -> Iterator[tuple[str, Any]]:
    """`full` adds the cases that need only one release."""
    with shim.cpu_megatron():
        _apply()
        for name in CASES if full else FEW:
            yield name, as_reference(expected, name)
        for name in ("BSHD, sparse loss", "THD", "shared selection") if full else ("THD",):
            for recompute in ("full", "core"):
                yield f"{name}, recompute {recompute}", as_reference(expected, name, **RECOMPUTE[recompute])
        yield from counted()
        yield from outside_schedules(expected)
        yield from multi_token_prediction()
        yield from without_rotary_channels()
        yield from refusals()
        yield from built_of_other_layers()
        yield from spec_functions()
        yield from half_precision()
        if importlib.util.find_spec("megatron.core.models.hybrid") is not None:
            yield from hybrid()


def counted() -> Iterator[tuple[str, Any]]:
    """Every op of a pass is counted by what it ran on."""
    before = mcore_patches.status()["dsa_parallel"].counters["routes"]
    train(SPARSE, count=1)
    after = mcore_patches.status()["dsa_parallel"].counters["routes"]
    ops = {"indexer_kl chunked", "select_blocks chunked", "sparse_mla chunked"}
    assert after.keys() == ops
    assert {op: after[op] - before[op] for op in ops} == dict.fromkeys(ops, 2)
    yield "counters", after
    yield "backends", list(obeyed())


def obeyed() -> Iterator[str]:
    """Every op is asked for the backend that strict mode wants, the kernels; a CPU has none, which the op says."""
    from mcore_patches.attention.dsa import telemetry

    count = telemetry.count
    for asked in ("select_blocks", "sparse_mla", "indexer_kl"):
        telemetry.count = lambda op, *_, asked=asked: "tilelang" if op == asked else "auto"
        try:
            with pytest.raises(ValueError, match=rf"{asked}: backend='tilelang' does not run these arguments"):
                train(SPARSE, count=1)
        finally:
            telemetry.count = count
        yield asked


def outside_schedules(expected: Expected) -> Iterator[tuple[str, float]]:
    """In a loop of one's own, also after a schedule, the indexer's loss counts once; the hook gets 0.19's factor."""
    calls: list[Tensor] = []
    fields = {**SPARSE, "experimental_attention_variant_loss_scale_func": calls.append}
    with parallel.model_parallel():
        chunks = build(fields)
        in_schedule = step(chunks, True, 4)
        assert [call.tolist() for call in calls] == [[0.25]] * 4
        (model,) = chunks
        model.zero_grad()
        (fresh,) = build(SPARSE)
        for each in (fresh, model):
            for parameter in each.parameters():
                parameter.main_grad = None  # type: ignore[attr-defined]
            batch = batches(True, 1)[0]
            loss = model_loss(fresh, batch)
            loss.backward()
        tracked()
    name = "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight"
    got = dict(fresh.named_parameters())[name].grad
    assert got is not None
    want = 2 * torch.from_numpy(expected["1 microbatch"][1][name])  # two passes
    error = ((got - want).norm() / want.norm()).item()
    assert error <= 1e-5, error
    assert in_schedule.gradients[name].any()
    yield "outside schedules", error


def model_loss(model: torch.nn.Module, batch: Any) -> Tensor:
    losses = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
    return (losses.float() * batch.loss_mask).sum() / batch.loss_mask.sum()


def multi_token_prediction() -> Iterator[tuple[str, Any]]:
    """An MTP layer's indexer trains, too, and is tracked behind the decoder's layers."""
    plain = train({**SPARSE, "mtp_num_layers": 1}, mtp=True)
    assert len(plain.tracked) == 3
    assert min(plain.tracked) > 0, plain.tracked
    assert any(n.startswith("mtp.") and ".indexer." in n and g.any() for n, g in plain.gradients.items())
    yield "MTP", plain.tracked


def without_rotary_channels() -> Iterator[tuple[str, float]]:
    """NoPE, which these releases do not have by themselves."""
    fields = {"qk_pos_emb_head_dim": 0, **SPARSE, "dsa_indexer_n_heads": 16, "dsa_indexer_scoring_relu": True}
    plain = train(fields, packed=True)
    assert any(".indexer." in n and g.any() for n, g in plain.gradients.items())
    yield "NoPE, recompute full", assert_equal(plain, train({**fields, **RECOMPUTE["full"]}, packed=True))


def refusals() -> Iterator[tuple[str, bool]]:
    """Calls and loops that the layers do not take."""
    batch = batches(False, 1)[0]
    with parallel.model_parallel():
        (model,) = build(SPARSE)
        causal = ~torch.ones(32, 32, dtype=torch.bool).tril()[None, None]
        assert model(batch.tokens, batch.positions, causal, labels=batch.labels).isfinite().all()
        padded = causal.repeat(2, 1, 1, 1)
        padded[1, :, :, 30:] = True
        with pytest.raises(RuntimeError, match="attention_mask is not the causal one"):
            model(batch.tokens, batch.positions, padded, labels=batch.labels)
        attention = model.decoder.layers[0].self_attention
        core = attention.core_attention
        hidden = torch.randn(8, 1, 64)
        with pytest.raises(NotImplementedError, match="inference_context"):
            attention(hidden, None, inference_context=object())
        query, key = torch.randn(8, 1, 4, 40), torch.randn(8, 1, 1, 40)
        up, qr = torch.randn(4, 16, 32), torch.randn(8, 1, 32)
        assert core(query, key, None, None, hidden, qr, up_v_weight=up).shape == (8, 1, 64)
        with pytest.raises(ValueError, match="value must be None and up_v_weight given"):
            core(query, key, key, None, hidden, qr, up_v_weight=up)
        with pytest.raises(ValueError, match=r"query \(8, 1, 4, 32\) and key \(8, 1, 1, 32\) must be .* 40\]"):
            core(query[..., :32], key[..., :32], None, None, hidden, qr, up_v_weight=up)
        with pytest.raises(ValueError, match=r"up_v_weight \(2, 16, 32\) must be \[4, value channels, 32\]"):
            core(query, key, None, None, hidden, qr, up_v_weight=up[:2])
        with pytest.raises(ValueError, match="attention_bias is given"):
            core(query, key, None, None, hidden, qr, up_v_weight=up, attention_bias=up)
        hidden[3, 0, 0] = torch.nan
        with pytest.raises(RuntimeError, match="DSA layer 1: index queries or keys are not finite"):
            core(query, key, None, None, hidden, qr, up_v_weight=up)
        hidden[3, 0, 0] = 0.0
        frozen = build({"dsa_indexer_loss_coeff": 0.0})[0].decoder.layers[0].self_attention.core_attention
        frozen.config.dsa_indexer_loss_coeff = 1.0
        with pytest.raises(ValueError, match=r"dsa_indexer_loss_coeff=1\.0, but the model was built without"):
            frozen(query, key, None, None, hidden, qr, up_v_weight=up)
        model.config.dsa_indexer_n_heads = 8
        with pytest.raises(ValueError, match="dsa_indexer_n_heads=8, but the model was built with 4"):
            core(query, key, None, None, hidden, qr, up_v_weight=up)
        discard_saved_routes(model)
        tracked()
    yield "refusals", True


def built_of_other_layers() -> Iterator[tuple[str, bool]]:
    """Most of megatron's spec functions do not look at the variant, and would train dense MLA without a word."""
    with parallel.model_parallel():
        config = dsa_config({})
        with pytest.raises(ValueError, match=r"dsa_kernel_backend='tilelang' asks for .* has MLASelfAttention"):
            build_gpt(config, mla_attention_spec(config))
        # What get_gpt_layer_..._spec gives without multi_latent_attention=True.
        with pytest.raises(ValueError, match=r"dsa_kernel_backend='tilelang' asks for .* has SelfAttention"):
            build_gpt(config, gqa_attention_spec(config))
    yield "built of other layers", True


def spec_functions() -> Iterator[tuple[str, Any]]:
    """Megatron's own functions give these layers to a config that opts in, and what they gave before to others."""
    specs = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    config = dsa_config({})
    provider = specs._get_backend_spec_provider
    specs._get_backend_spec_provider = lambda config: CpuBackend()
    try:
        with parallel.model_parallel():
            block = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
            modules = [layer.submodules.self_attention.module for layer in block.layer_specs]
            assert modules == [AbsorbedMLASelfAttention] * 2, modules
            build_gpt(config, block)
        assert specs.get_dsa_module_spec_for_backend(config).module is AbsorbedMLASelfAttention
        plain = stock_config()
        assert specs.get_dsa_module_spec_for_backend(plain, CpuBackend()).module is MLASelfAttention
        if __version__ >= "0.18":
            assert specs.get_experimental_attention_variant_module_spec(plain).module is MLASelfAttention
        else:
            with pytest.raises(ValueError, match="Invalid experimental attention variant: dsa"):
                specs.get_experimental_attention_variant_module_spec(plain)
    finally:
        specs._get_backend_spec_provider = provider
    yield "spec functions", [module.__name__ for module in modules]


def half_precision() -> Iterator[tuple[str, float]]:
    """A bf16 model with the Hadamard rotation through DDP and schedule, with and without recomputation."""
    fields = {"dtype": "bf16", "dsa_indexer_rotate_activation": True, **SPARSE}
    plain = train(fields, packed=True)
    assert all(value > 0 for value in plain.tracked)
    yield "bf16, recompute full", assert_equal(plain, train({**fields, **RECOMPUTE["full"]}, packed=True))


def hybrid() -> Iterator[tuple[str, float]]:
    """As the DSA layers of a hybrid stack, without and with recomputation."""
    from mcore_patches.cpu.hybrid import build_hybrid

    outcomes = []
    for recompute in ("none", "full"):
        with parallel.model_parallel():
            config = dsa_config({"num_layers": 4, **SPARSE, **RECOMPUTE[recompute]})
            model = build_hybrid(config, {"D": dsa_spec(config)}, "D-D-")
            seed_parameters(model)
            outcomes.append(step([model], True))
    assert [value > 0 for value in outcomes[0].tracked] == [True, False, True, False]
    yield "hybrid, recompute full", assert_equal(*outcomes)

    stock = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    stack = with_dsa_attention(stock, dsa_config({}), CpuBackend())
    layer = stack.submodules.dsa_layer.submodules
    assert layer.self_attention.module is AbsorbedMLASelfAttention
    assert layer.input_layernorm is CpuBackend().layer_norm()
    assert stack.submodules.mlp_layer is stock.submodules.mlp_layer
    assert stock.submodules.dsa_layer.submodules.self_attention.module is MLASelfAttention
    with pytest.raises(ValueError, match="the spec of HybridStack has no dsa_layer to replace"):
        with_dsa_attention(dataclasses.replace(stock, submodules=None), dsa_config({}), CpuBackend())
    yield "stack with DSA attention", 0.0


# --- two and four processes -------------------------------------------------------------------------------------------


def two_processes(expected: Expected, full: bool) -> Iterator[tuple[str, Any]]:
    """Layouts of two ranks; `full` adds the cases that need only one release."""
    with shim.cpu_megatron():
        _apply()
        for label, layout in {"TP2-SP": TP2, "CP2": CP2}.items():
            yield f"{label}-BSHD-core", as_reference(expected, "BSHD, sparse loss", layout, **RECOMPUTE["core"])
            yield f"{label}-THD-full", as_reference(expected, "THD", layout, **RECOMPUTE["full"])
            yield f"{label}, per token", as_reference(expected, "per token", layout)
            if full:
                yield f"{label}-BSHD-none", as_reference(expected, "BSHD", layout)
                yield f"{label}-THD-none", as_reference(expected, "THD, sparse loss", layout)
                yield f"{label}, shared", as_reference(expected, "shared selection", layout, **RECOMPUTE["core"])
        yield "PP2, 4 microbatches", as_reference(expected, "4 microbatches", {"pp": 2}, **RECOMPUTE["full"])
        if full:
            yield from pipelines(expected)
            yield from checkpoints()


def pipelines(expected: Expected) -> Iterator[tuple[str, Any]]:
    """Interleaved stages, and a stage that would have to attend what a layer of another selected."""
    deep = {"num_layers": 4, **SPARSE}
    want = train(deep, packed=True, count=4)
    for recompute in ("none", "full"):
        got = train({**deep, **RECOMPUTE[recompute]}, {"pp": 2, "vp": 2}, packed=True, count=4)
        yield f"PP2-VP2-{recompute}", assert_equal(want, got)
    yield "PP2, shared selection", as_reference(expected, "shared selection", {"pp": 2})
    with parallel.model_parallel(pp=2) as ranks:
        (model,) = build({"dsa_indexer_topk_freq": 4, "num_layers": 4}, {"pp": 2})
        if ranks.pp_rank:
            model.set_input_tensor(torch.randn(32, 2, 64))
            batch = batches(False, 1)[0]
            with pytest.raises(RuntimeError, match="DSA layer 3 attends what layer 1 selected, which did not run"):
                model(batch.tokens, batch.positions, None, labels=batch.labels)
    yield "PP2, selection on another stage", True


def checkpoints() -> Iterator[tuple[str, Any]]:
    """Saved with one tensor-parallel rank, loaded with two; and with norms fused into the projections, by name."""
    folder = [tempfile.mkdtemp(prefix="dsa-checkpoint-")]
    with parallel.model_parallel():
        torch.distributed.broadcast_object_list(folder, src=0)
        chunks = build({})
        save_checkpoint(chunks, Path(folder[0]))
        saved = full_parameters(chunks)
        state = chunks[0].state_dict()
        for name in list(state):
            for own, fused in (("q_layernorm.", "linear_q_up_proj"), ("kv_layernorm.", "linear_kv_up_proj")):
                if f".self_attention.{own}weight" in name:
                    state[name.replace(f"{own}weight", f"{fused}.layer_norm_weight")] = state.pop(name)
        (other,) = build({})
        seed_parameters(other, seed=1)
        other.load_state_dict(state)
        for name, parameter in full_parameters(other).items():
            assert torch.equal(saved[name], parameter), name
    with parallel.model_parallel(tp=2):
        chunks = build({}, TP2)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.fill_(float("nan"))
        load_checkpoint(chunks, Path(folder[0]))
        loaded = full_parameters(chunks)
    assert saved.keys() == loaded.keys()
    assert sum(".indexer." in name for name in saved) == 2 * 5
    for name, parameter in saved.items():
        assert torch.equal(parameter, loaded[name]), name
    yield "checkpoint TP1 to TP2", len(saved)


def four_processes(expected: Expected, full: bool) -> Iterator[tuple[str, float]]:
    """TP2 x CP2 with sequence parallelism."""
    with shim.cpu_megatron():
        _apply()
        layout = {**TP2, **CP2}
        yield "TP2-CP2-BSHD-core", as_reference(expected, "BSHD", layout, **RECOMPUTE["core"])
        yield "TP2-CP2-THD-full", as_reference(expected, "THD, sparse loss", layout, **RECOMPUTE["full"])
        if full:
            yield "TP2-CP2-BSHD-full", as_reference(expected, "BSHD, sparse loss", layout, **RECOMPUTE["full"])
            yield "TP2-CP2-THD-core", as_reference(expected, "THD", layout, **RECOMPUTE["core"])
            yield "CP2-PP2-full", as_reference(expected, "THD", {"cp": 2, "pp": 2}, **RECOMPUTE["full"])
