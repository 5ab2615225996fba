"""The environment switches, read when they are needed and checked in full: a typo must not switch a patch off.

MCORE_PATCHES             off | all | ids separated by commas; a leading '-' excludes an id ("all,-qsa", "-qsa")
MCORE_PATCHES_STRICT      0 | 1: apply_patches() raises when a patch ends in an error state
MCORE_PATCHES_FORCE       ids that are applied over text that is not known
MCORE_PATCHES_ON_DECLINE  fallback | raise: what a declined fused call does
MCORE_PATCHES_PREFIXES    further module prefixes whose from-imports are rebound, e.g. "skyrl,verl"
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from mcore_patches.overlay.errors import SettingsError, printable, shown

PREFIX = "MCORE_PATCHES"
KNOWN = frozenset({PREFIX, *(f"{PREFIX}_{s}" for s in ("STRICT", "FORCE", "ON_DECLINE", "PREFIXES", "RELEASES"))})
_LIKE_OURS = re.compile(r"MCORE_?PATCH", re.IGNORECASE)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Selection:
    """Which ids the environment allows.

    named: None means every patch that is on by default. explicit: ids written out, which may name third-party patches.
    """

    off: bool
    named: frozenset[str] | None
    explicit: frozenset[str]
    excluded: frozenset[str]
    text: str

    def refuses(self, patch_id: str) -> str | None:
        """Why the environment switches this id off, or None."""
        if self.off:
            return f"{PREFIX}={self.text} switches every patch off"
        if patch_id in self.excluded:
            return f"{PREFIX}={self.text} excludes it"
        if self.named is not None and patch_id not in self.named:
            return f"{PREFIX}={self.text} does not name it"
        return None


def _ids(variable: str, text: str, known: Collection[str]) -> list[str]:
    ids = [part.strip() for part in text.split(",")]
    for patch_id in ids:
        if patch_id.removeprefix("-") not in known:
            raise SettingsError(
                f"{variable}={shown(text)} names {shown(patch_id)}; known ids are {', '.join(sorted(known))}"
            )
    return ids


def selection(known: Collection[str]) -> Selection:
    """Read MCORE_PATCHES. Unset or empty means every patch that is on by default."""
    text = os.environ.get(PREFIX, "").strip()
    if not text:
        return Selection(False, None, frozenset(), frozenset(), text)
    if text == "off":
        return Selection(True, None, frozenset(), frozenset(), text)
    parts = _ids(PREFIX, text, {*known, "all", "off"})
    if {"-all", "-off", "off"} & set(parts):
        raise SettingsError(f"{PREFIX}={shown(text)}; write 'off' alone to switch everything off")
    excluded = frozenset(p[1:] for p in parts if p.startswith("-"))
    named = frozenset(p for p in parts if not p.startswith("-"))
    if both := excluded & named:
        raise SettingsError(f"{PREFIX}={shown(text)} names and excludes {', '.join(sorted(both))}")
    explicit = named - {"all"}
    return Selection(False, explicit if explicit == named and named else None, explicit, excluded, text)


def strict() -> bool:
    text = os.environ.get(f"{PREFIX}_STRICT", "").strip()
    if text not in ("", "0", "1"):
        raise SettingsError(f"{PREFIX}_STRICT={shown(text)}; allowed are 0 and 1")
    return text == "1"


def force(known: Collection[str]) -> frozenset[str]:
    text = os.environ.get(f"{PREFIX}_FORCE", "").strip()
    ids = _ids(f"{PREFIX}_FORCE", text, known) if text else []
    if bad := [i for i in ids if i.startswith("-")]:
        raise SettingsError(f"{PREFIX}_FORCE={shown(text)} excludes {shown(bad[0])}; only ids to force are allowed")
    return frozenset(ids)


def on_decline() -> Literal["fallback", "raise"]:
    text = os.environ.get(f"{PREFIX}_ON_DECLINE", "").strip() or "fallback"
    if text not in ("fallback", "raise"):
        raise SettingsError(f"{PREFIX}_ON_DECLINE={shown(text)}; allowed are fallback and raise")
    return "raise" if text == "raise" else "fallback"


def prefixes() -> tuple[str, ...]:
    """Module prefixes whose names are rebound: megatron and what MCORE_PATCHES_PREFIXES adds."""
    text = os.environ.get(f"{PREFIX}_PREFIXES", "").strip()
    extra = [part.strip().rstrip(".") for part in text.split(",")] if text else []
    for part in extra:
        if not _MODULE.fullmatch(part):
            raise SettingsError(f"{PREFIX}_PREFIXES={shown(text)} holds {shown(part)}; allowed are dotted module names")
    return ("megatron", *extra)


def check(known: Collection[str]) -> None:
    """Read every switch, so that a bad value is an error before anything is changed. Refuse names that look like it."""
    selection(known)
    strict()
    force(known)
    on_decline()
    prefixes()
    for name in os.environ:
        if name not in KNOWN and (name.startswith(f"{PREFIX}_") or _misspelt(name)):
            known_names = ", ".join(sorted(KNOWN))
            text = f"{printable(name)} is not a switch; known are {known_names}; the nearest is {_nearest(name)}"
            raise SettingsError(text)


def _misspelt(name: str) -> bool:
    """Whether a variable is named as a switch but for case, underscores, a plural, or a letter among many."""
    return bool(_LIKE_OURS.match(name)) and _likeness(name, _nearest(name)) > 0.93


def _nearest(name: str) -> str:
    return max(sorted(KNOWN), key=lambda known: _likeness(name, known))


def _likeness(left: str, right: str) -> float:
    from difflib import SequenceMatcher

    def plain(name: str) -> str:
        return name.upper().replace("_", "").replace("PATCHES", "PATCH")

    return SequenceMatcher(None, plain(left), plain(right)).ratio()
