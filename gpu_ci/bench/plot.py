"""Draws results.csv: forward + backward of QSA attention and its peers over the length, both axes logarithmic.

python -m gpu_ci.bench.plot [FILE]        # gpu_ci/bench/qsa.svg
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from gpu_ci.bench.results import RESULTS
from gpu_ci.bench.selections import KINDS

FILE = RESULTS.with_name("qsa.svg")


def series(path: Path = RESULTS) -> dict[str, list[tuple[int, float]]]:
    """Who, and on which selection, to ascending (tokens, milliseconds)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            who, _, metric = row["metric"].partition(": ")
            if row["bench"] == "qsa" and metric == "forward + backward":
                kind = next((f", {kind} selection" for kind in KINDS if kind in row["case"]), "")
                tokens = int(row["case"].split("-")[0].removeprefix("T"))
                lines.setdefault(who + kind, []).append((tokens, float(row["value"])))
    return {name: sorted(points) for name, points in sorted(lines.items())}


def draw(path: Path = FILE) -> None:
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "mcore-patches"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, points in series().items():
        axes.loglog(*zip(*points, strict=True), marker="o", base=2, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("forward + backward, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=FILE, metavar="FILE")
    draw(parser.parse_args().file)
