"""Tiny megatron configurations that train on a CPU; any field can be overridden."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = ["dsa_config", "gpt_config", "mla_config", "nope_dsa_config"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_MLA_FIELDS: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "rotary_percent": 1.0,
}
_DSA_FIELDS: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
    "dsa_indexer_loss_coeff": 0.1,
}


def gpt_config(
    dtype: str = "fp32", *, tp: int = 1, cp: int = 1, pp: int = 1, sp: bool = False, **fields: Any
) -> TransformerConfig:
    """A dense two-layer GPT with grouped-query attention: hidden 64, 4 heads, 2 groups, RMSNorm, SwiGLU.

    Args:
        dtype: "fp32" or "bf16", of parameters and activations.
        tp, cp, pp, sp: tensor-, context- and pipeline-parallel sizes, and sequence parallelism.
        fields: any field of ``TransformerConfig``, over the defaults here.

    Raises:
        ValueError: ``dtype`` is neither, or the installed release has no such field.
    """
    return _build(TransformerConfig, _common_fields(dtype, tp, cp, pp, sp) | {"num_query_groups": 2}, fields)


def mla_config(
    dtype: str = "fp32", *, tp: int = 1, cp: int = 1, pp: int = 1, sp: bool = False, **fields: Any
) -> MLATransformerConfig:
    """:func:`gpt_config` with multi-latent attention: latents of 32, heads of 16 + 8 rotary, values of 16."""
    return _build(MLATransformerConfig, _common_fields(dtype, tp, cp, pp, sp) | _MLA_FIELDS, fields)


def dsa_config(
    dtype: str = "bf16",
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    sp: bool = False,
    kernel_backend: str = "none",
    **fields: Any,
) -> MLATransformerConfig:
    """:func:`mla_config` with sparse attention: 4 index heads of 16, 8 tokens a query, indexer loss x 0.1.

    Args:
        dtype: "bf16" or "fp32". The Hadamard rotation of the index is for bf16 only: fp32 turns it off where the
            release has a switch (0.19); before, only the CPU shim's stand-in takes fp32.
        kernel_backend: ``dsa_kernel_backend``, set after construction: megatron refuses a fused backend without
            CUDA there, but not later. Its fused functions then run, see
            :func:`mcore_patches.cpu.models.fused_indexer_declined`.
        tp, cp, pp, sp, fields: as in :func:`gpt_config`.

    Raises:
        ValueError: the release lacks a field, or kernel backends altogether.
    """
    defaults = _common_fields(dtype, tp, cp, pp, sp) | _MLA_FIELDS | _DSA_FIELDS
    known = _field_names(MLATransformerConfig)
    if cp > 1:
        defaults["cp_comm_type"] = "allgather"
    # The switch is 0.19's; on older releases the patch dsa_parallel adds it, for configs that opt in.
    has_switch = (MAJOR, MINOR) >= (0, 19) or fields.get("dsa_kernel_backend", "none") != "none"
    if dtype == "fp32" and "dsa_indexer_rotate_activation" in known and has_switch:
        defaults["dsa_indexer_rotate_activation"] = False
    config = _build(MLATransformerConfig, defaults, fields)
    if kernel_backend != "none":
        if "dsa_kernel_backend" not in known:
            raise ValueError(f"kernel_backend={kernel_backend!r}: this megatron-core release has no dsa_kernel_backend")
        config.dsa_kernel_backend = kernel_backend
    return config


def nope_dsa_config(dtype: str = "bf16", **options: Any) -> MLATransformerConfig:
    """:func:`dsa_config` without rotary channels and with a latent of 512: absorbed attention 512 wide (0.19)."""
    return dsa_config(dtype, **{"kv_lora_rank": 512, "qk_pos_emb_head_dim": 0, **options})


def _common_fields(dtype: str, tp: int, cp: int, pp: int, sp: bool) -> dict[str, Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {sorted(_DTYPES)}")
    return {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "bf16": dtype == "bf16",
        "params_dtype": _DTYPES[dtype],
        "pipeline_dtype": _DTYPES[dtype],
        # Each of these fusions is a CUDA kernel.
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": sp,
    }


def _build(config_class: type, defaults: dict[str, Any], fields: dict[str, Any]) -> Any:
    unknown = sorted(set(fields) - _field_names(config_class))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no such field of {config_class.__name__} in this megatron-core release"
        )
    return config_class(**{**defaults, **fields})


def _field_names(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}
