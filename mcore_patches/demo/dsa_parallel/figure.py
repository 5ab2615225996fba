"""The picture: losses, the indexers' KL, and memory by sequence length."""

from __future__ import annotations

from pathlib import Path

from mcore_patches.demo.dsa_parallel.training import HEADS, LAYERS, TOPK, Run
from mcore_patches.demo.figures import AFTER, BEFORE, REFERENCE, picture

MIB = 2**20


def draw(png: Path, where: str, own: Run, ours: Run, own_peaks: dict[int, int], our_peaks: dict[int, int]) -> None:
    title = f"dsa_parallel on {where}: GPT with {LAYERS} DSA layers, {HEADS} heads, top-k {TOPK}"
    with picture(png, 15, 4.6, title) as figure:
        losses, kl, memory = figure.subplots(1, 3)
        for run, colour, label in ((own, BEFORE, "the release's own"), (ours, AFTER, "with dsa_parallel")):
            steps = range(1, len(run.losses) + 1)
            losses.plot(steps, run.losses, color=colour, lw=1.8, marker=".", label=label)
            kl.plot(steps, run.indexer_kl, color=colour, lw=1.8, marker=".", label=label)
        losses.set(title="Loss", xlabel="training step", ylabel="nats per byte")
        kl.set(title="The indexers' KL", xlabel="training step", ylabel="mean a token")
        for peaks, colour, label in (
            (own_peaks, BEFORE, "the release's own"),
            (our_peaks, AFTER, "with dsa_parallel"),
        ):
            memory.plot([*peaks], [peak / MIB for peak in peaks.values()], color=colour, marker="o", label=label)
        lengths = [*our_peaks]
        memory.plot(
            lengths,
            [4 * HEADS * n * n / MIB for n in lengths],
            color=REFERENCE,
            ls=":",
            label="one fp32 score of every pair",
        )
        memory.set(
            title="Peak memory of one attention layer",
            xlabel="tokens",
            ylabel="MiB, forward and backward",
            xscale="log",
            yscale="log",
        )
        for axes in (losses, kl, memory):
            axes.legend()
