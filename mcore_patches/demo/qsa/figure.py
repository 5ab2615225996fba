"""The picture: loss, indexer KL and route overlap through the stages, and a routing map before, between and after."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from mcore_patches.demo.figures import AFTER, BEFORE, REFERENCE, picture
from mcore_patches.demo.qsa.routing import Routing
from mcore_patches.demo.qsa.training import BUDGET, HEADS, LAYERS, LENGTH, RATIO, Stage

# Colours of a routing map: neither, only rated highest, only selected, both.
_MAP = ("#ffffff", "#f2b8a0", "#b9cfe8", "#123f73")
_STAGES = ("dense\npre-training", "Stage 1", "Stage 2")
_SHADES = ("#f4f4f4", "#eaf1fa", "#fdf3e7")
_LAYER_COLOURS = (AFTER, "#e08a1e", "#3c8d5a", "#8a5fa8")


def draw(png: Path, machine: str, dense: Stage, warmup: Stage, sparse: Stage) -> None:
    stages = (dense, warmup, sparse)
    title = (
        f"qsa on {machine}: GPT with {LAYERS} QSA layers, {HEADS} heads, {LENGTH} tokens, {BUDGET // RATIO} blocks of "
        f"{RATIO} a query"
    )
    with picture(png, 15, 10.5, title) as figure:
        grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.25))
        _losses(figure.add_subplot(grid[0, 0]), stages)
        _indexer_kl(figure.add_subplot(grid[0, 1]), stages)
        _overlap(figure.add_subplot(grid[0, 2]), stages)
        moments = (
            ("indexer untrained", warmup.first),
            ("after Stage 1", warmup.last),
            ("after Stage 2", sparse.last),
        )
        for column, (moment, evaluation) in enumerate(moments):
            axes = figure.add_subplot(grid[1, column])
            _routing_map(axes, evaluation.routings[-1], f"Routes of layer {LAYERS}, {moment}")
            if column == 0:
                axes.set_ylabel("query (position in the passage)")
        figure.legend(
            handles=[
                Patch(fc=_MAP[3], label="rated highest by dense attention and selected"),
                Patch(fc=_MAP[1], label="rated highest, not selected"),
                Patch(fc=_MAP[2], label="selected, not rated highest"),
            ],
            loc="outside lower center",
            ncols=3,
        )


def _starts(stages: tuple[Stage, ...]) -> list[int]:
    starts = [0]
    for stage in stages[:-1]:
        starts.append(starts[-1] + len(stage.losses))
    return starts


def _shade(axes: Axes, stages: tuple[Stage, ...], notes: tuple[str, ...], first: int = 0) -> None:
    """Colour the stages from number `first` on, each with its name and its note."""
    for number in range(first, len(stages)):
        start = _starts(stages)[number]
        end = start + len(stages[number].losses)
        axes.axvspan(start, end, color=_SHADES[number], lw=0, zorder=0)
        axes.annotate(
            f"{_STAGES[number]}\n{notes[number - first]}",
            ((start + end) / 2, 0.985),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=8.5,
            color=REFERENCE,
        )
    axes.set_xlim(_starts(stages)[first], _starts(stages)[-1] + len(stages[-1].losses))
    axes.set_xlabel("training step")


def _losses(axes: Axes, stages: tuple[Stage, ...]) -> None:
    for start, stage in zip(_starts(stages), stages):
        steps = range(start + 1, start + len(stage.losses) + 1)
        axes.plot(steps, stage.losses, color=REFERENCE, lw=0.8, alpha=0.7, label=None if start else "training batches")
        points = [(start + evaluation.step, evaluation.loss) for evaluation in stage.evaluations]
        sparse = bool(stage.first.routings)
        label = {0: "held-out, dense attention", _starts(stages)[1]: "held-out, selected blocks"}.get(start)
        axes.plot(*zip(*points), color=AFTER if sparse else BEFORE, marker="o", ms=4, lw=1.6, label=label)
    axes.axhline(stages[0].last.loss, color=BEFORE, lw=1, ls=":", label="held-out, end of pre-training")
    highest = max(evaluation.loss for stage in stages[1:] for evaluation in stage.evaluations)
    lowest = min(min(stage.losses) for stage in stages)
    axes.set(title="Language-model loss", ylabel="nats per byte")
    axes.set_ylim(lowest - 0.05, highest + 0.9)
    _shade(axes, stages, ("", "", ""))
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.88))


def _indexer_kl(axes: Axes, stages: tuple[Stage, ...]) -> None:
    for layer in range(LAYERS):
        for start, stage in list(zip(_starts(stages), stages))[1:]:
            colour = _LAYER_COLOURS[layer % len(_LAYER_COLOURS)]
            steps = range(start + 1, start + len(stage.losses) + 1)
            axes.plot(steps, [kl[layer] for kl in stage.indexer_kl], color=colour, lw=0.8, alpha=0.6)
            points = [(start + evaluation.step, evaluation.indexer_kl[layer]) for evaluation in stage.evaluations]
            label = f"layer {layer + 1}, held-out" if stage is stages[1] else None
            axes.plot(*zip(*points), color=colour, marker="o", ms=4, lw=1.6, label=label)
    axes.set(title="Indexer's KL to the attention", ylabel="nats per token", yscale="log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())
    _shade(axes, stages, ("over all blocks", "over selected blocks"), first=1)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.86))


def _overlap(axes: Axes, stages: tuple[Stage, ...]) -> None:
    for layer in range(LAYERS):
        points = [
            (start + evaluation.step, 100 * evaluation.routings[layer].overlap)
            for start, stage in list(zip(_starts(stages), stages))[1:]
            for evaluation in stage.evaluations
        ]
        colour = _LAYER_COLOURS[layer % len(_LAYER_COLOURS)]
        axes.plot(*zip(*points), color=colour, marker="o", ms=4, lw=1.6, label=f"layer {layer + 1}")
    chance = fmean(100 * routing.chance for routing in stages[1].first.routings)
    axes.axhline(chance, color=REFERENCE, ls=":", label="by chance")
    axes.set(title="Dense attention's top blocks that are selected", ylabel="% (held-out text)", ylim=(0, 100))
    _shade(axes, stages, ("only the indexer trains", "everything trains"), first=1)
    axes.legend(loc="lower right")


def _routing_map(axes: Axes, routing: Routing, title: str) -> None:
    selected, top = (mask[0].cpu().numpy() for mask in (routing.selected, routing.top))
    image = top.astype(np.int8) + 2 * selected.astype(np.int8)
    axes.imshow(
        image, cmap=ListedColormap(_MAP), vmin=0, vmax=3, aspect="auto", interpolation="nearest",
        extent=(0, image.shape[1], image.shape[0], 0),
    )  # fmt: skip
    axes.set(title=f"{title}: overlap {routing.overlap:.0%}", xlabel=f"key block ({RATIO} tokens each)")
    axes.grid(False)
