"""Demo of the patch dsa_parallel, on a release before 0.19: sparse attention as the release has it, then as 0.19 does.

The two indexers are other functions, so the runs may differ. What must agree: the loss of untrained models where every
key is selected, and the losses of packed documents with those of each document alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

import mcore_patches
from mcore_patches.demo import corpus
from mcore_patches.demo.device import device_name, patched, training_device
from mcore_patches.demo.dsa_parallel.figure import draw
from mcore_patches.demo.dsa_parallel.training import (
    HEADS,
    LAYERS,
    LENGTH,
    TOPK,
    Run,
    attention_peaks,
    documents,
    loss_on,
    model_of,
    train_model,
)
from mcore_patches.demo.outcome import Check, Outcome, table
from mcore_patches.demo.progress import Progress
from mcore_patches.overlay.counters import human_bytes

PATCH = "dsa_parallel"
OWN_LENGTHS, OUR_LENGTHS = (256, 512, 1024), (256, 512, 1024, 2048)
TOLERANCE = 1e-4


def train(steps: int, png: Path, progress: Progress) -> Outcome:
    """Train with the release's own attention and with the patch's, compare, and draw the picture."""
    with training_device() as device:
        where = device_name(device)
        progress.say(f"{PATCH}: a GPTModel with {LAYERS} DSA layers ({HEADS} heads, top-k {TOPK}) on {where}")
        own = train_model(False, steps, device, progress, "the release's own DSA")
        own_peaks = attention_peaks(False, OWN_LENGTHS, device, progress, "attention alone, its own")
        batch = corpus.batch(corpus.tokens(), 2, LENGTH, seed=0, device=device)
        own_loss = loss_on(model_of(False, device, topk=LENGTH), batch)
        with patched(PATCH):
            ours = train_model(True, steps, device, progress, "with dsa_parallel")
            our_peaks = attention_peaks(True, OUR_LENGTHS, device, progress, "attention alone, with it")
            our_loss = loss_on(model_of(True, device, topk=LENGTH), batch)
            packed, alone = documents(device)
            model = model_of(True, device)
            together = loss_on(model, packed)
            apart = torch.cat([loss_on(model, document) for document in alone], dim=1)
            report = mcore_patches.status()
            row = report[PATCH]
        checks = (
            _close("with every key selected both give the same losses, apart from", own_loss, our_loss),
            _close("documents packed give the losses of each alone, apart from", apart, together),
            *(_falls(name, run) for name, run in (("its own", own), ("with dsa_parallel", ours))),
            _grows("memory of its own attention for twice the tokens", own_peaks, 1024, 3.0, 5.0),
            _grows("memory with dsa_parallel for twice the tokens", our_peaks, 2048, 0.0, 2.2),
        )
        draw(png, where, own, ours, own_peaks, our_peaks)
    numbers = {
        "device": where,
        "steps": steps,
        "without": own.as_dict(),
        "with": ours.as_dict(),
        "counters": row.counters,
        "attention_peak_bytes_by_length": {"without": own_peaks, "with": our_peaks},
    }
    names = (
        "loss of the first step",
        "loss of the last step",
        "indexer KL of the last step",
        "time of a step (median)",
    )
    columns = (
        [f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.indexer_kl[-1]:.4f}", f"{run.seconds_per_step:.2f} s"]
        for run in (own, ours)
    )
    rows = [*zip(names, *columns, strict=True)]
    rows += [
        (f"peak memory of one attention layer, {n} tokens", human_bytes(own_peaks[n]), human_bytes(our_peaks[n]))
        for n in OWN_LENGTHS
    ]
    shown = str(dataclasses.replace(report, rows=(row,)))
    summary = "\n\n".join([shown, table(("", "the release's own", "with dsa_parallel"), rows)])
    return Outcome(summary, checks, png, numbers)


def _close(name: str, reference: torch.Tensor, got: torch.Tensor) -> Check:
    difference = ((got - reference).abs().max() / reference.abs().max()).item()
    # Written so that NaN fails.
    return Check(name, difference <= TOLERANCE, f"{difference:.1e}", f"at most {TOLERANCE:.0e}")


def _falls(name: str, run: Run) -> Check:
    first, last = run.losses[0], run.losses[-1]
    return Check(f"the loss falls, {name}", last < first, f"{first:.3f} to {last:.3f}", "below where it began")


def _grows(name: str, peaks: dict[int, int], tokens: int, least: float, most: float) -> Check:
    factor = peaks[tokens] / peaks[tokens // 2]
    return Check(name, least <= factor <= most, f"x {factor:.2f}", f"x {least:g} to {most:g}")
