"""Parameters and gradients under one name and in one shape, whatever the parallel layout."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

__all__ = ["full_gradients", "full_parameters", "named_parameters", "seed_parameters"]

type Chunks = torch.nn.Module | Sequence[torch.nn.Module]


def named_parameters(model: Chunks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, named as one process would name them.

    Layers carry their number in the whole model, not in the pipeline stage; an embedding shared with the output
    layer has one name on both stages.

    Args:
        model: a model, or the chunks of a pipeline stage; wrapped (DDP, Float16Module) or not.
    """
    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        chunk = unwrap_model(chunk)
        prefixes = {
            f"{name}.": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
            for name, module in chunk.named_modules()
            if name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number")
        }
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "shared_embedding", False):
                name = "embedding.word_embeddings.weight"
            for local, globally in prefixes.items():
                if name.startswith(local):
                    name = globally + name.removeprefix(local)
                    break
            yield name, parameter


def seed_parameters(model: Chunks, seed: int = 0) -> None:
    """Fill the parameters with values that depend on ``seed``, name and full shape only.

    Models of any parallel layout get equal weights. Matrices are normal with standard deviation
    ``fan_in ** -0.5``, other weights 1 + 0.1 normal, biases 0.1 normal: larger than megatron's initialisation, so that
    attention is far from uniform.
    """
    tp, tp_rank = _tensor_parallel()
    for name, parameter in named_parameters(model):
        shape, split = list(parameter.shape), _split_of(parameter)
        if split is not None:
            shape[split.dim] *= tp
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator)
        if values.ndim > 1:
            values *= shape[-1] ** -0.5
        else:
            values = 0.1 * values + (0.0 if name.endswith("bias") else 1.0)
        if split is not None:
            values = split.cut(values, tp)[tp_rank]
        with torch.no_grad():
            parameter.copy_(values)


def full_parameters(model: Chunks) -> dict[str, torch.Tensor]:
    """Name to the whole parameter, of all tensor- and pipeline-parallel ranks, on every rank. A collective."""
    return _full(model, lambda parameter: parameter.detach())


def full_gradients(model: Chunks) -> dict[str, torch.Tensor]:
    """Name to the whole gradient (``main_grad`` under DDP, else ``grad``) in fp32, on every rank. A collective.

    Parameters without a gradient are left out.
    """
    return _full(model, _gradient)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return None if gradient is None else gradient.float()


def _full(model: Chunks, tensor_of: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    tp, _ = _tensor_parallel()
    stage = {}
    for name, parameter in named_parameters(model):
        tensor = tensor_of(parameter)
        if tensor is None:
            continue
        split = _split_of(parameter)
        if tp > 1 and split is not None:
            shards = [torch.empty_like(tensor) for _ in range(tp)]
            dist.all_gather(shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            tensor = split.join(shards)
        stage[name] = tensor.clone()
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return stage
    stages: list[dict[str, torch.Tensor]] = [{}] * parallel_state.get_pipeline_model_parallel_world_size()
    # A pickled CUDA tensor comes back on the sender's device.
    sent = {name: tensor.cpu() for name, tensor in stage.items()}
    dist.all_gather_object(stages, sent, group=parallel_state.get_pipeline_model_parallel_group())
    device = next(iter(stage.values())).device
    return {name: tensor.to(device) for part in stages for name, tensor in part.items()}


def _tensor_parallel() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


@dataclass(frozen=True)
class _Split:
    """How a parameter is split over the tensor-parallel ranks.

    A stride of 2 marks gate and up projection in one weight: each rank holds a piece of both.
    """

    dim: int
    stride: int

    def cut(self, full: torch.Tensor, tp: int) -> list[torch.Tensor]:
        pieces = full.chunk(tp * self.stride, dim=self.dim)
        return [torch.cat(pieces[rank::tp], dim=self.dim) for rank in range(tp)]

    def join(self, shards: list[torch.Tensor]) -> torch.Tensor:
        parts = [shard.chunk(self.stride, dim=self.dim) for shard in shards]
        return torch.cat([piece for group in zip(*parts) for piece in group], dim=self.dim)


def _split_of(parameter: Any) -> _Split | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return _Split(parameter.partition_dim, parameter.partition_stride)
