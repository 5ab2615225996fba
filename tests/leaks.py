"""Find patches that a test has left in place in this process."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any


def patches_in_place() -> list[str]:
    """Names below megatron that hold something of the overlay's, and patches that wait for an import."""
    if "mcore_patches.overlay.layers" not in sys.modules:
        return []
    from mcore_patches.overlay.fields import ADDED
    from mcore_patches.overlay.rebind import MADE_BY

    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "megatron":
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                found += [f"{name}.{attribute}.{a}" for a, v in list(vars(value).items()) if _made(v, MADE_BY)]
                found += [f"{name}.{attribute}: fields {', '.join(vars(value)[ADDED])}"] if ADDED in vars(value) else []
            elif _made(value, MADE_BY):
                found.append(f"{name}.{attribute}")
    for engine in sys.modules["mcore_patches"]._engines.values():
        found += [f"{patch_id} waits for an import" for patch_id in engine._pending]
    return found


def _made(value: Any, mark: str) -> bool:
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return type(value) is FunctionType and hasattr(value, mark)
