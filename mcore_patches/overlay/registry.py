"""Which patches exist: every module of a package that holds a PATCH, and third-party ones by entry point.

Third-party patches are listed by status() and applied only when they are named: to install a package must not change
megatron.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_patches.overlay.errors import OverlayError, said
from mcore_patches.overlay.patch import RESERVED, Patch

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger("mcore_patches")

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
        """Import each module of `package`, load each entry point of `group`; a broken one of these becomes an error."""
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
    found: list[Entry] = []
    for point in sorted(_entry_points(group), key=lambda p: (p.name, p.value)):
        source = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        errors, patch = [], None
        try:
            patch = point.load()
        # A broken package of somebody else's must not take the overlay down with it, whatever it raises.
        except (Exception, SystemExit) as exc:
            errors.append(f"entry point {point.value} of {source} failed to load: {said(exc)}")
        if not errors and not isinstance(patch, Patch):
            kind = type(patch).__name__
            errors.append(f"entry point {point.value} of {source} is {kind}, not a mcore_patches.overlay.patch.Patch")
        patch_id = patch.id if isinstance(patch, Patch) else point.name
        if patch_id in taken or patch_id in RESERVED:
            errors.append(f"{source} registers the id {patch_id!r}, which is taken")
            wanted, patch_id = patch_id, f"{patch_id}@{point.value}"
            if patch_id in taken:
                patch_id = f"{wanted}@{point.name}={point.value}"
            if patch_id in taken:
                continue  # the very same entry point of a second copy of the package
        taken.add(patch_id)
        error = "; ".join(errors) or None
        found.append(Entry(patch_id, None if error else patch, source, False, error))
    return found


def _entry_points(group: str) -> list[EntryPoint]:
    from importlib.metadata import distributions, entry_points

    try:
        return list(entry_points(group=group))
    except Exception:
        # Some distribution's entry_points.txt cannot be parsed. Its own are lost, those of the others are not.
        found: list[EntryPoint] = []
        seen: set[str] = set()
        for distribution in distributions():
            try:
                if distribution.name not in seen:
                    seen.add(distribution.name)
                    found += distribution.entry_points.select(group=group)
            except Exception as exc:
                log.warning("entry points of %s cannot be read: %s", getattr(distribution, "name", "?"), exc)
        return found
