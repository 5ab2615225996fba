"""What apply_patches(), status() and revert() return: a table to read, JSON to store, a digest for ranks to compare."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from mcore_patches.overlay.counters import human_bytes
from mcore_patches.overlay.errors import printable
from mcore_patches.overlay.patch import ERRORS, IN_PLACE, State


@dataclass(frozen=True)
class TargetRow:
    """One target of a patch. before and after are "file:line" of the object that runs; None where it is not imported.

    rebound: module-level names changed along with the target. unreachable: references that keep the original.
    layers: ids of every patch in place on this target, innermost first.
    """

    name: str
    module: str | None
    before: str | None
    after: str | None
    fingerprint: str | None
    verdict: str
    layers: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One patch. decision: what apply_patches() would do now, for a state that is NOT_APPLIED. note: only in place."""

    id: str
    state: State
    reason: str
    summary: str
    upstream: str
    delete_when: str
    releases: str
    decision: State | None = None
    targets: tuple[TargetRow, ...] = ()
    counters: dict[str, Any] = field(default_factory=dict)
    source: str = "mcore_patches"
    note: str = ""


@dataclass(frozen=True)
class Report:
    """rows, in the registry's order, and what was found installed."""

    rows: tuple[Row, ...]
    megatron: dict[str, Any]
    python: str
    overlay: str
    warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, patch_id: str) -> Row:
        for row in self.rows:
            if row.id == patch_id:
                return row
        raise KeyError(f"no row for {patch_id!r}; the report has {', '.join(r.id for r in self.rows)}")

    @property
    def errors(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.state in ERRORS or (r.decision is not None and r.decision in ERRORS))

    @property
    def digest(self) -> str:
        """sha256 over what must agree between ranks: release, states, fingerprints, layers; no paths, no git hash."""
        rows = [
            {
                "id": r.id,
                "state": State.APPLIED if r.state is State.ALREADY_APPLIED else r.state,
                "decision": r.decision,
                "targets": [(t.name, t.fingerprint, t.layers) for t in r.targets],
            }
            for r in self.rows
        ]
        text = json.dumps([self.overlay, self.megatron.get("release"), rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "digest": self.digest}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.as_dict(), indent=indent)

    def __str__(self) -> str:
        version = self.megatron.get("text") or "not found"
        if local := self.megatron.get("local"):
            version += f" (package_info appends +{local}, which says nothing about it)"
        lines = [f"mcore_patches {self.overlay} on megatron-core {version}, Python {self.python}"]
        lines += [f"  warning: {w}" for w in self.warnings]
        width = max([len(r.id) for r in self.rows], default=2)
        for r in self.rows:
            state = f"{r.state} (would be {r.decision})" if r.decision else str(r.state)
            lines.append(f"{r.id:<{width}}  {state}  {r.upstream}")
            lines += _wrapped("reason", r.reason)
            lines += _wrapped("note", r.note)
            for t in r.targets:
                lines += _wrapped(
                    "target", f"{t.name}: {t.before or 'not imported'}" + (f" -> {t.after}" if t.after else "")
                )
                if len(t.layers) > 1:
                    lines += _wrapped("layers", " < ".join(t.layers))
                if t.rebound:
                    lines += _wrapped("rebound", ", ".join(t.rebound))
                if t.unreachable:
                    lines += _wrapped("keeps the original", "; ".join(t.unreachable))
            if r.counters.get("calls"):
                lines += _wrapped("calls", _counts(r.counters))
            lines += _wrapped("delete when", r.delete_when)
        if any(r.state in IN_PLACE for r in self.rows):
            lines.append("calls: those under torch.compile are neither counted nor logged")
        return "\n".join(map(printable, lines))


def _counts(counters: dict[str, Any]) -> str:
    parts = [f"{counters['calls']} calls, {counters['hits']} fused"]
    parts += [f"{n} {route}" for route, n in counters["routes"].items()]
    parts += [f"{n} declined: {reason}" for reason, n in counters["declines"].items()]
    if most := counters["largest_fallback_bytes"]:
        parts.append(f"the largest fallback took {human_bytes(most)}")
    return "; ".join(parts)


def _wrapped(label: str, text: str) -> list[str]:
    if not text:
        return []
    indent = "    "
    return textwrap.wrap(
        f"{label}: {text}",
        118,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
