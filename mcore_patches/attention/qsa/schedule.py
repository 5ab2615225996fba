"""What megatron's schedules tell QSA layers after each forward pass of a microbatch."""

from __future__ import annotations

from typing import Any

import torch

from mcore_patches.attention.common.loss import start_tracking
from mcore_patches.attention.common.schedule import AfterForward
from mcore_patches.attention.qsa.config import trains_indexer, uses_qsa
from mcore_patches.attention.qsa.freezing import check_backbone_frozen
from mcore_patches.attention.qsa.routes import qsa_layers

_tell_layers = AfterForward(qsa_layers)


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
    _tell_layers(model, output, config, num_microbatches)
