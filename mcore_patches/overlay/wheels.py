"""Fingerprints of every patch's targets in a wheel that is not installed, for adding a release to a patch's `known`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mcore_patches.overlay.fingerprint import Wheel, combined_texts, read_wheel, source_segment
from mcore_patches.overlay.patch import AnyTarget, FieldsTarget, ModuleTarget, covers
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
            rows.append({"patch": entry.id, "target": target.name, **_reading(wheel, modules, target)})
    return {"version": wheel.version, "targets": rows}


def _reading(wheel: Wheel, modules: Mapping[str, str], target: AnyTarget) -> dict[str, Any]:
    def row(verdict: str, reason: str = "", fingerprint: str | None = None) -> dict[str, Any]:
        return {"module": module, "fingerprint": fingerprint, "verdict": verdict, "reason": reason}

    there = [m for m in target.modules if m in modules]
    defining = (m for m in there if source_segment(wheel.text(modules[m]), target.qualname))
    module = next(defining, there[0] if there else None)
    if module is None:
        package = target.modules[0].rpartition(".")[0]
        if isinstance(target, ModuleTarget) and any(m.startswith(f"{package}.") for m in modules):
            return row("needs", f"the wheel has no {target.modules[0]}")
        return row("absent", f"the wheel has no {' or '.join(target.modules)}")
    texts: list[tuple[str, str]] = []
    for other, qualname in covers(target, module):
        lacks = f"the wheel has no {other}" if other not in modules else f"{other} does not define {qualname}"
        text = wheel.text(modules[other]) if other in modules else ""
        if source_segment(text, qualname) is None:
            return row("unknown", f"relies on {other}:{qualname}, but {lacks}") if texts else row("absent", lacks)
        texts.append((text, qualname))
    fingerprint = combined_texts(texts)
    return row(_verdict(target, texts[0][0], fingerprint), "", fingerprint)


def _verdict(target: AnyTarget, text: str, fingerprint: str | None) -> str:
    if isinstance(target, FieldsTarget):
        own = [f for f in target.fields if source_segment(text, f"{target.qualname}.{f.name}")]
        return "needs" if not own else "fixed" if len(own) == len(target.fields) else "unknown"
    return target.known.get(fingerprint or "", "unknown")
