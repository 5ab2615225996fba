"""Weights of a QSA attention layer between transformers' `qwen4_exp` and megatron, whole or cut for tensor parallelism.

transformers has one matrix each for queries, keys and values; the rows of `q_proj` go head by head, query then gate.
Megatron's `linear_qkv` goes by group of query heads: the group's queries, its gates, its key, its value. Names are
relative to the attention module (`self_attn.` there, `self_attention.` here).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_patches.attention.qsa.config import uses_qsa

# megatron's name: transformers' name
_UNCHANGED = {
    "q_layernorm.weight": "q_norm.weight",
    "k_layernorm.weight": "k_norm.weight",
    "indexer.index_qk_proj.weight": "indexer.index_qk_proj.weight",
    "indexer.q_layernorm.weight": "indexer.q_layernorm.weight",
    "indexer.k_layernorm.weight": "indexer.k_layernorm.weight",
}
_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def attention_weights_from_hf(
    state: Mapping[str, Tensor], config: Any, *, tp_rank: int = 0, tp_size: int = 1
) -> dict[str, Tensor]:
    """Megatron's parameters of one tensor-parallel rank from transformers'.

    Args:
        state: the state dict of a `Qwen4ExpTextAttention`, dtype and device as they are to be in the result.
        config: the layer's `TransformerConfig`, with output gate, q and k norms and zero-centred norm weights.

    Raises:
        ValueError: names or shapes do not fit the config, or the config does not describe such a layer.
    """
    _check_config(config)
    _check_rank(config, tp_rank, tp_size)
    shapes = _hf_shapes(config)
    _check_state(state, shapes, "state")
    groups, per_group, channels = config.num_query_groups, _heads_per_group(config), config.kv_channels
    queries, gates = state["q_proj.weight"].unflatten(0, (groups, per_group, 2, channels)).unbind(2)
    keys, values = (state[name].unflatten(0, (groups, 1, channels)) for name in _QKV[1:])
    qkv = torch.cat((queries, gates, keys, values), dim=1).flatten(0, 2)
    weights = {
        "linear_qkv.weight": qkv.chunk(tp_size, dim=0)[tp_rank].contiguous(),
        "linear_proj.weight": state["o_proj.weight"].chunk(tp_size, dim=1)[tp_rank].contiguous(),
    }
    return weights | {name: state[source].clone() for name, source in _UNCHANGED.items()}


def attention_weights_to_hf(shards: Sequence[Mapping[str, Tensor]], config: Any) -> dict[str, Tensor]:
    """transformers' parameters from megatron's of all tensor-parallel ranks, in their order.

    Raises:
        ValueError: names or shapes do not fit the config, or ranks disagree on a parameter that all of them hold.
    """
    _check_config(config)
    _check_rank(config, 0, len(shards))
    for rank, shard in enumerate(shards):
        _check_state(shard, _megatron_shapes(config, len(shards)), f"shards[{rank}]")
        for name in _UNCHANGED:
            if not torch.equal(shard[name], shards[0][name]):
                raise ValueError(f"shards[{rank}]: {name} differs from that of shards[0], and all ranks hold the same")
    groups, per_group, channels = config.num_query_groups, _heads_per_group(config), config.kv_channels
    qkv = torch.cat([shard["linear_qkv.weight"] for shard in shards], dim=0)
    qkv = qkv.unflatten(0, (groups, 2 * per_group + 2, channels))
    queries, gates, keys, values = qkv.split((per_group, per_group, 1, 1), dim=1)
    state = {
        "q_proj.weight": torch.stack((queries, gates), dim=2).flatten(0, 3),
        "k_proj.weight": keys.flatten(0, 2),
        "v_proj.weight": values.flatten(0, 2),
        "o_proj.weight": torch.cat([shard["linear_proj.weight"] for shard in shards], dim=1),
    }
    return state | {name: shards[0][source].clone() for source, name in _UNCHANGED.items()}


def _heads_per_group(config: Any) -> int:
    return config.num_attention_heads // config.num_query_groups


def _hf_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, channels = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * channels, config.num_query_groups * channels
    index = config.qsa_indexer_head_dim
    return {
        "q_proj.weight": (2 * queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "q_norm.weight": (channels,),
        "k_norm.weight": (channels,),
        "indexer.index_qk_proj.weight": ((config.qsa_indexer_n_heads + 1) * index, hidden),
        "indexer.q_layernorm.weight": (index,),
        "indexer.k_layernorm.weight": (index,),
    }


def _megatron_shapes(config: Any, tp_size: int) -> dict[str, tuple[int, ...]]:
    whole = _hf_shapes(config)
    rows = sum(whole[name][0] for name in _QKV)
    queries = whole["o_proj.weight"][1]
    return {
        "linear_qkv.weight": (rows // tp_size, config.hidden_size),
        "linear_proj.weight": (config.hidden_size, queries // tp_size),
    } | {name: whole[source] for name, source in _UNCHANGED.items()}


def _check_config(config: Any) -> None:
    if not uses_qsa(config):
        raise ValueError("config.qsa_indexer_n_heads=None: the attention layer of a config without QSA has no indexer")
    for field in ("attention_output_gate", "qk_layernorm", "layernorm_zero_centered_gamma"):
        if not getattr(config, field):
            raise ValueError(f"config.{field}={getattr(config, field)}: a qwen4_exp attention layer needs it True")
    for field in ("add_bias_linear", "add_qkv_bias"):
        if getattr(config, field):
            raise ValueError(f"config.{field}={getattr(config, field)}: a qwen4_exp attention layer has no biases")


def _check_rank(config: Any, tp_rank: int, tp_size: int) -> None:
    if tp_size < 1 or config.num_attention_heads % tp_size:
        raise ValueError(
            f"{tp_size} tensor-parallel ranks: must divide num_attention_heads={config.num_attention_heads}"
        )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank={tp_rank}: must be 0 to {tp_size - 1}")


def _check_state(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    if missing := sorted(set(shapes) - set(state)):
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    # Transformer Engine keeps quantisation state beside its weights; it is no part of the layer.
    if surplus := sorted(name for name in set(state) - set(shapes) if not name.endswith("_extra_state")):
        raise ValueError(f"{what} holds {', '.join(surplus)}, which a QSA attention layer does not have")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"{what}: {name} is {tuple(state[name].shape)}, the config says {shape}")
