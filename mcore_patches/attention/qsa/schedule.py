"""What megatron's schedules tell QSA layers after each forward pass of a microbatch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from mcore_patches.attention.qsa.config import trains_indexer, uses_qsa
from mcore_patches.attention.qsa.freezing import check_backbone_frozen
from mcore_patches.attention.qsa.loss import LossScale, schedule_scale, start_tracking
from mcore_patches.attention.qsa.routes import qsa_layers

if TYPE_CHECKING:
    from mcore_patches.attention.qsa.attention import QSASelfAttention

_layers: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[QSASelfAttention]]] = weakref.WeakKeyDictionary()


def after_forward(model: torch.nn.Module, output: Any, config: Any, num_microbatches: int) -> None:
    """Called before the loss of a microbatch is computed, on every pipeline stage.

    Args:
        model: the chunk that ran. output: what it returned, a tensor or a list or dict of tensors. config: the
            schedule's; that of the QSA layers may be another, inside a model of several.

    Raises:
        RuntimeError: stage "warmup" and a parameter outside the indexers requires a gradient.
    """
    if uses_qsa(config) and trains_indexer(config):
        if config.qsa_stage == "warmup":
            check_backbone_frozen(model)
        start_tracking(config)
    if model not in _layers:
        _layers[model] = [weakref.ref(layer) for layer in qsa_layers(model)]
    layers = [layer for layer in (ref() for ref in _layers[model]) if layer is not None]
    if not layers:
        return
    first = _first_tensor(output)
    scale = schedule_scale(config, num_microbatches, first.device)
    for layer in layers:
        layer.loss_scale.value = scale
        layer.loss_scale = LossScale()
        # Without a gradient there will be no backward pass, hence no recomputation.
        layer.routes.settle(keep=first.requires_grad)


def _first_tensor(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output
