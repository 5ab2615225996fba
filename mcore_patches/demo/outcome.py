"""What a demo hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_patches.overlay.errors import OverlayError


class DemoError(OverlayError, ValueError):
    """A demo cannot run as asked: a bad argument, something missing, or a release that the patch is not for."""


@dataclass(frozen=True)
class Check:
    """Something that must be true of the training run; `measured` and `allowed` are in the unit that `name` tells."""

    name: str
    ok: bool
    measured: str
    allowed: str

    def __str__(self) -> str:
        return f"  {'ok    ' if self.ok else 'FAILED'}  {self.name}: {self.measured} (must be {self.allowed})"


@dataclass(frozen=True)
class Outcome:
    """summary: text to print. checks: all must hold. png: the picture. numbers: everything measured, for JSON."""

    summary: str
    checks: tuple[Check, ...]
    png: Path
    numbers: dict[str, Any]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"png": str(self.png), "checks": [asdict(check) for check in self.checks], **self.numbers}

    def __str__(self) -> str:
        return "\n".join([self.summary, "", "checks", *map(str, self.checks)])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]).rstrip()
        for line in lines
    )
