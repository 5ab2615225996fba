"""Names of a patch's own in a module of upstream's that a release lacks, or has in a state that nobody can use.

A finder in front of all others answers for the module, so that nothing is imported before somebody imports it. If it
has been imported already, the names are put into the live module, and module-level names that hold the old ones follow.
What is provided is read off `sys.meta_path` and the live module, not off a flag.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mcore_patches.overlay import rebind, settings
from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.layers import Key, Layer, Stack
from mcore_patches.overlay.locate import locate, module_dict
from mcore_patches.overlay.patch import ModuleTarget

_ABSENT = object()


@dataclass(eq=False)
class Provision:
    """What stands in one module. before: what the names were in a module that was live, `_ABSENT` for none."""

    name: str
    target: ModuleTarget
    stack: Stack | None = None
    before: dict[str, Any] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """The names and their objects. Imports the provider."""
        provider = importlib.import_module(self.target.provider)
        return {name: getattr(provider, name) for name in self.target.names}

    def made(self, module: object) -> bool:
        """Whether this is the module that the finder made for this provision."""
        loader = getattr(module_dict(module).get("__spec__"), "loader", None)
        return getattr(loader, "provision", None) is self


class _Loader(Loader):
    def __init__(self, provision: Provision) -> None:
        self.provision = provision

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = self.provision.names()
        vars(module).update(names, __all__=list(names), __doc__=f"Provided by {self.provision.target.provider}.")


class ProvidedFinder:
    """The finder of `sys.meta_path` that makes provided modules. `locate` passes it over: it looks for upstream's."""

    def __init__(self) -> None:
        self.provisions: dict[str, Provision] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        provision = self.provisions.get(name)
        if provision is None:
            return None
        return ModuleSpec(name, _Loader(provision), origin=provision.target.provider)


def _finder() -> ProvidedFinder | None:
    # Another copy of this package may have put it there (after a reload of mcore_patches), so no isinstance.
    found: Any = next((f for f in sys.meta_path if type(f).__name__ == ProvidedFinder.__name__), None)
    return found


def provision_of(name: str) -> Provision | None:
    """What is provided for a module, if it is what an import gives now; None if the live module has other objects."""
    finder = _finder()
    provision = finder.provisions.get(name) if finder else None
    live = sys.modules.get(name)
    if provision is None or live is None or provision.made(live):
        return provision
    names = module_dict(live)
    return provision if all(names.get(n) is obj for n, obj in provision.names().items()) else None


@dataclass(eq=False)
class ModuleChange:
    """The next state of one provided module."""

    key: Key
    target: ModuleTarget
    module: ModuleType
    layers: tuple[Layer, ...]
    before: Provision | None = None
    after: Provision | None = None

    def build(self) -> None:
        if len(self.layers) > 1:
            ids = ", ".join(layer.patch_id for layer in self.layers)
            raise OverlayError(f"the patches {ids} all provide {self.key[0]}")
        finder = _finder()
        self.before = finder.provisions.get(self.key[0]) if finder else None
        if self.layers:
            self.after = Provision(self.key[0], self.target)
            if self.key[0] in sys.modules:
                self.after.names()  # an error of the provider's must show before anything is changed

    @property
    def stale(self) -> bool:
        finder = _finder()
        return (finder.provisions.get(self.key[0]) if finder else None) is not self.before

    def place(self) -> None:
        _exchange(self.before, self.after)
        if self.after is not None:
            self.after.stack = Stack(
                self.key, weakref.ref(self.after), self.target.provider, self.target.provider, self.module, self.layers
            )

    def undo(self) -> None:
        _exchange(self.after, self.before)


def _exchange(old: Provision | None, new: Provision | None) -> None:
    if old is not None:
        _withdraw(old)
    if new is not None:
        _provide(new)


def _provide(provision: Provision) -> None:
    finder = _finder()
    if finder is None:
        finder = ProvidedFinder()
        sys.meta_path.insert(0, finder)
    finder.provisions[provision.name] = provision
    live = sys.modules.get(provision.name)
    if live is None:
        return
    names = module_dict(live)
    ours = provision.names()
    provision.before = {name: names.get(name, _ABSENT) for name in ours}
    vars(live).update(ours)
    _follow({id(old): ours[name] for name, old in provision.before.items() if old is not _ABSENT})


def _withdraw(provision: Provision) -> None:
    finder = _finder()
    if finder is not None:
        finder.provisions.pop(provision.name, None)
        if not finder.provisions:
            sys.meta_path.remove(finder)
    live = sys.modules.get(provision.name)
    if live is None:
        return
    ours = provision.names()
    if provision.made(live):
        provision.before = _without_made(provision.name, live, ours)
    else:
        for name, old in provision.before.items():
            if old is not _ABSENT:
                setattr(live, name, old)
            elif name in module_dict(live):
                delattr(live, name)
    _follow({id(ours[name]): old for name, old in provision.before.items() if old is not _ABSENT})


def _without_made(name: str, made: ModuleType, ours: dict[str, Any]) -> dict[str, Any]:
    """Take out the module that the finder made. Returns what its names are in upstream's, if there is one."""
    del sys.modules[name]
    parent, _, attribute = name.rpartition(".")
    if module_dict(sys.modules.get(parent)).get(attribute) is made:
        delattr(sys.modules[parent], attribute)
    if not locate(name).found:
        return {}
    upstream = module_dict(importlib.import_module(name))
    return {each: upstream.get(each, _ABSENT) for each in ours}


def _follow(replaced: dict[int, Any]) -> None:
    """Let module-level names below the prefixes that hold a replaced object hold the new one.

    Not others, also when ours are withdrawn: a name elsewhere may come from the provider, which keeps its objects.
    """
    by_id = {key: rebind.Rename(new, False) for key, new in replaced.items()}
    rebind.rebind(by_id, lambda _: None, settings.prefixes())
