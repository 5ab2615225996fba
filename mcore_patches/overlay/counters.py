"""Counts of what a patch did at run time, so that a silent decline shows up in `status()`.

Counting is plain dictionary arithmetic: no lock on the hot path, so a count may be low by a few under heavy threading.
Replacements must not count while torch.compile traces them: a changing Python integer would recompile on every call.
"""

from __future__ import annotations

import logging
from typing import Any

from mcore_patches.overlay import settings
from mcore_patches.overlay.errors import DeclinedError

log = logging.getLogger("mcore_patches")


def human_bytes(n: int) -> str:
    """n bytes in binary units, e.g. 128.0 GiB."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Counters:
    """calls = hits + declines. A decline has a reason; the first of a reason and shape class is logged as a warning."""

    def __init__(self, patch_id: str) -> None:
        self.patch_id = patch_id
        self.hits = 0
        self.declines: dict[str, int] = {}
        self.fallback_bytes = 0
        self.routes: dict[str, int] = {}
        self._warned: set[tuple[str, Any]] = set()

    def hit(self, route: str) -> None:
        """Count a fused call; `route` says which way it went, e.g. "kernel" or "padded"."""
        self.hits += 1
        self.routes[route] = self.routes.get(route, 0) + 1

    def decline(self, reason: str, *, shape_class: object, fallback: str, fallback_bytes: int | None) -> None:
        """Count a decline and warn once per reason and shape class.

        reason: without tensor sizes, so that counts add up. fallback: what runs instead. fallback_bytes: what it
        allocates; None where that cannot be told.
        Raises DeclinedError when MCORE_PATCHES_ON_DECLINE=raise.
        """
        self.declines[reason] = self.declines.get(reason, 0) + 1
        allocates = "" if fallback_bytes is None else f" and allocates {human_bytes(fallback_bytes)}"
        message = f"{self.patch_id}: fused call declined: {reason} ({shape_class}); {fallback} runs instead{allocates}"
        if settings.on_decline() == "raise":
            raise DeclinedError(f"{message}; MCORE_PATCHES_ON_DECLINE=raise")
        self.fallback_bytes = max(self.fallback_bytes, fallback_bytes or 0)
        if (reason, shape_class) not in self._warned:
            self._warned.add((reason, shape_class))
            log.warning("%s", message)

    def reset(self) -> None:
        self.hits = self.fallback_bytes = 0
        self.declines.clear()
        self.routes.clear()
        self._warned.clear()

    def as_dict(self) -> dict[str, Any]:
        return {
            "calls": self.hits + sum(self.declines.values()),
            "hits": self.hits,
            "routes": dict(sorted(self.routes.items())),
            "declines": dict(sorted(self.declines.items())),
            "largest_fallback_bytes": self.fallback_bytes,
        }
