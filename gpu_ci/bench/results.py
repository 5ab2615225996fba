"""results.csv: one row a measured figure, with what is needed to measure it again."""

from __future__ import annotations

import csv
import datetime
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COLUMNS = (
    "date",
    "bench",
    "case",
    "metric",
    "value",
    "unit",
    "device",
    "torch",
    "tilelang",
    "megatron_core",
    "command",
)
RESULTS = Path(__file__).with_name("results.csv")


def installed(name: str) -> str:
    """Its version, or "none"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def row(bench: str, case: str, metric: str, value: float, unit: str) -> dict[str, str]:
    """One figure. case: the shape, e.g. T32768-H32-D512-K2048. Ratios say in `metric` what is divided by what."""
    return {
        "date": datetime.date.today().isoformat(),
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": f"{value:.4g}",
        "unit": unit,
        "device": device(),
        "torch": installed("torch"),
        "tilelang": installed("tilelang"),
        "megatron_core": installed("megatron-core"),
        "command": shlex.join(["python", "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]),
    }


def save(rows: list[dict[str, str]], path: Path | str = RESULTS) -> None:
    """Append, replacing rows of the same bench, case, metric and device: the file holds the latest of each."""
    path = Path(path)

    def key(r: Mapping[str, str]) -> tuple[str, ...]:
        return r["bench"], r["case"], r["metric"], r["device"]

    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as f:
            old = list(csv.DictReader(f))
    new = {key(r) for r in rows}
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([r for r in old if key(r) not in new] + rows)


def table(rows: list[dict[str, str]]) -> str:
    lines = [f"{r['bench']:<18} {r['case']:<34} {r['metric']:<44} {r['value']:>10} {r['unit']}" for r in rows]
    return "\n".join(lines)
