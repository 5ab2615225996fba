"""Find every module-level name that holds an object and make it hold another; list what cannot be reached that way.

Modules are read through their dictionary, never by getattr: a lazy module would import half the world, and a package
attribute can shadow a submodule.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from mcore_patches.overlay.locate import module_dict

_OVERLAY = __name__.partition(".")[0] + "."

MADE_BY = "__mcore_patches_layer__"
"""Attribute of every function that a patch built: the patch's id."""


def modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, dictionary) of every module in sys.modules; one that is there under two names comes once."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        # sys.modules may hold None (import blocked) and foreign objects; those have no module dictionary to rebind.
        if not issubclass(type(module), ModuleType):
            continue
        names = module_dict(module)
        if isinstance(names, dict) and id(names) not in seen:
            seen.add(id(names))
            yield name if isinstance(name, str) else f"sys.modules[{name!r}]", names


def covered(module_name: str, prefixes: Collection[str]) -> bool:
    """Whether a module lies under one of the dotted prefixes."""
    return any(module_name == p or module_name.startswith(p + ".") for p in prefixes)


@dataclass(frozen=True)
class Rename:
    """What is to stand in place of an object; anywhere: also in modules under no prefix."""

    new: Any
    anywhere: bool


@dataclass(frozen=True)
class Alias:
    """A module-level name that was changed."""

    module: str
    name: str
    names: dict[str, Any]
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def undo(self) -> None:
        if self.names.get(self.name) is self.new:
            self.names[self.name] = self.old


def rebind(
    by_id: dict[int, Rename], by_function: Callable[[FunctionType], Rename | None], prefixes: Collection[str]
) -> tuple[list[Alias], list[tuple[str, Any]]]:
    """Change every module-level name that holds an object of `by_id`, or a patch's function that `by_function` knows.

    Returns (names changed, names left alone because their module is under no prefix: "module.name" and its object).
    """
    changed: list[Alias] = []
    outside: list[tuple[str, Any]] = []
    try:
        for module_name, names in modules():
            inside = covered(module_name, prefixes)
            for name, value in list(names.items()):
                rename = by_id.get(id(value))
                if rename is None and type(value) is FunctionType and hasattr(value, MADE_BY):
                    rename = by_function(value)
                if rename is None or rename.new is value:
                    continue
                if inside or rename.anywhere:
                    changed.append(Alias(module_name, name, names, value, rename.new))
                    names[name] = rename.new
                else:
                    outside.append((f"{module_name}.{name}", value))
    except BaseException:
        for alias in changed:
            alias.undo()
        raise
    return changed, outside


def unreachable(originals: Sequence[Any], ignore: Collection[int]) -> list[list[str]]:
    """For each original, describe the references to it that are no module-level names: partials, defaults, containers.

    ignore: ids of objects whose references are ours. The search is over what the garbage collector tracks (objects
    frozen by gc.freeze() are not), and needs three passes over it however many originals there are.
    """
    found: list[set[str]] = [set() for _ in originals]
    position = {id(original): i for i, original in enumerate(originals)}
    first = [(holder, original) for holder, original in _referrers(originals) if id(holder) not in ignore]
    carriers = {id(h): h for h, _ in first if issubclass(type(h), tuple | dict | CellType)}
    holders: dict[int, list[Any]] = {}
    for holder, carrier in _referrers(list(carriers.values())):
        holders.setdefault(id(carrier), []).append(holder)
    closures = {id(t): t for c in carriers.values() if type(c) is CellType for t in holders.get(id(c), ())}
    closing: dict[int, list[Any]] = {}
    for holder, closure in _referrers([t for t in closures.values() if type(t) is tuple]):
        closing.setdefault(id(closure), []).append(holder)
    for holder, original in first:
        above = holders.get(id(holder), [])
        if type(holder) is CellType:
            above = [f for t in above for f in closing.get(id(t), ()) if type(f) is FunctionType]
        above = [a for a in above if id(a) not in ignore]
        text = _describe(holder, original, above)
        if text:
            found[position[id(original)]].add(text)
    return [sorted(texts) for texts in found]


def _referrers(objects: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs (holder, object) of what the collector tracks."""
    by_id = {id(o): o for o in objects}
    if not by_id:
        return []
    return [
        (holder, referent)
        for holder in gc.get_referrers(*objects)
        if holder is not by_id and holder is not objects and not issubclass(type(holder), FrameType)
        for referent in {id(r): r for r in gc.get_referents(holder) if id(r) in by_id}.values()
    ]


def _describe(holder: Any, original: Any, above: list[Any]) -> str | None:
    """Say what holds the original; None for module dictionaries, which are `rebind`'s business, and for what is ours.

    type() throughout, not isinstance(): the __class__ of a foreign proxy would run its code.
    """
    kind = type(holder)
    if _is_ours(kind) or issubclass(kind, ModuleType):
        return None
    if issubclass(kind, functools.partial):
        return f"functools.partial over {_name(original)}"
    if kind is MethodType:
        return f"bound method of {_kind(holder.__self__)}"
    if kind is CellType:
        names = sorted({_name(f) for f in above if not made_by_us(f)})
        return f"closure of {', '.join(names)}" if names else None
    if kind is FunctionType:
        return (
            None  # what a function refers to by itself is a cell, a tuple or a dictionary, which is described instead
        )
    if issubclass(kind, type):
        return None  # likewise: its dictionary
    if issubclass(kind, tuple):
        return _describe_tuple(holder, above)
    if issubclass(kind, dict):
        return _describe_dict(holder, original, above)
    if kind in (list, set, frozenset):
        return f"a {kind.__name__} of {len(holder)} items"
    names = _instance_dict(holder)
    # Small instances hold their attributes themselves, without a dictionary that would be the holder.
    if type(names) is dict and (key := _key(names, original)) is not None:
        return f"attribute {key!r} of an instance of {_kind(holder)}"
    return f"an instance of {_kind(holder)}"


def _describe_tuple(holder: Any, above: list[Any]) -> str | None:
    for owner in above:
        if type(owner) is FunctionType:
            if owner.__defaults__ is holder:
                return None if made_by_us(owner) else f"default argument of {_name(owner)}"
            if owner.__closure__ is holder:
                return None
        if issubclass(type(owner), functools.partial):
            return f"argument of functools.partial over {_name(owner.func)}"
    return f"a tuple of {len(holder)} items" if type(holder) is tuple else f"an instance of {_kind(holder)}"


def _describe_dict(holder: dict[Any, Any], original: Any, above: list[Any]) -> str | None:
    key = _key(holder, original)
    for owner in above:
        kind = type(owner)
        if _is_ours(kind):
            return None
        if issubclass(kind, ModuleType) and module_dict(owner) is holder:
            return None
        if kind is FunctionType:
            if owner.__globals__ is holder:
                return None
            if owner.__kwdefaults__ is holder:
                return None if made_by_us(owner) else f"keyword default of {_name(owner)}"
            return None if made_by_us(owner) else f"attribute {key!r} of function {_name(owner)}"
        if issubclass(kind, type):
            return f"attribute {key!r} of class {_name(owner)}"
        if issubclass(kind, functools.partial):
            return f"argument {key!r} of functools.partial over {_name(owner.func)}"
        if _instance_dict(owner) is holder:
            return f"attribute {key!r} of an instance of {_kind(owner)}"
    return f"a dict, under the key {key!r}"


def _key(names: dict[Any, Any], value: Any) -> Any:
    return next((k for k, v in list(names.items()) if v is value), None)


def _instance_dict(owner: Any) -> Any:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def made_by_us(function: FunctionType) -> bool:
    return hasattr(function, MADE_BY) or str(function.__module__).startswith(_OVERLAY)


def _is_ours(kind: type) -> bool:
    return str(_MODULE_OF.__get__(kind)).startswith(_OVERLAY)


def _kind(obj: Any) -> str:
    return f"{_MODULE_OF.__get__(type(obj))}.{_QUALNAME_OF.__get__(type(obj))}"


# A metaclass may have properties of these names, which would run its code.
_MODULE_OF, _QUALNAME_OF = vars(type)["__module__"], vars(type)["__qualname__"]


def _name(obj: Any) -> str:
    """module.qualname of a function or class; of anything else, its type's."""
    if issubclass(type(obj), type):
        return f"{_MODULE_OF.__get__(obj)}.{_QUALNAME_OF.__get__(obj)}"
    return f"{obj.__module__}.{obj.__qualname__}" if type(obj) is FunctionType else _kind(obj)
