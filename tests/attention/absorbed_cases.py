"""Absorbed MLA beside plain MLA, in processes of its own: functions that assert, and yield (case, what it measured)."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

import mcore_patches
from mcore_patches.attention.dsa import (
    AbsorbedMLASelfAttention,
    LatentAttention,
    get_absorbed_mla_module_spec_for_backend,
    set_checkpoint_layout,
    with_absorbed_mla,
)
from mcore_patches.cpu import parallel
from mcore_patches.cpu.checkpoint import load_checkpoint, save_checkpoint
from mcore_patches.cpu.data import Batch, packed_batch, random_batch
from mcore_patches.cpu.models import CpuBackend, Norm, block_spec, build_gpt, mla_attention_spec, mla_config
from mcore_patches.cpu.parameters import full_parameters, seed_parameters
from mcore_patches.cpu.training import build_optimizer, schedule_step, train_step, wrap_with_ddp

COSINE, TOLERANCE = 0.9999, 1e-5
DOCUMENTS = [13, 1, 40, 10]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def absorbed_spec(config: Any, **options: Any) -> ModuleSpec:
    return get_absorbed_mla_module_spec_for_backend(config, CpuBackend(), **options)


def plain_model(**fields: Any) -> Any:
    """Megatron's own MLA with seeded weights, in one process."""
    config = mla_config(**fields)
    model = build_gpt(config, mla_attention_spec(config))
    seed_parameters(model)
    return model


def absorbed_model(weights: dict[str, Any] | None, *, spec: Callable[..., Any] = absorbed_spec, **fields: Any) -> Any:
    """Absorbed MLA with the weights of a plain state dict (of one process), else seeded."""
    config = mla_config(**fields)
    model = build_gpt(config, spec(config))
    if weights is None:
        seed_parameters(model)
    else:
        model.load_state_dict(dict(weights))
    return model


def combined(named: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Whole parameters or gradients with the split up-projections as the combined one, written out head by head."""
    out = dict(named)
    for name in [n for n in named if "linear_k_up_proj" in n]:
        k, v = out.pop(name), out.pop(name.replace("linear_k_up", "linear_v_up"))
        rows = []
        for head in range(config.num_attention_heads):
            rows += [k[head * config.qk_head_dim :][: config.qk_head_dim]]
            rows += [v[head * config.v_head_dim :][: config.v_head_dim]]
        out[name.replace("linear_k_up", "linear_kv_up")] = torch.cat(rows)
    return out


def compare(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Assert that every tensor agrees; returns the largest relative error."""
    assert ours.keys() == reference.keys()
    worst = 0.0
    for name, expected in reference.items():
        got = ours[name].double()
        assert got.shape == expected.shape, name
        assert expected.norm() > 0, f"{name}: nothing to compare"
        assert torch.cosine_similarity(got.flatten(), expected.double().flatten(), dim=0) > COSINE, name
        worst = max(worst, ((got - expected).norm() / expected.norm()).item())
    assert worst < TOLERANCE, worst
    return worst


def outputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Logits, and the output of every attention layer."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.self_attention.register_forward_hook(lambda _, __, out, i=i: seen.update({f"layer {i}": out[0].detach()}))
        for i, layer in enumerate(model.decoder.layers)
    ]
    with torch.no_grad():
        extra = {} if batch.packed is None else {"packed_seq_params": batch.packed}
        seen["logits"] = model(batch.tokens, batch.positions, None, **extra)
    for hook in hooks:
        hook.remove()
    return seen


def documents(batch: Batch) -> list[Batch]:
    """The documents of a packed batch, each a batch of its own without padding."""
    assert batch.packed is not None
    real, laid_out = batch.packed.cu_seqlens_q, batch.packed.cu_seqlens_q_padded
    starts = (real if laid_out is None else laid_out).tolist()[:-1]
    parts = []
    for start, length in zip(starts, real.diff().tolist(), strict=True):
        tensors = (batch.tokens, batch.labels, batch.positions, batch.loss_mask)
        parts.append(Batch(*(x[:, start : start + length] for x in tensors)))
    return parts


def plain_step(model: Any, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss per token and gradients of plain MLA, each document on its own."""
    parts = [part for batch in batches for part in ([batch] if batch.packed is None else documents(batch))]
    total = sum(part.loss_mask.sum().item() for part in parts)
    loss, gradients = 0.0, {}
    for part in parts:
        share = part.loss_mask.sum().item() / total
        step = train_step(model, part)
        loss += step.loss * share
        for name, gradient in step.gradients.items():
            gradients[name] = gradients.get(name, 0.0) + share * gradient
    return loss, gradients


def one_process() -> Iterator[tuple[str, Any]]:
    with parallel.model_parallel():
        variants: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
            # fields of both, fields of the absorbed model alone, options of its spec
            "plain": ({}, {}, {}),
            "no query latent": ({"q_lora_rank": None}, {}, {}),
            "norms, split": ({"qk_layernorm": True}, {}, {"split": True}),
            "norms, values wider than keys": ({"qk_layernorm": True, "v_head_dim": 24}, {}, {}),
            "YaRN, split": (YARN, {}, {"split": True}),
            "rotary on half of the channels": ({"rotary_percent": 0.5}, {}, {}),
            "NoPE": ({"qk_pos_emb_head_dim": 0}, {}, {}),
            "NoPE, YaRN": ({"qk_pos_emb_head_dim": 0}, YARN, {}),
            "recompute full": ({}, FULL, {}),
            "recompute core attention": ({}, selective("core_attn"), {}),
            "recompute up-projection": ({}, selective("mla_up_proj"), {}),
            "recompute both, NoPE, split": (
                {"qk_pos_emb_head_dim": 0},
                selective("core_attn", "mla_up_proj"),
                {"split": True},
            ),
        }
        for name, (both, own, options) in variants.items():
            plain = plain_model(**both)
            ours = absorbed_model(
                plain.state_dict(), spec=lambda c, o=options: absorbed_spec(c, **o), **{**both, **own}
            )
            batch = random_batch(2, 33)
            loss, gradients = plain_step(plain, [batch])
            step = train_step(ours, batch)
            assert abs(step.loss - loss) < 1e-5
            compare(outputs(ours, batch), outputs(plain, batch))
            yield name, compare(combined(step.gradients, ours.config), gradients)

        plain = plain_model()
        for name, own, multiple in (
            ("packed", {}, 1),
            ("packed and padded, recompute both", selective("core_attn", "mla_up_proj"), 8),
        ):
            batch = packed_batch(DOCUMENTS, multiple=multiple)
            loss, gradients = plain_step(plain, [batch])
            ours = absorbed_model(plain.state_dict(), **own)
            step = train_step(ours, batch)
            assert abs(step.loss - loss) < 1e-5
            yield name, compare(step.gradients, gradients)

        yield "causal mask", _causal_mask(plain)
        yield "one gradient a weight", _one_gradient_a_weight()
        yield "plugged core attention", _plugged_core_attention(plain)
        yield "specs", _specs()
        yield "patched", _patched(plain)
        yield "refused", _refused()
        yield "checkpoints", _checkpoints()
        yield "optimizer", _optimizer_state()


def _causal_mask(plain: Any) -> None:
    ours = absorbed_model(plain.state_dict())
    with torch.no_grad():
        hidden = torch.randn(9, 2, 64)
        layer = ours.decoder.layers[0].self_attention
        mask = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
        assert torch.equal(layer(hidden, mask)[0], layer(hidden, None)[0])
        with pytest.raises(RuntimeError, match="attention_mask is not the causal one"):
            layer(hidden, torch.zeros_like(mask))


def _one_gradient_a_weight() -> None:
    """DDP takes a parameter's first gradient in a backward pass for the whole."""
    for recompute in ({}, selective("mla_up_proj"), selective("core_attn", "mla_up_proj")):
        model = absorbed_model(None, **recompute)
        times: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, times=times: times.update([name]))
        train_step(model, random_batch())
        assert times == Counter(dict(model.named_parameters()).keys())


class SeesEverything(LatentAttention):
    """A core attention as DSA's: applies W_v itself, and keeps what it was called with."""

    consumes_absorbed_v_up_projection = True

    def forward(self, query: Tensor, key: Tensor, *, up_v_weight: Tensor, **rest: Any) -> Tensor:  # type: ignore[override]
        self.seen = {"query": query, "key": key, "up_v_weight": up_v_weight, **rest}
        context = super().forward(query, key, up_v_weight=up_v_weight, **rest)
        heads = context.unflatten(-1, (query.shape[-2], -1))
        return torch.einsum("...nr,ndr->...nd", heads, up_v_weight).flatten(-2)


def _plugged_core_attention(plain: Any) -> None:
    for batch in (random_batch(2, 8), packed_batch([5, 11])):
        ours = absorbed_model(plain.state_dict(), spec=lambda c: absorbed_spec(c, core_attention=SeesEverything))
        compare(outputs(ours, batch), outputs(absorbed_model(plain.state_dict()), batch))
        seen = ours.decoder.layers[0].self_attention.core_attention.seen
        assert set(seen) == {
            *("query", "key", "value", "attention_mask", "x", "qr", "up_v_weight"),
            *("position_ids", "packed_seq_params", "attn_mask_type"),
        }
        lead = (8, 2) if batch.packed is None else (16,)
        shapes = {name: tuple(x.shape) for name, x in seen.items() if isinstance(x, Tensor)}
        assert shapes == {
            "query": (*lead, 4, 40),
            "key": (*lead, 1, 40),
            "x": (8, 2, 64) if batch.packed is None else (16, 1, 64),
            "qr": (*lead, 32),
            "up_v_weight": (4, 16, 32),
        }
        assert seen["value"] is None
        assert seen["attn_mask_type"] is AttnMaskType.causal
        assert seen["packed_seq_params"] is batch.packed

    class Wrong(LatentAttention):
        def forward(self, *args: Any, **rest: Any) -> Tensor:
            return super().forward(*args, **rest)[..., :-1]

    ours = absorbed_model(plain.state_dict(), spec=lambda c: absorbed_spec(c, core_attention=Wrong))
    with pytest.raises(ValueError, match=r"Wrong returned \(8, 2, 127\).* must be 4 x 32"):
        outputs(ours, random_batch(2, 8))


def _specs() -> None:
    config = mla_config()
    block = with_absorbed_mla(block_spec(config, mla_attention_spec(config)), config, CpuBackend(), split=True)
    model = build_gpt(config, block)
    layers = [layer.self_attention for layer in model.decoder.layers]
    assert all(type(layer) is AbsorbedMLASelfAttention and layer.is_split for layer in layers)
    assert isinstance(layers[0].core_attention, LatentAttention)
    normless = block_spec(config, mla_attention_spec(config)).layer_specs[0]
    assert with_absorbed_mla(normless, config, CpuBackend()).submodules.input_layernorm is Norm
    normless.submodules = dataclasses.replace(normless.submodules, input_layernorm=IdentityOp)
    assert with_absorbed_mla(normless, config, CpuBackend()).submodules.input_layernorm is Norm
    assert normless.submodules.input_layernorm is IdentityOp, "the spec that was given is left alone"

    layer, thing = block.layer_specs[0], type("NoAttention", (), {})
    layer.submodules = dataclasses.replace(layer.submodules, self_attention=ModuleSpec(module=thing))
    with pytest.raises(ValueError, match=r"self_attention=<class .*NoAttention'> is no MLASelfAttention"):
        with_absorbed_mla(layer, config, CpuBackend())

    class Fusing(CpuBackend):
        """As Transformer Engine's backend: plain MLA would norm inside the up-projections."""

        def column_parallel_layer_norm_linear(self) -> type:
            return ColumnParallelLinear

    normed = mla_config(qk_layernorm=True)
    for backend, given, norms in (
        (Fusing(), normed, "fused"),
        (Fusing(), config, "apart"),
        (CpuBackend(), normed, "apart"),
    ):
        assert get_absorbed_mla_module_spec_for_backend(given, backend).params["checkpoint_norms"] == norms


def _patched(plain: Any) -> None:
    """A spec written for megatron-core 0.19, whose core attention takes what 0.19 hands over."""
    name = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
    with mcore_patches.applied("absorbed_mla", strict=True):
        absorbed = importlib.import_module(name)

        def spec(config: Any) -> ModuleSpec:
            del config
            backend = CpuBackend()
            return ModuleSpec(
                module=absorbed.AbsorbedMLASelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=absorbed.AbsorbedMLASelfAttentionSubmodules(
                    linear_q_proj=backend.column_parallel_linear(),
                    linear_q_down_proj=backend.linear(),
                    linear_q_up_proj=backend.column_parallel_linear(),
                    linear_kv_down_proj=backend.linear(),
                    linear_kv_up_proj=backend.column_parallel_linear(),
                    core_attention=SeesEverything,
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=IdentityOp,
                    kv_layernorm=IdentityOp,
                ),
            )

        batch = random_batch(2, 16)
        ours = absorbed_model(plain.state_dict(), spec=spec)
        compare(outputs(ours, batch), outputs(plain, batch))
        compare(train_step(ours, batch).gradients, train_step(plain, batch).gradients)


def _layer(config: Any, **changes: Any) -> Any:
    spec = absorbed_spec(config)
    spec.submodules = dataclasses.replace(spec.submodules, **changes)
    return build_module(spec, config=config, layer_number=1)


def _refused() -> None:
    def refused(match: str, config: Any = None, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            _layer(mla_config() if config is None else config, **changes)

    def config_with(**fields: Any) -> Any:
        config = mla_config()
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    for name, value in {
        "multi_latent_attention": False,
        "add_bias_linear": True,
        "cache_mla_latents": True,
        "qk_l2_norm": True,
        "rotary_interleaved": True,
        "qk_clip": True,
        "log_max_attention_logit": True,
        "fp8_param": True,
        "attention_dropout": 0.1,
        "window_size": (3, 0),
        "softmax_type": "off-by-one",
        "experimental_attention_variant": "dsa",
    }.items():
        refused(rf"{name}={value!r}".replace("(", r"\(").replace(")", r"\)"), config_with(**{name: value}))
    refused("sequence_parallel=False.*set it to True", config_with(tensor_model_parallel_size=2))
    for quantised in ("fp8", "fp4"):
        config = config_with(**selective("mla_up_proj"), **{quantised: "e4m3"})
        refused(r"recompute_modules=\['mla_up_proj'\].*fp8 or fp4", config)
    refused(
        r"offload_modules=\['core_attn'\]",
        config_with(fine_grained_activation_offloading=True, offload_modules=["core_attn"]),
    )
    spec, cp2 = absorbed_spec(mla_config()), config_with(context_parallel_size=2)
    with pytest.raises(ValueError, match="cp_comm_type='p2p'"):
        build_module(spec, config=cp2, layer_number=1, cp_comm_type="p2p")
    spec.params = {"attn_mask_type": AttnMaskType.causal, "checkpoint_norms": "inside"}
    with pytest.raises(ValueError, match="norms='inside'"):
        build_module(spec, config=mla_config(), layer_number=1)
    spec.params = {}
    with pytest.raises(ValueError, match=r"attn_mask_type=.*padding: .*must be AttnMaskType.causal"):
        build_module(spec, config=mla_config(), layer_number=1)

    refused("linear_kv_up_proj=None, linear_k_up_proj=None", linear_kv_up_proj=None)
    refused("linear_k_up_proj=<class.*, linear_v_up_proj=None", linear_k_up_proj=ColumnParallelLinear)

    class NormAndLinear(ColumnParallelLinear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.weight.shape[1]))

    for name in ("linear_kv_up_proj", "linear_q_up_proj"):
        refused(f"{name}=NormAndLinear", **{name: NormAndLinear})
    for name in ("q_layernorm", "kv_layernorm"):
        refused(f"{name}=IdentityOp with qk_layernorm=True", mla_config(qk_layernorm=True), **{name: IdentityOp})

    layer, hidden = _layer(mla_config()), torch.randn(6, 1, 64)
    for name in ("inference_context", "inference_params", "rotary_pos_cos", "sequence_len_offset"):
        with pytest.raises(NotImplementedError, match=f"{name}=object.*latents are not cached"):
            layer(hidden, None, **{name: object()})
    for name in ("key_value_states", "rotary_pos_emb", "attention_bias"):
        with pytest.raises(ValueError, match=f"{name}=object"):
            layer(hidden, None, **{name: object()})
    packed = packed_batch([6]).packed
    with pytest.raises(ValueError, match="qkv_format='sbhd'"):
        layer(hidden, None, packed_seq_params=dataclasses.replace(packed, qkv_format="sbhd"))
    with pytest.raises(ValueError, match=r"packed_seq_params.local_cp_size=1"):
        layer(hidden, None, packed_seq_params=dataclasses.replace(packed, local_cp_size=1))
    with pytest.raises(NotImplementedError, match="clip_qk"):
        layer.clip_qk()
    with pytest.raises(ValueError, match="kv_up='both'"):
        set_checkpoint_layout(layer, kv_up="both")
    with pytest.raises(ValueError, match="model=Linear"):
        set_checkpoint_layout(torch.nn.Linear(1, 1), kv_up="split")
    core = layer.core_attention
    with pytest.raises(ValueError, match=r"value=\(1,\)"):
        core(hidden, hidden, torch.ones(1))


def _checkpoints() -> None:
    """Sharded and plain ones, from and to plain MLA, combined and split; keys and values differ in width."""
    fields = {"qk_layernorm": True, "v_head_dim": 24}
    plain = plain_model(**fields)
    weights = full_parameters(plain)

    def model(split: bool = False, *, seeded: bool = False, **layout: str) -> Any:
        built = absorbed_model(None, spec=lambda c: absorbed_spec(c, split=split), **fields)
        if not seeded:
            with torch.no_grad():
                for parameter in built.parameters():
                    parameter.zero_()
        if layout:
            set_checkpoint_layout(built, **layout)
        return built

    def same(built: Any) -> None:
        got = combined(full_parameters(built), built.config)
        assert got.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(got[name], value), name

    for split in (False, True):
        ours = model(split)
        ours.load_state_dict(plain.state_dict())
        same(ours)
        # What Transformer Engine's plain MLA is saved as: norms inside the up-projections.
        fused = {
            name.replace("kv_layernorm.", "linear_kv_up_proj.layer_norm_").replace(
                ".q_layernorm.", ".linear_q_up_proj.layer_norm_"
            ): value
            for name, value in plain.state_dict().items()
        }
        assert sum("layer_norm_weight" in name for name in fused) == 4
        another = model(split)
        another.load_state_dict(fused)
        same(another)
        for other_split in (False, True):
            other = model(other_split)
            other.load_state_dict(ours.state_dict())
            same(other)
        if not split:
            back = plain_model(**fields)
            seed_parameters(back, 1)
            back.load_state_dict(ours.state_dict())
            same(back)

        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(plain, Path(folder) / "plain")
            ours = model(split)
            load_checkpoint(ours, Path(folder) / "plain")
            same(ours)
            save_checkpoint(ours, Path(folder) / "ours")
            back = plain_model(**fields)
            seed_parameters(back, 1)
            load_checkpoint(back, Path(folder) / "ours")
            same(back)
            set_checkpoint_layout(ours, kv_up="split", norms="fused")
            save_checkpoint(ours, Path(folder) / "split")
            for other_split in (False, True):
                other = model(other_split, kv_up="split", norms="fused")
                load_checkpoint(other, Path(folder) / "split")
                same(other)
    keys = {
        entry.key
        for entry in model(False, kv_up="split", norms="fused").sharded_state_dict().values()
        if "up_proj" in entry.key
    }
    assert any("linear_kv_up_proj.layer_norm_weight" in key for key in keys), keys


def _optimizer_state() -> None:
    """An optimizer's moments go through a checkpoint of the other layout and back."""
    fields = {"v_head_dim": 24}

    def inner(optimizer: Any) -> torch.optim.Optimizer:
        return getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer

    for split, layout in ((False, "split"), (True, "combined")):

        def trained(split: bool = split, layout: str = layout) -> tuple[Any, Any, dict[str, Any]]:
            model = absorbed_model(None, spec=lambda c: absorbed_spec(c, split=split), **fields)
            set_checkpoint_layout(model, kv_up=layout)
            wrapped = wrap_with_ddp(model)
            optimizer = build_optimizer(wrapped)
            schedule_step(wrapped, [random_batch()], optimizer)
            return model, optimizer, {"optimizer": optimizer.sharded_state_dict(model.sharded_state_dict())}

        def moments(model: Any, optimizer: Any) -> dict[str, Tensor]:
            state = inner(optimizer).state
            return {name: state[parameter]["exp_avg"].clone() for name, parameter in model.named_parameters()}

        model, optimizer, state = trained()
        before = moments(model, optimizer)
        with tempfile.TemporaryDirectory() as folder:
            dist_checkpointing.save(state, folder)
            model, optimizer, state = trained()
            for moment in moments(model, optimizer):
                assert before[moment].norm() > 0, moment
            for held in inner(optimizer).state.values():
                held["exp_avg"].zero_()
            optimizer.load_state_dict(dist_checkpointing.load(state, folder)["optimizer"])
        for name, moment in moments(model, optimizer).items():
            assert torch.equal(moment, before[name]), name


def two_processes() -> Iterator[tuple[str, Any]]:
    """Each case in a layout of two ranks beside plain MLA in one process."""
    cases: dict[str, tuple[dict[str, Any], list[Batch]]] = {
        "BSHD": ({}, [random_batch(2, 32), random_batch(2, 32, seed=1)]),
        "BSHD, norms": ({"qk_layernorm": True}, [random_batch(2, 32)]),
        "BSHD, no query latent": ({"q_lora_rank": None}, [random_batch(2, 32)]),
        "BSHD, NoPE": ({"qk_pos_emb_head_dim": 0}, [random_batch(2, 32)]),
        "THD": ({}, [packed_batch(DOCUMENTS, multiple=8)]),
    }
    with parallel.model_parallel():
        plains = {name: plain_model(**fields) for name, (fields, _) in cases.items()}
        reference = {name: plain_step(plains[name], batches) for name, (_, batches) in cases.items()}
    runs: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        # case, what is added, fields of the absorbed model, options of its spec
        ("BSHD", "", {}, {}),
        ("BSHD", "recompute up-projection", selective("mla_up_proj"), {"split": True}),
        ("BSHD, norms", "", {}, {}),
        ("BSHD, no query latent", "recompute full", FULL, {}),
        ("BSHD, NoPE", "split", {}, {"split": True}),
        ("THD", "", {}, {}),
        ("THD", "recompute both", selective("core_attn", "mla_up_proj"), {"split": True}),
    ]
    folder = _shared_folder()
    for layout in ({"tp": 2, "sp": True}, {"cp": 2}):
        label = "TP2-SP" if "tp" in layout else "CP2"
        with parallel.model_parallel(tp=layout.get("tp", 1), cp=layout.get("cp", 1)):
            for case, added, own, options in runs:
                fields, batches = cases[case]
                ours = _in_layout({**fields, **layout, **own}, options, plains[case])
                loss, gradients = reference[case]
                step = schedule_step(wrap_with_ddp(ours), batches)
                assert abs(step.loss - loss) < 1e-5
                name = ", ".join(filter(None, (label, case, added)))
                yield name, compare(combined(step.gradients, ours.config), gradients)
            if "tp" in layout:
                fields, batches = cases["BSHD"]
                ours = _in_layout({**fields, **layout}, {}, None, down=ColumnParallelLinear)
                step = schedule_step(wrap_with_ddp(ours), batches)
                loss, gradients = reference["BSHD"]
                yield "TP2-SP, column-parallel down-projections", compare(step.gradients, gradients)
                yield "TP2-SP, checkpoints", _checkpoints_between_layouts(folder, layout)


def _in_layout(fields: dict[str, Any], options: dict[str, Any], whole: Any, down: Any = None) -> Any:
    """Absorbed MLA in the present layout, with the weights of the plain model `whole`.

    Megatron's MLA cannot be built on a CPU with context parallelism; under tensor parallelism its shards are loaded.
    """

    def spec(config: Any) -> ModuleSpec:
        made = absorbed_spec(config, **options)
        if down is not None:
            made.submodules = dataclasses.replace(made.submodules, linear_q_down_proj=down, linear_kv_down_proj=down)
        return made

    if down is not None:
        return absorbed_model(None, spec=spec, **fields)
    if "tp" in fields:
        whole = plain_model(**{name: value for name, value in fields.items() if not name.startswith("recompute")})
    return absorbed_model(whole.state_dict(), spec=spec, **fields)


def _shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    with parallel.model_parallel():
        dist.broadcast_object_list(folder, src=0)
    return folder[0]


def _checkpoints_between_layouts(folder: str, layout: dict[str, Any]) -> None:
    """Saved by two tensor-parallel ranks of plain MLA, loaded combined and split, and back; then in split layout."""
    fields = {"v_head_dim": 24, **layout}
    plain = plain_model(**fields)
    weights = full_parameters(plain)
    save_checkpoint(plain, Path(folder) / "plain")

    def loaded(split: bool, name: str, **chosen: str) -> Any:
        model = absorbed_model(None, spec=lambda c: absorbed_spec(c, split=split), **fields)
        seed_parameters(model, 1)
        if chosen:
            set_checkpoint_layout(model, **chosen)
        load_checkpoint(model, Path(folder) / name)
        got = combined(full_parameters(model), model.config)
        for key, value in weights.items():
            assert torch.equal(got[key], value), (split, name, key)
        return model

    for split in (False, True):
        ours = loaded(split, "plain")
        save_checkpoint(ours, Path(folder) / f"combined{split}")
        set_checkpoint_layout(ours, kv_up="split")
        save_checkpoint(ours, Path(folder) / f"split{split}")
    for split in (False, True):
        loaded(split, f"combined{not split}")
        loaded(split, f"split{not split}", kv_up="split")
    seed_parameters(plain, 1)
    load_checkpoint(plain, Path(folder) / "combinedTrue")
    for key, value in full_parameters(plain).items():
        assert torch.equal(value, weights[key]), key
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
