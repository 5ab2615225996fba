"""QSA (Qwen Sparse Attention, arXiv 2608.30320) as a megatron layer.

Names load on first use: importing this package loads neither torch nor megatron. In docstrings T is the tokens of a
rank, n those of the whole batch, K the blocks that a query selects.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "FIELDS": "config",
    "QSASelfAttention": "attention",
    "QSAIndexer": "indexer",
    "RouteError": "routes",
    "fields_markdown": "config",
    "attention_weights_from_hf": "weights",
    "attention_weights_to_hf": "weights",
    "discard_saved_routes": "routes",
    "freeze_backbone": "freezing",
    "get_qsa_module_spec_for_backend": "spec",
    "inject_routes": "routes",
    "record_routes": "routes",
    "support_matrix_markdown": "support",
    "uses_qsa": "config",
    "with_qsa_attention": "spec",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
