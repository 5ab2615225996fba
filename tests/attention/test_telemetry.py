"""What the layers' calls of the ops leave in the report, and what MCORE_PATCHES_ON_DECLINE=raise makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mcore_patches
from mcore_patches.attention.common.telemetry import FALLBACK, OpCalls
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.errors import DeclinedError
from tests.attention.tiny import qsa_config, qsa_layer, run_layer


def on(device: str) -> Any:
    """As much of an argument as is looked at."""
    return SimpleNamespace(device=torch.device(device), shape=torch.Size((7, 4, 128)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> tuple[OpCalls, Counters]:
    monkeypatch.delenv("MCORE_PATCHES_ON_DECLINE", raising=False)
    calls, counters = OpCalls(), Counters("qsa")
    calls.count_in(counters)
    return calls, counters


def test_calls_are_counted_by_what_they_ran_on(
    calls: tuple[OpCalls, Counters], caplog: pytest.LogCaptureFixture
) -> None:
    count, counters = calls[0].count, calls[1]
    assert count("sparse_gqa", on("cpu"), False, "q is on cpu, the kernels need cuda") == "auto"
    assert count("sparse_gqa", on("cuda"), True, "") == "auto"
    with caplog.at_level("WARNING", logger="mcore_patches"):
        for _ in range(2):
            assert count("sparse_gqa", on("cuda"), False, "out of registers") == "auto"
    assert counters.routes == {"sparse_gqa chunked": 1, "sparse_gqa tilelang": 1}
    assert counters.declines == {"sparse_gqa: out of registers": 2}
    (message,) = (record.getMessage() for record in caplog.records)
    assert f"sparse_gqa: out of registers ((4, 128)); {FALLBACK} runs instead" in message


def test_strict_mode_raises_and_asks_for_the_kernels(
    calls: tuple[OpCalls, Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With backend="tilelang" an op raises where a kernel does not compile."""
    count, counters = calls[0].count, calls[1]
    monkeypatch.setenv("MCORE_PATCHES_ON_DECLINE", "raise")
    assert count("indexer_kl", on("cuda"), True, "") == "tilelang"
    assert count("indexer_kl", on("cpu"), False, "q is on cpu") == "auto"
    with pytest.raises(DeclinedError, match=r"indexer_kl: ratio must be one of.*MCORE_PATCHES_ON_DECLINE=raise"):
        count("indexer_kl", on("cuda"), False, "ratio must be one of 1, 2, 4, 8, 16, got 3")
    assert counters.hits == 2


def test_while_compiling_nothing_is_counted_and_strict_mode_raises(
    calls: tuple[OpCalls, Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, counters = calls[0].count, calls[1]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert count("sparse_gqa", on("cuda"), True, "") == count("sparse_gqa", on("cuda"), False, "no") == "auto"
    assert counters.as_dict()["calls"] == 0
    monkeypatch.setenv("MCORE_PATCHES_ON_DECLINE", "raise")
    assert count("sparse_gqa", on("cuda"), True, "") == "tilelang"
    assert counters.hits == 0
    with pytest.raises(DeclinedError):
        count("sparse_gqa", on("cuda"), False, "no")


def test_nothing_is_counted_before_the_patch_is_there() -> None:
    assert OpCalls().count("sparse_gqa", on("cuda"), False, "no") == "auto"


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("stage", "ops"),
    [
        ("frozen", {"select_blocks", "sparse_gqa"}),
        ("warmup", {"sparse_gqa", "indexer_kl"}),
        ("sparse", {"select_blocks", "sparse_gqa", "indexer_kl"}),
    ],
)
def test_qsa_layers_count_every_op(stage: str, ops: set[str]) -> None:
    layer = qsa_layer(qsa_config(qsa_stage=stage))
    if stage == "warmup":
        from mcore_patches.attention.qsa import freeze_backbone

        freeze_backbone(layer)
    before = mcore_patches.status()["qsa"].counters["routes"]
    run_layer(layer, torch.randn(40, 1, 64))
    after = mcore_patches.status()["qsa"].counters["routes"]
    assert {route: n - before.get(route, 0) for route, n in after.items() if n != before.get(route, 0)} == {
        f"{op} chunked": 1 for op in ops
    }
    assert mcore_patches.status()["qsa"].counters["declines"] == {}
