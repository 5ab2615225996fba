"""The layers of patches on one upstream object: built first, then put in place, and undone if a later step fails.

A replacement carries its `Stack`: the upstream object under it and the layers in between. What is in place is read from
there, because a flag kept elsewhere lies after a reload, a fork or a second import of the module.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol

from mcore_patches.overlay import fields, rebind
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.locate import module_dict
from mcore_patches.overlay.patch import AnyTarget, Below, ConfigField, FieldsTarget, Target

STACK = "__mcore_patches__"

Key = tuple[str, str]
"""(module, qualname) of a target."""


@dataclass(frozen=True)
class Layer:
    """One patch's part of a target. note: what is unusual about it, e.g. that it was forced."""

    patch_id: str
    target: AnyTarget
    counters: Counters
    note: str = ""


@dataclass(eq=False)
class Stack:
    """What lies on an upstream object.

    carrier: the replacement (or the class) that carries this; a wrapper made with functools.wraps has a copy of it.
    original: upstream's function (or the class). raw: the same as its holder had it, e.g. within a staticmethod.
    rebound: names that were changed along with the target. unreachable: references that keep the original.
    """

    key: Key
    carrier: weakref.ref[Any]
    original: Any
    raw: Any
    module: ModuleType
    layers: tuple[Layer, ...]
    rebound: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(layer.patch_id for layer in self.layers)

    def layer(self, patch_id: str) -> Layer | None:
        return next((x for x in self.layers if x.patch_id == patch_id), None)


def stack_on(obj: Any) -> Stack | None:
    """The stack that this function or class carries itself."""
    if issubclass(type(obj), type):
        found = vars(obj).get(STACK)
    elif type(obj) is FunctionType:
        found = getattr(obj, STACK, None)
    else:
        return None
    # Another copy of this package may have put it there (after a reload of mcore_patches), so no isinstance.
    return found if type(found).__name__ == "Stack" and found.carrier() is obj else None


def beneath(obj: Any) -> Iterable[Any]:
    """obj, and what it wraps according to functools.wraps, outermost first."""
    seen: set[int] = set()
    while obj is not None and id(obj) not in seen:
        seen.add(id(obj))
        yield obj
        try:
            obj = vars(obj).get("__wrapped__")
        except TypeError:
            return


_carriers: weakref.WeakSet[Any] = weakref.WeakSet()
"""What has carried a stack: where to look for those whose modules have left sys.modules. Only a look tells."""


def strays(live: Iterable[Any]) -> dict[Key, list[Stack]]:
    """Stacks that are still in place although their target is another object by now.

    That is so after a reload or a second import of the target's module: module-level names hold the older replacement,
    or somebody the older module. live: the originals of the targets as they are.
    """
    known = {id(o) for o in live}
    found: dict[int, Stack] = {}
    for _, names in rebind.modules():
        for value in list(names.values()):
            if type(value) is FunctionType and hasattr(value, rebind.MADE_BY) and (stack := stack_on(value)):
                found[id(value)] = stack
    for value in list(_carriers):
        if (stack := stack_on(value)) and (issubclass(type(value), type) or home_of(stack)):
            found[id(value)] = stack
    found = {i: stack for i, stack in found.items() if id(stack.original) not in known}
    result: dict[Key, list[Stack]] = {}
    for stack in found.values():
        result.setdefault(stack.key, []).append(stack)
    return result


def home_of(stack: Stack) -> tuple[Any, str] | None:
    """(holder, attribute) of a stack's function in its own module; None if it does not lie there any more."""
    holder: Any = stack.module
    *outer, attribute = stack.key[1].split(".")
    try:
        for name in outer:
            holder = names_of(holder)[name]
        raw = names_of(holder)[attribute]
    except (KeyError, TypeError):
        return None
    return (holder, attribute) if unwrapped(raw) is stack.carrier() else None


def names_of(holder: Any) -> Any:
    """The dictionary of a module or class. Raises TypeError for anything else."""
    return module_dict(holder) if issubclass(type(holder), ModuleType) else vars(holder)


def unwrapped(raw: Any) -> Any:
    return raw.__func__ if issubclass(type(raw), staticmethod | classmethod) else raw


@dataclass(eq=False)
class Change:
    """The next state of one target, built and not yet visible.

    holder, attribute: where the target lives; None for a replacement that only aliases hold any more.
    before: the object that runs now. seen: what the holder had when this was built.
    """

    key: Key
    holder: Any
    attribute: str
    before: Any
    seen: Any
    original: Any
    raw: Any
    module: ModuleType
    layers: tuple[Layer, ...]
    after: Any = None
    aliases: list[rebind.Alias] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def build(self) -> None:
        """Run every layer's build(), innermost first. Changes nothing that anybody else can see."""
        self.layers = tuple(sorted(self.layers, key=lambda x: (getattr(x.target, "level", 0), x.patch_id)))
        made = self.original
        for layer in self.layers:
            assert isinstance(layer.target, Target)
            replacement = layer.target.build(Below(made, self.original, self.module, layer.counters))
            made = dressed(replacement, made, self.original, layer)
        self.after = made
        if self.layers:
            stack = Stack(self.key, weakref.ref(made), self.original, self.raw, self.module, self.layers)
            setattr(made, STACK, stack)

    @property
    def stale(self) -> bool:
        """Whether somebody else changed the target after this was built."""
        return self.holder is not None and vars(self.holder).get(self.attribute) is not self.seen

    def place(self) -> None:
        if self.holder is not None:
            wrapper = type(self.raw)
            wrapped = wrapper(self.after) if issubclass(wrapper, staticmethod | classmethod) else self.after
            setattr(self.holder, self.attribute, wrapped if self.layers else self.raw)
        if self.layers:
            _carriers.add(self.after)

    def undo(self) -> None:
        for alias in reversed(self.aliases):
            alias.undo()
        if self.holder is not None:
            setattr(self.holder, self.attribute, self.seen)

    @property
    def own(self) -> set[int]:
        """Ids of what holds the original on our behalf."""
        return _reachable(self.after, self.original) | _reachable(self.before, self.original) | {id(self.raw)}


@dataclass(eq=False)
class FieldsChange:
    """The next set of run-time fields of one class."""

    key: Key
    cls: type
    layers: tuple[Layer, ...]
    module: ModuleType
    before: tuple[ConfigField, ...] = ()
    stack_before: Stack | None = None

    def build(self) -> None:
        self.before, self.stack_before = fields.added(self.cls), stack_on(self.cls)
        fields.check(self.cls, self._wanted())

    @property
    def stale(self) -> bool:
        return fields.added(self.cls) != self.before

    def place(self) -> None:
        fields.install(self.cls, self._wanted())
        if self.layers:
            setattr(
                self.cls, STACK, Stack(self.key, weakref.ref(self.cls), self.cls, self.cls, self.module, self.layers)
            )
            _carriers.add(self.cls)
        elif self.stack_before is not None:
            delattr(self.cls, STACK)

    def undo(self) -> None:
        fields.install(self.cls, self.before)
        if self.stack_before is not None:
            setattr(self.cls, STACK, self.stack_before)
        elif STACK in vars(self.cls):
            delattr(self.cls, STACK)

    def _wanted(self) -> tuple[ConfigField, ...]:
        wanted: dict[str, ConfigField] = {}
        for layer in self.layers:
            assert isinstance(layer.target, FieldsTarget)
            for f in layer.target.fields:
                if wanted.setdefault(f.name, f) != f:
                    ids = ", ".join(x.patch_id for x in self.layers)
                    raise OverlayError(f"the patches {ids} disagree on the field {f.name} of {self.cls.__qualname__}")
        # A field that the class has on its own is upstream's (a forced patch on text that has some of its fields).
        return tuple(f for f in wanted.values() if f.name not in fields.native(self.cls, list(wanted)))


class AnyChange(Protocol):
    """The next state of one target: built first, then placed; `stale` if somebody else came in between."""

    @property
    def key(self) -> Key: ...

    @property
    def stale(self) -> bool: ...

    def build(self) -> None: ...

    def place(self) -> None: ...

    def undo(self) -> None: ...


def install(changes: Sequence[AnyChange], prefixes: tuple[str, ...]) -> None:
    """Put prepared changes in place, all or none. Module-level names that hold a replaced object follow."""
    done: list[AnyChange] = []
    try:
        for change in changes:
            done.append(change)
            change.place()
        _rebind([c for c in changes if isinstance(c, Change)], prefixes)
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise


def _rebind(changes: Sequence[Change], prefixes: tuple[str, ...]) -> None:
    if not changes:
        return
    by_original = {id(c.original): c for c in changes}
    by_id = {id(c.original): rebind.Rename(c.after, False) for c in changes}

    def earlier(function: FunctionType) -> rebind.Rename | None:
        """Whoever holds a replacement imported it while the target was patched, whatever its module."""
        stack = stack_on(function)
        change = by_original.get(id(stack.original)) if stack else None
        return rebind.Rename(change.after, True) if change else None

    changed, outside = rebind.rebind(by_id, earlier, prefixes)
    by_after = {id(c.after): c for c in changes}
    for alias in changed:
        by_after[id(alias.new)].aliases.append(alias)
    for where, value in outside:
        if not where.startswith(_PACKAGE):
            by_original[id(value)].outside.append(where)
    for change in changes:
        if change.layers:
            change.after.__dict__[STACK].rebound = tuple(sorted(map(str, change.aliases)))


def note_unreachable(changes: Sequence[Change]) -> None:
    """Record in each stack which references keep its original; one search for all."""
    # Of several changes to one target the last one is in place.
    latest = list({id(c.original): c for c in changes if c.layers}.values())
    own = {i for c in latest for i in c.own}
    found = rebind.unreachable([c.original for c in latest], own)
    for change, texts in zip(latest, found, strict=True):
        hint = " (its module is under no prefix; MCORE_PATCHES_PREFIXES adds one)"
        change.after.__dict__[STACK].unreachable = (*(where + hint for where in sorted(change.outside)), *texts)


def dressed(replacement: Any, below: Any, original: Any, layer: Layer) -> FunctionType:
    """Give a replacement upstream's name, module, docstring and signature, so that pickle and inspect work by name."""
    if type(replacement) is not FunctionType:
        raise OverlayError(f"build() returned {type(replacement).__name__}; a replacement is a plain function")
    used = rebind.MADE_BY in replacement.__dict__ and "__wrapped__" not in replacement.__dict__
    if used or replacement is below or replacement is original:
        raise OverlayError(f"build() returned {replacement.__qualname__} again; a replacement is a new function")
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(replacement, attribute, getattr(original, attribute, getattr(replacement, attribute)))
    # functools.wraps in build() leaves both: inspect.getsource would show upstream's text for our code, and the layer
    # below would seem to be this one.
    for attribute in ("__wrapped__", STACK):
        replacement.__dict__.pop(attribute, None)
    setattr(replacement, rebind.MADE_BY, layer.patch_id)
    signature = inspect.signature(original)
    if inspect.signature(replacement) != signature:
        replacement.__dict__["__signature__"] = signature
    return replacement


def _reachable(function: Any, original: Any) -> set[int]:
    """Ids of the functions, cells and containers below a replacement, down to the original."""
    found: set[int] = set()
    pending = [function]
    while pending:
        obj = pending.pop()
        if obj is original or id(obj) in found:
            continue
        found.add(id(obj))
        if type(obj) is FunctionType:
            pending += [x for x in (obj.__closure__, obj.__defaults__, obj.__kwdefaults__, obj.__dict__) if x]
        elif type(obj) in (tuple, list, set, frozenset, dict, CellType, functools.partial):
            pending += gc.get_referents(obj)
    return found


_PACKAGE = __name__.partition(".")[0] + "."
