"""Launches of several processes for tests, from a process that has imported what megatron needs.

That import is a large part of what a launch of tiny models takes. tests/cpu/test_launch.py launches as users do.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_patches.cpu import launch
from tests import releases
from tests.overlay.isolation import call


def run(target: str, *, nprocs: int = 1, release: str, args: Sequence[Any] = ()) -> list[Any]:
    """`mcore_patches.cpu.launch.run` on a supported release, but for the interpreter that it would start.

    Raises:
        LaunchError: as there, but for a launch that hangs, which is the `ChildFailed` of tests.overlay.isolation.
    """
    job = Path(tempfile.mkdtemp(prefix="mcore-patches-"))
    try:
        (job / "call").write_bytes(pickle.dumps((list(args), {})))
        environment = launch._environment(job, releases.path(release), {})
        arguments = {"target": target, "nprocs": nprocs, "job": job}
        call(f"{__name__}:fork_ranks", arguments, f"before-{release}", environment)
        return launch._collect(job, nprocs, target)
    finally:
        shutil.rmtree(job, ignore_errors=True)


def fork_ranks(target: str, nprocs: int, job: Path) -> None:
    """What the interpreter would do; a target that does not import is a ChildFailed that says so."""
    log = os.open(job / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in launch._TORCHRUN_VARIABLES:
        os.environ.pop(name, None)
    launch._fork_ranks(target, nprocs, job)
