"""dsa_cp_gradient: gradients of the indexer on two context-parallel ranks, and whose scale is left alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mcore_patches
from mcore_patches.overlay.patch import State
from tests import releases
from tests.launching import run
from tests.overlay.isolation import isolated
from tests.patches.edited_release import state_in

ID = "dsa_cp_gradient"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TOLERANCE = 1e-5
NEWEST_FIRST = [pytest.param("0.19.2"), pytest.param("0.19.0", marks=pytest.mark.thorough)]
FORMS = ("mean", "sum and count", "sparse loss", "sparse loss, packed", "per token", "scaled")


@pytest.mark.parametrize("release", NEWEST_FIRST)
def test_two_context_parallel_ranks_equal_one_process(release: str) -> None:
    for cases in run("tests.patches.dsa_cases:cp_gradient", nprocs=2, release=release):
        assert list(cases) == [f"{form}, {how}" for how in ("released", "patched") for form in FORMS]
        for name, found in cases.items():
            faulty = name.endswith("released") and not name.startswith("per token")
            assert found["indexer factors"] == pytest.approx([2.0 if faulty else 1.0], abs=1e-4), name
            assert found["same names"], name
            assert max(found["loss"], found["gradients"][1], found["indexer residual"]) < TOLERANCE, (name, found)


@pytest.mark.parametrize("release", ["0.18.2", "0.19.0", "0.19.2"])
@isolated()
def test_every_release_has_the_known_texts(release: str) -> None:
    sys.path.insert(0, str(releases.path(release)))
    row = mcore_patches.status()[ID]
    if release == "0.18.2":
        assert row.state is State.OUT_OF_RANGE
    else:
        assert (row.decision, row.targets[0].verdict) == (State.PENDING, "needs")


def scale_set(
    config: dict[str, Any] | None = None, *, cp_group_size: int | None = 2, is_last_stage: bool | None = False
) -> float:
    """What DSA's scale is after a microbatch of four, from 0.5 before it."""
    import torch

    schedules = importlib.import_module(SCHEDULES)
    dsa = importlib.import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = torch.full((1,), 0.5)
    fields = {
        "calculate_per_token_loss": False,
        "experimental_attention_variant": "dsa",
        "experimental_attention_variant_loss_scale_func": None,
        "grad_scale_func": None,
        "mtp_num_layers": None,
        "num_moe_experts": None,
        "timers": None,
        **(config or {}),
    }
    output, tokens = schedules.forward_step_calc_loss(
        None,
        torch.ones(1),
        None,
        SimpleNamespace(**fields),
        None,
        False,
        4,
        [],
        cp_group_size=cp_group_size,
        is_last_stage=is_last_stage,
    )
    assert (float(output), int(tokens)) == (1.0, 0)
    return float(dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale)


@isolated("before-0.19.2")
def test_only_the_scale_of_dsa_without_per_token_loss_changes() -> None:
    given: list[float] = []
    cases: list[tuple[float, float, dict[str, Any]]] = [
        (0.5, 0.25, {}),
        (4.0, 2.0, {"config": {"grad_scale_func": lambda loss: 8 * loss}}),
        (1.0, 1.0, {"config": {"calculate_per_token_loss": True}}),
        (0.5, 0.5, {"config": {"experimental_attention_variant": "gated_delta_net"}}),
        (0.5, 0.5, {"config": {"experimental_attention_variant_loss_scale_func": lambda s: given.append(float(s))}}),
        (0.25, 0.25, {"cp_group_size": 1}),
        (0.25, 0.25, {"cp_group_size": None}),
    ]
    found = [scale_set(**options) for _, _, options in cases]
    assert found == [released for released, _, _ in cases]
    assert mcore_patches.apply_patches(ID, strict=True)[ID].state is State.APPLIED
    found = [scale_set(**options) for _, _, options in cases]
    assert found == [patched for _, patched, _ in cases]
    assert given == [0.5, 0.5], "a hook of the user's own gets what megatron gives it"
    mcore_patches.revert(ID)
    assert scale_set() == 0.5


SCALED = "loss_scale * cp_size_for_scaling / num_microbatches\n            )\n\n    return"
EDITS = {
    "fixed": ("loss_scale / num_microbatches", State.UPSTREAM_FIXED),
    "other words": ("loss_scale / num_microbatches * cp_size_for_scaling", State.DRIFTED),
    "undecidable": ("loss_scale.no_such_method()", State.DRIFTED),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.thorough if k == "undecidable" else ()) for k in EDITS]
)
def test_edited_text(kind: str, tmp_path: Path) -> None:
    new, state = EDITS[kind]
    edited = SCALED.replace("loss_scale * cp_size_for_scaling / num_microbatches", new)
    assert state_in(tmp_path, ID, [(SCHEDULES, SCALED, edited)]) is state
