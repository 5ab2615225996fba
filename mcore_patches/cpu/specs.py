"""Module specs without Transformer Engine: attention specs, and the layer, block and stack specs around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from mcore_patches.cpu.layers import DuplicatedLinear, Norm

__all__ = [
    "CpuBackend",
    "MLADotProductAttention",
    "block_spec",
    "dsa_attention_spec",
    "gqa_attention_spec",
    "layer_spec",
    "mla_attention_spec",
    "stage_block_spec",
]


class CpuBackend(LocalSpecProvider):
    """Megatron's local backend with the stand-ins for the modules that only Transformer Engine has."""

    def linear(self) -> type:
        return DuplicatedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return Norm


class MLADotProductAttention(DotProductAttention):
    """Megatron's torch attention with the arguments and the value width of multi-latent attention.

    The parent knows neither ``k_channels`` nor ``v_channels`` and takes values to be as wide as keys.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def gqa_attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Self-attention with grouped queries; q and k norms if ``config.qk_layernorm``."""
    backend = CpuBackend()
    qk_norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def mla_attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """Multi-latent attention; norms of the latents if ``config.qk_layernorm``."""
    backend = CpuBackend()
    latent_norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=backend.column_parallel_linear(),
            core_attention=MLADotProductAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def dsa_attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """The release's own DSA spec on the CPU backend: over MLA up to 0.18, over absorbed MLA in 0.19.

    Up to 0.18 the spec asks for up projections fused with the norm, which only Transformer Engine has; they
    are separated here as 0.19 does.
    """
    backend = CpuBackend()
    spec = get_dsa_module_spec_for_backend(config=config, backend=backend)
    if config.qk_layernorm:
        spec.submodules = dataclasses.replace(
            spec.submodules,
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_up_proj=backend.column_parallel_linear(),
            q_layernorm=Norm,
            kv_layernorm=Norm,
        )
    return spec


def layer_spec(attention: ModuleSpec, mlp: Any = None) -> ModuleSpec:
    """A pre-norm transformer layer around a self-attention spec.

    Args:
        attention: spec of the self-attention; it gets the normed input.
        mlp: spec of the feed-forward part; default the dense MLP.
    """
    if mlp is None:
        mlp = get_mlp_module_spec_for_backend(backend=CpuBackend(), num_experts=None)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    config: TransformerConfig, attention: ModuleSpec | Sequence[ModuleSpec], *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage.

    Args:
        attention: one self-attention spec for every layer, or one for each of ``config.num_layers`` layers.
        vp_stage: virtual pipeline stage, with an interleaved pipeline.

    Raises:
        ValueError: another number of specs than layers.
    """
    per_layer = [attention] * config.num_layers if isinstance(attention, ModuleSpec) else list(attention)
    return stage_block_spec(config, [layer_spec(spec) for spec in per_layer], vp_stage=vp_stage)


def stage_block_spec(
    config: TransformerConfig, layers: Sequence[ModuleSpec], *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Cut the specs of all ``config.num_layers`` layers to those of this pipeline stage.

    Raises:
        ValueError: another number of specs than layers.
    """
    if len(layers) != config.num_layers:
        raise ValueError(f"{len(layers)} layer specs for num_layers={config.num_layers}")
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=list(layers[first : first + here]), layer_norm=Norm)
