"""How far a training of a layout is from the one on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

# Relative. Layouts round bf16 sums in another order, which also tips near ties of a selection: a few rows attend other
# keys, and from step to step the trainings drift apart. With given routes only rounding is left.
FIRST_LOSS = 2e-3
LOSS = 2e-2
INDEXER = 2e-2
GRADIENTS = 5e-2  # all together
GRADIENT = 2e-1  # each
GIVEN = 3e-2  # each, with the routes of one rank
# A gradient that is zero but for rounding, such as that of a bias which moves all scores alike, has no relative error:
# what it is compared with is at least this part of all gradients together.
LEAST_SHARE = 1e-4


@dataclass
class Training:
    """losses: of each step. gradients: of the first step, whole, by name. indexer: losses of the layers' indexers in
    the first step. routes: of QSA layers in the first step, by layer and microbatch. given: gradients of the first step
    with the routes of one rank, where those were given."""

    losses: list[float]
    gradients: dict[str, Tensor]
    indexer: list[float]
    routes: dict[int, list[Tensor]] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class Comparison:
    """Relative errors, and what is beyond its tolerance. gradients: of all together. gradient, given: of the worst one,
    with own and with given routes. worst: its name, with own routes."""

    first_loss: float = 0.0
    loss: float = 0.0
    indexer: float = 0.0
    gradients: float = 0.0
    gradient: float = 0.0
    given: float = 0.0
    worst: str = ""
    faults: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def relative(reference: float, value: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else float("inf")


def compare(reference: Training, got: Training) -> Comparison:
    """Losses of all steps, and all gradients and indexers' losses of the first."""
    result = Comparison()
    if len(got.losses) != len(reference.losses):
        result.faults.append(f"{len(got.losses)} steps in place of {len(reference.losses)}")
    for gradients in (got.gradients, got.given or got.gradients):
        if alone := sorted(gradients.keys() ^ reference.gradients.keys()):
            result.faults.append(f"gradients of {alone} on one side only")
    if len(got.indexer) != len(reference.indexer):
        result.faults.append(f"{len(got.indexer)} indexers' losses in place of {len(reference.indexer)}")
    if not reference.indexer:  # every case trains indexers: nothing would be compared
        result.faults.append("no indexer's loss was recorded")
    if result.faults:
        return result
    errors = [relative(a, b) for a, b in zip(reference.losses, got.losses)]
    result.first_loss, result.loss = errors[0], largest(errors)
    result.indexer = largest(relative(a, b) for a, b in zip(reference.indexer, got.indexer))
    own, result.gradients = _errors(reference.gradients, got.gradients)
    result.gradient = largest(own.values())
    result.worst = next(name for name, error in own.items() if not error < result.gradient)
    given, _ = _errors(reference.gradients, got.given) if got.given else ({}, 0.0)
    result.given = largest(given.values())
    worst_given = next((name for name, error in given.items() if not error < result.given), "")
    for what, error, allowed in (
        ("loss of the first step", result.first_loss, FIRST_LOSS),
        ("loss of a step", result.loss, LOSS),
        ("an indexer's loss", result.indexer, INDEXER),
        ("all gradients together", result.gradients, GRADIENTS),
        (f"gradient of {result.worst}", result.gradient, GRADIENT),
        (f"gradient of {worst_given} with the routes of one rank", result.given, GIVEN),
    ):
        if not error <= allowed:  # NaN is not
            result.faults.append(f"{what}: off by {error:.2e}, allowed {allowed:g}")
    return result


def _errors(reference: dict[str, Tensor], got: dict[str, Tensor]) -> tuple[dict[str, float], float]:
    """Norms of the differences over the norms, by name and of all together."""
    norms = {name: gradient.double().norm().item() for name, gradient in reference.items()}
    apart = {name: (got[name].double() - gradient.double()).norm().item() for name, gradient in reference.items()}
    total = _root_of_squares(norms.values())
    errors = {name: apart[name] / max(norms[name], LEAST_SHARE * total) if apart[name] else 0.0 for name in norms}
    return errors, _root_of_squares(apart.values()) / total


def _root_of_squares(values: Iterable[float]) -> float:
    return sum(value**2 for value in values) ** 0.5


def largest(errors: Iterable[float]) -> float:
    """NaN if there is one."""
    return max(errors, key=lambda error: (error != error, error), default=0.0)
