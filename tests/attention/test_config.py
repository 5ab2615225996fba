"""Fields, their checks, and the support matrix."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_patches.attention.qsa.config import FIELDS, STAGES, fields_markdown, uses_qsa
from mcore_patches.attention.qsa.support import CHOICES, EXCLUDED, FEATURES, Setup, refusal, support_matrix_markdown
from mcore_patches.cpu.models import gpt_config
from tests import readme_tables
from tests.attention.tiny import FULL, packed_params, qsa_config, qsa_layer, qsa_spec, rotary_table, run_layer

pytestmark = pytest.mark.usefixtures("megatron")


def test_fields_are_those_of_a_dataclass() -> None:
    names = [field.name for field in FIELDS]
    for cls in (TransformerConfig, MLATransformerConfig):
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        assert {name: fields[name] for name in names} == {field.name: field.default for field in FIELDS}
        assert set(names) <= set(inspect.signature(cls).parameters)


def test_config_survives_replace_deepcopy_and_pickle() -> None:
    config = qsa_config(qsa_indexer_budget=12)
    assert dataclasses.replace(config, qsa_stage="warmup").qsa_stage == "warmup"
    for twin in (dataclasses.replace(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (twin.qsa_indexer_budget, twin.qsa_indexer_n_heads, twin.qsa_stage) == (12, 4, "sparse")
    with pytest.raises(ValueError, match="qsa_stage='dense': must be one of 'frozen', 'warmup', 'sparse'"):
        dataclasses.replace(config, qsa_stage="dense")


def test_subclasses_take_and_check_the_fields() -> None:
    @dataclasses.dataclass
    class Provider(TransformerConfig):
        seq_length: int = 8

    given = {f.name: getattr(qsa_config(), f.name) for f in dataclasses.fields(TransformerConfig) if f.init}
    assert Provider(**given, seq_length=9).qsa_indexer_n_heads == 4
    with pytest.raises(ValueError, match="qsa_indexer_kv_heads=2"):
        Provider(**{**given, "qsa_indexer_kv_heads": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qsa_indexer_n_heads": None}, "qsa_indexer_n_heads=None: .* needs the number of index heads"),
        ({"experimental_attention_variant": None}, "qsa_indexer_n_heads=4 with experimental_attention_variant=None"),
        (
            {"linear_attention_freq": 4},
            "linear_attention_freq=4 .* set experimental_attention_variant='gated_delta_net'",
        ),
        ({"qsa_indexer_n_heads": 0}, "qsa_indexer_n_heads=0: must be an int of at least 1"),
        ({"qsa_indexer_n_heads": True}, "qsa_indexer_n_heads=True: must be an int"),
        ({"qsa_indexer_kv_heads": 2}, "qsa_indexer_kv_heads=2: must be 1"),
        ({"qsa_indexer_head_dim": 15}, "qsa_indexer_head_dim=15: must be even"),
        ({"qsa_indexer_budget": 9}, "qsa_indexer_budget=9: must be a multiple of qsa_indexer_compress_ratio=4"),
        ({"qsa_indexer_compress_ratio": 0}, "qsa_indexer_compress_ratio=0: must be an int of at least 1"),
        ({"num_query_groups": 3}, "num_query_groups=3: must divide num_attention_heads=4"),
        ({"qsa_stage": "dense"}, "qsa_stage='dense': must be one of"),
        ({"qsa_indexer_loss_reduction": "max"}, "qsa_indexer_loss_reduction='max': must be one of 'mean', 'sum'"),
        ({"qsa_indexer_detach_input": 1}, "qsa_indexer_detach_input=1: must be True or False"),
        ({"qsa_indexer_loss_coeff": None}, "qsa_indexer_loss_coeff=None: qsa_stage='sparse' trains the indexer"),
        ({"qsa_indexer_loss_coeff": 0.0}, "qsa_indexer_loss_coeff=0.0: .* above 0"),
        ({"qsa_indexer_loss_coeff": float("nan")}, "qsa_indexer_loss_coeff=nan"),
        (
            {"qsa_stage": "frozen", "qsa_indexer_loss_coeff": 0.1},
            "qsa_indexer_loss_coeff=0.1: must be None with qsa_stage='frozen'",
        ),
        (
            {"qsa_indexer_loss_reduction": "sum", "calculate_per_token_loss": True},
            "qsa_indexer_loss_reduction='sum' with calculate_per_token_loss=True",
        ),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_each_fault_has_one_clear_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qsa_config(**fields)


def test_configs_without_qsa_are_left_alone() -> None:
    config = gpt_config(attention_dropout=0.5)
    assert config.qsa_indexer_n_heads is None


@pytest.mark.parametrize(
    ("field", "value"), [("qsa_stage", "warmup"), ("qsa_indexer_loss_coeff", 0.1), ("qsa_indexer_kv_heads", 7)]
)
def test_fields_that_nothing_uses_are_refused(field: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"{field}={value!r} without qsa_indexer_n_heads, so that nothing would use it"
    ):
        gpt_config(**{field: value})


def test_configs_without_attention_are_no_qsa() -> None:
    """Megatron's schedules, which the patch wraps, also run models whose config knows no attention."""
    assert not uses_qsa(ModelParallelConfig())


REFUSED = {
    "multi-latent attention": {"multi_latent_attention": True},
    "attention dropout": {"attention_dropout": 0.1},
    "sliding windows": {"window_size": (64, 0)},
    "attention sinks": {"softmax_type": "off-by-one"},
    "interleaved rotary embedding": {"rotary_interleaved": True},
    "q and k norms other than RMS norm": {"normalization": "LayerNorm"},
    "largest attention logits": {"qk_clip": True},
    "query-key layer scaling": {"apply_query_key_layer_scaling": True},
    "fused QKV rotary embedding": {"fused_single_qkv_rope": True},
    "Kitchen attention": {"use_kitchen": True},
    "CUDA graphs": {"cuda_graph_impl": "local"},
    "offloading of attention activations": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
    },
    "CPU offloading of activations": {"cpu_offloading": True},
    "dynamic or hierarchical context parallelism": {"hybrid_context_parallel": True},
    "inference-optimised layers": {"flash_decode": True},
}


def test_every_refused_feature_is_listed_here() -> None:
    assert set(REFUSED) == {feature for feature, _, _ in FEATURES}


@pytest.mark.parametrize("feature", REFUSED)
def test_refused_features_name_the_setting_to_change(feature: str) -> None:
    config = qsa_config()
    assert refusal(Setup(config)) is None
    # Set afterwards: megatron has checks of its own on some of them.
    for name, value in REFUSED[feature].items():
        setattr(config, name, value)
    message = refusal(Setup(config))
    assert message is not None
    assert message.startswith(f"QSA does not support {feature}: ")
    assert any(name in message for name in REFUSED[feature])
    with pytest.raises(ValueError, match=re.escape(message)):
        qsa_layer(config)


CHOSEN: dict[tuple[str, str], dict[str, Any]] = {
    ("TP", "1"): {},
    ("TP", "> 1"): {"tp": 2},
    ("TP", "> 1 with SP"): {"tp": 2, "sp": True},
    ("CP", "1"): {},
    ("CP", "> 1, all-gather"): {"cp": 2, "cp_comm_type": ["all_gather", "allgather"]},
    ("CP", "> 1, p2p or a2a"): {"cp": 2, "cp_comm_type": "p2p"},
    ("PP", "1"): {},
    ("PP", "> 1"): {"pp": 2},
    ("PP", "> 1, interleaved"): {"pp": 2, "num_layers": 4, "virtual_pipeline_model_parallel_size": 2},
    ("recompute", "none"): {},
    ("recompute", "full, uniform"): FULL,
    ("recompute", "full, block"): {**FULL, "recompute_method": "block"},
    ("recompute", "selective, core_attn"): {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ("recompute", "selective, other modules"): {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm"],
    },
    ("MTP", "none"): {},
    ("MTP", "layers"): {"mtp_num_layers": 1},
    ("dtype", "fp32"): {},
    ("dtype", "bf16"): {"dtype": "bf16"},
    ("dtype", "fp16"): {"fp16": True},
}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.axis}-{choice.name}")
def test_support_matrix_is_what_construction_enforces(choice: Any) -> None:
    key = (choice.axis, choice.name)
    if choice.axis == "layout":
        assert refusal(Setup(qsa_config(), choice.name.lower())) is None
        assert [c for c in CHOICES if c.axis == "layout" and c.holds(Setup(None, choice.name.lower()))] == [choice]
        return
    if key == ("dtype", "fp8 or fp4"):  # megatron itself wants Transformer Engine for it
        config = qsa_config()
        config.fp8 = "hybrid"
        assert refusal(Setup(config)) == f"QSA does not support dtype fp8 or fp4: {choice.why_not}"
        return
    if choice.why_not:
        with pytest.raises(ValueError, match=re.escape(f"QSA does not support {choice.axis} {choice.name}: ")):
            qsa_config(**CHOSEN[key])
        return
    config = qsa_config(**CHOSEN[key])
    held = [c.name for c in CHOICES if c.axis == choice.axis and c.holds(Setup(config))]
    assert held == [choice.name]


def test_excluded_combinations_are_refused_once_the_layout_is_known() -> None:
    config = qsa_config(cp=2, mrope_section=[2, 1, 1])
    assert refusal(Setup(config, "bshd")) is None
    message = refusal(Setup(config, "thd"))
    assert (
        message
        == f"QSA does not support layout THD with CP > 1, all-gather with rotary multimodal: {EXCLUDED[0].why_not}"
    )
    assert refusal(Setup(qsa_config(mrope_section=[2, 1, 1]), "thd")) is None


@pytest.mark.parametrize(
    ("release", "method", "layout", "reason"),
    [
        ("0.17.1", "uniform", "thd", "does not take packed_seq_params"),
        ("0.17.1", "block", "thd", None),
        ("0.17.1", "uniform", "bshd", None),
        ("0.18.2", "uniform", None, "does not take the padding_mask"),
        ("0.18.2", "block", None, "does not take the padding_mask"),
        ("0.19.2", "uniform", "thd", None),
    ],
)
def test_recomputed_mtp_layers_are_refused_where_megatron_cannot(
    release: str, method: str, layout: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qsa_config(**FULL)
    config.recompute_method, config.mtp_num_layers = method, 1
    monkeypatch.setattr("megatron.core.package_info.__version__", release)
    message = refusal(Setup(config, layout))
    if reason is None:
        assert message is None
    else:
        assert reason in message
        assert f"recompute full, {method} with MTP layers on megatron-core >=" in message


def test_readme_shows_the_fields_and_the_matrix() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert readme_tables.find(text, "qsa-fields")["table"].strip() == fields_markdown()
    assert readme_tables.find(text, "qsa-support")["table"].strip() == support_matrix_markdown()


def test_markdown_has_every_choice_and_reason() -> None:
    text = support_matrix_markdown()
    for choice in CHOICES:
        assert f"| {choice.axis} | {choice.name} | {'no' if choice.why_not else 'yes'} |" in text
    for feature, _, why_not in FEATURES:
        assert f"- {feature}: {why_not}." in text
    assert all(excluded.why_not in text for excluded in EXCLUDED)


@pytest.mark.parametrize(
    "arguments",
    [
        {"inference_context": object()},
        {"inference_params": object()},
        {"rotary_pos_cos": 1},
        {"sequence_len_offset": 1},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_inference_is_refused(arguments: dict[str, Any]) -> None:
    layer = qsa_layer(qsa_config()).eval()
    with pytest.raises(
        NotImplementedError, match=f"{next(iter(arguments))} is given: QSA layers train and evaluate only"
    ):
        layer(torch.zeros(8, 1, 64), None, **arguments)


def test_calls_that_qsa_cannot_serve_are_refused() -> None:
    layer, x = qsa_layer(qsa_config()), torch.zeros(8, 1, 64)
    with pytest.raises(ValueError, match="attention_bias is given"):
        layer(x, None, attention_bias=x)
    with pytest.raises(ValueError, match="key_value_states is given"):
        layer(x, None, key_value_states=x)
    packed = packed_params([8])
    packed.qkv_format = "sbhd"
    with pytest.raises(ValueError, match="qkv_format='sbhd'"):
        layer(x, None, packed_seq_params=packed)
    packed = packed_params([8])
    packed.local_cp_size = 1
    with pytest.raises(ValueError, match="local_cp_size=1: dynamic context parallelism is not supported"):
        layer(x, None, packed_seq_params=packed)
    with pytest.raises(
        ValueError, match="rotary embedding covers 32 channels, index heads have qsa_indexer_head_dim=16"
    ):
        layer(x, None, rotary_pos_emb=rotary_table(8, 32))
    with pytest.raises(ValueError, match="rotary_pos_emb has 9 rows, must have one for each of 8 places"):
        layer(x, None, rotary_pos_emb=rotary_table(9))
    packed = packed_params([3, 5])
    with pytest.raises(RuntimeError, match="rotary_pos_emb has 4 rows, and a document is longer"):
        layer(x, None, rotary_pos_emb=rotary_table(4, packed=True), packed_seq_params=packed)
    layer(x, None, rotary_pos_emb=rotary_table(5, packed=True), packed_seq_params=packed)
    with pytest.raises(ValueError, match="a batch of 2 with packed_seq_params, must be"):
        layer(x.expand(-1, 2, -1), None, packed_seq_params=packed)


@pytest.mark.parametrize("field", ["qsa_indexer_n_heads", "qsa_indexer_head_dim", "qsa_indexer_compress_ratio"])
def test_the_indexer_of_a_built_model_cannot_be_changed(field: str) -> None:
    layer = qsa_layer(qsa_config()).eval()
    built = getattr(layer.config, field)
    setattr(layer.config, field, 2)
    with pytest.raises(ValueError, match=f"{field}=2, but the model was built with {built}"):
        run_layer(layer, torch.zeros(8, 1, 64))


@pytest.mark.parametrize("kind", AttnMaskType)
def test_masks_other_than_causal_ones_are_refused(kind: AttnMaskType) -> None:
    config = qsa_config()
    spec = qsa_spec(config)
    spec.params = {"attn_mask_type": kind}
    if kind in (AttnMaskType.causal, AttnMaskType.padding_causal):
        build_module(spec, config=config, layer_number=1)
    else:
        with pytest.raises(ValueError, match=rf"attn_mask_type={kind}: QSA is causal"):
            build_module(spec, config=config, layer_number=1)


def test_stages_are_those_of_the_field() -> None:
    (stage,) = (field for field in FIELDS if field.name == "qsa_stage")
    assert stage.type.__args__ == STAGES
