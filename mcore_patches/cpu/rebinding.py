"""Attribute rebindings that are recorded with a reason and can be taken back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Rebinding", "RebindingLog"]


@dataclass(frozen=True)
class Rebinding:
    """One rebound attribute: ``owner.name`` was ``original`` and is ``replacement`` because of ``reason``."""

    owner: Any
    name: str
    original: Any
    replacement: Any
    reason: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}: {self.reason}"


class RebindingLog:
    """Rebinds attributes of modules and undoes it in reverse order."""

    def __init__(self) -> None:
        self._done: list[Rebinding] = []

    def __iter__(self) -> Iterator[Rebinding]:
        return iter(self._done)

    def rebind(self, owner: Any, name: str, replacement: Any, reason: str) -> None:
        """Set ``owner.name`` to ``replacement``.

        Raises:
            AttributeError: ``owner`` has no attribute ``name``; a rebinding never adds one.
        """
        self._done.append(Rebinding(owner, name, getattr(owner, name), replacement, reason))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put every original back, also under the aliases that modules imported in the meantime took.

        Raises:
            RuntimeError: somebody else rebound one of the attributes later. Nothing is undone then: to
                restore the original would remove the later rebinding, and not to restore it would leave ours.
        """
        latest = {(id(r.owner), r.name): r for r in self._done}
        taken = [str(r) for r in latest.values() if getattr(r.owner, r.name) is not r.replacement]
        if taken:
            raise RuntimeError(f"cannot undo: rebound by other code since, undo that first:\n  {'\n  '.join(taken)}")
        while self._done:
            rebinding = self._done.pop()
            setattr(rebinding.owner, rebinding.name, rebinding.original)
            if callable(rebinding.replacement):
                _replace_aliases(rebinding.replacement, rebinding.original)


def _replace_aliases(old: Any, new: Any, prefix: str = "megatron.") -> None:
    """``from m import f`` in a module that was imported while ``m.f`` was rebound keeps the replacement."""
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(prefix):
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
