"""Demos: tiny models of the real megatron-core train on whatever device there is, without and with a patch.

    mcore-patches demo            all of them that are for the newest release
    mcore-patches demo NAME       one

Importing this package loads neither torch nor megatron.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mcore_patches import __version__, apply_patches
from mcore_patches.demo.other_release import run_on
from mcore_patches.demo.outcome import DemoError, Outcome
from mcore_patches.demo.progress import Progress
from mcore_patches.overlay.patch import State
from mcore_patches.overlay.report import Row
from mcore_patches.overlay.versions import installed

__all__ = ["DEMOS", "Demo", "DemoError", "run"]


@dataclass(frozen=True)
class Demo:
    """A demo, named after the patch that it shows.

    module: has `train(steps, png, progress) -> Outcome`. default_steps, least_steps, most_steps: training steps, or
    those of a stage where there are several. Its checks hold within these bounds: in fewer steps learning looks like
    noise, in more of them runs that differ by rounding part. release: it is for older releases, runs only when it is
    named, and on this one where the installed release does not need its patch.
    """

    name: str
    module: str
    default_steps: int
    least_steps: int
    most_steps: int
    release: str | None = None


DEMOS = {
    demo.name: demo
    for demo in (
        Demo("sparse_mla_nope", "mcore_patches.demo.sparse_mla_nope", default_steps=20, least_steps=1, most_steps=100),
        Demo("qsa", "mcore_patches.demo.qsa", default_steps=60, least_steps=10, most_steps=1000),
        Demo(
            "dsa_parallel",
            "mcore_patches.demo.dsa_parallel",
            default_steps=40,
            least_steps=10,
            most_steps=1000,
            release="0.18.2",
        ),
    )
}


def run(
    name: str | None = None, *, out: str | Path = "demo-output", steps: int | None = None, as_json: bool = False
) -> int:
    """Run a demo, or with `name` None every demo that the installed megatron-core can run, and print what came of it.

    A demo of a patch for older releases runs when it is named: on an older release fetched beside `out`, if need be.

    Args:
        name: one of `DEMOS`.
        out: folder for the pictures, `NAME.png`; made when missing.
        steps: training steps, or those of each stage; None is what the demo takes by itself.
        as_json: print one JSON object and nothing else on stdout.

    Returns:
        0, or 1 when one of a demo's own checks failed.

    Raises:
        DemoError: an unknown name, a bad argument, one of several processes, something is not installed, or the patch
            cannot be shown here. Nothing was trained.
    """
    demos = _named(name)
    _check_steps(steps, demos)
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise DemoError(f"WORLD_SIZE={world} is set, but the demos run in one process: start them without torchrun")
    folder = _folder(out)
    _check_packages()
    # Read when torch loads. The profiler that measures memory greets on stderr at its highest levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if name is not None and (release := demos[0].release) and not _has_release_for(demos[0]):
        return run_on(release, name, folder, steps, as_json)
    ready, not_run = _ready(demos)

    progress = Progress(as_json)
    for skipped, reason in not_run.items():
        progress.say(f"{skipped}: not run: {reason}")
    results: dict[str, Any] = {}
    for demo in ready:
        outcome, seconds = _train(demo, steps, folder, progress)
        results[demo.name] = {"ok": outcome.ok, "seconds": round(seconds, 1)} | outcome.as_dict()
        verdict = "ok" if outcome.ok else "FAILED"
        progress.say(f"\n{outcome}\n\n{demo.name}: {verdict} in {seconds:.0f} s; {outcome.png}\n")
    ok = all(result["ok"] for result in results.values())
    if as_json:
        found = installed()
        report = {
            "ok": ok,
            "mcore_patches": __version__,
            "megatron_core": found and found.text,
            "demos": results,
            "not_run": not_run,
        }
        print(json.dumps(_json_values(report), indent=2, allow_nan=False))
    return 0 if ok else 1


def _json_values(value: Any) -> Any:
    """With null for NaN and infinity, which a run that diverged produces and JSON does not know."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _train(demo: Demo, steps: int | None, folder: Path, progress: Progress) -> tuple[Outcome, float]:
    from mcore_patches.demo.device import quiet

    start = time.perf_counter()
    with quiet():
        module = importlib.import_module(demo.module)
        outcome = module.train(steps or demo.default_steps, folder / f"{demo.name}.png", progress)
    return outcome, time.perf_counter() - start


def _named(name: str | None) -> list[Demo]:
    if name is None:
        return [demo for demo in DEMOS.values() if demo.release is None]
    if name not in DEMOS:
        raise DemoError(f"unknown demo {name!r}; known are {', '.join(DEMOS)}")
    return [DEMOS[name]]


def _check_steps(steps: int | None, demos: list[Demo]) -> None:
    if steps is None:
        return
    least, most = max(demo.least_steps for demo in demos), min(demo.most_steps for demo in demos)
    if isinstance(steps, bool) or not isinstance(steps, int) or not least <= steps <= most:
        names = " and ".join(demo.name for demo in demos)
        raise DemoError(f"steps={steps!r}; allowed for {names} are {least} to {most}")


def _folder(out: str | Path) -> Path:
    if not str(out):
        raise DemoError("out=''; allowed is a folder, which is made when missing")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise DemoError(f"out={str(out)!r} cannot be a folder: {exc.strerror or exc}") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DemoError(f"out={str(out)!r} is a folder without write permission")
    return folder.resolve()


def _check_packages() -> None:
    for package, pip_name in (("torch", "torch"), ("matplotlib", "'mcore-patches[demo]'")):
        if importlib.util.find_spec(package) is None:
            raise DemoError(f"{package} is not installed and the demos need it: pip install {pip_name}")
    if installed() is None:
        raise DemoError("megatron-core is not installed and the demos train its models: pip install megatron-core")


def _ready(demos: list[Demo]) -> tuple[list[Demo], dict[str, str]]:
    """Demos that the installed release can run, and why others cannot."""
    obstacles = {demo.name: _obstacle(demo) for demo in demos}
    not_run = {name: reason for name, reason in obstacles.items() if reason}
    ready = [demo for demo in demos if demo.name not in not_run]
    if not ready:
        raise DemoError("; ".join(f"demo {name}: {reason}" for name, reason in not_run.items()))
    return ready, not_run


def _has_release_for(demo: Demo) -> bool:
    """Whether the installed release is one that the demo's patch is for."""
    patch, found = importlib.import_module(f"mcore_patches.patches.{demo.name}").PATCH, installed()
    return found is None or found.release is None or found.release in patch.releases


def _obstacle(demo: Demo) -> str:
    row = apply_patches(demo.name, strict=False, dry_run=True)[demo.name]
    if row.state is State.NOT_APPLIED and row.decision in (State.APPLIED, State.PENDING):
        return ""
    if row.state is State.ALREADY_APPLIED:
        return "its patch is in place in this process already, and the demo begins without it"
    return _why_not(row)


def _why_not(row: Row) -> str:
    found = installed()
    if row.state is State.OUT_OF_RANGE and found is not None:
        return f"needs megatron-core {row.releases}, found {found.text} ({found.file})"
    state = row.decision or row.state
    return f"its patch would be {state} here" + (f": {row.reason}" if row.reason else "")
