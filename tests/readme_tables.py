"""The tables of README.md that are made, not written: patches by release, figures, fields and support of QSA and DSA.

    python -m tests.readme_tables      # puts them into README.md, between their markers

A table stands between `<!-- NAME: ARGUMENTS -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mcore_patches.attention import dsa
from mcore_patches.attention.qsa import fields_markdown, support_matrix_markdown
from tests import releases

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "gpu_ci" / "bench" / "results.csv"
APPLIES = ("APPLIED", "PENDING")
NO_FIGURES = "No figures are recorded yet."


def status(release: str) -> dict[str, Any]:
    """What `mcore-patches status --json` says on one of the unpacked releases, with no switch set."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MCORE_PATCHES", "PYTHON"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(releases.path(release)), str(ROOT)])
    command = [sys.executable, "-m", "mcore_patches.cli", "status", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode not in (0, 1):  # 1: a patch is in an error state, which the table shows
        raise RuntimeError(f"status on megatron-core {release} failed:\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    if report["megatron"]["release"] != release:
        raise RuntimeError(f"{releases.path(release)} holds megatron-core {report['megatron']['release']}")
    return report


def releases_table() -> str:
    """One row a built-in patch, one column a release: "applies", or the state that keeps the patch off."""
    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(releases.RELEASES, pool.map(status, releases.RELEASES), strict=True))
    header = ["patch", "what it does", "upstream", *releases.RELEASES]
    lines = [_line(header), _line(["---"] * len(header))]
    rows = {r: {row["id"]: row for row in report["rows"]} for r, report in reports.items()}
    for patch_id, row in rows[releases.RELEASES[-1]].items():
        if row["source"] == "mcore_patches":
            cells = [_cell(rows[r][patch_id]) for r in releases.RELEASES]
            lines.append(_line([f"`{patch_id}`", row["summary"], link(row["upstream"]), *cells]))
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    state = row["decision"] or row["state"]
    return "applies" if state in APPLIES else state


def link(upstream: str) -> str:
    """OWNER/REPOSITORY#NUMBER as a link; GitHub leads from an issue's address to a pull request's."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", upstream)
    return f"[#{match[2]}](https://github.com/{match[1]}/issues/{match[2]})" if match else upstream


def figures_table(benches: list[str], results: Path = RESULTS) -> str:
    """The rows of results.csv that belong to `benches`, in the file's order."""
    rows = []
    if results.exists():
        with results.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["bench"] in benches]
    if not rows:
        return NO_FIGURES
    header = ["bench", "case", "metric", "value", "measured on", "date", "command"]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        versions = f"torch {row['torch']}, tilelang {row['tilelang']}, megatron-core {row['megatron_core']}"
        value, where = f"{row['value']} {row['unit']}", f"{row['device']}, {versions}"
        cells = [row["bench"], row["case"], row["metric"], value, where, row["date"], f"`{row['command']}`"]
        lines.append(_line(cells))
    return "\n".join(lines)


def ratios_table(benches: list[str], results: Path = RESULTS) -> str:
    """Those rows of results.csv that compare two times of one run, "A / B": they have no unit.

    A line a case and run, a column a metric; below, what the runs were.
    """
    rows = []
    if results.exists():
        with results.open(newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["bench"] in benches and not r["unit"] and " / " in r["metric"]]
    if not rows:
        return NO_FIGURES
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    runs = list(dict.fromkeys(map(_run, rows)))
    values: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        values.setdefault((row["case"], runs.index(_run(row)) + 1), {})[row["metric"]] = row["value"]
    lines = [_line(["case", *metrics, "run"]), _line(["---"] * (len(metrics) + 2))]
    for (case, run), cells in sorted(values.items(), key=lambda item: (_numbers(item[0][0]), item[0])):
        lines.append(_line([case, *(cells.get(metric, "") for metric in metrics), str(run)]))
    return "\n".join([*lines, "", *(f"{n}. {run}" for n, run in enumerate(runs, 1))])


def _run(row: dict[str, str]) -> str:
    versions = f"torch {row['torch']}, tilelang {row['tilelang']}, megatron-core {row['megatron_core']}"
    return f"`{row['command']}` on {row['device']}, {row['date']}, {versions}"


def _numbers(case: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", case)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def find(text: str, name: str) -> re.Match[str]:
    """The place of a table in README's text: groups `arguments` and `table`."""
    match = re.search(rf"<!-- {name}:(?P<arguments>.*?)-->\n(?P<table>.*?)<!-- /{name} -->", text, re.DOTALL)
    if match is None:
        raise LookupError(f"README.md has no place for the table {name!r}")
    return match


TABLES: dict[str, Callable[[list[str]], str]] = {
    "releases": lambda _: releases_table(),
    "figures": figures_table,
    "qsa-ratios": ratios_table,
    "mla-ratios": ratios_table,
    "qsa-fields": lambda _: fields_markdown(),
    "qsa-support": lambda _: support_matrix_markdown(),
    "dsa-fields": lambda _: dsa.fields_markdown(),
    "dsa-support": lambda _: dsa.support_markdown(),
}


def renewed(text: str) -> str:
    """README's text with all tables made anew."""
    for name, made in TABLES.items():
        place = find(text, name)
        table = made(place["arguments"].split())
        text = text[: place.start("table")] + f"{table}\n" + text[place.end("table") :]
    return text


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
