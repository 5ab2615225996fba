"""Absorbed multi-latent attention, and sparse attention on it, for megatron-core releases that lack them.

Names load on first use: importing this package loads neither torch nor megatron. In docstrings S is the tokens of a
rank's sequences, B the batch, T the tokens of a packed batch on this rank, n the attention heads of this rank, R the
latent's channels (`kv_lora_rank`) and P those of the rotary part (`qk_pos_emb_head_dim`).
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AbsorbedMLASelfAttention": "absorbed",
    "AbsorbedMLASelfAttentionSubmodules": "absorbed_submodules",
    "DSAIndexer": "indexer",
    "DSAttention": "core",
    "FIELDS": "config",
    "LatentAttention": "absorbed_core",
    "discard_saved_routes": "schedule",
    "dsa_layers": "schedule",
    "fields_markdown": "config",
    "get_absorbed_mla_module_spec_for_backend": "absorbed_spec",
    "get_dsa_module_spec_for_backend": "spec",
    "set_checkpoint_layout": "absorbed_checkpoint",
    "support_markdown": "support",
    "uses_dsa": "config",
    "with_absorbed_mla": "absorbed_spec",
    "with_dsa_attention": "spec",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
