"""Every error that the overlay raises on purpose, and how it words other people's values and errors."""

from __future__ import annotations

import reprlib


class OverlayError(Exception):
    """Base of the overlay's errors."""


class SettingsError(OverlayError, ValueError):
    """A bad id, argument or environment value. Nothing was changed."""


class NotAppliedError(OverlayError, RuntimeError):
    """`require_applied` found the patch not in place, or strict mode met an error state."""


class NotRevertedError(OverlayError, RuntimeError):
    """`revert` could not take a patch off, e.g. because another tool has wrapped the patched function since."""


class DeclinedError(OverlayError, RuntimeError):
    """A fused call was declined while MCORE_PATCHES_ON_DECLINE=raise."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """repr() of a value that somebody passed in, cut where it is long."""
    return _SHORT.repr(value)


def printable(text: str) -> str:
    """The text in one line, with control characters, such as those of a terminal's colours, written as escapes."""
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else ascii(c)[1:-1] for c in text)


def said(exc: BaseException) -> str:
    """An exception of other people's code in one line: its type and its text."""
    return printable(f"{type(exc).__name__}: {exc}")
