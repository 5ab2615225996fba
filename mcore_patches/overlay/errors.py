"""Every error that the overlay raises on purpose."""

from __future__ import annotations


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
