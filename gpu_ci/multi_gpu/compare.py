"""How far a training of a layout is from the one on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Relative. Layouts round bf16 sums in another order, which also tips near ties of a selection: from then on a few rows
# attend other keys, and from step to step the trainings drift apart.
FIRST_LOSS = 2e-3
LOSS = 2e-2
GRADIENT = 5e-2
# Ranks that hold a whole gradient hold the same one.
AMONG_RANKS = 1e-5


@dataclass
class Training:
    """losses: of each step. gradients: of the first step, whole, by name. indexer: losses of the layers' indexers in
    the first step."""

    losses: list[float]
    gradients: dict[str, Tensor]
    indexer: list[float]

    def as_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "gradients": self.gradients, "indexer": self.indexer}


@dataclass
class Comparison:
    """Relative errors, and what is beyond its tolerance."""

    first_loss: float = 0.0
    loss: float = 0.0
    indexer: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    faults: list[str] = field(default_factory=list)


def relative(reference: float, value: float) -> float:
    return abs(value - reference) / abs(reference) if value != reference else 0.0


def relative_norm(reference: Tensor, value: Tensor) -> float:
    """Norm of the difference over the norm of `reference`."""
    difference = (value.double() - reference.double()).norm().item()
    return difference / reference.double().norm().item() if difference else 0.0


def compare(reference: Training, got: Training) -> Comparison:
    """Losses of all steps, and all gradients and indexers' losses of the first.

    A loss may be off by LOSS, that of the first step by FIRST_LOSS, the other two by GRADIENT.
    """
    result = Comparison()
    if len(got.losses) != len(reference.losses):
        result.faults.append(f"{len(got.losses)} steps in place of {len(reference.losses)}")
    if got.gradients.keys() != reference.gradients.keys():
        result.faults.append(f"gradients of {sorted(got.gradients.keys() ^ reference.gradients.keys())} on one side only")
    if len(got.indexer) != len(reference.indexer):
        result.faults.append(f"{len(got.indexer)} indexers' losses in place of {len(reference.indexer)}")
    if result.faults:
        return result
    errors = [relative(a, b) for a, b in zip(reference.losses, got.losses)]
    result.first_loss = errors[0]
    result.loss = _largest(errors)
    result.indexer = _largest(relative(a, b) for a, b in zip(reference.indexer, got.indexer))
    by_name = {name: relative_norm(gradient, got.gradients[name]) for name, gradient in reference.gradients.items()}
    result.gradient = _largest(by_name.values())
    result.worst = next(name for name, error in by_name.items() if not error < result.gradient)
    for what, error, allowed in (
        ("loss of the first step", result.first_loss, FIRST_LOSS),
        ("loss of a step", result.loss, LOSS),
        ("indexer's loss", result.indexer, GRADIENT),
        (f"gradient of {result.worst}", result.gradient, GRADIENT),
    ):
        if not error <= allowed:  # NaN is not
            result.faults.append(f"{what} is off by {error:.2e}, allowed {allowed:g}")
    return result


def disagreement(norms: list[dict[str, float]]) -> list[str]:
    """Gradients whose norms differ between ranks, of which each passes those of all whole gradients."""
    found = []
    for name, norm in norms[0].items():
        others = [other.get(name, float("nan")) for other in norms]
        worst = _largest(relative(norm, other) for other in others)
        if not worst <= AMONG_RANKS:
            found.append(f"gradient of {name} differs between ranks by {worst:.2e}")
    return found


def _largest(errors: Any) -> float:
    """NaN if there is one."""
    return max(errors, key=lambda error: (error != error, error), default=0.0)
