"""The indexer's loss by the settings of QSA."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from mcore_patches.attention.common import loss as common


def training_loss(kl_sum: Tensor, num_valid: Tensor, config: Any, cp_size: int) -> Tensor:
    """What is attached: see `common.loss.microbatch_loss`."""
    return common.microbatch_loss(
        kl_sum,
        num_valid,
        coeff=config.qsa_indexer_loss_coeff,
        mean=config.qsa_indexer_loss_reduction == "mean",
        per_token=config.calculate_per_token_loss,
        cp_size=cp_size,
    )


def track_loss(kl_sum: Tensor, num_valid: Tensor, config: Any, layer_number: int, cp_group: dist.ProcessGroup) -> None:
    """Add the microbatch's loss of a layer to megatron's tracker of indexer losses, which sums it over `cp_group`.

    It is `qsa_indexer_loss_coeff` times the mean KL over valid tokens, the sum with reduction "sum".
    """
    loss = config.qsa_indexer_loss_coeff * kl_sum.detach()
    if config.qsa_indexer_loss_reduction == "mean":
        loss = loss / num_valid.clamp(min=1)
    common.track_loss(loss, config, layer_number, cp_group)
