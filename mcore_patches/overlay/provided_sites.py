"""Where a provided module stands: upstream's text of its names on disk, if there is any, and what an import gives."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mcore_patches.overlay.layers import AnyChange, Layer, Stack
from mcore_patches.overlay.locate import locate, module_dict
from mcore_patches.overlay.patch import AnyTarget, ModuleTarget
from mcore_patches.overlay.provided import ModuleChange, Provision, provision_of
from mcore_patches.overlay.sites import Site

__all__ = ["ProvidedSite", "site_of"]


def site_of(target: AnyTarget) -> Site:
    return ProvidedSite(target) if isinstance(target, ModuleTarget) else Site(target)


class ProvidedSite(Site):
    """A `ModuleTarget` resolved. Nothing waits for its import: what is provided is in place before."""

    target: ModuleTarget

    def _resolve(self) -> None:
        (name,) = self.target.modules
        self.module_name = name
        found = locate(name, anew=True)
        if found.found:
            self._read(name, found.file)
            return
        package = locate(name.rpartition(".")[0])
        if not package.found:
            self.absent = package.reason

    @property
    def lacks_module(self) -> bool:
        """Whether the release has no such module."""
        return self.file is None and self.absent is None

    @property
    def provision(self) -> Provision | None:
        return provision_of(self.target.modules[0])

    @property
    def verdict(self) -> str:
        return "needs" if self.lacks_module else self.target.known.get(self.fingerprint or "", "unknown")

    @property
    def module(self) -> ModuleType | None:
        """The live module; before its import the module that provides, unless a probe must look at upstream's."""
        live = super().module
        if live is None and not self.underway and self.verdict != "unknown":
            return sys.modules[__name__]
        return live

    @property
    def raw(self) -> Any:
        return self.current

    @property
    def current(self) -> Any:
        """The first name's object in the live module, or None."""
        return module_dict(super().module).get(self.target.qualname)

    @property
    def stack(self) -> Stack | None:
        provision = self.provision
        return provision.stack if provision else None

    @property
    def original(self) -> Any:
        provision = self.provision
        if provision is None:
            return self.current
        before = provision.before.get(self.target.qualname)
        return before if isinstance(before, type) else None

    def covered(self) -> str | None:
        return None

    def missing_live(self) -> str | None:
        if self.stack is not None or self.lacks_module or super().module is None:
            return None
        return None if self.current is not None else f"{self.module_name} is imported but has no {self.target.qualname}"

    def unfit(self) -> str | None:
        return None

    def foreign(self) -> str | None:
        live = super().module
        if self.stack is not None or live is None:
            return None
        if self.lacks_module:
            return f"{self.module_name} is imported although the release has no such module"
        for symbol in self._symbols:
            if reason := symbol.foreign(live, is_target=False):
                return reason
        return None

    def where(self) -> tuple[str | None, str | None]:
        before = "no such module" if self.lacks_module else f"{self.file}:{self.line}"
        return before, None if self.stack is None else f"{self.target.provider}"

    def change(self, layers: tuple[Layer, ...]) -> AnyChange:
        assert self.module is not None
        return ModuleChange(self.key, self.target, self.module, layers)
