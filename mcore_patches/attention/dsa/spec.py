"""Module specs with the DSA layers of this package."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerSubmodules, DSAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_patches.attention.dsa.absorbed import AbsorbedMLASelfAttention
from mcore_patches.attention.dsa.absorbed_submodules import AbsorbedMLASelfAttentionSubmodules
from mcore_patches.attention.dsa.config import uses_dsa
from mcore_patches.attention.dsa.core import DSAttention
from mcore_patches.attention.dsa.indexer import DSAIndexer

__all__ = ["get_dsa_module_spec_for_backend", "with_dsa_attention"]


def core_attention_spec(backend: Any) -> ModuleSpec:
    """Spec of the core attention with its indexer, whose projections every tensor-parallel rank holds in full."""
    return ModuleSpec(
        module=DSAttention,
        submodules=DSAttentionSubmodules(
            indexer=ModuleSpec(
                module=DSAIndexer,
                submodules=DSAIndexerSubmodules(
                    linear_wq_b=backend.linear(),
                    linear_wk=backend.linear(),
                    k_norm=backend.layer_norm(rms_norm=False, for_qk=True),
                    linear_weights_proj=backend.linear(),
                ),
            )
        ),
    )


def get_dsa_module_spec_for_backend(config: Any, backend: Any) -> ModuleSpec:
    """Spec of a self-attention with DSA over absorbed latents.

    Args:
        config: a `TransformerConfig` that opts in; the latents are normed if `qk_layernorm`.
        backend: a megatron `BackendSpecProvider`.

    Returns:
        A spec for a layer with an input norm of its own: the indexer reads the normed hidden states.
    """
    rms_norm = config.normalization == "RMSNorm"
    # The indexer reads the normed query latent, so the norm cannot be part of the projection behind it.
    norm = backend.layer_norm(rms_norm=rms_norm, for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=backend.column_parallel_linear(),
            core_attention=core_attention_spec(backend),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def with_dsa_attention(stack: ModuleSpec, config: Any, backend: Any) -> ModuleSpec:
    """A copy of a hybrid stack's spec whose DSA layers, "D" in the pattern, are those of this package.

    Raises:
        ValueError: the spec has no DSA layer.
    """
    layer = getattr(stack.submodules, "dsa_layer", None)
    if not isinstance(layer, ModuleSpec):
        raise ValueError(f"with_dsa_attention: the spec of {stack.module.__name__} has no dsa_layer to replace")
    layer = dataclasses.replace(
        layer,
        submodules=dataclasses.replace(
            layer.submodules,
            input_layernorm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False),
            self_attention=get_dsa_module_spec_for_backend(config, backend),
        ),
    )
    return dataclasses.replace(stack, submodules=dataclasses.replace(stack.submodules, dsa_layer=layer))


def check_is_dsa(layer: Any, config: Any) -> None:
    """Refuse megatron's own attention in a model whose config opts in: it would be dense, or with the old indexer.

    Most of megatron's spec functions (get_gpt_layer_..._spec) do not look at the variant.

    Raises:
        ValueError: the config opts in and the layer is megatron's.
    """
    if uses_dsa(config) and not isinstance(layer, AbsorbedMLASelfAttention):
        raise ValueError(
            f"dsa_kernel_backend={config.dsa_kernel_backend!r} asks for the DSA layers of mcore_patches, but the "
            f"model's spec has {type(layer).__name__}: build it with "
            f"get_transformer_block_with_experimental_attention_variant_spec, or put "
            f"mcore_patches.attention.dsa.get_dsa_module_spec_for_backend into a spec of your own (a hybrid stack: "
            f"with_dsa_attention)"
        )
