"""The indexer's loss: attached to the layer's output, scaled as the schedule scales the main loss, tracked."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from torch import Tensor


class LossScale:
    """What the schedule multiplies the main loss of one microbatch by; 1 where no schedule says so.

    A layer hands the same one to all its forward passes until `schedule.after_forward` fills it in and the layer takes
    a new one. So a scale goes with the autograd graph of its microbatch, and is over when that is.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def of(self, loss: Tensor) -> Tensor:
        """The gradient of a loss."""
        return torch.ones_like(loss) if self.value is None else self.value.to(loss.device, loss.dtype)


class AttachIndexerLoss(torch.autograd.Function):
    """Hands an activation on and, in backward, starts the backward pass of a loss beside it.

    The loss so enters the gradients without a place in the model's output. Its gradient is `scale` as it is by then.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad_output, ctx.scale.of(loss), None


def schedule_scale(config: Any, num_microbatches: int, device: torch.device) -> Tensor:
    """What megatron's schedules multiply the main loss of one of `num_microbatches` by, a scalar.

    1 over their number (1 with calculate_per_token_loss), times the gradient scaler's factor.
    """
    per_token = getattr(config, "calculate_per_token_loss", False)
    scale = torch.full((1,), 1.0 if per_token else 1.0 / num_microbatches, device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    return scale.detach().reshape(())


def microbatch_loss(
    kl_sum: Tensor, num_valid: Tensor, *, coeff: float, mean: bool, per_token: bool, cp_size: int
) -> Tensor:
    """What is attached: this rank's part of the loss of a microbatch, before the schedule's scale.

    Gradients are averaged over context-parallel ranks together with data-parallel ones, while the ranks' parts add up
    to the loss of the microbatch: hence the factor. With calculate_per_token_loss megatron sums gradients over all
    microbatches and ranks and divides them by the number of tokens that the main loss counts. That number is known
    after the last microbatch only, so the sum over this layer's tokens is what can be handed over, as megatron's own
    auxiliary losses do. Where the main loss masks tokens out, the indexer's loss is then its mean over valid tokens
    times valid over counted tokens.

    Args:
        kl_sum: KL summed over this rank's tokens, fp32 scalar.
        num_valid: tokens of the whole microbatch that are not padding, scalar.
        coeff: factor on the loss. mean: divide by `num_valid`. per_token: `config.calculate_per_token_loss`.
    """
    loss = coeff * kl_sum
    if per_token:
        return loss
    if mean:
        loss = loss / num_valid.clamp(min=1)
    return loss * cp_size


def start_tracking(config: Any) -> None:
    """Make the tracker where there is none: reducing it is a collective that stages without QSA layers take part in."""
    tracker = DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        tracker["values"] = torch.zeros(_tracked_layers(config), device=torch.cuda.current_device())


def _tracked_layers(config: Any) -> int:
    return config.num_layers + (config.mtp_num_layers or 0)


def track_loss(loss: Tensor, config: Any, layer_number: int, cp_group: dist.ProcessGroup) -> None:
    """Add this rank's part of a layer's loss to megatron's tracker of indexer losses, which sums it over `cp_group`."""
    DSAIndexerLossLoggingHelper.save_loss_to_tracker(
        loss=loss.detach(),
        layer_number=layer_number,
        num_layers=_tracked_layers(config),
        reduce_group=cp_group,
    )
