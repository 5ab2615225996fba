"""Each claim of a demo fails, alone, when what it says is not so."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch

from mcore_patches.demo import qsa, sparse_mla_nope
from mcore_patches.demo.qsa.routing import Routing
from mcore_patches.demo.qsa.training import Evaluation, Stage
from mcore_patches.demo.sparse_mla_nope.attention import FusedCalls
from mcore_patches.demo.sparse_mla_nope.training import Run

WITHOUT = Run([5.0, 4.0], torch.tensor([3.0, 4.0]), FusedCalls(0, 4, 100), [900, 900], 1.0)
WITH = Run([5.0, 4.0], torch.tensor([3.0, 4.0]), FusedCalls(4, 0, 0), [300, 300], 1.0)
COUNTERS: dict[str, Any] = {"hits": 4, "routes": {"chunked": 4}, "declines": {}}


def failed(checks) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_sparse_mla_nope_all_hold():
    assert failed(sparse_mla_nope.compare(WITHOUT, WITH, COUNTERS)) == []


@pytest.mark.parametrize(
    ("without", "with_overlay", "counters", "claim"),
    [
        ({"calls": FusedCalls(1, 3, 100)}, {}, {}, "without the overlay every fused call is declined"),
        ({}, {"calls": FusedCalls(3, 0, 0)}, {"hits": 3}, "with it every call is fused"),
        ({}, {"calls": FusedCalls(3, 1, 9)}, {"hits": 3, "declines": {"why": 1}}, "with it every call is fused"),
        ({}, {}, {"hits": 5}, "the overlay's own counters say the same"),
        ({}, {}, {"declines": {"width": 1}}, "the overlay's own counters say the same"),
        ({}, {"losses": [5.0, 4.13]}, {}, "losses of a step differ by at most"),
        ({}, {"losses": [5.0, nan]}, {}, "losses of a step differ by at most"),
        ({}, {"losses": [4.985, 4.0]}, {}, "the first loss differs by"),
        ({}, {"first_gradient": torch.tensor([3.0, 4.3])}, {}, "the first gradient differs by (relative norm)"),
        ({}, {"first_gradient": torch.tensor([3.0, nan])}, {}, "the first gradient differs by (relative norm)"),
        ({}, {"attention_peaks": [300, 900]}, {}, "attention holds less memory with the overlay"),
    ],
)
def test_sparse_mla_nope(without, with_overlay, counters, claim):
    checks = sparse_mla_nope.compare(replace(WITHOUT, **without), replace(WITH, **with_overlay), COUNTERS | counters)
    assert failed(checks) == [claim]


def test_a_model_without_fused_calls_proves_nothing():
    no_calls = FusedCalls()
    checks = sparse_mla_nope.compare(
        replace(WITHOUT, calls=no_calls), replace(WITH, calls=no_calls), {"hits": 0, "routes": {}, "declines": {}}
    )
    assert failed(checks) == ["without the overlay every fused call is declined"]


def routing(hits: int) -> Routing:
    """Of 10 top blocks of one row, `hits` are selected."""
    top = torch.arange(20) < 10
    selected = (torch.arange(20) >= 10 - hits) & (torch.arange(20) < 20 - hits)
    return Routing(selected[None, None], top[None, None], torch.ones(1, 1, dtype=torch.bool))


def evaluation(loss: float, kl: float, hits: int) -> Evaluation:
    return Evaluation(0, loss, [kl, kl], [routing(hits), routing(hits)])


def stages(
    dense: tuple[float, float] = (5.0, 2.0),
    stage_1: tuple[Evaluation, ...] = (evaluation(2.6, 1.0, 3), evaluation(2.1, 0.2, 6)),
    stage_2: tuple[Evaluation, ...] = (evaluation(2.1, 0.1, 6), evaluation(2.0, 0.08, 6)),
    touched: bool = False,
) -> tuple[Stage, Stage, Stage]:
    before, after = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    after.load_state_dict(before.state_dict())
    if touched:
        with torch.no_grad():
            after.bias[1] += 1e-6
    return (
        Stage(before, [], [], [Evaluation(0, dense[0]), Evaluation(1, dense[1])]),
        Stage(after, [], [], [*stage_1]),
        Stage(after, [], [], [*stage_2]),
    )


def test_qsa_all_hold():
    assert routing(6).overlap == pytest.approx(0.6)
    assert failed(qsa.compare(*stages())) == []


def test_qsa_may_overfit_after_it_learned():
    later = (evaluation(2.1, 0.1, 6), evaluation(2.0, 0.09, 6), evaluation(2.3, 0.08, 6))
    assert failed(qsa.compare(*stages(stage_2=later))) == []


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({"dense": (2.0, 2.0)}, "dense pre-training: the loss falls"),
        ({"dense": (5.0, nan)}, "dense pre-training: the loss falls"),
        (
            {"stage_1": (evaluation(2.6, 1.0, 3), evaluation(2.1, 0.95, 6))},
            "Stage 1: the indexer's KL falls",
        ),
        (
            {"stage_1": (evaluation(2.6, 1.0, 3), evaluation(2.6, 0.2, 6))},
            "Stage 1: the loss with selected blocks falls",
        ),
        (
            {"stage_1": (evaluation(2.6, 1.0, 3), evaluation(2.1, 0.2, 3))},
            "Stage 1: overlap with the teacher's top blocks rises",
        ),
        ({"touched": True}, "Stage 1: parameters outside the indexers that changed"),
        ({"stage_2": (evaluation(2.1, 0.1, 6), evaluation(2.1, 0.08, 6))}, "Stage 2: the loss falls, at its lowest"),
        ({"stage_2": (evaluation(2.1, 0.1, 6), evaluation(2.0, 0.1, 6))}, "Stage 2: the indexer's KL falls"),
        (
            {"stage_2": (evaluation(2.1, 0.1, 6), evaluation(nan, 0.08, 6))},
            "Stage 2: the loss falls, at its lowest",
        ),
        (
            {"stage_2": (evaluation(2.1, 0.1, 6), evaluation(2.0, 0.08, 3))},
            "Stage 2: the overlap stays above where it began",
        ),
    ],
)
def test_qsa(changed, claim):
    assert failed(qsa.compare(*stages(**changed))) == [claim]
