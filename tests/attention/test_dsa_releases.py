"""DSA of this package on the releases without it, in every parallel layout, against the DSA of 0.19 in one process."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_patches.cpu import launch
from tests import releases
from tests.attention import dsa_memory
from tests.attention.dsa_tiny import CASES, FEW, REFERENCE
from tests.launching import run

OLDER = tuple(release for release in releases.RELEASES if not releases.at_least(release, "0.19.0"))
OLDEST = OLDER[0]
# Several processes on two cores take long: make test-thorough runs the other releases.
OLDEST_FIRST = pytest.mark.parametrize(
    "release", [pytest.param(r, marks=() if r == OLDEST else pytest.mark.thorough) for r in OLDER]
)
pytestmark = pytest.mark.xdist_group("dsa")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    (outcomes,) = run("tests.attention.dsa_tiny:reference", release=REFERENCE, args=[list(CASES)])
    assert outcomes.keys() == CASES.keys()
    for name, (_, gradients, tracked) in outcomes.items():
        trains = "no loss" not in name
        assert any(tracked) == trains, (name, tracked)
        assert any(".indexer." in n and g.any() for n, g in gradients.items()) == trains, name
    return outcomes


def _cases(function: str, release: str, nprocs: int, *args: object) -> dict[str, object]:
    """Run the cases of one function on every rank; their names and what they measured, on rank 0."""
    target = f"tests.attention.dsa_cases:{function}"
    first, *others = run(target, nprocs=nprocs, release=release, args=args)
    assert all(other.keys() == first.keys() for other in others)
    return first


@pytest.mark.parametrize("release", OLDER)
def test_one_process(release: str, expected: dict[str, Any]) -> None:
    full = release == OLDEST
    cases = _cases("one_process", release, 1, expected, full)
    others = {"THD, recompute full", "THD, recompute core", "refusals", "MTP", "backends"}
    assert {*(CASES if full else FEW), *others} <= set(cases)
    assert ("hybrid, recompute full" in cases) == releases.at_least(release, "0.18.2")


@pytest.mark.thorough
def test_memory_is_linear() -> None:
    # In an interpreter of its own: what this one has imported is none of the memory.
    (peaks,) = launch.run("tests.attention.dsa_memory:peaks", release=releases.path(OLDER[-1]), args=[[2048, 4096]])
    scores = 4 * dsa_memory.HEADS * 4096**2
    assert peaks[4096] < scores / 4, "scores of every pair exist"
    # Chunks of rows take what they may at both lengths; the rest grows by tokens, by 3 KB each when this was written.
    assert peaks[4096] - peaks[2048] < 2048 * 6000, peaks


@OLDEST_FIRST
def test_two_ranks_equal_one(release: str, expected: dict[str, Any]) -> None:
    cases = _cases("two_processes", release, 2, expected, release == OLDER[-1])
    for layout in ("TP2-SP", "CP2"):
        assert {f"{layout}-BSHD-core", f"{layout}-THD-full", f"{layout}, per token"} <= set(cases)


@pytest.mark.thorough
@pytest.mark.parametrize("release", OLDER)
def test_four_ranks_equal_one(release: str, expected: dict[str, Any]) -> None:
    cases = _cases("four_processes", release, 4, expected, release == OLDER[-1])
    assert {"TP2-CP2-BSHD-core", "TP2-CP2-THD-full"} <= set(cases)
