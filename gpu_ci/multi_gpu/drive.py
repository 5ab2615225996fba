"""Runs everything of `plan.py` on the GPUs of this host and prints a line a case; exit status 1 if one failed.

    python -m gpu_ci.multi_gpu.drive [--gpus N] [--only REGEX] [--steps 20] [--seconds 540] [--out FOLDER] [--save]

Each job is a set of processes of its own, started by `mcore_patches.cpu.launch`, which ends all ranks when one fails or
time runs out; the cases that it did not come to are started again without the one that failed. `--device cpu` runs the
same with smaller models on gloo. Kernels are built into an empty folder unless `--cache` names one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_ci.multi_gpu import report
from gpu_ci.multi_gpu.plan import Job, jobs
from mcore_patches.cpu.launch import LaunchError, run

WORKERS = {"cuda": "gpu_ci.multi_gpu.worker:work", "cpu": "gpu_ci.multi_gpu.cpu_worker:work"}
TOKENS = {"cuda": 32768, "cpu": 64}
# One program that uses NVLink multicast wrongly can take the GPUs of a host out of service.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "MCORE_PATCHES_ON_DECLINE": "raise",
    # Each process would tell of every optional package that is not there.
    "PYTHONWARNINGS": "ignore::UserWarning",
}
# Launches of a job in a row that fail before a case is done, such as on import, before the rest is given up.
MOST_EMPTY = 2


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    gpus = _ranks(options.device, options.gpus)
    if options.out:  # what cannot be written should not show after all has run
        Path(options.out).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    records: list[dict[str, Any]] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as scratch:

        def run_and_show(job: Job) -> None:
            # Who compiles what shows in an empty cache only.
            cache = Path(scratch) / "kernels" if job.kind == "warmup" or not options.cache else Path(options.cache)
            environment = environment_of(options.device, gpus, cache.resolve())
            for record in run_job(job, Path(scratch), environment, options, deadline):
                with lock:
                    print(report.line(record), flush=True)
                    records.append(record)

        for together in stages(chosen(jobs(gpus), options.only, options.device)):
            with ThreadPoolExecutor(len(together)) as threads:
                list(threads.map(run_and_show, together))
    failed = [record["name"] for record in records if record["faults"]]
    print(f"{len(records) - len(failed)} passed, {len(failed)} failed on {gpus} x {report.device_name(options.device)}")
    if options.out:
        write(Path(options.out), records)
    if options.save:
        from gpu_ci.bench import results

        results.save(report.rows(records, gpus))
    return 1 if failed or not records else 0


def chosen(planned: list[Job], only: str, device: str) -> list[Job]:
    """The jobs with those of their cases that match `only`; the cases on one rank that those are compared with stay."""
    pattern = re.compile(only)
    kept = []
    for job in planned:
        if device == "cpu" and job.kind == "warmup":
            continue
        if job.kind != "train":
            if any(pattern.search(name) for name in job.case_names()):
                kept.append(job)
            continue
        kept.append(replace(job, cases=tuple(case for case in job.cases if pattern.search(case.name))))
    needed = {case.reference for job in kept for case in job.cases}
    for place, job in enumerate(kept):
        if job.name == "one":
            every = {case.name: case for case in next(j for j in planned if j.name == "one").cases}
            wanted = {case.name for case in job.cases} | needed
            kept[place] = replace(job, cases=tuple(case for name, case in every.items() if name in wanted))
    return [job for job in kept if job.kind != "train" or job.cases]


def environment_of(device: str, gpus: int, cache: Path) -> dict[str, str]:
    """Variables of the processes of every job."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    visible = ",".join(visible.split(",")[:gpus]) if device == "cuda" else ""
    return WITHOUT_MULTICAST | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": visible, "TILELANG_CACHE_DIR": str(cache)}


def stages(planned: list[Job]) -> list[list[Job]]:
    """Jobs that run at the same time, in order: CPUs build the kernels, so one rank need not wait for all of them."""
    if [job.name for job in planned[:2]] == ["warmup", "one"]:
        return [planned[:2], *([job] for job in planned[2:])]
    return [[job] for job in planned]


def run_job(
    job: Job, scratch: Path, environment: dict[str, str], options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """A record of every case of a job, as it is done. One that breaks its processes has failed, and the rest is started
    again."""
    done = empty = 0
    names = job.case_names()
    log = scratch / f"results-{job.name}.jsonl"
    while done < len(names):
        left = remaining(job, done)
        seconds = min(options.job_seconds, deadline - time.monotonic())
        if seconds < 10 or empty == MOST_EMPTY:
            why = "out of time" if seconds < 10 else f"{empty} launches failed on their first case"
            yield from ({"name": name, "faults": [f"not started: {why}"]} for name in names[done:])
            return
        log.unlink(missing_ok=True)
        settings: dict[str, Any] = {
            "nprocs": left.ranks,
            "args": [left.as_dict(), str(scratch), options.device, options.steps, options.tokens],
            "env": environment,
            "timeout": seconds,
        }
        before = done
        with ThreadPoolExecutor(1) as thread:
            launch = thread.submit(run, WORKERS[options.device], **settings)
            for record in _follow(log, launch):
                done += 1
                yield record
        empty = 0 if done > before else empty + 1
        error = launch.exception()
        if error is not None and not isinstance(error, LaunchError):
            raise error
        if done < len(names):
            yield {"name": names[done], "faults": [str(error or "no result and no error")]}
            done += 1
            if job.kind != "train":
                return
        elif error is not None:
            yield {"name": f"{job.name}, its end", "faults": [str(error)]}


def _follow(log: Path, launch: Future[Any]) -> Iterator[dict[str, Any]]:
    """Records that a launch writes to `log`, until it is over."""
    read = 0
    over = False
    while not over:
        over = bool(wait([launch], timeout=0.2).done)
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        complete = [line for line in lines if line.endswith("\n")]
        yield from map(json.loads, complete[read:])
        read = len(complete)


def remaining(job: Job, done: int) -> Job:
    """The job without its first `done` cases. Only trainings stand for themselves."""
    return replace(job, cases=job.cases[done:]) if job.kind == "train" else job


def write(folder: Path, records: list[dict[str, Any]]) -> None:
    """The printed lines, and the records as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text("".join(report.line(record) + "\n" for record in records))
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _ranks(device: str, wanted: int | None) -> int:
    """How many ranks to run on; NCCL refuses two on one GPU, but only after every job has started."""
    if device == "cpu":
        return wanted or 2
    import torch

    found = torch.cuda.device_count()
    if found == 0:
        raise SystemExit("no CUDA device: --device cpu runs the same with smaller models on gloo")
    if wanted and wanted > found:
        raise SystemExit(f"--gpus {wanted}: must be at most {found}, the GPUs that are visible here")
    return wanted or max(n for n in (1, 2, 4, 8) if n <= found)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_ci.multi_gpu.drive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), help="ranks; default: the GPUs here, on a CPU 2")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of each training, default %(default)s")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a rank in weak scaling, default 32768; on a CPU 64")
    parser.add_argument("--seconds", type=float, default=540, help="for everything, default %(default)s")
    parser.add_argument("--job-seconds", type=float, default=300, help="for one job, default %(default)s")
    parser.add_argument("--cache", metavar="FOLDER", help="of built kernels; default: an empty one")
    parser.add_argument("--out", metavar="FOLDER", help="for report.txt and records.jsonl")
    parser.add_argument("--save", action="store_true", help="write the figures to gpu_ci/bench/results.csv")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    if options.tokens is None:
        options.tokens = TOKENS[options.device]
    if options.tokens < 2 or options.tokens % 2:
        parser.error(f"--tokens {options.tokens}: must be even (a rank holds two chunks) and at least 2")
    for name in ("seconds", "job_seconds"):
        if not 0 < getattr(options, name) < math.inf:  # nor NaN
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be finite and above 0")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only}: must be a regular expression: {error}")
    if options.save and options.device == "cpu":
        # A host that has GPUs too would file them under the GPU's name.
        parser.error("--save: must not be given with --device cpu, whose times say nothing")
    return options


if __name__ == "__main__":
    sys.exit(main())
