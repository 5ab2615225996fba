"""The picture: both loss curves and their difference, memory step by step, and memory by sequence length."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from mcore_patches.demo.figures import AFTER, BEFORE, REFERENCE, picture
from mcore_patches.demo.sparse_mla_nope.training import HEADS, LAYERS, TOPK, WIDTH, Machine, Run
from mcore_patches.overlay.counters import human_bytes

MIB = 2**20
LONGEST, SHOWN = 131_072, 32_768


def draw(
    png: Path,
    here: Machine,
    without: Run,
    with_overlay: Run,
    dense_peaks: dict[int, int],
    fused_peaks: dict[int, int],
    tolerance: float,
) -> None:
    title = (
        f"sparse_mla_nope on {here.name}: GPT with {LAYERS} NoPE absorbed-MLA DSA layers, {HEADS} heads, "
        f"width {WIDTH}, top-k {TOPK}; fused calls run on the {here.fused_by}"
    )
    with picture(png, 15, 5.2, title) as figure:
        grid = figure.add_gridspec(2, 3, height_ratios=(3, 1), width_ratios=(1.1, 0.9, 1.1))
        losses = figure.add_subplot(grid[0, 0])
        _losses(losses, without, with_overlay)
        _differences(figure.add_subplot(grid[1, 0], sharex=losses), without, with_overlay, tolerance)
        _memory_of_steps(figure.add_subplot(grid[:, 1]), here, without, with_overlay)
        _memory_by_length(figure.add_subplot(grid[:, 2]), here, dense_peaks, fused_peaks)


def _losses(axes: Axes, without: Run, with_overlay: Run) -> None:
    steps = range(1, len(without.losses) + 1)
    axes.plot(steps, without.losses, color=BEFORE, lw=5, alpha=0.45, marker="o", label="without: declined, dense")
    axes.plot(steps, with_overlay.losses, color=AFTER, lw=1.6, marker=".", label="with the overlay: fused")
    axes.set(title="Same losses", ylabel="loss (nats per byte)")
    axes.tick_params(labelbottom=False)
    axes.legend()


def _differences(axes: Axes, without: Run, with_overlay: Run, tolerance: float) -> None:
    steps = range(1, len(without.losses) + 1)
    percent = [100 * (b - a) / a for a, b in zip(without.losses, with_overlay.losses)]
    axes.axhspan(-100 * tolerance, 100 * tolerance, color=REFERENCE, alpha=0.12, lw=0)
    axes.axhline(0, color=REFERENCE, lw=0.8)
    axes.plot(steps, percent, color=AFTER, lw=1.2, marker=".")
    axes.set(xlabel="training step", ylabel="difference (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.annotate("allowed", (1, 1), (-4, -4), "axes fraction", "offset points", ha="right", va="top", color=REFERENCE)


def _memory_of_steps(axes: Axes, here: Machine, without: Run, with_overlay: Run) -> None:
    steps = range(1, len(without.losses) + 1)
    for run, colour, label in ((without, BEFORE, "without: dense"), (with_overlay, AFTER, "with the overlay: fused")):
        peaks = [peak / MIB for peak in run.attention_peaks]
        axes.plot(steps, peaks, color=colour, lw=1.8, marker=".", label=f"{label}, {max(peaks):.1f} MiB")
    scores = here.scores(here.length) / MIB
    axes.axhline(scores, color=BEFORE, lw=1, ls=":", label=f"one dense fp32 score matrix, {scores:.1f} MiB")
    axes.set(title=f"Peak memory of attention, {here.length} tokens", xlabel="training step", ylabel="MiB a layer")
    axes.set_ylim(0, 1.3 * max(without.attention_peaks) / MIB)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left")


def _memory_by_length(axes: Axes, here: Machine, dense_peaks: dict[int, int], fused_peaks: dict[int, int]) -> None:
    lengths = [*dense_peaks]
    while lengths[-1] < LONGEST:
        lengths.append(2 * lengths[-1])
    (*_, longest), (*_, before_last, last) = dense_peaks, fused_peaks
    slope = (fused_peaks[last] - fused_peaks[before_last]) / (last - before_last)

    def dense(n: int) -> float:
        return dense_peaks[longest] * (n / longest) ** 2

    def fused(n: int) -> float:
        return fused_peaks[last] + slope * (n - last)

    for peaks, ahead, colour, name in ((dense_peaks, dense, BEFORE, "dense"), (fused_peaks, fused, AFTER, "fused")):
        axes.plot([*peaks], [*peaks.values()], color=colour, marker="o", lw=1.8, label=f"{name}, measured")
        further = [n for n in lengths if n >= max(peaks)]
        axes.plot(further, [ahead(n) for n in further], color=colour, ls="--", lw=1.3, label=f"{name}, extrapolated")
        axes.plot([SHOWN], [ahead(SHOWN)], marker="o", mfc="white", color=colour)
        axes.annotate(
            f"{human_bytes(round(ahead(SHOWN)))} at 32k", (SHOWN, ahead(SHOWN)), (8, -12), textcoords="offset points",
            color=colour, bbox={"fc": "white", "ec": "none", "pad": 1},
        )  # fmt: skip
    axes.plot(
        lengths, [here.scores(n) for n in lengths], color=BEFORE, ls=":", lw=1, label="one dense fp32 score matrix"
    )
    axes.set(
        title=f"Peak memory of one layer's attention, {HEADS} heads",
        xlabel="sequence length (tokens)",
        ylabel="forward and backward",
        xscale="log",
        yscale="log",
    )
    axes.xaxis.set_major_locator(FixedLocator([2**power for power in range(8, 18, 2)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:.0f}k" if n >= 1024 else f"{n:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([8**power * MIB for power in range(8)]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(round(value)).replace(".0", "")))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(loc="upper left")
