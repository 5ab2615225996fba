"""What the shim's tests run in a fresh process, where megatron is not imported yet."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mcore_patches.cpu import shim
from mcore_patches.cpu.layers import DuplicatedLinear


def life_cycle() -> Iterator[tuple[str, Any]]:
    """On and off before and after megatron's import."""
    yield "megatron imported", "megatron.core" in sys.modules
    before = _globals("torch.cuda", "torch.autograd")
    shim.enable()
    yield (
        "rebindings",
        [(rebinding.owner.__name__, rebinding.name, rebinding.reason) for rebinding in shim.rebindings()],
    )
    yield "rebound", [str(r) for r in shim.rebindings() if getattr(r.owner, r.name) is not r.replacement]
    originals = [(r.owner, r.name, r.original) for r in shim.rebindings()]
    late = types.ModuleType("megatron.imported_while_on")
    late.current_device = torch.cuda.current_device
    sys.modules[late.__name__] = late
    yield "devices", _devices()
    shim.disable()
    yield (
        "restored",
        [f"{owner.__name__}.{name}" for owner, name, value in originals if getattr(owner, name) is not value],
    )
    yield "alias restored", late.current_device is torch.cuda.current_device
    del sys.modules[late.__name__]
    yield "left before import", _changed(before, _globals("torch.cuda", "torch.autograd"))
    yield "modes", len(_get_current_function_mode_stack())
    yield "off", (shim.is_enabled(), shim.rebindings())

    import megatron.core.models.gpt  # noqa: F401

    before = _globals("torch", "megatron")
    with shim.cpu_megatron():
        during = _changed(before, _globals("torch", "megatron"))
    yield "changed after import", during
    yield "left after import", _changed(before, _globals("torch", "megatron"))
    with shim.package_stand_ins():
        yield "stand-ins", _changed(before, _globals("torch", "megatron"))
    yield "left by stand-ins", _changed(before, _globals("torch", "megatron"))


def behaviour() -> Iterator[tuple[str, Any]]:
    """Everything that does not depend on the release."""
    yield from _misuse()
    yield from _backward()
    yield from _fused()


def _misuse() -> Iterator[tuple[str, Any]]:
    """Errors, and that the shim survives them."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield "cuda", _message(shim.enable)
        yield "off after cuda", shim.is_enabled()
        shim.enable(allow_cuda=True)
        shim.disable()
    finally:
        torch.cuda.is_available = is_available
    yield "off twice", _message(shim.disable)
    with shim.cpu_megatron():
        yield "on twice", _message(shim.enable)
        with shim.cpu_megatron():
            pass
        yield "on after nesting", shim.is_enabled()
        with _Nothing():
            yield "later mode", _message(shim.disable)
        original = torch.cuda.synchronize
        torch.cuda.synchronize = lambda: None
        yield "foreign", _message(shim.disable)
        yield "on after foreign", shim.is_enabled()
        torch.cuda.synchronize = original
    with contextlib.suppress(KeyError), shim.cpu_megatron():
        raise KeyError
    yield "off after an exception", shim.is_enabled()


def _backward() -> Iterator[tuple[str, Any]]:
    """CUDA requests inside a backward pass, where torch suspends function modes."""
    seen = []

    class AskForCuda(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.ones(1, device="cuda").device.type)
            return grad * 2

    with shim.cpu_megatron():
        x = torch.ones(3, requires_grad=True)
        AskForCuda.apply(x).sum().backward()
        yield "backward", x.grad.tolist()
        yield "grad", torch.autograd.grad(AskForCuda.apply(x).sum(), x)[0].tolist()
        yield "modes in backward", len(_get_current_function_mode_stack())
    yield "devices in backward", seen


def _fused() -> Iterator[tuple[str, Any]]:
    """A function that is to be compiled, as megatron's fused ones are, in the shim and after it."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    fused = torch.compile(lambda x: x * 2 + 1, backend=backend)
    with shim.cpu_megatron():
        yield "fused", fused(torch.ones(3)).tolist()
        yield "compiled in the shim", len(compiled)
    yield "fused after it", fused(torch.ones(3)).tolist()
    yield "compiled after it", len(compiled)


def _devices() -> dict[str, str]:
    x = torch.zeros(2)
    return {
        "factory": torch.empty(2, device="cuda").device.type,
        "indexed": torch.zeros(2, device="cuda:0").device.type,
        "current": torch.empty(2, device=torch.cuda.current_device()).device.type,
        "cuda()": x.cuda().device.type,
        "to": x.to("cuda").device.type,
        "to device=": x.to(device=torch.device("cuda")).device.type,
        "pinned": torch.empty(2, pin_memory=True).device.type,
        "module": DuplicatedLinear(
            2,
            2,
            config=types.SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False),
            init_method=lambda w: w,
        )
        .cuda()
        .weight.device.type,
    }


def _globals(*packages: str) -> dict[str, Any]:
    """Every global of every loaded module of these packages."""
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(tuple(f"{package}." for package in packages)) and isinstance(module, types.ModuleType)
        for attribute, value in list(vars(module).items())
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in before.items() if name not in after or after[name] is not value)


def _message(call: Callable[[], None]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


class _Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
