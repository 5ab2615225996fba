"""What megatron's schedules tell DSA layers after each forward pass of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mcore_patches.attention.common.loss import schedule_scale, start_tracking
from mcore_patches.attention.common.passes import discard_saved_routes
from mcore_patches.attention.common.schedule import AfterForward, first_tensor
from mcore_patches.attention.dsa.config import trains_indexer, uses_dsa
from mcore_patches.attention.dsa.core import DSAttention

__all__ = ["after_forward", "discard_saved_routes", "dsa_layers"]


def dsa_layers(model: torch.nn.Module) -> Iterator[DSAttention]:
    """The DSA core attentions of a model."""
    for module in model.modules():
        if isinstance(module, DSAttention):
            yield module


_tell_layers = AfterForward(dsa_layers)


def after_forward(model: torch.nn.Module, output: Any, config: Any, num_microbatches: int) -> None:
    """Called before the loss of a microbatch is computed, on every pipeline stage.

    Args:
        model: the chunk that ran. output: what it returned, a tensor or a list or dict of tensors. config: the
            schedule's; that of the DSA layers may be another, inside a model of several.
    """
    if uses_dsa(config) and trains_indexer(config):
        start_tracking(config)
    function = getattr(config, "experimental_attention_variant_loss_scale_func", None)
    if function is not None:
        # As 0.19 calls it: not for layers here, which are told below, but for a variant of the user's own.
        scale = schedule_scale(config, num_microbatches, first_tensor(output).device).reshape(1)
        function(scale if config.calculate_per_token_loss else scale * config.context_parallel_size)
    _tell_layers(model, output, config, num_microbatches)
