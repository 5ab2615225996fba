"""How the pictures look. Figures are drawn without pyplot, which would choose a backend for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

BEFORE, AFTER, REFERENCE = "#c0504d", "#1f5fa8", "#707070"
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 130,
}


@contextmanager
def picture(png: Path, width: float, height: float, title: str) -> Iterator[Figure]:
    """A figure of that size in inches to draw on; saved at the end."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, fontsize=12.5)
        yield figure
        figure.savefig(png)
