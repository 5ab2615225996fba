"""Fingerprints of every patch's targets in a wheel that is not installed, for adding a release to a patch's `known`."""

from __future__ import annotations

import os
from typing import Any

from mcore_patches.overlay.fingerprint import combined, read_wheel, source_segment
from mcore_patches.overlay.patch import FieldsTarget, Target
from mcore_patches.overlay.registry import Registry


def wheel_fingerprints(path: str | os.PathLike[str], registry: Registry) -> dict[str, Any]:
    """Read a megatron-core wheel without importing or unpacking it.

    Returns {"version": text, "targets": [{"patch", "target", "module", "fingerprint", "verdict", "reason"}]}; the
    verdict is "needs", "fixed", "unknown" or "absent". Raises WheelError for a file that is not a readable
    megatron-core wheel.
    """
    wheel = read_wheel(path)
    modules = wheel.modules()
    rows = []
    for entry in registry.entries.values():
        for target in entry.patch.targets if entry.patch else ():
            module = next((m for m in target.modules if m in modules), None)
            row: dict[str, Any] = {"patch": entry.id, "target": target.name, "module": module, "fingerprint": None}
            text = wheel.text(modules[module]) if module else ""
            if module is None:
                row |= {"verdict": "absent", "reason": f"the wheel has no {' or '.join(target.modules)}"}
            elif source_segment(text, target.qualname) is None:
                row |= {"verdict": "absent", "reason": f"{module} does not define {target.qualname}"}
            else:
                row |= {"verdict": _verdict(target, text), "reason": ""}
                relies_on = target.relies_on if isinstance(target, Target) else ()
                row["fingerprint"] = combined(text, (target.qualname, *relies_on))
            rows.append(row)
    return {"version": wheel.version, "targets": rows}


def _verdict(target: Target | FieldsTarget, text: str) -> str:
    if isinstance(target, FieldsTarget):
        own = [f for f in target.fields if source_segment(text, f"{target.qualname}.{f.name}")]
        return "needs" if not own else "fixed" if len(own) == len(target.fields) else "unknown"
    return target.known.get(combined(text, (target.qualname, *target.relies_on)) or "", "unknown")
