"""What QSA layers run with, as data: `refusal` enforces it, `support_matrix_markdown` prints it.

Along every axis exactly one choice holds for a given setup. All combinations of supported choices run, `EXCLUDED`
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mcore_patches.overlay.versions import Releases, parse


@dataclass(frozen=True)
class Setup:
    """What is asked for.

    config: a `TransformerConfig`. layout: "bshd" or "thd", known from the forward pass on, else None.
    """

    config: Any
    layout: str | None = None


@dataclass(frozen=True)
class Choice:
    """One value of an axis. why_not: empty if supported, else the reason. note: a condition on a supported one."""

    axis: str
    name: str
    holds: Callable[[Setup], bool]
    why_not: str = ""
    note: str = ""


@dataclass(frozen=True)
class Excluded:
    """Choices (axis -> names), each supported alone, that do not run together; on these releases, None is all."""

    choices: Mapping[str, tuple[str, ...]]
    why_not: str
    releases: Releases | None = None


def _config(holds: Callable[[Any], bool]) -> Callable[[Setup], bool]:
    return lambda setup: holds(setup.config)


def _cp_comm_types(config: Any) -> list[str]:
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    return [kind.replace("_", "").lower() for kind in kinds if kind is not None]


def _all_gather(config: Any) -> bool:
    return all(kind == "allgather" for kind in _cp_comm_types(config))


def _virtual_stages(config: Any) -> int:
    return config.virtual_pipeline_model_parallel_size or 1


def _recomputes(config: Any) -> tuple[str, ...]:
    if config.recompute_granularity == "selective":
        return tuple(config.recompute_modules or ())
    return (config.recompute_granularity or "none",)


CHOICES = (
    Choice("layout", "BSHD", lambda setup: setup.layout == "bshd"),
    Choice(
        "layout",
        "THD",
        lambda setup: setup.layout == "thd",
        note="documents of any length; padded to a multiple of 2 CP (x TP with SP) where that is above 1",
    ),
    Choice("TP", "1", _config(lambda c: c.tensor_model_parallel_size == 1)),
    Choice(
        "TP",
        "> 1",
        _config(lambda c: c.tensor_model_parallel_size > 1 and not c.sequence_parallel),
        note="also above the number of KV heads",
    ),
    Choice("TP", "> 1 with SP", _config(lambda c: c.tensor_model_parallel_size > 1 and c.sequence_parallel)),
    Choice("CP", "1", _config(lambda c: c.context_parallel_size == 1)),
    Choice(
        "CP",
        "> 1, all-gather",
        _config(lambda c: c.context_parallel_size > 1 and _all_gather(c)),
        note="`cp_comm_type` None or 'all_gather'; zigzag layout",
    ),
    Choice(
        "CP",
        "> 1, p2p or a2a",
        _config(lambda c: c.context_parallel_size > 1 and not _all_gather(c)),
        "selected blocks may lie on any rank, so keys and values are gathered: set cp_comm_type=None or 'all_gather'",
    ),
    Choice("PP", "1", _config(lambda c: c.pipeline_model_parallel_size == 1)),
    Choice("PP", "> 1", _config(lambda c: c.pipeline_model_parallel_size > 1 and _virtual_stages(c) == 1)),
    Choice("PP", "> 1, interleaved", _config(lambda c: c.pipeline_model_parallel_size > 1 and _virtual_stages(c) > 1)),
    Choice("recompute", "none", _config(lambda c: _recomputes(c) in (("none",), ()))),
    Choice(
        "recompute",
        "full, uniform",
        _config(lambda c: _recomputes(c) == ("full",) and c.recompute_method == "uniform"),
        note="replays the routes",
    ),
    Choice(
        "recompute",
        "full, block",
        _config(lambda c: _recomputes(c) == ("full",) and c.recompute_method == "block"),
        note="replays the routes; megatron does not recompute MTP layers by it",
    ),
    Choice(
        "recompute",
        "selective, core_attn",
        _config(lambda c: "core_attn" in _recomputes(c)),
        note="replays the routes",
    ),
    Choice(
        "recompute",
        "selective, other modules",
        _config(
            lambda c: (
                c.recompute_granularity == "selective" and bool(_recomputes(c)) and "core_attn" not in _recomputes(c)
            )
        ),
        note="megatron's own, outside the attention; tested with 'mlp'",
    ),
    Choice("MTP", "none", _config(lambda c: not c.mtp_num_layers)),
    Choice("MTP", "layers", _config(lambda c: bool(c.mtp_num_layers)), note="their indexers train, too"),
    Choice("dtype", "fp32", _config(lambda c: not (c.bf16 or c.fp16 or c.fp8 or c.fp4))),
    Choice("dtype", "bf16", _config(lambda c: c.bf16 and not (c.fp8 or c.fp4))),
    Choice("dtype", "fp16", _config(lambda c: c.fp16 and not (c.fp8 or c.fp4))),
    Choice(
        "dtype",
        "fp8 or fp4",
        _config(lambda c: bool(c.fp8 or c.fp4)),
        "its checkpointing and quantised projections are untested with QSA: unset fp8 and fp4",
    ),
)

# (name, when it is asked for, why not)
FEATURES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "multi-latent attention",
        lambda c: c.multi_latent_attention,
        "QSA is grouped-query attention: set multi_latent_attention=False",
    ),
    ("attention dropout", lambda c: c.attention_dropout != 0, "the sparse attention has none: set attention_dropout=0"),
    (
        "sliding windows",
        lambda c: c.window_size is not None,
        "the selection takes the place of a window: set window_size=None",
    ),
    ("attention sinks", lambda c: c.softmax_type != "vanilla", "QSA's softmax has no sink: set softmax_type='vanilla'"),
    (
        "interleaved rotary embedding",
        lambda c: c.rotary_interleaved,
        "QSA rotates half-split pairs: set rotary_interleaved=False",
    ),
    (
        "q and k norms other than RMS norm",
        lambda c: c.qk_l2_norm or (c.qk_layernorm and c.normalization != "RMSNorm"),
        "QSA norms q and k by RMS: set normalization='RMSNorm' and qk_l2_norm=False",
    ),
    (
        "largest attention logits",
        lambda c: c.qk_clip or c.log_max_attention_logit,
        "the sparse attention does not keep the largest logits: set qk_clip=False and log_max_attention_logit=False",
    ),
    (
        "query-key layer scaling",
        lambda c: c.apply_query_key_layer_scaling,
        "the indexer's teacher would see other scores: set apply_query_key_layer_scaling=False",
    ),
    (
        "fused QKV rotary embedding",
        lambda c: c.fused_single_qkv_rope,
        "q, k, v are needed apart: set fused_single_qkv_rope=False",
    ),
    ("Kitchen attention", lambda c: c.use_kitchen, "QSA brings its own attention: set use_kitchen=False"),
    (
        "CUDA graphs",
        lambda c: c.cuda_graph_impl != "none",
        "routes of a recomputation are kept on the host: set cuda_graph_impl='none'",
    ),
    (
        "offloading of attention activations",
        lambda c: (
            c.fine_grained_activation_offloading
            and bool({"qkv_linear", "core_attn", "attn_proj"} & set(c.offload_modules or ()))
        ),
        "not built: take qkv_linear, core_attn and attn_proj out of offload_modules",
    ),
    ("CPU offloading of activations", lambda c: c.cpu_offloading, "not built: set cpu_offloading=False"),
    (
        "dynamic or hierarchical context parallelism",
        lambda c: bool(
            c.hybrid_context_parallel
            or getattr(c, "dynamic_context_parallel", False)
            or c.hierarchical_context_parallel_sizes
        ),
        "the layout of a sequence over ranks must be the zigzag of one group: unset hybrid_context_parallel, "
        "dynamic_context_parallel and hierarchical_context_parallel_sizes",
    ),
    (
        "inference-optimised layers",
        lambda c: c.transformer_impl == "inference_optimized" or c.flash_decode,
        "QSA layers train and evaluate only: set transformer_impl='transformer_engine' or 'local', flash_decode=False",
    ),
)

EXCLUDED = (
    Excluded(
        MappingProxyType({"layout": ("THD",), "CP": ("> 1, all-gather",), "rotary": ("multimodal",)}),
        "megatron cuts a multimodal rotary table without regard to document boundaries",
    ),
    Excluded(
        MappingProxyType({"layout": ("THD",), "recompute": ("full, uniform",), "MTP": ("layers",)}),
        "megatron's checkpoint of an MTP layer does not take packed_seq_params",
        Releases((0, 16, 0), (0, 18, 0)),
    ),
    Excluded(
        MappingProxyType({"recompute": ("full, uniform", "full, block"), "MTP": ("layers",)}),
        "megatron's checkpoint of an MTP layer does not take the padding_mask that it is given",
        Releases((0, 18, 0), (0, 19, 0)),
    ),
)


def refusal(setup: Setup) -> str | None:
    """Why this setup does not run: the first reason, naming the choice; None if it does."""
    for feature, asked, why_not in FEATURES:
        if asked(setup.config):
            return f"QSA does not support {feature}: {why_not}"
    held = {choice.axis: choice for choice in CHOICES if choice.holds(setup)}
    for choice in held.values():
        if choice.why_not:
            return f"QSA does not support {choice.axis} {choice.name}: {choice.why_not}"
    names = {axis: choice.name for axis, choice in held.items()}
    names["rotary"] = "multimodal" if setup.config.mrope_section is not None else "plain"
    for excluded in EXCLUDED:
        if all(names.get(axis) in allowed for axis, allowed in excluded.choices.items()) and _concerns_us(excluded):
            together = " with ".join(f"{axis} {names[axis]}" for axis in excluded.choices)
            return f"QSA does not support {together}{_on_releases(excluded)}: {excluded.why_not}"
    return None


def _concerns_us(excluded: Excluded) -> bool:
    # Not at the top: the fields are read before megatron is imported.
    from megatron.core.package_info import __version__

    return excluded.releases is None or parse(__version__).release in excluded.releases


def _on_releases(excluded: Excluded) -> str:
    return "" if excluded.releases is None else f" on megatron-core {excluded.releases}"


def support_matrix_markdown() -> str:
    """The support matrix for the README: axes and choices, excluded combinations, refused features."""
    lines = ["| axis | choice | runs | why not, or a condition |", "| --- | --- | --- | --- |"]
    for choice in CHOICES:
        lines.append(
            f"| {choice.axis} | {choice.name} | {'no' if choice.why_not else 'yes'} | {choice.why_not or choice.note} |"
        )
    lines += ["", "Every combination of choices that run runs, except:", ""]
    for excluded in EXCLUDED:
        together = ", ".join(f"{axis} {' or '.join(names)}" for axis, names in excluded.choices.items())
        lines.append(f"- {together}{_on_releases(excluded)}: {excluded.why_not}.")
    lines += ["", "Refused when the config is built:", ""]
    lines += [f"- {feature}: {why_not}." for feature, _, why_not in FEATURES]
    lines += ["", "Inference, static or dynamic, is refused in the forward pass."]
    return "\n".join(lines)
