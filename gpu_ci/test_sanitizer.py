"""compute-sanitizer over every kernel on small shapes; each op's own tests put guards around its buffers as well."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.h100,
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH"),
]


@pytest.mark.parametrize("op", ["sparse_gqa", "select_blocks", "indexer_kl", "sparse_mla"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("memory", [[], ["--shared-kib", "99"]], ids=["this-gpu", "plain-99KiB"])
def test_clean(memory: list[str], tool: str, op: str) -> None:
    assert SANITIZER is not None
    run = [sys.executable, "-m", "gpu_ci.sanitized", *memory, op]
    root = Path(__file__).parents[1]
    # Kernels compile in a run of their own: the compiler under the tool would take minutes.
    subprocess.run(run, cwd=root, check=True, timeout=300)
    torch.cuda.empty_cache()
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5", *run]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    report = (done.stdout + done.stderr)[-4000:]
    assert f"{op} ran" in report, report
    assert done.returncode == 0, report
