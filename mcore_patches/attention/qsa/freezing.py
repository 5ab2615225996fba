"""Who trains in which stage: freeze the backbone for warmup, and notice what does not fit the stage."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from mcore_patches.attention.common.passes import is_recomputation
from mcore_patches.attention.qsa.config import check_loss, trains_indexer, uses_qsa
from mcore_patches.attention.qsa.indexer import QSAIndexer
from mcore_patches.attention.qsa.routes import qsa_layers

if TYPE_CHECKING:
    from mcore_patches.attention.qsa.attention import QSASelfAttention

_HIDDEN = "hidden_states"


class _Watch(NamedTuple):
    """backbone: parameters that must not train in stage "warmup", of the model inside the outermost module that ran."""

    outermost: Callable[[], torch.nn.Module | None]
    backbone: tuple[tuple[str, torch.nn.Parameter], ...]


_NOT_SEEN = _Watch(lambda: None, ())
# One layer of a model watches for all; None: another one does.
_watched: weakref.WeakKeyDictionary[QSASelfAttention, _Watch | None] = weakref.WeakKeyDictionary()


def freeze_backbone(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Leave gradients to the indexers only, for stage "warmup". Call it before the model is wrapped in DDP.

    The hidden states that enter a stack of layers require a gradient from then on: a checkpointed layer without such
    an input has no backward pass, and its indexer would not train.

    Args:
        model: a model, or the chunks of a pipeline stage. A stage without QSA layers is frozen whole.

    Raises:
        TypeError: not a module or several.
        ValueError: an empty sequence; neither the model nor its config has to do with QSA; the stage is another; or the
            model is wrapped already, so that DDP would wait for gradients that do not come.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise TypeError(f"freeze_backbone: model must be a module or a sequence of them, got {type(model).__name__}")
    if not chunks:
        raise ValueError("freeze_backbone: model is an empty sequence, must be a module or at least one")
    for chunk in chunks:
        _check_can_freeze(chunk)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if isinstance(module, QSAIndexer):
                module.requires_grad_(True)
            elif _is_stack(module) and _require_gradient not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_require_gradient, with_kwargs=True)
        for layer in qsa_layers(chunk):
            layer.backbone_is_frozen = True
            _watched.pop(layer, None)


def _check_can_freeze(chunk: torch.nn.Module) -> None:
    for module in chunk.modules():
        if isinstance(module, DistributedDataParallel) or hasattr(module, "ddp_config"):
            raise ValueError(
                f"freeze_backbone: model is wrapped in {type(module).__name__} already; call it before that"
            )
    configs = [layer.config for layer in qsa_layers(chunk)] or [getattr(chunk, "config", None)]
    if not uses_qsa(configs[0]):
        raise ValueError(
            f"freeze_backbone: {type(chunk).__name__} has no QSA layers and its config asks for none, so that nothing "
            f"would train"
        )
    for config in configs:
        if config.qsa_stage != "warmup":
            raise ValueError(
                f"freeze_backbone: qsa_stage={config.qsa_stage!r} trains the backbone, must be 'warmup': set it before "
                f"the model is built"
            )


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
        RuntimeError: another stage than at construction; a parameter that does not fit, in stage "warmup" one of the
            whole model that runs; the patch was reverted.
        ValueError: the stage and the loss coefficient do not fit.
    """
    config = layer.config
    if not hasattr(type(config), "qsa_stage"):
        raise RuntimeError(
            "the patch qsa was reverted while a model with QSA layers trains: megatron's schedules no longer tell the "
            "layers how they scale the loss, call mcore_patches.apply_patches('qsa')"
        )
    if config.qsa_stage != layer.built_stage:
        raise RuntimeError(
            f"config.qsa_stage={config.qsa_stage!r}, but the model was built in stage {layer.built_stage!r}, which "
            f"decides on the gradients of its parameters: build a model of the new stage and load the weights into it"
        )
    check_loss(config)
    trains = trains_indexer(config)
    for name, parameter in layer.indexer.named_parameters():
        if parameter.requires_grad != trains:
            raise RuntimeError(
                f"qsa_stage={config.qsa_stage!r} {'trains' if trains else 'does not train'} the indexer, but "
                f"indexer.{name} {'requires no' if trains else 'requires a'} gradient: leave requires_grad of the "
                f"indexer's parameters to the stage that the model is built in"
            )
    if config.qsa_stage == "warmup" and not is_recomputation():
        _check_running_model(layer)


def _check_running_model(layer: QSASelfAttention) -> None:
    """Check all parameters of the model that runs, which are collected when it first does."""
    watch = _watched.get(layer, _NOT_SEEN)
    if watch is None:
        return
    running = _running_modules(layer)
    if watch.outermost() is not running[0]:
        model = next(module for module in running if any(inside is layer for inside in module.modules()))
        _watched.update(dict.fromkeys(qsa_layers(model)))
        watch = _watched[layer] = _Watch(weakref.ref(running[0]), tuple(_backbone(model)))
    _check_frozen(watch.backbone)


def _running_modules(layer: QSASelfAttention) -> list[torch.nn.Module]:
    """The modules whose `forward` is under way, from the outermost to the layer, in a schedule or in any other loop.

    Modules do not know what holds them, and a layer may be called by itself: the call stack is what can be asked.
    """
    modules: list[torch.nn.Module] = [layer]
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(caller := frame.f_locals.get("self"), torch.nn.Module):
            modules.append(caller)
        frame = frame.f_back
    return modules[::-1]


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
    _check_frozen(_backbone(model))


def _check_frozen(backbone: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    for name, parameter in backbone:
        if parameter.requires_grad:
            raise RuntimeError(
                f"qsa_stage='warmup' trains only the indexer, but {name} requires a gradient: call "
                f"mcore_patches.attention.qsa.freeze_backbone(model) before the model is wrapped in DDP"
            )


def _backbone(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of all that is outside the indexers."""
    indexers = {id(p) for m in model.modules() if isinstance(m, QSAIndexer) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in indexers:
            yield name, parameter
