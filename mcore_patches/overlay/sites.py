"""Where a target is in the running interpreter and on disk, and the layers that lie on it.

Truth is read off the live object: a replacement carries its `Stack`. Flags kept elsewhere lie after a reload or a fork.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mcore_patches.overlay import fields, rebind
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.fingerprint import SourceError, combined, read_source, source_segment
from mcore_patches.overlay.locate import locate
from mcore_patches.overlay.patch import AnyTarget, Below, FieldsTarget, Target

STACK = "__mcore_patches__"


@dataclass(frozen=True)
class Layer:
    """One patch's part of a target."""

    patch_id: str
    target: AnyTarget


@dataclass(frozen=True)
class Stack:
    """What lies on a live target. `replaced` remembers our earlier objects, which others may have imported meanwhile."""

    original: Any
    layers: tuple[Layer, ...]
    replaced: tuple[weakref.ref[Any], ...] = ()
    rebound: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(layer.patch_id for layer in self.layers)


class Site:
    """A target resolved: its module, its text on disk, its live object if the module is imported."""

    def __init__(self, target: AnyTarget) -> None:
        self.target = target
        self.module_name: str | None = None
        self.file: str | None = None
        self.absent: str | None = None
        self.broken: str | None = None
        self.fingerprint: str | None = None
        self.line: int | None = None
        self._text: str | None = None
        self._resolve()

    def _resolve(self) -> None:
        reasons = []
        for name in self.target.modules:
            found = locate(name)
            if found.found:
                self.module_name, self.file = name, found.file
                break
            reasons.append(found.reason)
        else:
            self.absent = "; ".join(reasons)
            return
        if self.file is None or not self.file.endswith(".py"):
            self.absent = None if self.module else f"{self.module_name} has no source file to read ({self.file})"
            return
        try:
            self._text = read_source(self.file)
            segment = source_segment(self._text, self.target.qualname)
        except SourceError as exc:
            self.broken = str(exc)
            return
        if segment is None:
            self.absent = f"{self.file} does not define {self.target.qualname}"
            return
        self.line = segment[1]
        relies_on = self.target.relies_on if isinstance(self.target, Target) else ()
        self.fingerprint = combined(self._text, (self.target.qualname, *relies_on))

    @property
    def module(self) -> ModuleType | None:
        """The live module, once its own import is over."""
        module = sys.modules.get(self.module_name) if self.module_name else None
        if not isinstance(module, ModuleType):
            return None
        spec = vars(module).get("__spec__")
        return (
            None if spec is not None and getattr(spec, "_initializing", False) and not self._defined(module) else module
        )

    def _defined(self, module: ModuleType) -> bool:
        return self.target.qualname.split(".")[0] in vars(module)

    @property
    def verdict(self) -> str:
        """ "needs", "fixed" or "unknown"; a dataclass has no text of interest, only fields: "fixed" when it has them all."""
        if isinstance(self.target, Target):
            return self.target.known.get(self.fingerprint or "", "unknown")
        names = [f.name for f in self.target.fields]
        if self.module is not None:
            own = fields.native(self.original, names)
        else:
            own = [n for n in names if source_segment(self._text or "", f"{self.target.qualname}.{n}")]
        return "needs" if not own else "fixed" if len(own) == len(names) else "unknown"

    def _holder(self) -> tuple[Any, str]:
        assert self.module is not None
        holder: Any = self.module
        *outer, attribute = self.target.qualname.split(".")
        for name in outer:
            holder = vars(holder)[name]
        return holder, attribute

    @property
    def raw(self) -> Any:
        """What the holder's dictionary has: the function, or the staticmethod or classmethod around it. KeyError if absent."""
        holder, attribute = self._holder()
        return vars(holder)[attribute]

    @property
    def current(self) -> Any:
        raw = self.raw
        return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw

    @property
    def stack(self) -> Stack | None:
        """The layers on the live object, or None when it is upstream's own, or not imported."""
        if self.module is None:
            return None
        try:
            current = self.current
        except (KeyError, AttributeError):
            return None
        found = getattr(current, "__dict__", {}).get(STACK)
        # Another copy of this package may have put it there (after a reload of mcore_patches), so no isinstance.
        return found if type(found).__name__ == "Stack" else None

    @property
    def original(self) -> Any:
        stack = self.stack
        return self.current if stack is None else stack.original if isinstance(self.target, Target) else self.current

    def missing_live(self) -> str | None:
        """Why the imported module lacks what its text defines (deleted, or defined on a branch not taken)."""
        if self.module is None:
            return None
        try:
            _ = self.raw
        except (KeyError, AttributeError, TypeError):
            return f"{self.module_name} is imported but has no {self.target.qualname}"
        return None

    def foreign(self) -> str | None:
        """Why the live original is not what the file on disk defines: another tool replaced it, or the file changed."""
        if self.module is None or self._text is None or isinstance(self.target, FieldsTarget):
            return None
        codes = _codes(self._text, self.file or "", self.target.qualname)
        seen: Any = self.original
        while seen is not None:
            if isinstance(seen, FunctionType) and seen.__code__ in codes:
                return None
            seen = getattr(seen, "__dict__", {}).get("__wrapped__")
        live = self.original
        where = _where(live) or f"an object of {type(live).__module__}.{type(live).__qualname__}"
        return f"the live {self.target.qualname} ({where}) is not what {self.file}:{self.line} defines"

    def where(self) -> tuple[str | None, str | None]:
        """ "file:line" of upstream's text and, with layers on it, of the object that runs."""
        before = f"{self.file}:{self.line}" if self.line is not None else self.file
        stack = self.stack
        if stack is None:
            return before, None
        if isinstance(self.target, FieldsTarget):
            return before, "fields " + ", ".join(f.name for layer in stack.layers for f in _fields(layer))
        return before, _where(self.current)

    # Changing the live object ---------------------------------------------------------------------------------------

    def set_layers(
        self, layers: tuple[Layer, ...], counters: Mapping[str, Counters], prefixes: tuple[str, ...]
    ) -> None:
        """Make exactly these layers lie on the target. No layers: the original is back, wherever a replacement went."""
        if isinstance(self.target, FieldsTarget):
            self._set_fields(layers)
            return
        ordered = tuple(
            sorted(layers, key=lambda x: (x.target.level if isinstance(x.target, Target) else 0, x.patch_id))
        )
        old, current, original, raw = self.stack, self.current, self.original, self.raw
        assert self.module is not None
        new = original
        for layer in ordered:
            assert isinstance(layer.target, Target)
            below = Below(new, original, self.module, counters[layer.patch_id])
            new = dressed(layer.target.build(below), original)
        replaced = (*(old.replaced if old else ()), *((weakref.ref(current),) if old else ()))
        ours = [o for o in (ref() for ref in replaced) if o is not None]
        holder, attribute = self._holder()
        wrapped = type(raw)(new) if isinstance(raw, staticmethod | classmethod) else new
        setattr(holder, attribute, wrapped)
        rebound, outside = rebind.rebind([original], ours, new, prefixes)
        if not ordered:
            return
        own = f"{self.module_name}.{self.target.qualname}"
        stack = Stack(original, ordered, replaced, tuple(r for r in rebound if r != own))
        new.__dict__[STACK] = stack
        left = rebind.unreachable(original, [stack, stack.__dict__, vars(holder), new, *ours])
        hint = " (its module is under no prefix; MCORE_PATCHES_PREFIXES adds one)"
        object.__setattr__(stack, "unreachable", tuple([*(o + hint for o in outside), *left]))

    def _set_fields(self, layers: tuple[Layer, ...]) -> None:
        cls = self.current
        added = {f.name: f for layer in layers for f in _fields(layer)}
        for layer in layers:
            for f in _fields(layer):
                if added[f.name] != f:
                    raise OverlayError(
                        f"patches {', '.join(x.patch_id for x in layers)} disagree on the field {f.name}"
                    )
        fields.install(cls, tuple(added.values()))
        if layers:
            setattr(cls, STACK, Stack(cls, layers))
        elif STACK in vars(cls):
            delattr(cls, STACK)


def _fields(layer: Layer) -> tuple[Any, ...]:
    return layer.target.fields if isinstance(layer.target, FieldsTarget) else ()


def dressed(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Give a replacement upstream's name, module, docstring and signature, so that pickle and inspect work by name.

    No __wrapped__: inspect.getsource would show upstream's text for our code.
    """
    if not isinstance(replacement, FunctionType):
        raise OverlayError(f"build() returned {type(replacement).__name__}; a replacement is a plain function")
    if replacement is original or STACK in replacement.__dict__:
        raise OverlayError(f"build() returned {replacement.__qualname__} itself; a replacement is a new function")
    replacement.__name__, replacement.__qualname__ = original.__name__, original.__qualname__
    replacement.__module__, replacement.__doc__ = original.__module__, original.__doc__
    signature = inspect.signature(original)
    if inspect.signature(replacement) != signature:
        replacement.__dict__["__signature__"] = signature
    return replacement


def _where(obj: Any) -> str | None:
    code = getattr(obj, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else None


def _codes(text: str, file: str, qualname: str) -> list[CodeType]:
    """The code objects that the interpreter compiles from the text for this name, one for each branch that defines it."""
    found = []
    pending = [compile(text, file, "exec", dont_inherit=True)]
    while pending:
        for const in pending.pop().co_consts:
            if isinstance(const, CodeType):
                if const.co_qualname == qualname:
                    found.append(const)
                pending.append(const)
    return found
