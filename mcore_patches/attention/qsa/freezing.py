"""Warmup trains the indexer alone: freeze the rest, and notice when it is not frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from mcore_patches.attention.qsa.indexer import QSAIndexer


def freeze_backbone(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Leave gradients to the indexers only, for stage "warmup". Call it before the model is wrapped in DDP.

    Embeddings go on to return tensors that require a gradient: a checkpointed layer without such an input has no
    backward pass, and its indexer would not train.

    Args:
        model: a model, or the chunks of a pipeline stage. A stage without QSA layers is frozen whole.

    Raises:
        ValueError: the model is wrapped already, so that DDP would wait for gradients that do not come.
    """
    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        if hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"freeze_backbone: model is wrapped in {type(chunk).__name__} already; call it before that"
            )
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if isinstance(module, QSAIndexer):
                module.requires_grad_(True)
            elif isinstance(module, LanguageModelEmbedding):
                module.register_forward_hook(_require_gradient)


def _require_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    # An embedding that has been unfrozen since has its own gradient.
    return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()


def check_backbone_frozen(model: torch.nn.Module) -> None:
    """Raise RuntimeError naming the first parameter outside the indexers that requires a gradient."""
    for name in _trained_backbone(model):
        raise RuntimeError(
            f"qsa_stage='warmup' trains only the indexer, but {name} requires a gradient: call "
            f"mcore_patches.attention.qsa.freeze_backbone(model) before the model is wrapped in DDP"
        )


def _trained_backbone(model: torch.nn.Module) -> Iterator[str]:
    indexers = {id(p) for m in model.modules() if isinstance(m, QSAIndexer) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in indexers:
            yield name
