"""Module specs with absorbed MLA."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_patches.attention.dsa.absorbed import AbsorbedMLASelfAttention
from mcore_patches.attention.dsa.absorbed_core import LatentAttention
from mcore_patches.attention.dsa.absorbed_submodules import AbsorbedMLASelfAttentionSubmodules

__all__ = ["get_absorbed_mla_module_spec_for_backend", "with_absorbed_mla"]


def get_absorbed_mla_module_spec_for_backend(
    config: Any, backend: Any, *, core_attention: Any = LatentAttention, split: bool = False
) -> ModuleSpec:
    """Spec of an absorbed MLA self-attention.

    Args:
        config: an `MLATransformerConfig`; the latents are normed if `qk_layernorm`.
        backend: a megatron `BackendSpecProvider`.
        core_attention: class or spec of what attends over the latents; the default is dense.
        split: give keys and values up-projections of their own instead of one.

    Returns:
        A spec for a layer with an input norm of its own. Sharded checkpoints are those of plain MLA on this backend.
    """
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=True)
    latent_norm = norm if config.qk_layernorm else IdentityOp
    column = backend.column_parallel_linear()
    up_projections = ("linear_k_up_proj", "linear_v_up_proj") if split else ("linear_kv_up_proj",)
    # Plain MLA up to 0.18 norms latents inside the up-projections wherever the backend has such a layer.
    fuses = config.qk_layernorm and backend.column_parallel_layer_norm_linear() is not None
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "checkpoint_norms": "fused" if fuses else "apart"},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=column,
            linear_kv_down_proj=backend.linear(),
            **dict.fromkeys(up_projections, column),
            core_attention=core_attention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def with_absorbed_mla(spec: Any, config: Any, backend: Any, **options: Any) -> Any:
    """A copy of a layer's or a block's spec whose MLA layers are absorbed MLA layers.

    A layer whose input norm is part of a down-projection (`mla_down_proj_fusion`) gets a norm of its own.

    Args:
        spec: `ModuleSpec` of a transformer layer, or `TransformerBlockSubmodules`.
        config, backend, options: as for `get_absorbed_mla_module_spec_for_backend`.

    Raises:
        ValueError: there is no plain MLA self-attention in it.
    """
    layers = getattr(spec, "layer_specs", None)
    if layers is not None:
        return dataclasses.replace(
            spec, layer_specs=[with_absorbed_mla(layer, config, backend, **options) for layer in layers]
        )
    attention = getattr(spec.submodules, "self_attention", None)
    module = getattr(attention, "module", None)
    if not (isinstance(module, type) and issubclass(module, MLASelfAttention)):
        raise ValueError(f"with_absorbed_mla: self_attention={module} is no MLASelfAttention to replace")
    changes = {"self_attention": get_absorbed_mla_module_spec_for_backend(config, backend, **options)}
    if spec.submodules.input_layernorm in (None, IdentityOp):
        changes["input_layernorm"] = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **changes))
