"""Add fields to a dataclass at run time, and take them away again.

The dataclass machinery reads four things, all of which are kept in step: `__dataclass_fields__` (fields, replace, asdict,
and inheritance into subclasses defined later), the class attribute (the default), `__init__` with its signature, and
`__repr__` and `__eq__` where they are generated. Instances pickle and deepcopy through their `__dict__`, so values of added fields travel with them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.patch import ConfigField

MARK = "__mcore_patches_fields__"
LATE = "__mcore_patches_late__"


def subclasses(root: type) -> Iterator[type]:
    for sub in root.__subclasses__():
        yield sub
        yield from subclasses(sub)


def native(cls: type, names: Sequence[str]) -> list[str]:
    """Which of the names the class has as fields of its own, without ours."""
    ours = _ours(cls)
    return [n for n in names if n in cls.__dataclass_fields__ and n not in ours]  # type: ignore[attr-defined]


def _ours(cls: type) -> dict[str, ConfigField]:
    for base in cls.__mro__:
        if MARK in vars(base):
            return vars(base)[MARK].added
    return {}


@dataclasses.dataclass
class _Mark:
    """What install() put on the root class and what it replaced there."""

    added: dict[str, ConfigField]
    inits: weakref.WeakKeyDictionary[type, Callable[..., None]]
    reprs: weakref.WeakKeyDictionary[type, Callable[..., str]]


def install(root: type, added: Sequence[ConfigField]) -> None:
    """Make `added` the full set of run-time fields of `root`; an empty sequence restores the class and its subclasses."""
    if not dataclasses.is_dataclass(root):
        raise OverlayError(f"{root.__qualname__} is not a dataclass; fields can be added to dataclasses only")
    if taken := native(root, [f.name for f in added]):
        raise OverlayError(f"{root.__qualname__} has the fields {', '.join(taken)} of its own")
    _remove(root)
    if not added:
        return
    mark = _Mark({f.name: f for f in added}, weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary())
    setattr(root, MARK, mark)
    for f in added:
        setattr(root, f.name, f.default)
    for cls in {root, *subclasses(root)}:
        if dataclasses.is_dataclass(cls):
            _extend(cls, mark)


def _dataclass_field(spec: ConfigField) -> dataclasses.Field[Any]:
    f: dataclasses.Field[Any] = dataclasses.field(default=spec.default, kw_only=True)
    f.name, f.type = spec.name, spec.type
    f._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    return f


def _extend(cls: type, mark: _Mark) -> None:
    """Give one class that exists already the fields that it lacks."""
    own: dict[str, dataclasses.Field[Any]] = vars(cls)["__dataclass_fields__"]
    new = [f for f in mark.added.values() if f.name not in own]
    if not new:
        return
    for f in new:
        own[f.name] = _dataclass_field(f)
    # A subclass without an __init__ of its own (dataclass(init=False)) reaches its base's, which takes the fields.
    if "__init__" in vars(cls):
        original = vars(cls)["__init__"]
        mark.inits[cls] = original
        late: _Late | None = getattr(original, LATE, None)
        if late is not None:
            refused = [n for n in late.names if n not in mark.added]
            original = late.init(refused)
            new = [f for f in new if f.name not in late.names]
        cls.__init__ = _init(original, new) if new else original  # type: ignore[misc]
    if "__repr__" in vars(cls) and not _generic(vars(cls)["__repr__"]):
        mark.reprs[cls] = vars(cls)["__repr__"]
        cls.__repr__ = _repr(mark.reprs[cls], [f.name for f in mark.added.values()])  # type: ignore[method-assign]


def _init(original: Callable[..., None], new: Sequence[ConfigField]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Before the original runs: __post_init__ may validate the added fields.
        for f in new:
            object.__setattr__(self, f.name, kwargs.pop(f.name, f.default))
        original(self, *args, **kwargs)

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    tail = [parameters.pop()] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    extra = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in new
    ]
    __init__.__signature__ = signature.replace(parameters=[*parameters, *extra, *tail])  # type: ignore[attr-defined]
    return __init__


def _repr(original: Callable[[Any], str], names: Sequence[str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def __repr__(self: Any) -> str:
        text = original(self)
        extra = ", ".join(f"{n}={getattr(self, n)!r}" for n in names)
        return f"{text[:-1]}, {extra})" if text.endswith(")") else f"{text} [{extra}]"

    return __repr__


def _remove(root: type) -> None:
    mark: _Mark | None = vars(root).get(MARK)
    if mark is None:
        return
    for cls in {root, *subclasses(root)}:
        own = vars(cls).get("__dataclass_fields__")
        if own is None:
            continue
        for name in mark.added:
            own.pop(name, None)
        if cls in mark.inits:
            cls.__init__ = mark.inits[cls]  # type: ignore[misc]
        elif "__init__" in vars(cls):
            _retire(cls, mark)
        if cls in mark.reprs:
            cls.__repr__ = mark.reprs[cls]  # type: ignore[method-assign]
    for name in mark.added:
        delattr(root, name)
    delattr(root, MARK)


@dataclasses.dataclass(frozen=True)
class _Late:
    """The generated __init__ of a subclass that was defined while the root had run-time fields, and their names."""

    generated: Callable[..., None]
    names: tuple[str, ...]

    def init(self, refused: Sequence[str]) -> Callable[..., None]:
        """The generated __init__ without the refused names: neither accepted nor set."""
        generated = self.generated

        @functools.wraps(generated)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if given := [n for n in refused if n in kwargs]:
                raise TypeError(f"{type(self).__qualname__}.__init__() got an unexpected keyword argument {given[0]!r}")
            generated(self, *args, **kwargs)
            for n in refused:
                vars(self).pop(n, None)

        kept = [p for n, p in inspect.signature(generated).parameters.items() if n not in refused]
        __init__.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        setattr(__init__, LATE, self)
        return __init__


def _retire(cls: type, mark: _Mark) -> None:
    """Take the run-time fields out of what the dataclass decorator generated for a subclass defined while patched."""
    generated = vars(cls)["__init__"]
    parameters = inspect.signature(generated).parameters
    names = tuple(n for n in mark.added if n in parameters)
    if not names:
        return
    cls.__init__ = _Late(generated, names).init(names)  # type: ignore[misc]
    # The generated methods name every field; these read the fields that the class has at the time of the call.
    if "__repr__" in vars(cls) and _generated(vars(cls)["__repr__"]):
        cls.__repr__ = _fields_repr  # type: ignore[method-assign]
    if "__eq__" in vars(cls) and _generated(vars(cls)["__eq__"]):
        cls.__eq__ = _fields_eq  # type: ignore[method-assign, assignment]


def _generated(function: Any) -> bool:
    return getattr(function, "__code__", None) is not None and function.__code__.co_filename in (
        "<string>",
        dataclasses.__file__,
        reprlib.__file__,
    )


def _generic(function: Any) -> bool:
    return function is _fields_repr


def _fields_repr(self: Any) -> str:
    parts = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({parts})"


def _fields_eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    names = [f.name for f in dataclasses.fields(self) if f.compare]
    return all(getattr(self, n) == getattr(other, n) for n in names)
