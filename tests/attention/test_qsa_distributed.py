"""The README's command: a tiny model on four processes, started by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_patches.demo import qsa_distributed

ROOT = Path(__file__).parents[2]


def test_torchrun_trains_with_tensor_and_context_parallelism() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Standalone: a free port, as another test may use the default one.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*torchrun, "-m", "mcore_patches.demo.qsa_distributed", "--tp", "2", "--cp", "2", "--steps", "4"],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(
        r"^step +\d+  loss ([\d.]+)  indexer loss by layer ([\d.]+) ([\d.]+)$", done.stdout, re.MULTILINE
    )
    assert len(steps) == 4, done.stdout
    first, last = (list(map(float, step)) for step in (steps[0], steps[-1]))
    assert all(after < before for before, after in zip(first, last)), done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "2"], "--tp 2 x --cp 1 x --pp 1 must divide the 1 processes"),
        (["--cp", "0"], "--cp 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
    ],
    ids=lambda x: "".join(x) if isinstance(x, list) else "",
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        qsa_distributed.main(arguments)
    assert message in capsys.readouterr().err
