"""Does `qsa` work on a snapshot of Megatron-LM? Runs the cases of every release there, and prints its fingerprints.

    python -m tests.attention.snapshot CHECKOUT

CHECKOUT holds `megatron/core`. The patch is applied over text that it does not know, as MCORE_PATCHES_FORCE=qsa does.
Takes about 5 minutes on 2 cores. Exit status 1: a case failed, and the patch is not for that snapshot.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mcore_patches.cpu.launch import LaunchError, run
from mcore_patches.overlay.fingerprint import combined
from mcore_patches.overlay.patch import Target
from mcore_patches.patches.qsa import PATCH


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (Path(arguments[0]) / "megatron" / "core").is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    checkout = Path(arguments[0]).resolve()
    for line in fingerprints(checkout):
        print(line)
    os.environ["MCORE_PATCHES_FORCE"] = PATCH.id
    for function, nprocs, settings in (
        ("one_process", 1, ()),
        ("two_processes", 2, (True,)),
        ("four_processes", 4, (True,)),
    ):
        try:
            cases, *_ = run(f"tests.attention.cases:{function}", nprocs=nprocs, release=checkout, args=settings)
        except LaunchError as error:
            print(f"{function}: failed\n{error}")
            return 1
        print(f"{function}: {len(cases)} cases passed", flush=True)
    return 0


def fingerprints(checkout: Path) -> list[str]:
    """A line for each target: its name, its fingerprint, and what the patch knows of it."""
    lines = []
    for target in PATCH.targets:
        if not isinstance(target, Target):
            continue
        paths = [checkout / (module.replace(".", "/") + ".py") for module in target.modules]
        text = next((path.read_text() for path in paths if path.exists()), "")
        fingerprint = combined(text, (target.qualname, *target.relies_on)) or "absent"
        lines.append(f"{target.qualname}  {fingerprint}  {target.known.get(fingerprint, 'unknown')}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
