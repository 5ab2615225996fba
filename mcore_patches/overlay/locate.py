"""Where a module's source is, without importing the module or any of its parents.

Importing ``megatron.core`` imports torch and takes seconds, so the overlay reads text first. The library's own ways do
not do: ``importlib.util.find_spec`` imports the parents of a dotted name; ``PathFinder.find_spec`` asks ``sys.modules``
for the parent of a namespace package (a folder without ``__init__.py``) and raises ``KeyError`` when that is not
imported. Therefore the path-based part of the import system (PEP 420) is walked here, one level at a time, and every
other finder of ``sys.meta_path`` is asked in its order, as an import would.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Finders that only watch imports. They answer find_spec by calling importlib.util.find_spec, which imports the parents,
# and find nothing that another finder does not. A vendored copy of wrapt ends in the same module path. The last one is
# ours and finds what patches provide, where upstream's is asked for.
_WATCHERS = ("wrapt.importer", "ddtrace.internal.module", "mcore_patches.overlay.provided")


@dataclass(frozen=True)
class Located:
    """Answer of `locate`.

    kind: ``"found"``; ``"root-absent"`` when not even the top-level package is there (megatron-core is not installed);
        ``"submodule-absent"`` when a package on the way is there, but has no such submodule (another release).
    file: absolute path of the source, or None. A found module has none when it is a namespace package, built in or made
        by hand. It may also be compiled (``.so``, ``.pyc``).
    is_package: whether it can have submodules.
    reason: why there is no module, or no file; empty when `file` is given.
    """

    module: str
    file: str | None
    is_package: bool
    reason: str
    kind: Literal["found", "root-absent", "submodule-absent"]

    @property
    def found(self) -> bool:
        return self.kind == "found"


def locate(module: str, *, anew: bool = False) -> Located:
    """Find `module` (dotted name) without executing anything that belongs to it or to its parents.

    anew: as if the module itself, not its parents, were not in ``sys.modules``.

    Modules in ``sys.modules`` are believed first, for the module itself as for its parents. Their ``__spec__``,
    ``__file__`` and ``__path__`` are read from the module's dictionary: no lazy module loads, and a package attribute
    cannot shadow a submodule of the same name. A finder that raises is passed over; its error is part of `reason` if
    nothing else finds the module.

    Raises ValueError for a name that no import statement could name.
    """
    if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"module={module!r}: allowed is an absolute dotted name such as 'megatron.core.utils'")
    names = [".".join(module.split(".")[:n]) for n in range(1, module.count(".") + 2)]
    # An import starts at the deepest name that is already in sys.modules, and so does this.
    present = {name for name in names if name in sys.modules and not (anew and name == module)}
    start = max((i for i, name in enumerate(names) if name in present), default=0)
    search: list[str] | None = None  # None stands for sys.path, as finders expect for a top-level name
    level: _Level | str | None = None
    for name in names[start:]:
        level = _imported(name) if name in present else _find(name, search)
        if isinstance(level, str):
            return Located(module, None, False, level, "submodule-absent" if "." in name else "root-absent")
        if level.search is None and name != module:
            reason = f"no module {module}: {name} is a module, not a package ({level.file or level.origin})"
            return Located(module, None, False, reason, "submodule-absent")
        search = level.search
    assert isinstance(level, _Level)
    return Located(module, level.file, level.search is not None, "" if level.file else level.origin, "found")


@dataclass(frozen=True)
class _Level:
    """A name found on the way: its file, or what else is known of its origin, and where its submodules are."""

    file: str | None
    origin: str
    search: list[str] | None


def _folders(search: list[str]) -> str:
    return ", ".join(search) or "an empty path"


def _imported(name: str) -> _Level | str:
    """The level of a name in sys.modules, or why it cannot be used."""
    module = sys.modules[name]
    if module is None:
        return f"the import of {name} is blocked: sys.modules[{name!r}] is None"
    values = module_dict(module)
    search: list[str] | None = None
    if values.get("__path__") is not None:
        try:
            search = list(values["__path__"])
        except Exception as error:  # a namespace path recomputes itself and fails when its parent was removed
            return f"the __path__ of the imported package {name} cannot be read: {error!r}"
    spec = values.get("__spec__")
    file = values.get("__file__") or _spec_file(spec)
    if isinstance(file, str):
        return _Level(os.path.abspath(file), "", search)
    return _Level(None, _fileless(name, spec, search, "it was put into sys.modules without a file"), search)


def module_dict(module: object) -> Mapping[str, Any]:
    """The dictionary of a module, past every ``__getattr__`` and ``__getattribute__`` that would load a lazy module."""
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def _find(name: str, search: list[str] | None) -> _Level | str:
    """The first answer of sys.meta_path for `name` among the folders `search`, or why there is none."""
    troubles: list[str] = []
    for finder in tuple(sys.meta_path):
        if _is_watcher(finder):
            continue
        try:
            if finder is importlib.machinery.PathFinder:
                spec = _path_spec(name, sys.path if search is None else search, troubles)
            else:
                spec = finder.find_spec(name, search)
            if spec is None:
                continue
            locations = spec.submodule_search_locations
            below = None if locations is None else list(locations)
            file = _spec_file(spec)
        except Exception as error:  # another finder's answer is as good, and an import will show the error
            troubles.append(f"finder {_label(finder)} raised {error!r}")
            continue
        if file is not None:
            return _Level(os.path.abspath(file), "", below)
        return _Level(None, _fileless(name, spec, below, f"its loader is {spec.loader!r}"), below)
    if search is None:
        return "; ".join([f"no top-level package {name} on sys.path", *troubles])
    return "; ".join([f"no module {name} below {name.rpartition('.')[0]} ({_folders(search)})", *troubles])


def _is_watcher(finder: object) -> bool:
    kind = finder if isinstance(finder, type) else type(finder)
    return any(base.__module__ == w or base.__module__.endswith(f".{w}") for base in kind.__mro__ for w in _WATCHERS)


def _label(finder: object) -> str:
    kind = finder if isinstance(finder, type) else type(finder)
    return f"{kind.__module__}.{kind.__qualname__}"


def _path_spec(name: str, search: Iterable[str], troubles: list[str]) -> importlib.machinery.ModuleSpec | None:
    """What PathFinder finds, without asking for the parent: the first loader, else a namespace of all portions."""
    portions: list[str] = []
    for entry in search:
        try:
            finder = _entry_finder(entry) if isinstance(entry, str) else None
            spec = finder.find_spec(name) if finder is not None else None
        except Exception as error:
            troubles.append(f"looking in {entry!r} raised {error!r}")
            continue
        if spec is None:
            continue
        if spec.loader is not None:
            return spec
        portions.extend(spec.submodule_search_locations or ())
    if not portions:
        return None
    found = importlib.machinery.ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = portions
    return found


def _entry_finder(entry: str) -> Any:
    """The finder of one path entry, from the cache that imports use too (an empty entry is the working folder)."""
    entry = entry or os.getcwd()
    if entry not in sys.path_importer_cache:
        finder = None
        for hook in sys.path_hooks:
            try:
                finder = hook(entry)
            except ImportError:
                continue
            break
        sys.path_importer_cache[entry] = finder
    return sys.path_importer_cache[entry]


def _spec_file(spec: Any) -> str | None:
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str):
        return None
    return origin if getattr(spec, "has_location", False) or os.path.isfile(origin) else None


def _fileless(name: str, spec: Any, search: list[str] | None, otherwise: str) -> str:
    origin = getattr(spec, "origin", None)
    if isinstance(origin, str):
        return f"{name} has no file: its origin is {origin!r}"
    if search is not None:
        return f"{name} is a namespace package without __init__.py: {_folders(search)}"
    return f"{name} has no file: {otherwise}"
