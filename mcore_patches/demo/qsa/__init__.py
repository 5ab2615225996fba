"""Demo of the patch qsa: a dense GPT becomes a sparse one in the two stages of Qwen Sparse Attention.

A small model learns a text with megatron's own dense attention. Its weights move into the same model with QSA layers.
Stage 1 trains their indexers alone, to find the blocks that the dense attention rates highest; Stage 2 trains
everything, with attention to the selected blocks only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import mcore_patches
from mcore_patches.demo.device import device_name, patched, training_device
from mcore_patches.demo.outcome import Check, Outcome, table
from mcore_patches.demo.progress import Progress
from mcore_patches.demo.qsa.figure import draw
from mcore_patches.demo.qsa.training import (
    BUDGET,
    HEADS,
    LAYERS,
    LENGTH,
    RATIO,
    Evaluation,
    Stage,
    dense_stage,
    sparse_stage,
    warmup_stage,
)

PATCH = "qsa"

# What learns nothing stays where it is; a run of the fewest steps allowed clears these by a wide margin.
KL_FALL = 0.1
OVERLAP_RISE = 0.05
# However few steps the stages take: a teacher without structure leaves nothing to learn.
PRETRAINING_STEPS = 120


def train(steps: int, png: Path, progress: Progress) -> Outcome:
    """Pre-train densely, go through both stages with `steps` steps each, check, and draw the picture.

    Raises:
        DemoError: the patch cannot be put in place.
    """
    with training_device() as device, patched(PATCH):
        name = device_name(device)
        progress.say(
            f"{PATCH}: a GPTModel with {LAYERS} QSA layers, {HEADS} heads, learns passages of {LENGTH} bytes on "
            f"{name}; a query selects {BUDGET} bytes, in blocks of {RATIO}"
        )
        dense = dense_stage(PRETRAINING_STEPS, device, progress)
        warmup = warmup_stage(steps, dense.model, device, progress)
        sparse = sparse_stage(steps, warmup.model, device, progress)
        report = mcore_patches.status()
    draw(png, name, dense, warmup, sparse)
    row = dataclasses.replace(report, rows=(report[PATCH],))
    numbers = {
        "device": name,
        "steps": steps,
        "sequence_length": LENGTH,
        "block_size": RATIO,
        "blocks_per_query": BUDGET // RATIO,
        "chance_overlap": warmup.first.routings[0].chance,
        "pretraining": _numbers(dense),
        "stage_1": _numbers(warmup),
        "stage_2": _numbers(sparse),
    }
    summary = f"{row}\n\n{_table(dense, warmup, sparse)}"
    return Outcome(summary, compare(dense, warmup, sparse), png, numbers)


def compare(dense: Stage, warmup: Stage, sparse: Stage) -> tuple[Check, ...]:
    """The demo's claims, checked on held-out text."""
    untrained = overlap(warmup.first)
    return (
        _falls("dense pre-training: the loss falls", dense.first.loss, dense.last.loss),
        _falls("Stage 1: the indexer's KL falls", kl(warmup.first), kl(warmup.last), by=KL_FALL),
        _falls("Stage 1: the loss with selected blocks falls", warmup.first.loss, warmup.last.loss),
        _rises("Stage 1: overlap with the teacher's top blocks rises", untrained, overlap(warmup.last)),
        _untouched(dense.model, warmup.model),
        # Many steps learn so short a text by heart, and the held-out loss rises again.
        _falls(
            "Stage 2: the loss falls, at its lowest", sparse.first.loss, min(e.loss for e in sparse.evaluations[1:])
        ),
        _falls("Stage 2: the indexer's KL falls", kl(sparse.first), kl(sparse.last)),
        _rises("Stage 2: the overlap stays above where it began", untrained, overlap(sparse.last)),
    )


def kl(evaluation: Evaluation) -> float:
    """Mean over layers."""
    return fmean(evaluation.indexer_kl)


def overlap(evaluation: Evaluation) -> float:
    """Mean over layers."""
    return fmean(routing.overlap for routing in evaluation.routings)


def _falls(name: str, before: float, after: float, *, by: float = 0.0) -> Check:
    limit = before * (1 - by)
    return Check(name, after < limit, f"{before:.3f} to {after:.3f}", f"below {limit:.3f}")


def _rises(name: str, before: float, after: float) -> Check:
    limit = before + OVERLAP_RISE
    return Check(name, after > limit, f"{before:.1%} to {after:.1%}", f"above {limit:.1%}")


def _untouched(dense: torch.nn.Module, warm: torch.nn.Module) -> Check:
    after = dict(warm.named_parameters())
    changed = [name for name, before in dense.named_parameters() if not torch.equal(before, after[name])]
    return Check("Stage 1: parameters outside the indexers that changed", not changed, str(len(changed)), "0")


def _numbers(stage: Stage) -> dict[str, Any]:
    return {
        "losses": stage.losses,
        "indexer_kl": stage.indexer_kl,
        "evaluations": [
            {
                "step": evaluation.step,
                "loss": evaluation.loss,
                "indexer_kl": evaluation.indexer_kl,
                "overlap": [routing.overlap for routing in evaluation.routings],
            }
            for evaluation in stage.evaluations
        ],
    }


def _table(dense: Stage, warmup: Stage, sparse: Stage) -> str:
    def line(name: str, attention: str, evaluation: Evaluation) -> tuple[str, ...]:
        if not evaluation.routings:
            return name, attention, f"{evaluation.loss:.3f}", "", ""
        return name, attention, f"{evaluation.loss:.3f}", f"{kl(evaluation):.3f}", f"{overlap(evaluation):.1%}"

    chance = warmup.first.routings[0].chance
    return table(
        ("on held-out text", "attention", "loss", "indexer KL", "overlap"),
        [
            line("after dense pre-training", "dense", dense.last),
            line("indexers untrained", "selected blocks", warmup.first),
            line("after Stage 1", "selected blocks", warmup.last),
            line("Stage 2 begins", "selected blocks", sparse.first),
            line("after Stage 2", "selected blocks", sparse.last),
        ],
    ) + (
        f"\nLoss in nats per byte. KL per token, over all blocks in Stage 1 and over selected ones in Stage 2. "
        f"Overlap: share of the blocks that dense attention rates highest, {chance:.1%} by chance."
    )
