"""gpu_ci/multi_gpu without a GPU: its plan, its verdicts, its launches; and two gloo ranks beside one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_ci.bench import results
from gpu_ci.multi_gpu import compare, drive, plan, report, verdict
from gpu_ci.multi_gpu.compare import Training
from mcore_patches.cpu.launch import LaunchError

ROOT = Path(__file__).parents[2]


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        (1, []),
        (2, ["TP2-SP", "CP2", "PP2"]),
        (4, ["TP2-SP", "CP2", "PP2", "TP2-SP-CP2"]),
        (8, ["TP2-SP", "CP2", "PP2", "TP2-SP-CP2", "TP2-SP-CP2-PP2"]),
    ],
)
def test_layouts(gpus: int, names: list[str]) -> None:
    assert [sizes.name for sizes in plan.layouts(gpus)] == names
    jobs = plan.jobs(gpus)
    several = ["several"] if names else []
    assert [job.name for job in jobs] == ["warmup", "one", *several, "layer"]
    assert [job.ranks for job in jobs] == [max(2, gpus), 1, *[gpus for _ in several], gpus]
    assert {case.sizes.name for job in jobs[2:-1] for case in job.cases} == set(names)
    # Kernels are built while one rank trains already.
    assert [[job.name for job in stage] for stage in drive.stages(jobs)] == [
        ["warmup", "one"],
        *[[name] for name in [*several, "layer"]],
    ]
    assert [len(stage) for stage in drive.stages(jobs[1:])] == [1] * len(jobs[1:])
    for job in jobs:
        assert plan.job_from_dict(json.loads(json.dumps(job.as_dict()))) == job
    assert jobs[-1].case_names() == [f"layer-CP{cp}" for cp in (1, 2, 4, 8) if cp <= gpus]
    lines = [name for job in jobs for name in job.case_names()]
    assert len(lines) == len(set(lines))


def test_other_numbers_of_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus=3: must be 1, 2, 4 or 8"):
        plan.layouts(3)
    with pytest.raises(SystemExit):
        drive.main(["--gpus", "3"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--tokens", "0"], "--tokens 0: must be even"),
        (["--tokens", "-2"], "--tokens -2: must be even"),
        (["--tokens", "7"], "--tokens 7: must be even"),
        (["--seconds", "nan"], "--seconds nan: must be finite and above 0"),
        (["--job-seconds", "0"], "--job-seconds 0.0: must be finite and above 0"),
        (["--only", "("], "--only (: must be a regular expression: missing )"),
        (["--device", "cpu", "--save"], "--save: must not be given with --device cpu"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drive.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "wanted", "ranks"),
    [(2, None, 2), (3, None, 2), (8, 4, 4), (2, 4, "--gpus 4: must be at most 2"), (0, None, "no CUDA device")],
)
def test_ranks_have_a_gpu_each(
    found: int, wanted: int | None, ranks: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    if isinstance(ranks, int):
        assert drive._ranks("cuda", wanted) == ranks
    else:
        with pytest.raises(SystemExit, match=ranks):
            drive._ranks("cuda", wanted)
    assert drive._ranks("cpu", wanted) == (wanted or 2)


def test_a_folder_that_cannot_be_written_shows_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        drive.main(["--device", "cpu", "--only", "nothing", "--out", str(tmp_path / "file" / "out")])


def test_every_layout_takes_every_form_and_recomputation() -> None:
    cases = list(plan.cases(plan.Sizes()))
    for model in plan.MODELS:
        mine = {(case.form, case.recompute) for case in cases if case.model == model}
        assert {("bshd", "none"), ("thd", "none"), ("thd", "full"), ("thd", "core_attn")} == mine
    # What the others are compared with is there, before it is asked for.
    names = [case.name for case in cases]
    assert {case.reference for case in plan.cases(plan.Sizes(cp=2))} < set(names)
    assert all(names.index(case.reference) <= names.index(case.name) for case in cases)


def test_chosen_cases_bring_what_they_are_compared_with() -> None:
    kept = drive.chosen(plan.jobs(2), "^CP2-dsa-thd-full$|^layer", "cuda")
    assert [(job.name, [case.name for case in job.cases]) for job in kept] == [
        ("one", ["one-dsa-thd-none"]),
        ("several", ["CP2-dsa-thd-full"]),
        ("layer", []),
    ]
    assert drive.chosen(plan.jobs(2), "", "cuda") == plan.jobs(2)
    assert [job.name for job in drive.chosen(plan.jobs(2), "", "cpu")] == ["one", "several", "layer"]
    assert drive.chosen(plan.jobs(2), "nothing", "cuda") == []


def test_multicast_is_off_and_declines_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = drive.environment_of("cuda", 4, Path("/kernels"))
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == environment["NVSHMEM_DISABLE_NVLS"] == "1"
    assert environment["MCORE_PATCHES_ON_DECLINE"] == "raise"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert environment["TILELANG_CACHE_DIR"] == "/kernels"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    assert drive.environment_of("cuda", 2, Path("/kernels"))["CUDA_VISIBLE_DEVICES"] == "5,3"
    assert drive.environment_of("cpu", 2, Path("/kernels"))["CUDA_VISIBLE_DEVICES"] == ""
    script = (ROOT / "gpu_ci" / "multi_gpu" / "run.sh").read_text()
    assert all(f"{name}={value}" in script for name, value in drive.WITHOUT_MULTICAST.items())


def test_script_hands_on_arguments_and_status() -> None:
    script = [ROOT / "gpu_ci" / "multi_gpu" / "run.sh", "--gpus", "7"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHON": "echo"})
    assert (done.returncode, done.stdout.split()) == (0, ["-m", "gpu_ci.multi_gpu.drive", "--gpus", "7"])
    done = subprocess.run(script, capture_output=True, timeout=60, env={**os.environ, "PYTHON": "false"})
    assert done.returncode == 1


# --- verdicts ---------------------------------------------------------------------------------------------------------


def training(**changes: Any) -> Training:
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(20, 30, generator=generator) for name in ("a", "b.indexer.c")}
    return Training(**{"losses": [4.0, 3.0], "gradients": gradients, "indexer": [0.5, 0.25]} | changes)


def test_equal_trainings_have_no_faults() -> None:
    result = compare.compare(training(), training())
    assert (result.faults, result.loss, result.gradient, result.indexer) == ([], 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"losses": [4.0 * (1 + 2 * compare.FIRST_LOSS), 3.0]}, "loss of the first step: off by 4.00e-03"),
        ({"losses": [4.0, 3.0 * (1 - 2 * compare.LOSS)]}, "loss of a step: off by 4.00e-02"),
        ({"losses": [4.0, math.nan]}, "loss of a step: off by nan"),
        ({"losses": [4.0]}, "1 steps in place of 2"),
        ({"indexer": [0.5, 0.25 * (1 + 2 * compare.INDEXER)]}, "an indexer's loss: off"),
        ({"indexer": [0.5]}, "1 indexers' losses in place of 2"),
        ({"indexer": []}, "0 indexers' losses in place of 2"),
        ({"gradients": {"a": training().gradients["a"]}}, "gradients of ['b.indexer.c'] on one side only"),
        (
            {"gradients": {n: g * 1.5 for n, g in training().gradients.items()}},
            "all gradients together: off by 5.00",
        ),
        (
            {"given": {n: g * 1.04 for n, g in training().gradients.items()}},
            "gradient of a with the routes of one rank: off by 4.00e-02",
        ),
        ({"given": {"a": training().gradients["a"]}}, "gradients of ['b.indexer.c'] on one side only"),
        (
            {"gradients": training().gradients | {"a": training().gradients["a"] * math.nan}},
            "gradient of a: off by nan",
        ),
    ],
)
def test_what_is_beyond_its_tolerance_is_a_fault(changes: dict[str, Any], fault: str) -> None:
    assert any(found.startswith(fault) for found in compare.compare(training(), training(**changes)).faults)


def test_trainings_without_an_indexer_s_loss_prove_nothing() -> None:
    assert compare.compare(training(indexer=[]), training(indexer=[])).faults == ["no indexer's loss was recorded"]


def test_differences_within_the_tolerances_are_none() -> None:
    reference = training()
    noise = torch.Generator().manual_seed(1)
    near = {
        name: g + 0.5 * compare.GRADIENTS * g.norm() / g.numel() ** 0.5 * torch.randn(g.shape, generator=noise)
        for name, g in reference.gradients.items()
    }
    result = compare.compare(reference, training(losses=[4.0 * (1 + 0.5 * compare.FIRST_LOSS), 3.0], gradients=near))
    assert result.faults == []
    assert result.gradients > 0.3 * compare.GRADIENTS


def test_gradients_that_are_rounding_alone_are_compared_with_the_others() -> None:
    zero = {"zero": 1e-7 * torch.ones(4)}
    result = compare.compare(
        training(gradients=training().gradients | zero),
        training(gradients=training().gradients | {"zero": -zero["zero"]}),
    )
    assert result.faults == [] and 0 < result.gradient < 1e-3


def ranks(count: int = 2, **changes: Any) -> list[dict[str, Any]]:
    entry = {"place": [0, 0], "first": {1: ["x", "y"], 2: ["z", "z"]}, "again": {1: ["x", "y"], 2: ["z", "z"]}}
    return [entry] * (count - 1) + [entry | changes]


def test_routes() -> None:
    assert verdict.route_faults(ranks(), True) == []
    assert verdict.route_faults(ranks(again={}), True) == [
        "rank 1, layers [1, 2]: recomputed passes attended something else, or none came"
    ]
    assert verdict.route_faults(ranks(again={1: ["x", "y"], 2: ["z", "q"]}), True) == [
        "rank 1, layers [2]: recomputed passes attended something else, or none came"
    ]
    # Without recomputation nothing may have run again.
    assert len(verdict.route_faults(ranks(again={}), False)) == 1
    other = {1: ["x", "y"], 2: ["z", "q"]}
    assert verdict.route_faults(ranks(first=other, again=other), True) == [
        "rank 1, layers [2]: attended something else than a rank with the same tokens"
    ]
    # Another context-parallel rank has other tokens.
    assert verdict.route_faults(ranks(first=other, again=other, place=[1, 0]), True) == []
    assert verdict.route_faults(ranks(first={}, again={}), True)[0] == "rank 1 recorded no routes"


def test_gradients_among_ranks() -> None:
    norms = {"a": 1.0, "b": 0.0}
    assert verdict.disagreement([norms, dict(norms)]) == []
    assert verdict.disagreement([norms, norms | {"a": 1.001}]) == ["gradient of a differs between ranks by 1.00e-03"]
    assert verdict.disagreement([norms, {"a": 1.0}]) == ["gradient of b differs between ranks by inf"]


def test_digests() -> None:
    assert verdict.digest_faults(["a", "a"]) == []
    assert verdict.digest_faults(["a", "b"]) == ["report digests differ: ['a', 'b']"]


def test_builds() -> None:
    def entry(compiled: list[str], keys: list[str], **failed: str) -> dict[str, Any]:
        return {"compiled": compiled, "keys": keys, "failed": failed}

    assert verdict.build_faults([entry(["p"], ["1", "2"]), entry(["q"], ["1", "2"])]) == []
    twice = verdict.build_faults([entry(["p", "q"], ["1", "2"]), entry(["q"], ["1", "2"])])
    assert twice == ["q was compiled 2 times"]
    assert verdict.build_faults([entry(["p"], ["1"]), entry([], [])]) == ["ranks have different kernels: [1, 0]"]
    assert "cache was not empty" in verdict.build_faults([entry([], ["1"]), entry([], ["1"])])[0]
    assert verdict.build_faults([entry(["p"], ["1"]), entry([], ["1"], k="no")]) == ["rank 1: no"]


# --- launches ---------------------------------------------------------------------------------------------------------


class Launches:
    """Stands for the launcher: does the cases of the job up to one that breaks."""

    def __init__(self, breaking: str) -> None:
        self.breaking, self.started = breaking, []

    def __call__(self, target: str, *, nprocs: int, args: list[Any], env: dict[str, str], timeout: float) -> None:
        job, folder = plan.job_from_dict(args[0]), Path(args[1])
        self.started.append((nprocs, job.case_names()))
        with (folder / f"results-{job.name}.jsonl").open("a") as file:
            for name in job.case_names():
                if name == self.breaking:
                    raise LaunchError("rank 1 of 2 was killed by SIGSEGV", 1)
                file.write(json.dumps({"name": name, "faults": []}) + "\n")


OPTIONS = SimpleNamespace(device="cpu", steps=2, tokens=64, job_seconds=180.0)


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, job: plan.Job, breaking: str, left: float = 1e3) -> Any:
    launches = Launches(breaking)
    monkeypatch.setattr(drive, "run", launches)
    return list(drive.run_job(job, folder, {}, OPTIONS, time.monotonic() + left)), launches.started


def test_a_case_that_breaks_its_processes_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = replace(plan.jobs(2)[2], cases=plan.jobs(2)[2].cases[:3])
    first, second, third = job.case_names()
    records, started = run_with(monkeypatch, tmp_path, job, second)
    assert [record["name"] for record in records] == [first, second, third]
    assert [record["faults"] for record in records] == [[], ["rank 1 of 2 was killed by SIGSEGV"], []]
    assert started == [(2, [first, second, third]), (2, [third])]


def test_a_job_that_cannot_begin_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(Launches):
        def __call__(self, *args: Any, **settings: Any) -> None:
            self.breaking = plan.job_from_dict(settings["args"][0]).case_names()[0]
            super().__call__(*args, **settings)

    launches = Broken("")
    monkeypatch.setattr(drive, "run", launches)
    job = plan.jobs(2)[2]
    records = list(drive.run_job(job, tmp_path, {}, OPTIONS, time.monotonic() + 1e3))
    assert len(launches.started) == drive.MOST_EMPTY and len(records) == len(job.cases)
    assert records[-1]["faults"] == ["not started: 2 launches failed on their first case"]


def test_a_bench_that_breaks_is_not_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records, started = run_with(monkeypatch, tmp_path, plan.jobs(2)[-1], "layer-CP2")
    assert [len(record["faults"]) for record in records] == [0, 1]
    assert len(started) == 1


def test_what_time_does_not_allow_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records, started = run_with(monkeypatch, tmp_path, plan.jobs(2)[2], "", left=5.0)
    assert len(records) == len(plan.jobs(2)[2].cases)
    assert {fault for record in records for fault in record["faults"]} == {"not started: out of time"}
    assert started == []


# --- reports ----------------------------------------------------------------------------------------------------------


def record(name: str, **changes: Any) -> dict[str, Any]:
    fields = {"first_loss": 1e-4, "loss": 2e-3, "indexer": 1e-3, "gradients": 0.01, "gradient": 0.03}
    fields |= {"given": 0.005, "worst": "w"}
    return {"name": name, "faults": [], **fields, "peaks": [1.0, 2.0], "step_ms": 50.0, "seconds": 3.0, **changes}


def test_lines() -> None:
    line = report.line(record("CP2-qsa-thd-none"))
    assert "passed" in line and "2.0e-03" in line and "peak 2.000 GiB" in line and "3.0 s" in line
    failed = report.line({"name": "CP2-qsa-thd-none", "faults": ["one\ntwo"]})
    assert failed.splitlines()[1:] == ["    one", "    two"] and "FAILED" in failed
    long = report.line({"name": "x", "faults": ["\n".join(map(str, range(100)))]}).split()
    assert long[2] == "0" and long[-1] == "99" and len(long) < 50


def test_rows_are_those_of_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.sys.modules["__main__"], "__spec__", SimpleNamespace(name="gpu_ci.multi_gpu.drive"))
    records = [
        record("TP2-SP-qsa-bshd-none"),
        record("TP2-SP-qsa-thd-full", gradient=0.04, peaks=[3.0, 1.0]),
        record("TP2-SP-dsa-thd-full", faults=["broken"]),
        {"name": "warmup", "faults": [], "compiled": [3, 1], "kernels": 4},
        {"name": "layer-CP1", "faults": [], "tokens": 8, "forward_ms": 10.0, "backward_ms": 30.0, "peaks": [1.0]},
        {"name": "layer-CP2", "faults": [], "tokens": 16, "forward_ms": 20.0, "backward_ms": 30.0, "peaks": [1.0]},
    ]
    rows = report.rows(records, 2)
    values = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert values["2x-TP2-SP-qsa", "gradient beside one GPU, largest relative error"] == "0.04"
    assert values["2x-TP2-SP-qsa", "peak memory of a rank"] == "3"
    assert values["2x-layer-CP2-T16", "forward + backward, one rank's tokens / all ranks'"] == "0.8"
    assert not any("dsa" in case for case, _ in values)
    results.save(rows, tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_text().count("\n") == 1 + len(rows)


# --- two ranks of gloo beside one -------------------------------------------------------------------------------------


# A busy machine imports megatron in minutes.
PATIENT = ("--job-seconds", "600", "--seconds", "1200")


def test_two_ranks_equal_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "^TP2-SP-(qsa|dsa)-thd-full$"
    arguments = ["--device", "cpu", "--gpus", "2", "--only", only, "--steps", "2", *PATIENT, "--out", str(tmp_path)]
    assert drive.main(arguments) == 0, capsys.readouterr().out
    records = {r["name"]: r for r in map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())}
    assert list(records) == ["one-qsa-thd-none", "one-dsa-thd-none", "TP2-SP-qsa-thd-full", "TP2-SP-dsa-thd-full"]
    for name, entry in records.items():
        assert (entry["gradient"] == 0) == name.startswith("one"), entry
        assert len(entry["losses"]) == 2 and len(entry["peaks"]) == (1 if name.startswith("one") else 2)
    assert capsys.readouterr().out.splitlines()[-1] == "4 passed, 0 failed on 2 x CPU"


@pytest.mark.thorough
def test_four_ranks_equal_one(capsys: pytest.CaptureFixture[str]) -> None:
    only = "^TP2-SP-CP2-(qsa-thd-full|qsa-bshd-none|dsa-thd-none)$|^layer"
    status = drive.main(["--device", "cpu", "--gpus", "4", "--only", only, "--steps", "2", *PATIENT])
    assert status == 0, capsys.readouterr().out


@pytest.mark.thorough
def test_other_layouts_of_two_ranks_equal_one(capsys: pytest.CaptureFixture[str]) -> None:
    only = "^(CP2|PP2)-(qsa|dsa)-thd-none$"
    status = drive.main(["--device", "cpu", "--gpus", "2", "--only", only, "--steps", "2", *PATIENT])
    assert status == 0, capsys.readouterr().out
