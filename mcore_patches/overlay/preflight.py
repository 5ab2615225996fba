"""`doctor()`: what about this environment would make a patch fail, or run something else than people expect."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from mcore_patches.overlay import settings
from mcore_patches.overlay.errors import OverlayError, printable, said
from mcore_patches.overlay.patch import ERRORS
from mcore_patches.overlay.versions import installed

if TYPE_CHECKING:
    from mcore_patches.overlay.engine import Engine

# Distribution -> release -> why not to use it.
KNOWN_BAD: dict[str, dict[str, str]] = {
    "tilelang": {
        "0.1.9": "its aggressive shared-memory merge gave NaN gradients in megatron-core's sparse-MLA backward",
    },
}
OPTIONAL = {
    "tilelang": "fused kernels for CUDA tensors",
    "fast_hadamard_transform": "DSA's indexer with dsa_indexer_rotate_activation",
    "transformer_engine": "megatron-core's default layer specs",
}


@dataclass(frozen=True)
class Check:
    name: str
    level: Literal["ok", "warning", "error"]
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Checks in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """No check is an error."""
        return all(c.level != "error" for c in self.checks)

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps({"ok": self.ok, "checks": [asdict(c) for c in self.checks]}, indent=indent)

    def __str__(self) -> str:
        width = max(len(c.name) for c in self.checks)
        return "\n".join(printable(f"{c.level:<7}  {c.name:<{width}}  {c.detail}") for c in self.checks)


def diagnose(engine: Engine) -> Diagnosis:
    """Run every check. Imports torch, megatron's targets and tilelang, as training would."""
    return Diagnosis((*_versions(), *_packages(), *_switches(engine), *_device(), *_targets(engine)))


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    found = installed()
    if found is None:
        yield Check("megatron-core", "error", "not found; install it, or put its folder on PYTHONPATH")
        return
    yield Check("megatron-core", "ok", f"{found.text} ({found.file}, read from {found.source})")
    for warning in found.warnings:
        yield Check("megatron-core", "warning", warning)


def _packages() -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("torch", "wrapt", "packaging"):
        try:
            yield Check(name, "ok", version(name))
        except PackageNotFoundError:
            yield Check(name, "error", f"not installed; pip install {name}")
    for name, purpose in OPTIONAL.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(name, "warning", f"not installed; needed for {purpose}")
            continue
        bad = KNOWN_BAD.get(name, {}).get(found.partition("+")[0])  # the local part names a CUDA build
        if bad:
            yield Check(name, "error", f"{found} must not be used: {bad}")
            continue
        try:
            importlib.import_module(name)
        except Exception as exc:
            yield Check(name, "error", f"{found} is installed but importing it raised {said(exc)}")
            continue
        yield Check(name, "ok", found)


def _switches(engine: Engine) -> Iterator[Check]:
    given = {k: v for k, v in sorted(os.environ.items()) if k.startswith(settings.PREFIX)}
    try:
        settings.check(engine.registry.entries)
    except OverlayError as exc:
        yield Check("switches", "error", str(exc))
        return
    yield Check("switches", "ok", ", ".join(f"{k}={v}" for k, v in given.items()) or "none set")


def _device() -> Iterator[Check]:
    try:
        import torch
    except Exception as exc:
        yield Check("device", "error", f"importing torch raised {said(exc)}")
        return
    if not torch.cuda.is_available():
        yield Check("device", "ok", f"no CUDA device; torch {torch.__version__} runs the chunked CPU paths")
        return
    major, minor = torch.cuda.get_device_capability()
    yield Check("device", "ok", f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}")
    if shutil.which("nvcc") is None:
        yield Check("nvcc", "warning", "not on PATH; TileLang compiles its kernels with it (or with NVRTC)")


def _targets(engine: Engine) -> Iterator[Check]:
    try:
        report = engine.status()
    except OverlayError:
        return  # the switches' check has said it
    for row in report:
        for target in row.targets:
            lacks_module = target.verdict == "needs" and target.fingerprint is None  # the patch provides it
            if target.module and target.module not in sys.modules and not lacks_module:
                try:
                    importlib.import_module(target.module)
                except Exception as exc:
                    detail = f"importing {target.module} raised {said(exc)}"
                    yield Check(row.id, "error", detail)
    for row in engine.status():
        state = row.decision or row.state
        level: Literal["ok", "warning", "error"] = "error" if state in ERRORS else "ok"
        if level == "ok" and engine.registry.entries[row.id].error:
            level = "warning"  # a third-party patch that nobody has named
        yield Check(row.id, level, f"{row.state}: {row.reason}" if row.reason else str(row.state))
