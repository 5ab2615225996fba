"""A demo of a patch for another release than the installed one: that release beside it, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mcore_patches.demo.outcome import DemoError


def run_on(release: str, name: str, out: Path, steps: int | None, as_json: bool) -> int:
    """Run demo `name` on a megatron-core release; returns the exit status of `mcore-patches demo`.

    Raises:
        DemoError: the release cannot be fetched.
    """
    folder = _folder(release, out)
    here = Path(__file__).resolve().parents[2]
    path = [str(folder), str(here), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    command = [sys.executable, "-m", "mcore_patches.cli", "demo", name, "--out", str(out)]
    command += [] if steps is None else ["--steps", str(steps)]
    command += ["--json"] if as_json else []
    sys.stdout.flush()
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, check=False).returncode


def _folder(release: str, out: Path) -> Path:
    """Where the release lies: among the unpacked releases of a checkout, or fetched beside the demo's pictures."""
    unpacked = Path(os.environ.get("MCORE_PATCHES_RELEASES") or ".releases").resolve() / release
    fetched = out / f"megatron-core-{release}"
    for folder in (unpacked, fetched):
        if (folder / "megatron" / "core").is_dir():
            return folder
    part = out / f".megatron-core-{release}"
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--target", str(part), f"megatron-core=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DemoError(
            f"megatron-core {release} could not be fetched into {out}: {said}; unpack it yourself into a folder "
            f"{release} and set MCORE_PATCHES_RELEASES to the folder above"
        )
    part.rename(fetched)
    return fetched
