"""Every supported release: one process against itself and megatron, parallel layouts against one process."""

from __future__ import annotations

import pytest

from tests import releases
from tests.attention import snapshot
from tests.launching import run

OLDEST, NEWEST = releases.RELEASES[0], releases.RELEASES[-1]
# Several processes on two cores take up to a minute a release: make test-thorough runs the releases between.
OLDEST_AND_NEWEST = pytest.mark.parametrize(
    "release",
    [pytest.param(r, marks=() if r in (OLDEST, NEWEST) else pytest.mark.thorough) for r in releases.RELEASES],
)


def _cases(function: str, release: str, nprocs: int, *args: object) -> dict[str, object]:
    """Run the cases of one function on every rank; their names and what they measured, on rank 0."""
    first, *others = run(f"tests.attention.cases:{function}", nprocs=nprocs, release=release, args=args)
    assert all(other.keys() == first.keys() for other in others)
    return first


@pytest.mark.parametrize("release", releases.RELEASES)
def test_one_process(release: str) -> None:
    cases = _cases("one_process", release, 1)
    assert {
        "everything selected, gate and norms",
        "4 microbatches, per token",
        "after schedules, warmup, recompute full",
        "outside embeddings, block",
        "causal mask, recompute full",
        "built of other layers",
        "reverted",
        "layer patterns",
        "guards",
        "own loops",
    } <= set(cases)
    assert ("hybrid, full recomputation" in cases) == releases.at_least(release, "0.18.2")


@OLDEST_AND_NEWEST
def test_two_ranks_equal_one(release: str) -> None:
    cases = _cases("two_processes", release, 2, release == NEWEST)
    for layout in ("TP2-SP", "CP2", "PP2"):
        assert {f"{layout}-BSHD-core", f"{layout}-THD-full", f"{layout}-warmup", f"{layout}, per token"} <= set(cases)


@OLDEST_AND_NEWEST
def test_four_ranks_equal_one(release: str) -> None:
    cases = _cases("four_processes", release, 4, release == NEWEST)
    assert {"TP2-CP2-BSHD-none", "TP2-CP2-THD-full", "TP2-CP2-THD-core"} <= set(cases)


def test_snapshots_are_compared_by_fingerprint(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m tests.attention.snapshot`, which runs the cases above on a checkout of Megatron-LM."""
    for release in releases.RELEASES:
        lines = snapshot.fingerprints(releases.path(release))
        assert len(lines) == 6
        assert all(line.endswith("  needs") for line in lines), lines
    assert snapshot.main(["/nowhere"]) == 2
    assert "python -m tests.attention.snapshot CHECKOUT" in capsys.readouterr().err
