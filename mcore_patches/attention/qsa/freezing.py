"""Who trains in which stage: freeze the backbone for warmup, and notice parameters that do not fit the stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mcore_patches.attention.qsa.config import check_loss, trains_indexer, uses_qsa
from mcore_patches.attention.qsa.indexer import QSAIndexer
from mcore_patches.attention.qsa.routes import qsa_layers

if TYPE_CHECKING:
    from mcore_patches.attention.qsa.attention import QSASelfAttention

_HIDDEN = "hidden_states"


def freeze_backbone(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Leave gradients to the indexers only, for stage "warmup". Call it before the model is wrapped in DDP.

    The hidden states that enter a stack of layers require a gradient from then on: a checkpointed layer without such
    an input has no backward pass, and its indexer would not train.

    Args:
        model: a model, or the chunks of a pipeline stage. A stage without QSA layers is frozen whole.

    Raises:
        TypeError: not a module or several.
        ValueError: neither the model nor its config has to do with QSA; or the model is wrapped already, so that DDP
            would wait for gradients that do not come.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise TypeError(f"freeze_backbone: model must be a module or a sequence of them, got {type(model).__name__}")
    for chunk in chunks:
        if hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"freeze_backbone: model is wrapped in {type(chunk).__name__} already; call it before that"
            )
        if not any(qsa_layers(chunk)) and not uses_qsa(getattr(chunk, "config", None)):
            raise ValueError(
                f"freeze_backbone: {type(chunk).__name__} has no QSA layers and its config asks for none, so that "
                f"nothing would train"
            )
    for chunk in chunks:
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if isinstance(module, QSAIndexer):
                module.requires_grad_(True)
            elif _is_stack(module) and _require_gradient not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_require_gradient, with_kwargs=True)
        for layer in qsa_layers(chunk):
            layer.backbone_is_frozen = True


def _is_stack(module: torch.nn.Module) -> bool:
    """Whether it runs layers, and perhaps checkpoints them: megatron's blocks of transformer, hybrid and MTP layers."""
    return isinstance(getattr(module, "layers", None), torch.nn.ModuleList) and _HIDDEN in _signature(module).parameters


def _signature(module: torch.nn.Module) -> inspect.Signature:
    return inspect.signature(module.forward)


def _require_gradient(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    call = _signature(module).bind(*args, **kwargs)
    hidden = call.arguments.get(_HIDDEN)
    if torch.is_grad_enabled() and isinstance(hidden, torch.Tensor) and not hidden.requires_grad:
        call.arguments[_HIDDEN] = hidden.detach().requires_grad_()
    return call.args, call.kwargs


def check_stage(layer: QSASelfAttention) -> None:
    """Check, before a forward pass in training mode, that what requires gradients is what the stage trains.

    Raises:
        RuntimeError: naming the first parameter that does not fit. The patch was reverted.
        ValueError: the stage and the loss coefficient do not fit.
    """
    config = layer.config
    if not hasattr(type(config), "qsa_stage"):
        raise RuntimeError(
            "the patch qsa was reverted while a model with QSA layers trains: megatron's schedules no longer tell the "
            "layers how they scale the loss, call mcore_patches.apply_patches('qsa')"
        )
    check_loss(config)
    trains = trains_indexer(config)
    for name, parameter in layer.indexer.named_parameters():
        if parameter.requires_grad != trains:
            raise RuntimeError(
                f"qsa_stage={config.qsa_stage!r} {'trains' if trains else 'does not train'} the indexer, but "
                f"indexer.{name} {'requires no' if trains else 'requires a'} gradient: set the stage before the model "
                f"is built, and leave requires_grad of the indexer's parameters to it"
            )
    if config.qsa_stage == "warmup":
        check_backbone_frozen(layer)


def check_frozen_before_checkpoint(layer: QSASelfAttention) -> None:
    """Raise RuntimeError in a checkpoint of stage "warmup" that may never see a gradient."""
    if layer.config.qsa_stage == "warmup" and not layer.backbone_is_frozen:
        raise RuntimeError(
            "qsa_stage='warmup' with full recomputation: a checkpoint whose input requires no gradient has no backward "
            "pass, and its indexer would not train. mcore_patches.attention.qsa.freeze_backbone(model) sees to that, "
            "call it before the model is wrapped in DDP"
        )


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
