"""Which configurations and calls absorbed MLA refuses, each with the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from mcore_patches.attention.dsa.adapters import has_fused_norm

__all__ = ["check_call", "check_config", "check_norms", "recomputes_up_projection"]

_ADVICE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "multi_latent_attention",
        lambda c: not c.multi_latent_attention,
        "there is no latent to attend over; set it to True (MLATransformerConfig)",
    ),
    (
        "add_bias_linear",
        lambda c: c.add_bias_linear,
        "the up-projections are absorbed as matrices; set it to False",
    ),
    (
        "sequence_parallel",
        lambda c: c.tensor_model_parallel_size > 1 and not c.sequence_parallel,
        "the latent's gradient is summed over tensor-parallel ranks by sequence parallelism; set it to True with "
        "tensor_model_parallel_size > 1",
    ),
    (
        "cache_mla_latents",
        lambda c: c.cache_mla_latents,
        "layers train and evaluate only, latents are not cached for inference; set it to False",
    ),
    (
        "qk_l2_norm",
        lambda c: c.qk_l2_norm,
        "heads have no keys of their own to norm; set it to False",
    ),
    (
        "rotary_interleaved",
        lambda c: c.rotary_interleaved,
        "MLA rotates neighbouring channels anyway; set it to False",
    ),
    (
        "qk_clip",
        lambda c: c.qk_clip,
        "the largest logits are not kept; set it to False",
    ),
    (
        "log_max_attention_logit",
        lambda c: c.log_max_attention_logit,
        "the largest logits are not kept; set it to False",
    ),
    (
        "fp8_param",
        lambda c: getattr(c, "fp8_param", False),
        "the absorbed up-projection must be a plain matrix; set it to False",
    ),
    (
        "recompute_modules",
        lambda c: recomputes_up_projection(c) and bool(c.fp8 or getattr(c, "fp4", None)),
        "the up-projection is not recomputed under fp8 or fp4; take 'mla_up_proj' out of it, or unset fp8 and fp4",
    ),
    (
        "offload_modules",
        lambda c: (
            getattr(c, "fine_grained_activation_offloading", False)
            and bool({"qkv_linear", "core_attn", "attn_proj"} & set(c.offload_modules or ()))
        ),
        "offloading of the attention's activations is not built; take qkv_linear, core_attn and attn_proj out of it",
    ),
)


def recomputes_up_projection(config: Any) -> bool:
    return config.recompute_granularity == "selective" and "mla_up_proj" in (config.recompute_modules or ())


def check_config(config: Any) -> None:
    """Refuse what absorbed MLA does not support.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    for field, refused, why in _ADVICE:
        if refused(config):
            raise ValueError(f"{field}={getattr(config, field)!r}: absorbed MLA does not support it: {why}")


def check_norms(layer: Any) -> None:
    """Refuse norms of the latents that would be skipped: absorbed weights are read, their layers never called.

    Args:
        layer: an `AbsorbedMLASelfAttention` whose projections and norms are built.

    Raises:
        ValueError: names the submodule and what is allowed.
    """
    names = ("linear_kv_up_proj", "linear_k_up_proj", "linear_v_up_proj", "linear_q_up_proj", "linear_q_proj")
    for name in names:
        linear = getattr(layer, name, None)
        if linear is not None and has_fused_norm(linear):
            raise ValueError(
                f"{name}={type(linear).__name__}: absorbed MLA norms latents apart from the projections; must be a "
                "linear layer without a norm, with q_layernorm and kv_layernorm among the submodules"
            )
    if not layer.config.qk_layernorm:
        return
    for name in ("kv_layernorm",) if layer.config.q_lora_rank is None else ("q_layernorm", "kv_layernorm"):
        if isinstance(getattr(layer, name), IdentityOp):
            raise ValueError(f"{name}=IdentityOp with qk_layernorm=True: must be a norm, or set qk_layernorm to False")


def check_call(inference: Mapping[str, Any], unsupported: Mapping[str, Any], packed_seq_params: Any) -> None:
    """Refuse arguments of a forward call.

    Raises:
        NotImplementedError: one of the arguments for inference is given.
        ValueError: one that MLA does not take is given, or documents are packed in another format than 'thd'.
    """
    for name, argument in inference.items():
        if argument is not None:
            raise NotImplementedError(
                f"{name}={type(argument).__name__}: absorbed MLA trains and evaluates only, latents are not cached for "
                "inference; must be None"
            )
    for name, argument in unsupported.items():
        if argument is not None:
            raise ValueError(f"{name}={type(argument).__name__}: absorbed MLA does not take it; must be None")
    if packed_seq_params is None:
        return
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(
            f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r}: absorbed MLA takes packed documents only; "
            "must be 'thd'"
        )
    # Releases differ in whether they have these fields.
    for field in ("local_cp_size", "cp_group"):
        given = getattr(packed_seq_params, field, None)
        if given is not None:
            raise ValueError(
                f"packed_seq_params.{field}={given!r}: absorbed MLA does not support dynamic context parallelism; "
                "must be None"
            )
