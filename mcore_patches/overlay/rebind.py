"""Find every name that holds an object and make it hold another; list what cannot be reached that way.

Modules are read through `vars(module)`, never getattr: lazy modules would import half the world, and a package attribute
can shadow a submodule.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Collection, Iterator
from types import BuiltinMethodType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        # sys.modules may hold None (import blocked) and foreign objects; those have no module dictionary to rebind.
        if isinstance(module, ModuleType):
            yield name, vars(module)


def covered(module_name: str, prefixes: Collection[str]) -> bool:
    """Whether a module lies under one of the dotted prefixes."""
    return any(module_name == p or module_name.startswith(p + ".") for p in prefixes)


def rebind(
    originals: Collection[Any], ours: Collection[Any], new: Any, prefixes: Collection[str]
) -> tuple[list[str], list[str]]:
    """Point every module-level name that holds one of `originals` or `ours` at `new`.

    Names of `originals` are changed only in modules under `prefixes`; names of `ours` (earlier replacements) everywhere,
    because whoever holds one imported it while it was patched.
    Returns (names rebound, names outside the prefixes that still hold an original), each "module.name", sorted.
    """
    original_ids, our_ids = {id(o) for o in originals if o is not new}, {id(o) for o in ours if o is not new}
    both = original_ids | our_ids
    rebound, outside, seen = [], [], set()
    for module_name, names in _modules():
        if id(names) in seen:  # one module object under two names, e.g. __main__
            continue
        seen.add(id(names))
        for name, value in list(names.items()):
            if id(value) not in both:
                continue
            if id(value) in our_ids or covered(module_name, prefixes):
                names[name] = new
                rebound.append(f"{module_name}.{name}")
            else:
                outside.append(f"{module_name}.{name}")
    return sorted(rebound), sorted(outside)


def unreachable(original: Any, ignore: Collection[Any]) -> list[str]:
    """Describe the references to `original` that are not module-level names: partials, defaults, containers, closures.

    ignore: objects whose references are ours. The search looks at what the garbage collector tracks, two steps out.
    """
    own = {id(o) for o in ignore} | {id(ignore)}
    found: set[str] = set()
    # Module dictionaries are `rebind`'s business; where a module inlines its values the module itself is the referrer.
    for referrer in gc.get_referrers(original):
        if id(referrer) in own or isinstance(referrer, FrameType | ModuleType | BuiltinMethodType):
            continue
        text = _describe(referrer, original, own)
        if text:
            found.add(text)
    return sorted(found)


def _describe(referrer: Any, original: Any, own: set[int]) -> str | None:
    if isinstance(referrer, functools.partial):
        return f"functools.partial over {_name(original)}"
    if isinstance(referrer, MethodType):
        return f"bound method of {type(referrer.__self__).__qualname__}"
    if isinstance(referrer, CellType):
        owners = [f for f in gc.get_referrers(referrer) if isinstance(f, tuple)]
        functions = [
            f for t in owners for f in gc.get_referrers(t) if isinstance(f, FunctionType) and f.__closure__ is t
        ]
        names = sorted({_name(f) for f in functions if id(f) not in own and not _ours(f)})
        return f"closure of {', '.join(names)}" if names else None
    if isinstance(referrer, FunctionType):
        return (
            None
            if _ours(referrer) or referrer.__dict__.get("__wrapped__") is not original
            else f"wrapper {_name(referrer)}"
        )
    if isinstance(referrer, tuple):
        for holder in gc.get_referrers(referrer):
            if isinstance(holder, FunctionType) and not _ours(holder):
                if holder.__defaults__ is referrer:
                    return f"default argument of {_name(holder)}"
                if holder.__closure__ is referrer:
                    return f"closure of {_name(holder)}"
            if isinstance(holder, functools.partial):
                return f"argument of functools.partial over {_name(holder.func)}"
        return "a tuple"
    if isinstance(referrer, dict):
        return _describe_dict(referrer, original, own)
    if isinstance(referrer, list | set | frozenset):
        return f"a {type(referrer).__name__} of {len(referrer)} items"
    if isinstance(referrer, type):
        return None  # a method target's own class, or an alias in a class body, whose __dict__ is described instead
    if type(referrer).__module__.startswith("mcore_patches."):
        return None
    return f"an instance of {type(referrer).__module__}.{type(referrer).__qualname__}"


def _describe_dict(holder: dict[Any, Any], original: Any, own: set[int]) -> str | None:
    key = next((k for k, v in list(holder.items()) if v is original), None)
    for owner in gc.get_referrers(holder):
        if isinstance(owner, ModuleType) and vars(owner) is holder:
            return None
        if isinstance(owner, FunctionType):
            if owner.__globals__ is holder:
                return None
            if owner.__dict__ is holder:
                return None if _ours(owner) or id(owner) in own else f"attribute {key!r} of function {_name(owner)}"
            if owner.__kwdefaults__ is holder:
                return f"keyword default of {_name(owner)}"
        if getattr(type(owner), "__module__", "").startswith("mcore_patches."):
            return None
        if not isinstance(owner, type | FrameType) and getattr(owner, "__dict__", None) is holder:
            return f"attribute {key!r} of an instance of {type(owner).__module__}.{type(owner).__qualname__}"
    return f"a dict, under the key {key!r}"


def _ours(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_HERE) or "__mcore_patches__" in function.__dict__


def _name(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', type(obj).__qualname__)}"


_HERE = __file__.rsplit("/", 2)[0] + "/"
