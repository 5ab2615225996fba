"""Module specs with QSA attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_patches.attention.qsa.attention import BlockSparseCore, QSASelfAttention
from mcore_patches.attention.qsa.config import uses_qsa
from mcore_patches.attention.qsa.indexer import QKNorm

__all__ = ["get_qsa_module_spec_for_backend", "with_qsa_attention"]


def get_qsa_module_spec_for_backend(config: Any, backend: Any) -> ModuleSpec:
    """Spec of a QSA self-attention.

    Args:
        config: a `TransformerConfig` with `qsa_indexer_n_heads`; q and k are normed if `qk_layernorm`.
        backend: a megatron `BackendSpecProvider`.

    Returns:
        A spec for a layer with an input norm of its own: the indexer reads the normed hidden states.
    """
    norm = _qk_norm(backend) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=QSASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=BlockSparseCore,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def with_qsa_attention(stack: ModuleSpec, config: Any, backend: Any) -> ModuleSpec:
    """A copy of a hybrid (or mamba) stack's spec whose attention layers, "*" in the pattern, are QSA layers.

    Raises:
        ValueError: the spec has no attention layer.
    """
    layer = getattr(stack.submodules, "attention_layer", None)
    if not isinstance(layer, ModuleSpec):
        raise ValueError(f"with_qsa_attention: the spec of {stack.module.__name__} has no attention_layer to replace")
    rms_norm = config.normalization == "RMSNorm"
    layer = dataclasses.replace(
        layer,
        submodules=dataclasses.replace(
            layer.submodules,
            input_layernorm=backend.layer_norm(rms_norm=rms_norm, for_qk=False),
            self_attention=get_qsa_module_spec_for_backend(config, backend),
        ),
    )
    return dataclasses.replace(stack, submodules=dataclasses.replace(stack.submodules, attention_layer=layer))


def check_is_qsa(layer: SelfAttention, config: Any) -> None:
    """Refuse megatron's own self-attention in a model whose config asks for QSA: it would train dense without a word.

    Most of megatron's spec functions (get_gpt_layer_..._spec) do not look at the variant.

    Raises:
        ValueError: the config uses QSA and the layer is another self-attention.
    """
    if uses_qsa(config) and not isinstance(layer, QSASelfAttention):
        raise ValueError(
            f"qsa_indexer_n_heads={config.qsa_indexer_n_heads} asks for QSA, but the model's spec has "
            f"{type(layer).__name__}: build it with get_transformer_block_with_experimental_attention_variant_spec, or "
            f"put mcore_patches.attention.qsa.get_qsa_module_spec_for_backend into a spec of your own. Layers that are "
            f"to stay dense take a config without QSA"
        )


def _qk_norm(backend: Any) -> Any:
    """Transformer Engine's fused norm where the backend has it; others know no zero-centred weight."""
    norm = backend.layer_norm(rms_norm=True, for_qk=True)
    return norm if norm.__module__.startswith("megatron.core.extensions.transformer_engine") else QKNorm
