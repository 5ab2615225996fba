"""Runs a function on one or several gloo processes, on a chosen megatron-core release.

From Python, with results per rank::

    losses = run("mypackage.cases:train", nprocs=2, release=".releases/0.18.2", args=(4,))

From a shell, or under torchrun (which then provides the ranks)::

    python -m mcore_patches.cpu.launch mypackage.cases:train --nprocs 2 --release .releases/0.18.2 --args '[4]'
    torchrun --nproc-per-node 2 -m mcore_patches.cpu.launch mypackage.cases:train --args '[4]'

The target calls :func:`mcore_patches.cpu.parallel.init_model_parallel` (any number of times) and returns something
that pickles; plain numbers, strings and tensors spare the caller megatron's import. As torch and megatron take
seconds to import, one call can run many cases: a target that yields ``(name, result)`` pairs returns their dict, and
a failure then says which cases were done.

A launch is one process that imports the target's module and forks the ranks, so that any number of ranks costs one
import. The module must therefore not start threads when it is imported, nor initialise CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ["LaunchError", "run"]

INIT_METHOD_VARIABLE = "MCORE_CPU_INIT_METHOD"

_TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LOG_LINES = 60
_GRACE = 1.0  # seconds in which ranks that fail together may all report


class LaunchError(RuntimeError):
    """A launch failed: the message holds the traceback of the rank that failed first, and the end of its output.

    Attributes:
        rank: that rank; None when the target's module could not be imported, or on a timeout.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def run(
    target: str,
    *,
    nprocs: int = 1,
    release: Path | str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> list[Any]:
    """Call ``target(*args, **kwargs)`` on ``nprocs`` ranks and wait.

    Args:
        target: "module:function", importable with this process's ``sys.path``.
        nprocs: number of ranks. Each sees ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
        release: folder that holds ``megatron/core``, put first on the path; None for what is installed.
        args, kwargs: pickled to the ranks.
        env: variables over this process's. CUDA is hidden, and OpenMP has one thread, unless set here.
        timeout: seconds for everything, imports included.

    Returns:
        The result of each rank, in order of rank.

    Raises:
        ValueError: a bad ``target``, ``nprocs``, ``release`` or ``timeout``.
        LaunchError: the module cannot be imported, a rank raises or dies, or time runs out. All processes are
            gone then.
    """
    _split_target(target)
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: expected at least 1")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout}: expected seconds, more than 0")
    if release is not None and not (Path(release) / "megatron" / "core").is_dir():
        raise ValueError(f"release={str(release)!r}: no megatron/core in it")
    job = Path(tempfile.mkdtemp(prefix="mcore-patches-"))
    try:
        (job / "call").write_bytes(pickle.dumps((list(args), dict(kwargs or {}))))
        with (job / "log").open("wb") as log:
            forker = subprocess.Popen(
                [sys.executable, "-m", "mcore_patches.cpu.launch", target, "--job", str(job), "--nprocs", str(nprocs)],
                env=_environment(job, release, env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait(forker, job, nprocs, timeout, target)
        finally:
            # The session's group also holds what the ranks started: megatron's checkpoints leave a manager process.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forker.pid, signal.SIGKILL)
            forker.wait()
        return _collect(job, nprocs, target)
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _wait(forker: subprocess.Popen, job: Path, nprocs: int, timeout: float, target: str) -> None:
    try:
        forker.wait(timeout)
    except subprocess.TimeoutExpired:
        pids = [forker.pid]
        with contextlib.suppress(FileNotFoundError):
            pids += json.loads((job / "pids").read_text())
        for pid in pids:  # each dumps its stack to its log
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_GRACE)
        places = "\n".join(
            f"--- {name}:\n{_tail(path)}"
            for name, path in [("before the ranks", job / "log")]
            + [(f"rank {rank}", job / f"log{rank}") for rank in range(nprocs)]
        )
        raise LaunchError(f"{target} took longer than {timeout:g} s; the ranks were here:\n{places}") from None


def _collect(job: Path, nprocs: int, target: str) -> list[Any]:
    outcomes = {}
    for rank in range(nprocs):
        with contextlib.suppress(FileNotFoundError):
            outcomes[rank] = pickle.loads((job / f"outcome{rank}").read_bytes())
    failures = sorted((when, rank, text) for rank, (good, when, text) in outcomes.items() if not good)
    if failures:
        _, rank, text = failures[0]
        raise LaunchError(
            f"{target} failed on rank {rank} of {nprocs}:\n{text}\n--- output:\n{_tail(job / f'log{rank}')}", rank
        )
    try:
        exits, stopped = json.loads((job / "exits").read_text())
    except FileNotFoundError:
        raise LaunchError(f"{target} was not called:\n{_tail(job / 'log')}") from None
    for rank, code in enumerate(exits):
        if rank not in outcomes and rank not in stopped:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            raise LaunchError(f"rank {rank} of {nprocs} {how} in {target}:\n{_tail(job / f'log{rank}')}", rank)
    return [outcomes[rank][2] for rank in range(nprocs)]


def _environment(job: Path, release: Path | str | None, env: Mapping[str, str]) -> dict[str, str]:
    child = {name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES}
    child |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    # Gloo otherwise resolves the host's name, which not every container can.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        child.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    child |= env
    child[INIT_METHOD_VARIABLE] = f"file://{job / 'rendezvous'}"
    own = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    own.add(str(Path(sysconfig.get_paths()["stdlib"]) / "lib-dynload"))
    here = str(Path(__file__).parents[2])
    path = [str(Path(entry).resolve()) for entry in sys.path if entry not in own and not entry.endswith(".zip")]
    first = [] if release is None else [str(Path(release).resolve())]
    first += filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    child["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*first, *path, here]))
    return child


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "(nothing)"
    return "\n".join(lines[-_LOG_LINES:]) or "(nothing)"


def _split_target(target: str) -> tuple[str, str]:
    module, colon, function = target.partition(":")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"target={target!r}: expected 'module:function'")
    return module, function


def _resolve(target: str) -> Callable[..., Any]:
    module, function = _split_target(target)
    return getattr(importlib.import_module(module), function)


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    result = function(*args, **kwargs)
    if not inspect.isgenerator(result):
        return result
    cases: dict[str, Any] = {}
    try:
        for name, value in cast(Generator[tuple[str, Any]], result):
            if name in cases:
                raise ValueError(f"{function.__name__} yielded the case {name!r} twice")
            cases[name] = value
    except Exception as error:
        error.add_note(f"cases done before: {', '.join(cases) or 'none'}")
        raise
    return cases


def _fork_ranks(target: str, nprocs: int, job: Path) -> None:
    """What the launched process does: import once, fork, watch."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    parent = os.getppid()
    function = _resolve(target)
    args, kwargs = pickle.loads((job / "call").read_bytes())
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, nprocs, function, args, kwargs, job)) for rank in range(nprocs)]
    for process in ranks:
        process.start()
    (job / "pids").write_text(json.dumps([process.pid for process in ranks]))
    running = dict(enumerate(ranks))
    stopped: set[int] = set()
    deadline = None
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running.values()], timeout=_GRACE)
        done = [rank for rank, process in running.items() if not process.is_alive()]
        for rank in done:
            failed = running.pop(rank).exitcode or not (job / f"outcome{rank}").exists()
            if failed and deadline is None:
                deadline = time.monotonic() + _GRACE
        # Ranks that wait for a failed one would wait out the collective's timeout; so would ranks without a caller.
        if os.getppid() != parent or (deadline is not None and time.monotonic() > deadline):
            for rank, process in running.items():
                process.kill()
                stopped.add(rank)
    (job / "exits").write_text(json.dumps([[process.exitcode for process in ranks], sorted(stopped)]))


def _rank(
    rank: int, nprocs: int, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], job: Path
) -> None:
    log = os.open(job / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
    }
    try:
        outcome = pickle.dumps((True, time.time(), _call(function, args, kwargs)))
    except BaseException:
        outcome = pickle.dumps((False, time.time(), traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        (job / f"part{rank}").write_bytes(outcome)
        (job / f"part{rank}").rename(job / f"outcome{rank}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_patches.cpu.launch", description="Run a function on gloo processes on the CPU."
    )
    parser.add_argument("target", help="module:function")
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--release", help="folder that holds another megatron/core")
    parser.add_argument("--args", type=json.loads, default=[], help="positional arguments, a JSON list")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="keyword arguments, a JSON object")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.job is not None:
        _fork_ranks(options.target, options.nprocs, options.job)
        return 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        result = _call(_resolve(options.target), options.args, options.kwargs)
        if os.environ["RANK"] == "0":
            print(json.dumps(result, default=str))
        return 0
    try:
        results = run(
            options.target,
            nprocs=options.nprocs,
            release=options.release,
            args=options.args,
            kwargs=options.kwargs,
            timeout=options.timeout,
        )
    except (LaunchError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for rank, result in enumerate(results):
        print(f"rank {rank}: {json.dumps(result, default=str)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
