"""The demos themselves, in processes of their own, with few steps; and that each notices when it ought to fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )


def failed_checks(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["ok"]]


def assert_picture(png: str, folder: Path, width: int, height: int) -> None:
    assert Path(png) == folder / Path(png).name
    pixels = matplotlib.image.imread(png)
    assert pixels.shape[:2] == (height, width)
    assert 10_000 < Path(png).stat().st_size < 1_000_000
    drawn = (pixels[..., :3] < 0.9).any(axis=2)
    assert 0.02 < drawn.mean() < 0.9
    # Every quarter of the picture has something in it.
    for half in (drawn[: height // 2], drawn[height // 2 :]):
        assert half[:, : width // 2].any() and half[:, width // 2 :].any()


def test_sparse_mla_nope(tmp_path):
    done = run("-m", "mcore_patches.cli", "demo", "sparse_mla_nope", "--steps", "2", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    whole = json.loads(done.stdout)
    assert whole["ok"] is True
    result = whole["demos"]["sparse_mla_nope"]
    assert failed_checks(result) == []
    assert result["steps"] == 2
    assert result["device"].startswith("CPU")
    without, with_overlay = result["without"], result["with"]
    calls = 2 * 2  # steps x layers
    assert (without["fused_calls"], without["declined_calls"]) == (0, calls)
    assert (with_overlay["fused_calls"], with_overlay["declined_calls"]) == (calls, 0)
    assert result["counters"] == {"hits": calls, "routes": {"chunked": calls}, "declines": {}}
    scores = 4 * result["heads"] * result["sequence_length"] ** 2
    assert without["dense_score_bytes"] == scores
    assert with_overlay["dense_score_bytes"] == 0
    # The dense path holds several such matrices, the fused one not even two.
    assert all(peak > 4 * scores for peak in without["attention_peak_bytes"])
    assert result["attention_peak_bytes_by_length"]["dense"]["1280"] > 3 * without["attention_peak_bytes"][0]
    by_length = result["attention_peak_bytes_by_length"]["fused"]
    assert by_length["2560"] < 3 * by_length["640"]
    for run_ in (without, with_overlay):
        assert len(run_["losses"]) == len(run_["attention_peak_bytes"]) == 2
        assert 3 < run_["losses"][1] < run_["losses"][0] < 7
    assert result["largest_loss_difference"] < 0.01
    assert_picture(result["png"], tmp_path, 1950, 676)


def test_dsa_parallel(tmp_path):
    """Named, it runs on an older release than the installed one."""
    done = run("-m", "mcore_patches.cli", "demo", "dsa_parallel", "--steps", "10", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    whole = json.loads(done.stdout)
    assert whole["megatron_core"].startswith("0.18.2")
    result = whole["demos"]["dsa_parallel"]
    assert failed_checks(result) == []
    assert [len(result[run]["losses"]) for run in ("without", "with")] == [10, 10]
    ops = {"indexer_kl chunked", "select_blocks chunked", "sparse_mla chunked"}
    assert result["counters"]["routes"].keys() == ops
    assert result["counters"]["declines"] == {}
    assert_picture(result["png"], tmp_path, 1950, 598)


def test_qsa(tmp_path):
    done = run("-m", "mcore_patches.cli", "demo", "qsa", "--steps", "10", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)["demos"]["qsa"]
    assert failed_checks(result) == []
    stages = [result["pretraining"], result["stage_1"], result["stage_2"]]
    assert [len(stage["losses"]) for stage in stages] == [120, 10, 10]
    assert [len(stage["indexer_kl"]) for stage in stages[1:]] == [10, 10]
    assert stages[0]["losses"][-1] < 0.6 * stages[0]["losses"][0]
    first, *_, last = stages[1]["evaluations"]
    assert (first["step"], last["step"]) == (0, 10)
    assert len(first["indexer_kl"]) == len(first["overlap"]) == 2  # layers
    assert all(after < 0.6 * before for before, after in zip(first["indexer_kl"], last["indexer_kl"]))
    assert all(after > before for before, after in zip(first["overlap"], last["overlap"]))
    # Untrained indexers select about as well as chance, and Stage 2 begins where Stage 1 ended.
    assert first["overlap"][0] == pytest.approx(result["chance_overlap"], abs=0.1)
    assert stages[2]["evaluations"][0]["overlap"] == last["overlap"]
    assert stages[2]["evaluations"][0]["loss"] == last["loss"]
    assert_picture(result["png"], tmp_path, 1950, 1365)


BROKEN_ATTENTION = """
from mcore_patches.demo import sparse_mla_nope as demo
demo.attention_peaks = lambda here, lengths, *_: {length: length for length in lengths}  # takes time and is not judged
import mcore_patches.ops.sparse_mla as op
right = op.sparse_mla
op.sparse_mla = lambda q, kv, indices, *, scale, v_channels: right(
    q, kv, indices, scale=3 * scale, v_channels=v_channels
)
"""

BROKEN_INDEXER = """
from mcore_patches.demo import qsa
qsa.PRETRAINING_STEPS = 20
from mcore_patches.attention.qsa import attention
right = attention.indexer_kl.indexer_kl
attention.indexer_kl.indexer_kl = lambda q_idx, k_blocks, *args, **options: (
    right(q_idx.detach(), k_blocks.detach(), *args, **options) + 0 * (q_idx.sum() + k_blocks.sum())
)
"""


def run_broken(breakage: str, name: str, steps: int, folder: Path) -> dict[str, Any]:
    code = f"{breakage}\nimport sys\nfrom mcore_patches import cli\n"
    code += f"sys.exit(cli.main(['demo', {name!r}, '--steps', '{steps}', '--json', '--out', {str(folder)!r}]))"
    done = run("-W", "ignore", "-c", code)
    assert done.returncode == 1, done.stdout + done.stderr
    whole = json.loads(done.stdout)
    assert whole["ok"] is whole["demos"][name]["ok"] is False
    return whole["demos"][name]


def test_wrong_attention_is_noticed(tmp_path):
    result = run_broken(BROKEN_ATTENTION, "sparse_mla_nope", 1, tmp_path)
    assert "the first loss differs by" in failed_checks(result)
    assert "the first gradient differs by (relative norm)" in failed_checks(result)


def test_indexer_that_does_not_learn_is_noticed(tmp_path):
    result = run_broken(BROKEN_INDEXER, "qsa", 10, tmp_path)
    failed = failed_checks(result)
    assert "Stage 1: the indexer's KL falls" in failed
    assert "Stage 1: overlap with the teacher's top blocks rises" in failed
    assert "Stage 1: the loss with selected blocks falls" in failed
