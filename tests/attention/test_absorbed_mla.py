"""Absorbed MLA on the releases that lack it: equal to plain MLA in one process, whatever the layout."""

from __future__ import annotations

import pytest

from tests import releases
from tests.launching import run

OLD = tuple(release for release in releases.RELEASES if not releases.at_least(release, "0.19.0"))
VARIANTS = {
    "plain",
    "no query latent",
    "norms, split",
    "norms, values wider than keys",
    "YaRN, split",
    "rotary on half of the channels",
    "NoPE",
    "recompute core attention",
    "recompute up-projection",
    "packed",
    "packed and padded, recompute both",
}


def _cases(function: str, release: str, nprocs: int) -> dict[str, object]:
    target = f"tests.attention.absorbed_cases:{function}"
    first, *others = run(target, nprocs=nprocs, release=release)
    assert all(other.keys() == first.keys() for other in others)
    return first


@pytest.mark.parametrize("release", [OLD[0], pytest.param(OLD[1], marks=pytest.mark.thorough), OLD[2]])
def test_one_process(release: str) -> None:
    cases = _cases("one_process", release, 1)
    assert cases.keys() >= VARIANTS | {
        "one gradient a weight",
        "plugged core attention",
        "patched",
        "refused",
        "checkpoints",
    }


@pytest.mark.parametrize("release", [OLD[0], *(pytest.param(r, marks=pytest.mark.thorough) for r in OLD[1:])])
def test_two_ranks_equal_one(release: str) -> None:
    cases = _cases("two_processes", release, 2)
    for layout in ("TP2-SP", "CP2"):
        for case in ("BSHD", "BSHD, norms", "BSHD, NoPE, split", "THD", "THD, recompute both"):
            assert f"{layout}, {case}" in cases
    assert {"TP2-SP, column-parallel down-projections", "TP2-SP, checkpoints"} <= set(cases)
