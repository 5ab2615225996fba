"""Training steps: plain, on one model, or with megatron's DDP, schedules and gradient finalisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.utils import get_model_config

from mcore_patches.cpu.data import Batch
from mcore_patches.cpu.parameters import full_gradients

__all__ = ["LossForm", "StepResult", "build_optimizer", "schedule_step", "train_step", "wrap_with_ddp"]

LossForm = Literal["mean", "sum_and_count"]


@dataclass(frozen=True)
class StepResult:
    """Mean loss per token over all microbatches and ranks, and the whole gradient (fp32) of every parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def train_step(model: torch.nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None = None) -> StepResult:
    """Forward, masked mean loss, backward and, given an optimizer, its step, without megatron's machinery.

    For a model that this process holds whole. The gradients are of before the optimizer's step.

    Raises:
        ValueError: the model is split over ranks; :func:`schedule_step` is for those.
    """
    config = get_model_config(model)
    for field in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"):
        if getattr(config, field) > 1:
            raise ValueError(f"{field}={getattr(config, field)}: train_step is for one process, use schedule_step")
    model.zero_grad()
    with _fresh_indexer_state():
        losses = _forward(model, batch)
        loss = (losses.float() * batch.loss_mask).sum() / batch.loss_mask.sum()
        loss.backward()
    gradients = full_gradients(model)
    if optimizer is not None:
        optimizer.step()
    return StepResult(loss.item(), gradients)


def wrap_with_ddp(chunks: torch.nn.Module | Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Megatron's DDP around each chunk of this rank, with fp32 gradients, and its hooks in the config."""
    chunks = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], lr: float = 1e-3, *, clip_grad: float = 0.0
) -> MegatronOptimizer:
    """Megatron's Adam for wrapped chunks; of bf16 parameters it keeps fp32 copies.

    Args:
        clip_grad: largest norm of all gradients together, 0 for any. Megatron clips on CUDA only.

    Raises:
        ValueError: a bf16 model on the CPU, where megatron's mixed-precision optimizer does not run.
    """
    bf16 = get_model_config(chunks[0]).bf16
    if bf16 and not next(chunks[0].parameters()).is_cuda:
        raise ValueError("bf16 model: megatron's mixed-precision optimizer runs on CUDA only, use an fp32 model")
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=lr,
        weight_decay=0.0,
        clip_grad=clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return get_megatron_optimizer(config, list(chunks))


def schedule_step(
    chunks: Sequence[DistributedDataParallel],
    microbatches: Sequence[Batch],
    optimizer: MegatronOptimizer | None = None,
    *,
    loss_form: LossForm = "mean",
) -> StepResult:
    """One training step with the release's own schedule, gradient reduction and finalisation. A collective.

    Args:
        chunks: from :func:`wrap_with_ddp`.
        microbatches: of one size, whole: each context-parallel rank takes its shard. Data-parallel ranks pass
            their own.
        optimizer: from :func:`build_optimizer`; steps after the gradients are collected.
        loss_form: what the loss function returns to the schedule. "mean" is a pair: the local loss sum over the token
            count of all context-parallel ranks. "sum_and_count" is a triple with the local sum and count, as
            megatron's ``pretrain_gpt`` returns; the schedule divides unless ``config.calculate_per_token_loss``.

    Raises:
        ValueError: no microbatches, or of different sizes.
    """
    sizes = {batch.size for batch in microbatches}
    if len(sizes) != 1:
        raise ValueError(f"microbatches of sizes {sorted(sizes)}: expected at least one, all of one size")
    ((batch_size, seq),) = sizes
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if optimizer is not None:
        optimizer.zero_grad()
    with _fresh_indexer_state():
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss_form=loss_form),
            data_iterator=[iter(microbatches) for _ in chunks] if len(chunks) > 1 else iter(microbatches),
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=seq,
            micro_batch_size=batch_size,
            forward_only=False,
        )
    gradients = full_gradients(chunks)
    if optimizer is not None:
        optimizer.step()
    return StepResult(_mean_loss(reports), gradients)


@contextlib.contextmanager
def _fresh_indexer_state() -> Iterator[None]:
    # Class attributes of megatron's that outlive the model. The loss scale that a schedule sets would scale the next
    # plain step, and the scalar that a plain step leaves there does not fit what 0.19's schedules copy into it.
    # The log of losses has as many entries as the first model had layers.
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    DSAIndexerLossLoggingHelper.tracker.clear()
    try:
        yield
    finally:
        DSAIndexerLossAutoScaler.main_loss_backward_scale = None


def _forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    extra = {} if batch.packed is None else {"packed_seq_params": batch.packed}
    return model(batch.tokens, batch.positions, None, labels=batch.labels, **extra)


def _forward_step(data: Iterator[Batch], model: torch.nn.Module, *, loss_form: LossForm) -> Any:
    batch = next(data).context_parallel_shard(
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )
    return _forward(model, batch), partial(_loss, batch.loss_mask, loss_form)


def _loss(loss_mask: torch.Tensor, loss_form: LossForm, losses: torch.Tensor) -> tuple[Any, ...]:
    total = (losses.float() * loss_mask).sum()
    count = loss_mask.sum()
    report = torch.stack([total.detach(), count])
    if loss_form == "sum_and_count":
        return total, count.int(), report
    dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return total / count, report


def _mean_loss(reports: list[torch.Tensor]) -> float:
    # Only last stages report; every tensor-parallel rank of one reports the same, which the division cancels.
    sums = torch.stack(reports).sum(0) if reports else torch.zeros(2, device=torch.cuda.current_device())
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
