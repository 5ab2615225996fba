"""Down-projection of hidden states to the latents of multi-latent attention."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

__all__ = ["latents"]


def latents(layer: Any, hidden_states: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Down-projections and norms. A collective with tensor parallelism, which is always with sequence parallelism.

    Args:
        layer: an `MLASelfAttention`, down-projections duplicated or column-parallel.
        hidden_states: [S / TP, B, hidden].
        packed: whether these are packed documents, B = 1.

    Returns:
        query latent [S / TP, B, q_lora_rank], normed, or the hidden states if q_lora_rank is None; latent [S, B, R],
        normed; rotary key [S, B, P], not rotated. Packed without B.
    """
    config, tp_group = layer.config, layer.pg_collection.tp
    q_latent = hidden_states
    if config.q_lora_rank is not None:
        q_latent, _ = layer.linear_q_down_proj(hidden_states)
        if q_latent.shape[-1] != config.q_lora_rank:  # of a column-parallel projection
            q_latent = gather_from_tensor_model_parallel_region(q_latent, group=tp_group)
            q_latent = scatter_to_sequence_parallel_region(q_latent, group=tp_group)
    key, _ = layer.linear_kv_down_proj(hidden_states)
    parts = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if key.shape[-1] != sum(parts):
        kv_latent, k_rotary = gather_from_tensor_model_parallel_region(key, group=tp_group).split(parts, dim=-1)
        kv_latent = scatter_to_sequence_parallel_region(kv_latent, group=tp_group)
        # Every rank holds all of it and uses it for its own heads: gradients add up.
        k_rotary = copy_to_tensor_model_parallel_region(k_rotary, group=tp_group)
    else:
        kv_latent, k_rotary = key.split(parts, dim=-1)
        if tp_group.size() > 1:
            k_rotary = gather_from_sequence_parallel_region(k_rotary, group=tp_group)
    if packed:
        q_latent, kv_latent, k_rotary = (x.squeeze(1) for x in (q_latent, kv_latent, k_rotary))
    if config.q_lora_rank is not None:
        q_latent = layer.q_layernorm(q_latent)
    kv_latent = layer.kv_layernorm(kv_latent)
    if tp_group.size() > 1:
        kv_latent = gather_from_sequence_parallel_region(kv_latent, group=tp_group)
    return q_latent, kv_latent, k_rotary
