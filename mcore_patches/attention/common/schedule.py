"""What megatron's schedules tell layers with an indexer after each forward pass of a microbatch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from mcore_patches.attention.common.loss import LossScale, schedule_scale
from mcore_patches.attention.common.passes import PassQueue


class IndexedLayer(Protocol):
    """A layer with an indexer, as far as schedules are concerned."""

    routes: PassQueue
    loss_scale: LossScale


class AfterForward:
    """Hands the schedule's scale to the layers of one kind, and settles what they saved for recomputation.

    layers_of: yields these layers of a model.
    """

    def __init__(self, layers_of: Callable[[torch.nn.Module], Iterable[Any]]) -> None:
        self._layers_of = layers_of
        self._found: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()

    def __call__(self, model: torch.nn.Module, output: Any, config: Any, num_microbatches: int) -> None:
        """Called before the loss of a microbatch is computed, on every pipeline stage.

        Args:
            model: the chunk that ran. output: what it returned, a tensor or a list or dict of tensors. config: the
                schedule's.
        """
        if model not in self._found:
            self._found[model] = [weakref.ref(layer) for layer in self._layers_of(model)]
        layers: list[IndexedLayer] = [layer for layer in (ref() for ref in self._found[model]) if layer is not None]
        if not layers:
            return
        first = first_tensor(output)
        scale = schedule_scale(config, num_microbatches, first.device)
        for layer in layers:
            layer.loss_scale.value = scale
            layer.loss_scale = LossScale()
            # Without a gradient there will be no backward pass, hence no recomputation.
            layer.routes.settle(keep=first.requires_grad)


def first_tensor(output: Any) -> torch.Tensor:
    """The first of a model's outputs."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output
