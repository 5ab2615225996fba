"""Add fields to a dataclass at run time, and take them away again.

What the dataclass decorator has spread over a class is kept in step: `__dataclass_fields__` (read by fields, replace,
asdict, and by the decorator of a subclass defined later), `__annotations__`, the class attribute that holds the
default, `__init__` with its signature, and `__repr__` and `__eq__` where they are generated. Instances pickle and
deepcopy through their `__dict__`, so values of added fields travel with them. `__hash__` and ordering leave them out.

The state lives on the classes. A root carries the fields that were added to it; every dataclass below it carries what
the decorator had made of it, and is made anew from that after each change, so the order of changes does not matter, nor
whether a class or one of its bases is the root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.patch import ConfigField

ADDED = "__mcore_patches_fields__"
PRISTINE = "__mcore_patches_pristine__"


@dataclass(frozen=True)
class _Pristine:
    """What a class had before it was touched, and what has been put there instead.

    methods: `__init__`, `__repr__` and `__eq__` as far as the class has its own. ours: what stands in their place.
    baked: run-time fields that the decorator found in the bases and wrote into these methods, because the class was
    defined while they were there.
    """

    methods: dict[str, Callable[..., Any]]
    ours: dict[str, Callable[..., Any]]
    baked: frozenset[str]


def added(root: type) -> tuple[ConfigField, ...]:
    """The run-time fields of this very class; those of its bases do not count."""
    return tuple(vars(root).get(ADDED, {}).values())


def native(cls: type, names: Sequence[str]) -> list[str]:
    """Which of the names are fields of the class that are not ours: declared by it or by a base."""
    table = getattr(cls, "__dataclass_fields__", {})
    return [n for n in names if n in table and n not in _in_effect(cls)]


def subclasses(root: type) -> Iterator[type]:
    sub: type
    for sub in type.__subclasses__(root):
        yield sub
        yield from subclasses(sub)


def check(root: type, fields: Sequence[ConfigField]) -> None:
    """Raise OverlayError if `install` could not do it; nothing is changed."""
    name = root.__qualname__
    if "__dataclass_fields__" not in vars(root):
        raise OverlayError(f"{name} is not a dataclass; fields can be added to dataclasses only")
    if root.__dictoffset__ == 0:
        raise OverlayError(f"{name} has __slots__ and no __dict__; its instances have no room for a further field")
    names = [f.name for f in fields]
    if taken := native(root, names):
        raise OverlayError(f"{name} has the fields {', '.join(taken)} of its own")
    for cls in _tree(root):
        record: _Pristine | None = vars(cls).get(PRISTINE)
        for n in names:
            # A slot of a field that a subclass with slots inherited from us stays there when the field is gone.
            holder = next((b for b in cls.__mro__ if n in vars(b) and n not in _baked(b)), None)
            if holder is not None and n not in _in_effect(holder) and n not in native(cls, [n]):
                raise OverlayError(
                    f"{cls.__qualname__} has an attribute {n!r} that is no field, from {holder.__qualname__}"
                )
        for method, ours in record.ours.items() if record else ():
            if vars(cls).get(method) is not ours:
                raise OverlayError(f"{cls.__qualname__}.{method} was replaced by other code since; undo that first")


def install(root: type, fields: Sequence[ConfigField]) -> None:
    """Make `fields` the full set of run-time fields of `root`; an empty sequence takes all away.

    Raises OverlayError, before anything is changed: see `check`.
    """
    check(root, fields)
    classes = [cls for cls in _tree(root) if "__dataclass_fields__" in vars(cls)]
    for cls in classes:
        _record(cls)
    for f in added(root):
        delattr(root, f.name)
        root.__annotations__.pop(f.name, None)
    if fields:
        setattr(root, ADDED, {f.name: f for f in fields})
    elif ADDED in vars(root):
        delattr(root, ADDED)
    for f in fields:
        setattr(root, f.name, f.default)
        root.__annotations__[f.name] = f.type
    for cls in classes:
        _refresh(cls)


def _tree(root: type) -> list[type]:
    return list({id(cls): cls for cls in (root, *subclasses(root))}.values())


def _in_effect(cls: type) -> dict[str, ConfigField]:
    """Run-time fields that a class has from its own and its bases' roots, without names that it or a base declares."""
    found: dict[str, ConfigField] = {}
    for base in reversed(cls.__mro__):
        ours = vars(base).get(ADDED, {})
        for name in inspect.get_annotations(base):
            if name not in ours:
                found.pop(name, None)
        found |= ours
    return found


def _baked(cls: type) -> frozenset[str]:
    return vars(cls)[PRISTINE].baked if PRISTINE in vars(cls) else frozenset()


def _record(cls: type) -> None:
    """Keep what the decorator made of a class, the first time that it is seen."""
    if PRISTINE in vars(cls):
        return
    # A class without a record that has run-time fields already was defined while they were there.
    baked = frozenset(n for n in _in_effect(cls) if n in vars(cls)["__dataclass_fields__"])
    methods = {n: vars(cls)[n] for n in ("__init__", "__repr__", "__eq__") if n in vars(cls)}
    setattr(cls, PRISTINE, _Pristine(methods, {}, baked))


def _refresh(cls: type) -> None:
    """Make a class anew from its record and the run-time fields in effect."""
    record: _Pristine = vars(cls)[PRISTINE]
    wanted = _in_effect(cls)
    table: dict[str, dataclasses.Field[Any]] = vars(cls)["__dataclass_fields__"]
    for name in [n for n, f in table.items() if n not in wanted and (n in record.baked or _is_ours(f))]:
        del table[name]
    for name, spec in wanted.items():
        if name not in table or _is_ours(table[name]) or name in record.baked:
            table[name] = _dataclass_field(spec)
    for method, pristine in record.methods.items():
        setattr(cls, method, pristine)
    if not wanted and not record.baked:
        delattr(cls, PRISTINE)
        return
    ours: dict[str, Callable[..., Any]] = {}
    init = record.methods.get("__init__")
    if init is not None and (_is_generated(init) or not _takes_any_keyword(init)):
        ours["__init__"] = _init(init, wanted, record.baked)
    for method, replacement in (("__repr__", _repr), ("__eq__", _eq)):
        if method in record.methods and _is_generated(record.methods[method]):
            ours[method] = replacement
    for method, replacement in ours.items():
        setattr(cls, method, replacement)
    setattr(cls, PRISTINE, dataclasses.replace(record, ours=ours))


_OURS = {"mcore_patches": True}


def _is_ours(f: dataclasses.Field[Any]) -> bool:
    return "mcore_patches" in f.metadata


def _dataclass_field(spec: ConfigField) -> dataclasses.Field[Any]:
    f: dataclasses.Field[Any] = dataclasses.field(default=spec.default, kw_only=True, metadata=_OURS)
    f.name, f.type = spec.name, spec.type
    f._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    return f


def _takes_any_keyword(function: Callable[..., Any]) -> bool:
    """A handwritten __init__ that passes keywords on needs no help: the generated one that it calls takes them."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _init(pristine: Callable[..., None], wanted: dict[str, ConfigField], baked: frozenset[str]) -> Callable[..., None]:
    refused = [n for n in baked if n not in wanted]
    passed = {n: f.default for n, f in wanted.items() if n in baked}
    new = {n: f.default for n, f in wanted.items() if n not in baked}

    @functools.wraps(pristine)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if given := [n for n in refused if n in kwargs]:
            raise TypeError(f"{type(self).__qualname__}.__init__() got an unexpected keyword argument {given[0]!r}")
        # Before the generated __init__ runs: __post_init__ may validate the added fields.
        for name, default in new.items():
            if name in kwargs:
                object.__setattr__(self, name, kwargs.pop(name))
            elif name not in self.__dict__:  # else a subclass's __init__, which called this one, has set it
                object.__setattr__(self, name, default)
        for name, default in passed.items():
            kwargs.setdefault(name, default)
        pristine(self, *args, **kwargs)
        for name in refused:
            with contextlib.suppress(AttributeError):
                object.__delattr__(self, name)

    signature = inspect.signature(pristine)
    parameters = [p for n, p in signature.parameters.items() if n not in baked]
    tail = [parameters.pop()] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    extra = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for n, f in wanted.items()
    ]
    __init__.__signature__ = signature.replace(parameters=[*parameters, *extra, *tail])  # type: ignore[attr-defined]
    return __init__


def _is_generated(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    # A generated __repr__ is wrapped by a guard against recursion, which is in dataclasses or in reprlib.
    return code is not None and code.co_filename in ("<string>", dataclasses.__file__, reprlib.__file__)


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    parts = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({parts})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    names = [f.name for f in dataclasses.fields(self) if f.compare]
    return tuple(getattr(self, n) for n in names) == tuple(getattr(other, n) for n in names)
