"""What runs in processes of its own, on any release: functions that assert, and yield (case, what it measured)."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.models.gpt.experimental_attention_variant_module_specs as variant_specs
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.package_info import __version__
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from torch import Tensor

import mcore_patches
from mcore_patches.attention.common.layout import zigzag_tokens
from mcore_patches.attention.qsa import (
    QSASelfAttention,
    discard_saved_routes,
    freeze_backbone,
    inject_routes,
    record_routes,
    with_qsa_attention,
)
from mcore_patches.attention.qsa.config import FIELDS
from mcore_patches.attention.qsa.indexer import QKNorm
from mcore_patches.attention.qsa.routes import qsa_layers
from mcore_patches.cpu import parallel, shim
from mcore_patches.cpu.checkpoint import load_checkpoint, save_checkpoint
from mcore_patches.cpu.data import Batch, packed_batch, random_batch
from mcore_patches.cpu.models import CpuBackend, block_spec, build_gpt, gpt_config, gqa_attention_spec
from mcore_patches.cpu.parameters import full_gradients, full_parameters, seed_parameters
from mcore_patches.cpu.training import schedule_step, wrap_with_ddp
from mcore_patches.ops import block_topk
from mcore_patches.ops.row_split import deal_rows
from tests.attention.tiny import FULL, PACKED, RECOMPUTE, qsa_config, qsa_spec, relative_error

TOLERANCE = 1e-5
# Rotary embedding on half of the 16 channels of a head.
ROTARY = {"rotary_percent": 0.5}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one training step: mean loss, whole gradients, and megatron's tracker of indexer losses over all ranks."""

    loss: float
    gradients: dict[str, Tensor]
    tracked: list[float]


def build(
    fields: dict[str, Any], layout: dict[str, Any], *, mtp: bool = False, spec: Any = None
) -> list[torch.nn.Module]:
    """This rank's chunks of a tiny GPT with seeded weights, of QSA layers or of those of `spec`.

    `layout` holds tp, cp, pp, sp and vp.
    """
    stages = layout.get("vp", 1)
    if stages > 1:
        # Two stages that exchange both ways in one batch of messages would mix them up; overlapping sends them apart.
        fields = fields | {
            "virtual_pipeline_model_parallel_size": stages,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    config = qsa_config(**fields, **{name: size for name, size in layout.items() if name != "vp"})
    if spec is not None:
        config = without_qsa(config)
    spec = qsa_spec(config) if spec is None else spec(config)
    chunks = []
    for stage in range(stages):
        vp_stage = stage if stages > 1 else None
        block = block_spec(config, spec, vp_stage=vp_stage)
        options: dict[str, Any] = dict(ROTARY)
        if mtp:
            _tell_inference_layers_apart()
            options["mtp_block_spec"] = get_gpt_mtp_block_spec_for_backend(config, block, CpuBackend())
        chunks.append(build_gpt(config, block, vp_stage=vp_stage, **options))
    seed_parameters(chunks)
    if config.qsa_stage == "warmup":
        freeze_backbone(chunks)
    return chunks


def without_qsa(config: Any) -> Any:
    """The same model with megatron's own attention."""
    defaults = {field.name: field.default for field in FIELDS}
    return dataclasses.replace(config, experimental_attention_variant=None, **defaults)


def _tell_inference_layers_apart() -> None:
    """Snapshots after 0.19 ask MTP layers for classes that are None without Transformer Engine."""
    module = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    if hasattr(module, "is_inference_column_parallel_linear"):
        module.is_inference_column_parallel_linear = lambda _: False


def batches(packed: bool, count: int = 2) -> list[Batch]:
    """Documents of odd lengths, padded to multiples of 8, or two sequences of 32."""
    return [packed_batch(PACKED, multiple=8, seed=s) if packed else random_batch(2, 32, seed=s) for s in range(count)]


def step(chunks: Sequence[torch.nn.Module], microbatches: list[Batch], form: str = "mean") -> Outcome:
    wrapped = wrap_with_ddp(chunks)
    result = schedule_step(wrapped, microbatches, loss_form=form)  # type: ignore[arg-type]
    assert all(len(layer.routes) == 0 for layer in qsa_layers(wrapped)), "routes left over"
    return Outcome(result.loss, result.gradients, tracked())


def tracked() -> list[float]:
    """Take the tracker's contents, reduced as megatron's training loop does."""
    tracker = DSAIndexerLossLoggingHelper.tracker
    DSAIndexerLossLoggingHelper.reduce_loss_in_tracker()
    values = tracker["values"].tolist() if "values" in tracker else []
    tracker.clear()
    return values


def train(
    fields: dict[str, Any],
    layout: dict[str, Any] | None = None,
    *,
    packed: bool = False,
    count: int = 2,
    form: str = "mean",
    **options: Any,
) -> Outcome:
    """One step in a layout of its own. Ranks beyond the layout are data-parallel copies with the same batches."""
    layout = layout or {}
    sizes = {name: layout.get(name, 1) for name in ("tp", "cp", "pp")}
    groups = {"virtual_pipeline_model_parallel_size": layout["vp"]} if layout.get("vp", 1) > 1 else {}
    with parallel.model_parallel(**sizes, **groups):
        return step(build(fields, layout, **options), batches(packed, count), form)


def assert_equal(expected: Outcome, got: Outcome, *, only: str = "") -> float:
    """Loss, gradients and tracked losses within the tolerance; returns the worst gradient's error."""
    assert abs(got.loss - expected.loss) <= TOLERANCE * abs(expected.loss), (expected.loss, got.loss)
    assert expected.gradients.keys() == got.gradients.keys(), expected.gradients.keys() ^ got.gradients.keys()
    assert len(expected.tracked) == len(got.tracked)
    for want, have in zip(expected.tracked, got.tracked):
        assert abs(have - want) <= TOLERANCE * max(want, 1e-3), (expected.tracked, got.tracked)
    errors = {n: relative_error(g, got.gradients[n]) for n, g in expected.gradients.items() if only in n}
    assert errors, f"no gradient has {only!r} in its name"
    name = max(errors, key=lambda n: errors[n])
    assert errors[name] <= TOLERANCE, f"{name}: relative error {errors[name]:.1e}"
    return errors[name]


def indexer_norm(outcome: Outcome) -> float:
    return sum(g.norm().item() for name, g in outcome.gradients.items() if ".indexer." in name)


# --- one process ------------------------------------------------------------------------------------------------------


def one_process() -> Iterator[tuple[str, Any]]:
    """Cases for one process."""
    with shim.cpu_megatron():
        row = mcore_patches.apply_patches("qsa", strict=True)["qsa"]
        assert row.state == "APPLIED", row
        yield from everything_selected()
        yield from microbatch_scaling()
        yield from after_schedules()
        yield from metrics()
        yield from another_config()
        yield from outside_embeddings()
        yield from causal_masks()
        yield from built_of_other_layers()
        yield from reverted()
        yield from multi_token_prediction()
        yield from spec_functions()
        yield from stages()
        yield from own_loops()
        yield from selective_recomputation()
        yield from half_precision()
        if importlib.util.find_spec("megatron.core.models.hybrid") is not None:
            yield from hybrid()


def everything_selected() -> Iterator[tuple[str, float]]:
    """With a budget above the sequence length QSA is the release's own self-attention."""

    def stock(config: Any) -> Any:
        spec = gqa_attention_spec(config)
        if config.qk_layernorm:
            # The harness's norm knows no zero-centred weight; both sides take ours.
            spec.submodules = dataclasses.replace(spec.submodules, q_layernorm=QKNorm, k_layernorm=QKNorm)
        return spec

    for name, fields in {
        "gate and norms": {},
        "neither": {"attention_output_gate": False, "qk_layernorm": False},
        "one KV head": {"num_query_groups": 1},
        "no rotary embedding in layer 2": {"no_rope_freq": [0, 1]},
    }.items():
        fields = {"qsa_indexer_budget": 64, "qsa_stage": "frozen", **fields}
        ours, theirs = train(fields), train(fields, spec=stock)
        mine = {name: g for name, g in ours.gradients.items() if ".indexer." not in name}
        # DDP gives every parameter a gradient buffer; a frozen indexer's stays 0.
        assert indexer_norm(ours) == 0.0
        yield f"everything selected, {name}", assert_equal(theirs, dataclasses.replace(ours, gradients=mine))


def microbatch_scaling() -> Iterator[tuple[str, float]]:
    """The indexer's gradient is that of the mean loss over microbatches, or over tokens if calculated per token."""
    with parallel.model_parallel():
        alone = []
        for batch in batches(True, 4):
            (model,) = build({}, {})
            alone.append(_indexer_gradients_outside_schedules(model, batch))
    tokens = [int(batch.loss_mask.sum()) for batch in batches(True, 4)]
    for count in (1, 2, 4):
        expected = {n: sum(g[n] for g in alone[:count]) / count for n in alone[0]}
        for form in ("mean", "sum_and_count"):
            got = train({}, packed=True, count=count, form=form)
            yield f"{count} microbatches, {form}", _same_indexer_gradients(expected, got)
        got = train({"calculate_per_token_loss": True}, packed=True, count=count, form="sum_and_count")
        weighted = {n: sum(g[n] * t for g, t in zip(alone[:count], tokens)) / sum(tokens[:count]) for n in alone[0]}
        yield f"{count} microbatches, per token", _same_indexer_gradients(weighted, got)
        got = train({"qsa_indexer_loss_reduction": "sum"}, packed=True, count=count)
        summed = {n: sum(g[n] * t for g, t in zip(alone[:count], tokens)) / count for n in alone[0]}
        yield f"{count} microbatches, sum", _same_indexer_gradients(summed, got)
    plain = train({}, packed=True)
    scaled = train({"grad_scale_func": _eightfold}, packed=True)
    for name, gradient in plain.gradients.items():
        assert relative_error(8 * gradient, scaled.gradients[name]) <= TOLERANCE, name
    yield "gradient scaler", 0.0


def _indexer_gradients_outside_schedules(model: torch.nn.Module, batch: Batch, **inputs: Tensor) -> dict[str, Tensor]:
    """Of the indexers' losses alone, in a loop without a schedule."""
    losses = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed, **inputs)
    (losses * 0.0).sum().backward()
    DSAIndexerLossLoggingHelper.tracker.clear()
    return {n: g for n, g in full_gradients(model).items() if ".indexer." in n}


def after_schedules() -> Iterator[tuple[str, float]]:
    """What a schedule multiplies losses by ends with it: for the model that it ran, another one, and the next schedule.

    The model of `microbatch_scaling` is not enough, as it never saw a schedule.
    """
    batch = batches(True, 1)[0]
    for stage in ("sparse", "warmup"):
        for recompute in ("none", "full"):
            fields = {"qsa_stage": stage, **RECOMPUTE[recompute]}
            with parallel.model_parallel():
                expected = _indexer_gradients_outside_schedules(build(fields, {})[0], batch)
                (other,) = build(fields, {})
                chunks = wrap_with_ddp(build(fields, {}))
                in_schedule = schedule_step(chunks, batches(True, 4)).gradients
                chunks[0].zero_grad_buffer()
                for again in (other, chunks[0]):
                    got = _indexer_gradients_outside_schedules(again, batch)
                    assert expected.keys() == got.keys()
                    worst = max(relative_error(g, got[n]) for n, g in expected.items())
                    assert worst <= TOLERANCE, (stage, recompute, worst)
                DSAIndexerLossLoggingHelper.tracker.clear()
                twice = schedule_step(chunks, batches(True, 4)).gradients
                worst = max(relative_error(g, twice[n]) for n, g in in_schedule.items() if ".indexer." in n)
                assert worst <= TOLERANCE, worst
                DSAIndexerLossLoggingHelper.tracker.clear()
                yield f"after schedules, {stage}, recompute {recompute}", worst


def metrics() -> Iterator[tuple[str, float]]:
    """Megatron's own function logs the mean over layers and microbatches of the indexers' losses, and clears them."""
    expected = sum(train({}, packed=True).tracked) / 4
    logged: list[float] = []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: logged.append(float(value)))
    with parallel.model_parallel():
        chunks = wrap_with_ddp(build({}, {}))
        for iteration in range(2):
            schedule_step(chunks, batches(True))
            DSAIndexerLossLoggingHelper.track_indexer_metrics(loss_scale=1 / 2, iteration=iteration, writer=writer)
        DSAIndexerLossLoggingHelper.tracker.clear()
    assert logged == [pytest.approx(expected, rel=TOLERANCE)] * 2
    yield "metrics", logged[0]


def another_config() -> Iterator[tuple[str, float]]:
    """A model of several: the schedule is given a config that knows no QSA, the layers inside have one."""
    expected = train({}, packed=True, count=2)
    with parallel.model_parallel():
        chunks = wrap_with_ddp(build({}, {}))
        chunks[0].config = without_qsa(chunks[0].config)
        got = step(chunks, batches(True, 2))
    yield (
        "another config",
        assert_equal(dataclasses.replace(expected, tracked=[]), dataclasses.replace(got, tracked=[])),
    )


def built_of_other_layers() -> Iterator[tuple[str, bool]]:
    """Most of megatron's spec functions do not look at the variant, and would train a dense model without a word."""
    for fields in ({}, {"qsa_stage": "frozen"}):
        with parallel.model_parallel():
            config = qsa_config(**fields)
            dense = gqa_attention_spec(config)
            dense.submodules = dataclasses.replace(dense.submodules, q_layernorm=QKNorm, k_layernorm=QKNorm)
            for specs in (dense, [qsa_spec(config), dense]):
                with pytest.raises(ValueError, match=r"qsa_indexer_n_heads=4 asks for QSA, but .* has SelfAttention"):
                    build_gpt(config, block_spec(config, specs), **ROTARY)
            build_gpt(without_qsa(config), block_spec(config, dense), **ROTARY)
    yield "built of other layers", True


def reverted() -> Iterator[tuple[str, bool]]:
    """A model that outlives the patch trains no indexer, as schedules would scale its loss wrongly."""
    with parallel.model_parallel():
        chunks = build({}, {})
        mcore_patches.revert("qsa")
        try:
            with pytest.raises(RuntimeError, match="the patch qsa was reverted while a model with QSA layers trains"):
                step(chunks, batches(False))
            chunks[0].eval()
            batch = batches(False)[0]
            with torch.no_grad():
                assert chunks[0](batch.tokens, batch.positions, None, labels=batch.labels).isfinite().all()
        finally:
            assert mcore_patches.apply_patches("qsa", strict=True)["qsa"].state == "APPLIED"
        DSAIndexerLossLoggingHelper.tracker.clear()
    yield "reverted", True


def outside_embeddings() -> Iterator[tuple[str, float]]:
    """Warmup on hidden states from outside that require no gradient, with and without recomputation."""
    batch = batches(False, 1)[0]
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    hidden = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(7))
    gradients = {}
    for name, fields in {"none": {}, "uniform": FULL, "block": block}.items():
        with parallel.model_parallel():
            (model,) = build({"qsa_stage": "warmup", **fields}, {})
            freeze_backbone(model)  # twice, which must do no harm
            gradients[name] = _indexer_gradients_outside_schedules(model, batch, decoder_input=hidden)
            assert not hidden.requires_grad
            assert all(len(layer.routes) == 0 for layer in qsa_layers(model))
            # What a checkpoint without gradients does not get is made to matter by the last layer alone.
            assert {n.split(".")[2] for n in gradients[name] if n.startswith("decoder.layers.")} == {"0", "1"}
            assert all(g.abs().max() > 0 for g in gradients[name].values()), name
    for name in ("uniform", "block"):
        worst = max(relative_error(g, gradients[name][n]) for n, g in gradients["none"].items())
        assert worst <= TOLERANCE, (name, worst)
        yield f"outside embeddings, {name}", worst


def causal_masks() -> Iterator[tuple[str, float]]:
    """Megatron's mask changes nothing; a mask of padding is refused. Full recomputation hands it on, too."""
    batch = batches(False, 1)[0]
    causal = ~torch.ones(32, 32, dtype=torch.bool).tril()[None, None]
    padded = causal.repeat(2, 1, 1, 1)
    padded[1, :, :, 30:] = True
    for name, fields in RECOMPUTE.items():
        with parallel.model_parallel():
            outputs = []
            for mask in (None, causal):
                (model,) = build(fields, {})
                losses = model(batch.tokens, batch.positions, mask, labels=batch.labels)
                losses.sum().backward()
                outputs.append(full_gradients(model))
            for parameter in outputs[0]:
                assert torch.equal(outputs[0][parameter], outputs[1][parameter]), parameter
            with pytest.raises(RuntimeError, match="attention_mask is not the causal one"):
                model(batch.tokens, batch.positions, padded, labels=batch.labels)
            discard_saved_routes(model)
            DSAIndexerLossLoggingHelper.tracker.clear()
        yield f"causal mask, recompute {name}", 0.0


def _eightfold(x: Tensor) -> Tensor:
    return 8 * x


def _same_indexer_gradients(expected: dict[str, Tensor], got: Outcome) -> float:
    worst = max(relative_error(g, got.gradients[n]) for n, g in expected.items())
    assert worst <= TOLERANCE, worst
    return worst


def multi_token_prediction() -> Iterator[tuple[str, Any]]:
    """The MTP layer's indexer trains, is tracked behind the decoder's layers, and replays its routes."""
    fields = {"mtp_num_layers": 1}
    plain = train(fields, mtp=True)
    assert len(plain.tracked) == 3
    assert min(plain.tracked) > 0, plain.tracked
    assert any(n.startswith("mtp.") and ".indexer." in n and g.any() for n, g in plain.gradients.items())
    for packed in (False, True):
        # Megatron's own faults, whatever the attention: the checkpoint of an MTP layer lacks an argument.
        refused = "padding_mask" if __version__.startswith("0.18") else "packed_seq_params" if packed else ""
        if refused and __version__ < "0.19":
            with pytest.raises(ValueError, match=f"does not support .*with MTP layers on megatron-core .*{refused}"):
                train(fields | FULL, packed=packed, mtp=True)
            discard_saved_routes([])
        else:
            stored = train(fields, packed=packed, mtp=True)
            recomputed = train(fields | FULL, packed=packed, mtp=True)
            yield f"MTP, full recomputation, {'THD' if packed else 'BSHD'}", assert_equal(stored, recomputed)
    with parallel.model_parallel():
        numbers = [layer.global_layer_number for layer in qsa_layers(build(fields, {}, mtp=True))]
    assert numbers == [1, 2, 3], numbers
    yield "MTP, layer numbers", numbers


def hybrid() -> Iterator[tuple[str, float]]:
    """QSA as the attention layers of a hybrid stack, without and with recomputation."""
    from mcore_patches.cpu.hybrid import build_hybrid

    outcomes = []
    for fields in ({}, FULL):
        with parallel.model_parallel():
            config = qsa_config(num_layers=4, **fields)
            model = build_hybrid(config, {"*": qsa_spec(config)}, "*-*-", **ROTARY)
            seed_parameters(model)
            outcomes.append(step([model], batches(True)))
    assert indexer_norm(outcomes[0]) > 0
    assert [value > 0 for value in outcomes[0].tracked] == [True, False, True, False]
    yield "hybrid, full recomputation", assert_equal(*outcomes)

    stacks = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs")
    config = qsa_config()
    stack = with_qsa_attention(stacks.hybrid_stack_spec, config, CpuBackend())
    layer = stack.submodules.attention_layer.submodules
    assert layer.self_attention.module is QSASelfAttention
    assert layer.input_layernorm is CpuBackend().layer_norm()
    assert stack.submodules.mlp_layer is stacks.hybrid_stack_spec.submodules.mlp_layer
    assert stacks.hybrid_stack_spec.submodules.attention_layer.submodules.self_attention.module is SelfAttention
    bare = dataclasses.replace(stack, submodules=None)
    with pytest.raises(ValueError, match="the spec of HybridStack has no attention_layer to replace"):
        with_qsa_attention(bare, config, CpuBackend())
    yield "stack with QSA attention", 0.0


class LinearStandIn(torch.nn.Module):
    """Stands for GatedDeltaNet, which wants CUDA packages: an attention module without attention."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return self.projection(hidden_states), None


def spec_functions() -> Iterator[tuple[str, Any]]:
    """Megatron's own spec functions build QSA layers, in every layer or beside gated delta nets."""
    original = variant_specs._get_backend_spec_provider, variant_specs.GatedDeltaNet
    variant_specs._get_backend_spec_provider = lambda config: CpuBackend()
    variant_specs.GatedDeltaNet = LinearStandIn
    block = variant_specs.get_transformer_block_with_experimental_attention_variant_spec
    mixed = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
        "num_layers": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    patterns = {}
    try:
        for name, fields in {
            "qsa": {},
            "mixed": mixed,
            "mixed, listed": {**mixed, "linear_attention_freq": [0, 1, 1, 0]},
        }.items():
            with parallel.model_parallel():
                config = qsa_config(**fields)
                spec = block(config)
                attention = [layer.submodules.self_attention for layer in spec.layer_specs]
                patterns[name] = ["Q" if a.module is QSASelfAttention else "L" for a in attention]
                assert all(not a.metainfo["fuse_input_layernorm"] for a in attention if a.module is QSASelfAttention)
                model = build_gpt(config, spec, **ROTARY)
                seed_parameters(model)
                outcome = step([model], batches(False))
                assert [value > 0 for value in outcome.tracked] == [kind == "Q" for kind in patterns[name]]
                assert indexer_norm(outcome) > 0
        assert patterns == {"qsa": ["Q", "Q"], "mixed": ["L", "L", "L", "Q"], "mixed, listed": ["Q", "L", "L", "Q"]}
        with parallel.model_parallel():
            config = qsa_config()
            assert variant_specs.get_experimental_attention_variant_module_spec(config).module is QSASelfAttention
            layer = variant_specs.get_experimental_attention_variant_module_spec(config, CpuBackend())
            assert layer.submodules.linear_qkv is ColumnParallelLinear
            without = gpt_config(**mixed)
            spec = variant_specs.get_experimental_attention_variant_module_spec(without, CpuBackend())
            assert spec.module is LinearStandIn, "gated delta nets without QSA are megatron's own business"
    finally:
        variant_specs._get_backend_spec_provider, variant_specs.GatedDeltaNet = original
    yield "layer patterns", patterns


def stages() -> Iterator[tuple[str, Any]]:
    """Who trains in which stage, with and without recomputation, and the guard against a trained backbone."""
    for stage in ("warmup", "frozen"):
        plain = train({"qsa_stage": stage}, packed=True)
        for name, fields in RECOMPUTE.items():
            yield f"{stage}, recompute {name}", assert_equal(plain, train({"qsa_stage": stage, **fields}, packed=True))
        trained = {n for n, g in plain.gradients.items() if g.any()}
        if stage == "warmup":
            assert trained
            assert all(".indexer." in n for n in trained), trained
        else:
            assert not any(".indexer." in n for n in trained)
            assert any(n.endswith("linear_qkv.weight") for n in trained)
            assert plain.tracked == []
    with parallel.model_parallel():
        chunks = build({"qsa_stage": "warmup"}, {})
        chunks[0].output_layer.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"output_layer\.weight requires a gradient: call .*\.freeze_backbone"):
            step(chunks, batches(False))
        tracked()
        freeze_backbone(chunks)
        for wrapped in (wrap_with_ddp(chunks), [torch.nn.parallel.DistributedDataParallel(chunks[0])]):
            with pytest.raises(ValueError, match="wrapped in DistributedDataParallel already"):
                freeze_backbone(wrapped)
    yield "guards", True


def own_loops() -> Iterator[tuple[str, Any]]:
    """Without a schedule the layers look at the whole model that calls them, at each forward pass in training mode."""
    batch = batches(True, 1)[0]
    for recompute in ("none", "full"):
        for name in ("embedding.word_embeddings", "decoder.layers.1.mlp.linear_fc1", "output_layer"):
            with parallel.model_parallel():
                (model,) = build({"qsa_stage": "warmup", **RECOMPUTE[recompute]}, {})
                _indexer_gradients_outside_schedules(model, batch)
                model.get_submodule(name).weight.requires_grad_(True)
                message = rf"{name}\.weight requires a gradient: call .*freeze_backbone"
                for again in (model, torch.nn.parallel.DistributedDataParallel(model)):
                    with pytest.raises(RuntimeError, match=message):
                        _indexer_gradients_outside_schedules(again, batch)
                    discard_saved_routes(model)
                freeze_backbone(model)
                _indexer_gradients_outside_schedules(model, batch)
    yield "own loops", True


def selective_recomputation() -> Iterator[tuple[str, float]]:
    """Modules outside the attention, alone and beside it."""
    expected = train({}, packed=True)
    for modules in (["mlp"], ["core_attn", "mlp"]):
        fields = {"recompute_granularity": "selective", "recompute_modules": modules}
        yield f"recompute {' and '.join(modules)}", assert_equal(expected, train(fields, packed=True))


def half_precision() -> Iterator[tuple[str, float]]:
    """A bf16 model through DDP and schedule, with and without recomputation."""
    expected = train({}, packed=True)
    plain = train({"dtype": "bf16"}, packed=True)
    assert abs(plain.loss - expected.loss) < 0.01 * expected.loss, (expected.loss, plain.loss)
    for before, after in zip(expected.tracked, plain.tracked):
        assert abs(before - after) < 0.1 * before, (expected.tracked, plain.tracked)
    yield "bf16, full recomputation", assert_equal(plain, train({"dtype": "bf16", **FULL}, packed=True))


# --- two and four processes -------------------------------------------------------------------------------------------


def two_processes(full: bool) -> Iterator[tuple[str, Any]]:
    """Layouts of two ranks against one; `full` adds the cases that need only one release."""
    with shim.cpu_megatron():
        mcore_patches.apply_patches("qsa", strict=True)
        layouts = {"TP2-SP": {"tp": 2, "sp": True}, "CP2": {"cp": 2}, "PP2": {"pp": 2}}
        if full:
            layouts["TP2"] = {"tp": 2}
        for packed in (False, True):
            expected = train({}, packed=packed)
            for name, layout in layouts.items():
                for recompute, fields in RECOMPUTE.items():
                    if not full and (recompute == "core") == packed:
                        continue
                    got = train(fields, layout, packed=packed)
                    yield f"{name}-{'THD' if packed else 'BSHD'}-{recompute}", assert_equal(expected, got)
        expected = train({"qsa_stage": "warmup"}, packed=True)
        for name, layout in layouts.items():
            fields = FULL if name == "PP2" else {}
            got = train({"qsa_stage": "warmup", **fields}, layout, packed=True)
            yield f"{name}-warmup", assert_equal(expected, got)
        one_kv_head = {"num_query_groups": 1}
        expected = train(one_kv_head, packed=True)
        yield "TP2-SP, one KV head", assert_equal(expected, train(one_kv_head, layouts["TP2-SP"], packed=True))
        yield from per_token(layouts)
        yield from checkpoints()
        if full:
            yield from pipelines()
            yield from routes_across_ranks()
            yield from shared_selection()
            yield from attached_input(layouts)
            yield from masks_across_ranks()


def per_token(layouts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    fields = {"calculate_per_token_loss": True}
    expected = train(fields, packed=True, form="sum_and_count")
    for name, layout in layouts.items():
        got = train(fields, layout, packed=True, form="sum_and_count")
        yield f"{name}, per token", assert_equal(expected, got)
    # With three outputs and without it, megatron averages the local means of ranks: batches, whose ranks hold as many
    # tokens each, must come out the same, the indexer's gradient in particular.
    expected = train({}, form="sum_and_count")
    yield "CP2, sum and count", assert_equal(expected, train({}, layouts["CP2"], form="sum_and_count"))


def pipelines() -> Iterator[tuple[str, float]]:
    """Interleaved stages, each with its own queue of routes, and a stage with an MTP layer."""
    deep = {"num_layers": 4}
    expected = train(deep, count=4)
    for recompute, fields in RECOMPUTE.items():
        got = train(deep | fields, {"pp": 2, "vp": 2}, count=4)
        yield f"PP2-VP2-{recompute}", assert_equal(expected, got)
    for name, fields, form in (
        ("per token", {"calculate_per_token_loss": True}, "sum_and_count"),
        ("warmup", {"qsa_stage": "warmup", **FULL}, "mean"),
    ):
        expected = train(deep | fields, packed=True, count=4, form=form)
        got = train(deep | fields, {"pp": 2, "vp": 2}, packed=True, count=4, form=form)
        yield f"PP2-VP2, {name}", assert_equal(expected, got)
    mtp = {"mtp_num_layers": 1}
    expected = train(mtp, mtp=True)
    yield "PP2-MTP", assert_equal(expected, train(mtp, {"pp": 2}, mtp=True))
    # Megatron averages the MTP layer's main loss by rank, over different numbers of tokens; indexers are not concerned.
    yield "CP2-MTP", assert_equal(expected, train(mtp, {"cp": 2}, mtp=True), only=".indexer.")


def attached_input(layouts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """An indexer loss that reaches the layers below is summed over ranks like any other gradient."""
    fields = {"qsa_indexer_detach_input": False, "qsa_indexer_loss_coeff": 5.0}
    expected = train(fields, packed=True)
    detached = train({"qsa_indexer_loss_coeff": 5.0}, packed=True)
    assert (
        relative_error(
            detached.gradients["embedding.word_embeddings.weight"],
            expected.gradients["embedding.word_embeddings.weight"],
        )
        > 0.1
    )
    for name, layout in layouts.items():
        yield f"{name}, attached input", assert_equal(expected, train(fields, layout, packed=True))


def routes_across_ranks() -> Iterator[tuple[str, Any]]:
    """Routes are recorded for the whole batch in document order, and each rank takes its rows of given ones."""
    batch = batches(True, 1)

    def run(layout: dict[str, Any], given: dict[int, list[Tensor]]) -> tuple[dict[int, list[Tensor]], Outcome]:
        with parallel.model_parallel(**{name: layout.get(name, 1) for name in ("tp", "cp", "pp")}):
            chunks = build({}, layout)
            with record_routes(chunks) as recorded, inject_routes(chunks, given):
                outcome = step(chunks, batch)
            return {layer: [ids.clone() for ids in passes] for layer, passes in recorded.items()}, outcome

    routes, expected = run({}, {})
    for name, layout in {"CP2": {"cp": 2}, "TP2-SP": {"tp": 2, "sp": True}}.items():
        again, _ = run(layout, {})
        for layer, (ids,) in routes.items():
            assert torch.equal(ids, again[layer][0]), (name, layer)
    other = {layer: [_mirrored(ids)] for layer, (ids,) in routes.items()}
    _, elsewhere = run({}, other)
    assert abs(elsewhere.loss - expected.loss) > 1e-4 * expected.loss, "the given routes changed nothing"
    _, got = run({"cp": 2}, other)
    yield "CP2, given routes", assert_equal(elsewhere, got)


def shared_selection() -> Iterator[tuple[str, float]]:
    """Two tensor-parallel ranks select for a part of the rows each, once, and attend what one alone would."""
    batch = [packed_batch([150, 7, 131], multiple=2)]
    shared: list[int] = []

    def deal(number: int, *args: Any, **kwargs: Any) -> Any:
        shared.append(number)
        return deal_rows(number, *args, **kwargs)

    def run(fields: dict[str, Any], layout: dict[str, Any]) -> tuple[dict[int, list[Tensor]], Outcome]:
        with parallel.model_parallel(tp=layout.get("tp", 1)):
            chunks = build(fields, layout)
            with record_routes(chunks) as recorded:
                return recorded, step(chunks, batch)

    routes, expected = run({}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_topk, "deal_rows", deal)
        for recompute, fields in RECOMPUTE.items():
            shared.clear()
            again, got = run(fields, {"tp": 2, "sp": True})
            assert shared == [290] * len(routes), "once for every layer, and not in the recomputation"
            assert again.keys() == routes.keys()
            for layer, passes in routes.items():
                assert torch.equal(torch.stack(passes), torch.stack(again[layer])), (recompute, layer)
            yield f"TP2-SP, shared selection, {recompute}", assert_equal(expected, got)


def _mirrored(ids: Tensor) -> Tensor:
    """Other blocks, complete at their rows: the mirror image of each row's ids."""
    real = ids >= 0
    # The highest id that a row may name is not known here; that of the row's own selection is a safe bound.
    highest = ids.amax(dim=1, keepdim=True)
    mirrored = torch.where(real, highest - ids, -1)
    return mirrored.sort(dim=1, descending=True).values


def masks_across_ranks() -> Iterator[tuple[str, float]]:
    """Megatron hands each context-parallel rank its rows of the mask; all rows with sequence parallelism."""
    causal = ~torch.ones(32, 32, dtype=torch.bool).tril()[None, None]
    padded = causal | (torch.arange(32) < 2)
    for layout in ({"cp": 2}, {"tp": 2, "sp": True}):
        name, size = next(iter(layout.items()))
        with parallel.model_parallel(**{name: size}) as ranks:
            (model,) = build({}, layout)
            batch = batches(False, 1)[0].context_parallel_shard(ranks.cp_rank, ranks.cp)
            rows = zigzag_tokens(torch.tensor([0, 32]), 32 // ranks.cp, ranks.cp_rank, ranks.cp)
            model(batch.tokens, batch.positions, causal[:, :, rows], labels=batch.labels).sum().backward()
            with pytest.raises(RuntimeError, match="attention_mask is not the causal one"):
                model(batch.tokens, batch.positions, padded[:, :, rows], labels=batch.labels)
            if name == "cp":
                with pytest.raises(ValueError, match=r"must be bool \(1, 1, 16, 32\) or \(2, 1, 16, 32\)"):
                    model(batch.tokens, batch.positions, causal, labels=batch.labels)
            DSAIndexerLossLoggingHelper.tracker.clear()
        yield f"masks with {name} 2", 0.0


def checkpoints() -> Iterator[tuple[str, Any]]:
    """Saved with one tensor-parallel rank, loaded with two."""
    folder = [tempfile.mkdtemp(prefix="qsa-checkpoint-")]
    with parallel.model_parallel() as layout:
        torch.distributed.broadcast_object_list(folder, src=0)
        chunks = build({}, {})
        save_checkpoint(chunks, Path(folder[0]))
        saved = full_parameters(chunks)
        assert layout.dp == 2
    with parallel.model_parallel(tp=2):
        chunks = build({}, {"tp": 2, "sp": True})
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.fill_(float("nan"))
        load_checkpoint(chunks, Path(folder[0]))
        loaded = full_parameters(chunks)
    assert saved.keys() == loaded.keys()
    assert any(".indexer." in name for name in saved)
    for name, parameter in saved.items():
        assert torch.equal(parameter, loaded[name]), name
    yield "checkpoint TP1 to TP2", len(saved)


def four_processes(full: bool) -> Iterator[tuple[str, float]]:
    """TP2 x CP2 with sequence parallelism, and with pipelines."""
    with shim.cpu_megatron():
        mcore_patches.apply_patches("qsa", strict=True)
        layout = {"tp": 2, "cp": 2, "sp": True}
        for packed in (False, True):
            expected = train({}, packed=packed)
            for recompute, fields in RECOMPUTE.items():
                if not full and (recompute == "none") == packed:
                    continue
                got = train(fields, layout, packed=packed)
                yield f"TP2-CP2-{'THD' if packed else 'BSHD'}-{recompute}", assert_equal(expected, got)
        if full:
            expected = train({"qsa_stage": "warmup"}, packed=True)
            got = train({"qsa_stage": "warmup"}, layout, packed=True)
            yield "TP2-CP2-warmup", assert_equal(expected, got)
            expected = train({}, packed=True)
            yield "CP2-PP2-full", assert_equal(expected, train(FULL, {"cp": 2, "pp": 2}, packed=True))
            fields = {"num_query_groups": 2}
            yield "TP4, two KV heads", assert_equal(train(fields), train(fields, {"tp": 4, "sp": True}))
