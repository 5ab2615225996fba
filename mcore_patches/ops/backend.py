"""Which implementation of an op runs."""

import importlib
import importlib.util
from types import ModuleType

BACKENDS = ("auto", "naive", "chunked", "tilelang")


def resolve(op: str, requested: str, tilelang: tuple[bool, str]) -> str:
    """The implementation for `requested`: "naive", "chunked" or "tilelang".

    "auto" takes TileLang where `tilelang` (the answer of the op's `supports`) is true, else the chunked path.

    Raises:
        ValueError: unknown name, or "tilelang" was asked for and declines these arguments; the text carries its reason.
    """
    if requested not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    supported, reason = tilelang
    if requested == "tilelang" and not supported:
        raise ValueError(f"{op}: backend='tilelang' does not run these arguments: {reason}")
    if requested == "auto":
        return "tilelang" if supported else "chunked"
    return requested


def kernel_module(name: str) -> ModuleType | None:
    """The module of TileLang kernels called `name`, or None where this build has none."""
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)
