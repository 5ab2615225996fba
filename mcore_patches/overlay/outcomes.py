"""From what became of the patches to what people read: report rows and log lines."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.errors import printable
from mcore_patches.overlay.patch import ERRORS, IN_PLACE, State
from mcore_patches.overlay.registry import Entry
from mcore_patches.overlay.report import Report, Row, TargetRow
from mcore_patches.overlay.sites import Site
from mcore_patches.overlay.versions import Installed

log = logging.getLogger("mcore_patches")

_LEVELS = {
    State.TARGET_ABSENT: logging.INFO,
    State.OUT_OF_RANGE: logging.WARNING,
    State.UPSTREAM_FIXED: logging.WARNING,
    **dict.fromkeys(ERRORS, logging.ERROR),
}


_SHOWN = 5
"""References to an original that a warning names; the report has all."""


@dataclass(frozen=True)
class Outcome:
    """What a report says of a patch. decision: what apply_patches() would do, for a state that is NOT_APPLIED."""

    state: State
    reason: str
    sites: tuple[Site, ...] = ()
    decision: State | None = None


def row_of(entry: Entry, outcome: Outcome, counters: Counters) -> Row:
    """counters: those to show where no layer of the patch is in place that has its own."""
    patch = entry.patch
    targets = []
    for site in outcome.sites:
        before, after = site.where()
        stack = site.stack
        if stack and (layer := stack.layer(entry.id)):
            counters = layer.counters
        targets.append(
            TargetRow(
                name=site.target.name,
                module=site.module_name,
                before=before,
                after=after,
                fingerprint=site.fingerprint,
                verdict="absent" if site.absent else "unreadable" if site.broken else site.verdict,
                layers=stack.ids if stack else (),
                rebound=stack.rebound if stack else (),
                unreachable=stack.unreachable if stack else (),
            )
        )
    return Row(
        id=entry.id,
        state=outcome.state,
        reason=outcome.reason,
        summary=patch.summary if patch else "",
        upstream=patch.upstream if patch else "",
        delete_when=patch.delete_when if patch else "",
        releases=str(patch.releases) if patch else "",
        decision=outcome.decision,
        targets=tuple(targets),
        counters=counters.as_dict(),
        source=entry.source,
        note=patch.note if patch and outcome.state in (*IN_PLACE, State.PENDING) else "",
    )


def report_of(rows: Iterable[Row], found: Installed | None, overlay_version: str) -> Report:
    megatron: dict[str, Any] = {"text": None, "release": None, "file": None}
    if found is not None:
        megatron = {
            "text": found.text,
            "release": ".".join(map(str, found.release)) if found.release else None,
            "local": found.local,
            "file": found.file,
            "source": found.source,
            "metadata": found.metadata_text,
        }
    missing = ("megatron-core was not found; install it, or put its folder on PYTHONPATH",)
    warnings = found.warnings if found else missing
    return Report(tuple(rows), megatron, platform.python_version(), overlay_version, warnings)


class Speaker:
    """Logs what a person should know: each thing once in a process, and by one rank for all."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def log(self, row: Row) -> None:
        if row.state in IN_PLACE and (kept := [text for t in row.targets for text in t.unreachable]):
            more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
            text = f"in place, but not for {'; '.join(kept[:_SHOWN])}{more}; call apply_patches() before they are made"
            self._say(logging.WARNING, row.id, text)
        level = _LEVELS.get(row.state)
        if level is None and "FORCED" in row.reason:
            level = logging.WARNING
        if level is not None:
            self._say(level, row.id, f"{row.state}: {row.reason}")

    def _say(self, level: int, patch_id: str, text: str) -> None:
        if (patch_id, text) in self._said:
            return
        self._said.add((patch_id, text))
        # Ranks of one node read the same files, so one of them speaks: rank 0 for the job, local rank 0 for errors.
        speaks = os.environ.get("LOCAL_RANK", "0") if level >= logging.ERROR else os.environ.get("RANK", "0")
        if speaks in ("0", ""):
            log.log(level, "%s: %s", patch_id, printable(text))
