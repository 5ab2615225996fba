"""One selection for several layers (`dsa_indexer_topk_freq`).

The layer that selects leaves its ids with the config that all layers of a model share, and the layers after it take
them. Only forward passes for the first time come here: a recomputation replays what each layer saved for itself, so
it cannot meet the ids of another pass.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout
from mcore_patches.attention.dsa.config import selects, source_layer


class _Selection(NamedTuple):
    layer: int
    ids: Tensor
    cu_seqlens: Tensor


# Configs compare by value and so have no hash; their identity is what counts here.
_latest: dict[int, _Selection] = {}


def leave(layer: int, ids: Tensor, layout: TokenLayout, config: Any) -> None:
    """Keep a layer's ids [T, K] for the layers after it, if any share them. The previous layer's are dropped."""
    if config.dsa_indexer_topk_freq == 1:
        return
    if id(config) not in _latest:
        weakref.finalize(config, _latest.pop, id(config), None)
    _latest[id(config)] = _Selection(layer, ids, layout.cu_seqlens)


def take(layer: int, layout: TokenLayout, config: Any) -> Tensor:
    """The ids [T, K] that a layer attends which does not select for itself.

    Raises:
        RuntimeError: the layer that selects them did not run before it, for the same batch, in this process.
    """
    source = source_layer(layer, config)
    found = _latest.get(id(config))
    if found is None or found.layer != source or found.ids.shape[0] != layout.tokens.shape[0]:
        raise RuntimeError(
            f"DSA layer {layer} attends what layer {source} selected, which did not run before it in this process: "
            f"with pipeline parallelism each stage must start at a layer that selects "
            f"(dsa_indexer_topk_freq={config.dsa_indexer_topk_freq}, "
            f"dsa_indexer_skip_topk_offset={config.dsa_indexer_skip_topk_offset})"
        )
    if layer == config.num_layers or selects(layer + 1, config):
        del _latest[id(config)]
    return found.ids
