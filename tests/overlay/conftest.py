"""Fixtures of the overlay's tests: fresh interpreters, unpacked releases, and an old packaging beside the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ROOT / ".releases"


@pytest.fixture(scope="session")
def releases() -> Path:
    """The folder of unpacked megatron-core wheels, one subfolder a release."""
    return RELEASES


@pytest.fixture(scope="session")
def packaging_24_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds packaging 24.2, installed there on first use."""
    target = RELEASES / "packaging-24.2"
    if not target.exists():
        fresh = tmp_path_factory.mktemp("packaging") / "packaging-24.2"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(fresh), "packaging==24.2"], check=True, timeout=120)
        RELEASES.mkdir(exist_ok=True)
        try:
            fresh.rename(target)
        except OSError:  # another worker was first, or the temporary folder is on another file system
            return target if target.exists() else fresh
    return target


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., Any]:
    """Runs code in an interpreter of its own and returns what the code printed, read as JSON."""

    def run(
        code: str, *, path: Iterable[os.PathLike[str] | str] = (), python: str = sys.executable, text: str = ""
    ) -> Any:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MCORE_PATCHES"))
        }
        environment["PYTHONPATH"] = os.pathsep.join([*map(os.fspath, path), str(ROOT)])
        done = subprocess.run(
            [python, "-c", code], input=text, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
