"""Private copies of a module's functions, for probes that must change nothing of the module."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


def with_globals(module: ModuleType, function: Any, **changed: Any) -> Callable[..., Any]:
    """A copy of a module's function that sees `changed` in place of the module's globals, as do those that it calls."""
    private = {**vars(module), **changed}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(module) and name not in changed:
            private[name] = _copy(value, private)
    return _copy(function, private)


def _copy(function: FunctionType, scope: dict[str, Any]) -> FunctionType:
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
