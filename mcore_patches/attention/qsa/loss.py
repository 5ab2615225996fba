"""The indexer's loss: attached to the layer's output, scaled as the schedule scales the main loss, tracked."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from torch import Tensor


class AttachIndexerLoss(torch.autograd.Function):
    """Hands an activation on and, in backward, starts the backward pass of a loss beside it.

    The loss so enters the gradients without a place in the model's output. Its gradient is `scale`, what the schedule
    multiplies the main loss by: 1 over the microbatches (1 with calculate_per_token_loss) times the gradient scaler's
    factor. It is 1 until a schedule has run in this process, and stays what the last microbatch of a schedule set,
    like the scales of megatron's own auxiliary losses: a loop without a schedule after one resets it to None.
    """

    scale: ClassVar[Tensor | None] = None

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype, ctx.loss_device = loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        scale = AttachIndexerLoss.scale
        if scale is None:
            return grad_output, torch.ones((), dtype=ctx.loss_dtype, device=ctx.loss_device)
        return grad_output, scale.to(ctx.loss_device, ctx.loss_dtype)


def set_loss_scale(config: Any, num_microbatches: int, device: torch.device) -> None:
    """Scale indexer losses as megatron's schedules scale the main loss of one of `num_microbatches`."""
    scale = torch.full((1,), 1.0 if config.calculate_per_token_loss else 1.0 / num_microbatches, device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    AttachIndexerLoss.scale = scale.detach().reshape(())


def training_loss(kl_sum: Tensor, num_valid: Tensor, config: Any, cp_size: int) -> Tensor:
    """What is attached: this rank's part of the loss of a microbatch, before the schedule's scale.

    Gradients are averaged over context-parallel ranks together with data-parallel ones, while the ranks' parts add up
    to the loss of the microbatch: hence the factor. With calculate_per_token_loss megatron sums gradients over all
    ranks and divides
    by the tokens of the main loss.

    Args:
        kl_sum: KL summed over this rank's tokens, fp32 scalar.
        num_valid: tokens of the whole microbatch that are not padding, scalar.
    """
    loss = config.qsa_indexer_loss_coeff * kl_sum
    if config.calculate_per_token_loss:
        return loss
    if config.qsa_indexer_loss_reduction == "mean":
        loss = loss / num_valid.clamp(min=1)
    return loss * cp_size


def start_tracking(config: Any) -> None:
    """Make the tracker where there is none: reducing it is a collective that stages without QSA layers take part in."""
    tracker = DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        tracker["values"] = torch.zeros(_tracked_layers(config), device=torch.cuda.current_device())


def _tracked_layers(config: Any) -> int:
    return config.num_layers + (config.mtp_num_layers or 0)


def track_loss(kl_sum: Tensor, num_valid: Tensor, config: Any, layer_number: int, cp_group: dist.ProcessGroup) -> None:
    """Add the microbatch's loss of a layer to megatron's tracker of indexer losses, which sums it over `cp_group`.

    It is `qsa_indexer_loss_coeff` times the mean KL over valid tokens, the sum with reduction "sum".
    """
    loss = config.qsa_indexer_loss_coeff * kl_sum.detach()
    if config.qsa_indexer_loss_reduction == "mean":
        loss = loss / num_valid.clamp(min=1)
    DSAIndexerLossLoggingHelper.save_loss_to_tracker(
        loss=loss,
        layer_number=layer_number,
        num_layers=_tracked_layers(config),
        reduce_group=cp_group,
    )
