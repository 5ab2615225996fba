"""Demo of the patch sparse_mla_nope: NoPE layers with an unaligned top-k, first declined and dense, then fused.

The same model trains twice from the same weights on the same batches: on the installed megatron-core as it is, then
with the overlay. Losses, and the gradients of the first step, must agree.
"""

from __future__ import annotations

import dataclasses
from math import isnan
from pathlib import Path
from typing import Any

from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

import mcore_patches
from mcore_patches.demo.device import patched
from mcore_patches.demo.outcome import Check, Outcome, table
from mcore_patches.demo.progress import Progress
from mcore_patches.demo.sparse_mla_nope.figure import draw
from mcore_patches.demo.sparse_mla_nope.training import (
    HEADS,
    LAYERS,
    TOPK,
    WIDTH,
    Machine,
    Run,
    attention_peaks,
    machine,
    train_model,
)
from mcore_patches.overlay.counters import human_bytes
from mcore_patches.overlay.report import Report

PATCH = "sparse_mla_nope"

# The two paths round differently: the dense one turns probabilities to bfloat16 before it multiplies by the values, and
# a rounded activation can tip a near tie of the indexer's top-k. From step to step the two runs drift apart.
FIRST_LOSS_TOLERANCE = 0.002
LOSS_TOLERANCE = 0.03
GRADIENT_TOLERANCE = 0.05


def train(steps: int, png: Path, progress: Progress) -> Outcome:
    """Train without and with the patch, compare, and draw the picture.

    Raises:
        DemoError: CUDA without the kernel that the patch feeds.
    """
    with machine() as here:
        progress.say(
            f"{PATCH}: a GPTModel with {LAYERS} NoPE absorbed-MLA DSA layers ({HEADS} heads, {WIDTH} channels, top-k "
            f"{TOPK}) learns {here.length} bytes a step on {here.name}"
        )
        with patched(PATCH):
            pass  # What keeps the patch from working, such as missing kernels, is to be known before the training.
        without = train_model(here, steps, progress, "without the overlay")
        dense_peaks = attention_peaks(here, here.dense_lengths, progress, "attention alone, dense")
        with patched(PATCH):
            counters_before = mcore_patches.status()[PATCH].counters
            with_overlay = train_model(here, steps, progress, "with the overlay")
            report = mcore_patches.status()
            fused_peaks = attention_peaks(here, here.fused_lengths, progress, "attention alone, fused")
        counters = _since(counters_before, report[PATCH].counters)
        checks = compare(without, with_overlay, counters)
        draw(png, here, without, with_overlay, dense_peaks, fused_peaks, LOSS_TOLERANCE)
    numbers = {
        "device": here.name,
        "steps": steps,
        "sequence_length": here.length,
        "heads": HEADS,
        "topk": TOPK,
        "without": without.as_dict(),
        "with": with_overlay.as_dict(),
        "counters": counters,
        "largest_loss_difference": largest_difference(without, with_overlay),
        "first_gradient_difference": gradient_difference(without, with_overlay),
        "attention_peak_bytes_by_length": {"dense": dense_peaks, "fused": fused_peaks},
    }
    return Outcome(_summary(here, without, with_overlay, report), checks, png, numbers)


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the patch counted between two looks at its counters."""

    def added(name: str) -> dict[str, int]:
        grown = {key: n - before[name].get(key, 0) for key, n in after[name].items()}
        return {key: n for key, n in grown.items() if n}

    return {"hits": after["hits"] - before["hits"], "routes": added("routes"), "declines": added("declines")}


def compare(without: Run, with_overlay: Run, counters: dict[str, Any]) -> tuple[Check, ...]:
    """The demo's claims, checked."""
    calls = without.calls.total
    fused, declined = counters["hits"], sum(counters["declines"].values())
    first = relative_differences(without, with_overlay)[0]
    gradient = gradient_difference(without, with_overlay)
    peak, dense_peak = max(with_overlay.attention_peaks), max(without.attention_peaks)
    return (
        Check(
            "without the overlay every fused call is declined",
            calls > 0 and without.calls.declined == calls,
            f"{without.calls.declined} of {calls} declined",
            "all",
        ),
        Check(
            "with it every call is fused",
            with_overlay.calls.taken == with_overlay.calls.total == calls,
            f"{with_overlay.calls.taken} of {with_overlay.calls.total} fused",
            f"all, {calls}",
        ),
        Check(
            "the overlay's own counters say the same",
            fused == with_overlay.calls.taken and declined == with_overlay.calls.declined,
            f"{fused} hits, {declined} declines",
            f"{with_overlay.calls.taken} and {with_overlay.calls.declined}",
        ),
        _within("the first loss differs by", first, FIRST_LOSS_TOLERANCE),
        _within("the first gradient differs by (relative norm)", gradient, GRADIENT_TOLERANCE),
        _within("losses of a step differ by at most", largest_difference(without, with_overlay), LOSS_TOLERANCE),
        Check(
            "attention holds less memory with the overlay",
            peak < dense_peak,
            human_bytes(peak),
            f"less than {human_bytes(dense_peak)}",
        ),
    )


def relative_differences(without: Run, with_overlay: Run) -> list[float]:
    """|a - b| / a of the losses, step by step."""
    return [abs(a - b) / a for a, b in zip(without.losses, with_overlay.losses, strict=True)]


def largest_difference(without: Run, with_overlay: Run) -> float:
    """The largest of `relative_differences`; NaN if there is one."""
    return max(relative_differences(without, with_overlay), key=lambda difference: (isnan(difference), difference))


def gradient_difference(without: Run, with_overlay: Run) -> float:
    """Norm of the difference of the first step's gradients, all parameters together, relative to their norm."""
    ours, theirs = with_overlay.first_gradient, without.first_gradient
    return ((ours - theirs).norm() / theirs.norm()).item()


def _within(name: str, measured: float, allowed: float) -> Check:
    # Written so that NaN fails.
    return Check(name, measured <= allowed, f"{measured:.3%}", f"at most {allowed:.1%}")


def _summary(here: Machine, without: Run, with_overlay: Run, report: Report) -> str:
    def column(run: Run) -> list[str]:
        return [
            f"{run.calls.taken} of {run.calls.total}",
            f"{run.calls.declined}",
            human_bytes(run.calls.dense_bytes) if run.calls.declined else "none",
            human_bytes(max(run.attention_peaks)),
            f"{run.seconds_per_step:.2f} s",
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
        ]

    names = (
        "fused calls",
        "declined calls, which ran dense",
        "dense fp32 scores of one such call",
        "attention's peak memory, one layer, forward and backward",
        "time of a step (median)",
        "loss of the first step",
        "loss of the last step",
    )
    rows = zip(names, column(without), column(with_overlay), strict=True)
    notes = [
        f"Here fused calls run on the {here.fused_by}. The dense scores grow with the square of the length:",
        f"{human_bytes(here.scores(32768, 32))} for 32k tokens and 32 heads.",
    ]
    if tilelang_dsa.SparseMLA is None:
        notes.append("TileLang is not installed: megatron declines for that alone, whatever the shapes.")
    return "\n\n".join(
        [
            str(dataclasses.replace(report, rows=(report[PATCH],))),
            table(("", "without", "with overlay"), [*rows]),
            "\n".join(notes),
        ]
    )
