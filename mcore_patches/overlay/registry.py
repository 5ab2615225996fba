"""Which patches exist: every module of a package that holds a PATCH, and third-party ones by entry point.

Third-party patches are listed by status() and applied only when they are named: installing a package must not change megatron.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.patch import Patch

GROUP = "mcore_patches.patches"


@dataclass(frozen=True)
class Entry:
    """One registered patch. patch is None when a third-party entry could not be loaded; error then says why."""

    id: str
    patch: Patch | None
    source: str
    builtin: bool
    error: str | None = None


class Registry:
    """Patches by id, in a fixed order: built-in ones by module name, then third-party ones by entry-point name."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: dict[str, Entry] = {}
        for entry in entries:
            if entry.id in self.entries:
                raise OverlayError(
                    f"two patches have the id {entry.id!r}: {self.entries[entry.id].source} and {entry.source}"
                )
            self.entries[entry.id] = entry

    @classmethod
    def discover(cls, package: str, group: str = GROUP) -> Registry:
        """Import each module of `package`; load each entry point of `group`. A broken entry point is kept as an error."""
        entries = []
        root = importlib.import_module(package)
        for info in sorted(pkgutil.iter_modules(root.__path__), key=lambda i: i.name):
            module = importlib.import_module(f"{package}.{info.name}")
            patch = getattr(module, "PATCH", None)
            if not isinstance(patch, Patch):
                raise OverlayError(f"{module.__name__} has no PATCH; every module in {package} describes one patch")
            entries.append(Entry(patch.id, patch, package.split(".")[0], True))
        taken = {e.id for e in entries}
        return cls([*entries, *_third_party(group, taken)])

    @property
    def builtin(self) -> frozenset[str]:
        return frozenset(e.id for e in self.entries.values() if e.builtin)


def _third_party(group: str, taken: set[str]) -> list[Entry]:
    from importlib.metadata import entry_points

    found: list[Entry] = []
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        source = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        error, patch = None, None
        try:
            patch = point.load()
        # A broken package of somebody else's must not take the overlay down with it, whatever it raises.
        except Exception as exc:
            error = f"entry point {point.value} of {source} failed to load: {type(exc).__name__}: {exc}"
        if error is None and not isinstance(patch, Patch):
            error = f"entry point {point.value} of {source} is {type(patch).__name__}, not a mcore_patches.Patch"
        patch_id = patch.id if isinstance(patch, Patch) else point.name
        if patch_id in taken:
            error = f"{source} registers the id {patch_id!r}, which is taken"
            patch_id = f"{patch_id}@{point.value}"
            if patch_id in taken:
                continue
        taken.add(patch_id)
        found.append(Entry(patch_id, None if error else patch, source, False, error))
    return found
