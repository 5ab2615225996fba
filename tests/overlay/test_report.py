"""The report: what a person reads, what a program reads, what ranks compare."""

from __future__ import annotations

import json
import os

import pytest

from mcore_patches.overlay.patch import State
from mcore_patches.overlay.report import Report, Row, TargetRow
from tests.overlay.isolation import call, isolated
from tests.overlay.stubs import OPS, Records, engine_for, module, ops_tree, patch, target, times


def a_report(**changes):
    row = {
        "id": "tenfold",
        "state": State.APPLIED,
        "reason": "",
        "summary": "ten times as much",
        "upstream": "NVIDIA/Megatron-LM#1",
        "delete_when": "upstream multiplies",
        "releases": ">=0.19.0",
        "targets": (
            TargetRow(
                name="megatron.core.ops:f",
                module="megatron.core.ops",
                before="/a/ops.py:1",
                after="/b/patch.py:2",
                fingerprint="f" * 64,
                verdict="needs",
                layers=("lower", "tenfold"),
                rebound=("megatron.core.user.f",),
                unreachable=("a list of 2 items",),
            ),
        ),
        "counters": {
            "calls": 3,
            "hits": 2,
            "routes": {"padded": 2},
            "declines": {"float16": 1},
            "largest_fallback_bytes": 3 << 29,
        },
    } | changes
    megatron = {"text": "0.19.2", "release": "0.19.2", "local": None}
    return Report((Row(**row),), megatron, "3.12.1", "0.1.0", ("metadata says 0.18.2",))


def test_the_table_has_everything_that_a_person_asks_for():
    text = str(a_report())
    for part in (
        "megatron-core 0.19.2",
        "warning: metadata says 0.18.2",
        "tenfold  APPLIED  NVIDIA/Megatron-LM#1",
        "/a/ops.py:1 -> /b/patch.py:2",
        "lower < tenfold",
        "rebound: megatron.core.user.f",
        "keeps the original: a list of 2 items",
        "3 calls, 2 fused; 2 padded; 1 declined: float16; the largest fallback took 1.5 GiB",
        "delete when: upstream multiplies",
        "calls: those under torch.compile are neither counted nor logged",
    ):
        assert part in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_table_of_what_is_not_in_place():
    text = str(
        a_report(state=State.NOT_APPLIED, decision=State.PENDING, reason="lacks the fix", targets=(), counters={})
    )
    assert "NOT_APPLIED (would be PENDING)" in text
    assert "reason: lacks the fix" in text
    assert "torch.compile" not in text
    nothing = Report((), {"text": None}, "3.12.1", "0.1.0")
    assert "megatron-core not found" in str(nothing)


def test_json_is_the_whole_report():
    report = a_report()
    data = json.loads(report.to_json())
    assert data["digest"] == report.digest
    assert data["rows"][0]["targets"][0]["layers"] == ["lower", "tenfold"]
    assert data["rows"][0]["state"] == "APPLIED"
    assert data["megatron"]["release"] == "0.19.2"


def test_rows_by_id():
    report = a_report()
    assert report["tenfold"] is report.rows[0]
    assert [row.id for row in report] == ["tenfold"]
    with pytest.raises(KeyError, match="no row for 'twofold'; the report has tenfold"):
        report["twofold"]


def test_the_digest_tells_what_matters_and_nothing_else():
    digest = a_report().digest
    assert a_report(state=State.ALREADY_APPLIED).digest == digest, "a second call does not make a difference"
    assert a_report(reason="another", counters={}, summary="other words").digest == digest
    assert a_report(state=State.PENDING).digest != digest
    assert a_report(state=State.NOT_APPLIED, decision=State.DRIFTED).digest != a_report(state=State.NOT_APPLIED).digest
    report = a_report()
    (target_row,) = report.rows[0].targets
    moved = TargetRow(**{**vars(target_row), "before": "/c/ops.py:9", "after": None, "rebound": (), "unreachable": ()})
    assert a_report(targets=(moved,)).digest == digest, "paths differ between nodes"
    other = TargetRow(**{**vars(target_row), "layers": ("tenfold",)})
    assert a_report(targets=(other,)).digest != digest
    other = TargetRow(**{**vars(target_row), "fingerprint": "e" * 64})
    assert a_report(targets=(other,)).digest != digest


def digest_of_a_rank(root, local, environment):
    os.environ.update(environment)
    tree = ops_tree(root, local=local)
    engine = engine_for(patch("tenfold", target(tree)))
    engine.apply()
    module()
    module("megatron.core.package_info")  # the hash is there once this has run
    report = engine.status()
    assert report["tenfold"].state is State.APPLIED
    if local:
        assert report.megatron["local"] == local[1:]
        assert local[1:] in str(report)
    return report.digest


def test_ranks_agree_whatever_the_folder_the_rank_and_the_git_hash(tmp_path):
    digests = {
        call(
            f"{__name__}:digest_of_a_rank", {"root": tmp_path / f"node{i}", "local": local, "environment": environment}
        )
        for i, (local, environment) in enumerate(
            [("", {}), ("+abc1234", {"RANK": "0"}), ("+def5678", {"RANK": "1", "LOCAL_RANK": "1"})]
        )
    }
    assert len(digests) == 1


# The log --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "levels"),
    [
        ({}, {"INFO", "WARNING", "ERROR"}),
        ({"RANK": "0", "LOCAL_RANK": "0"}, {"INFO", "WARNING", "ERROR"}),
        ({"RANK": "", "LOCAL_RANK": ""}, {"INFO", "WARNING", "ERROR"}),
        ({"RANK": "8", "LOCAL_RANK": "0"}, {"ERROR"}),
        ({"RANK": "9", "LOCAL_RANK": "1"}, set()),
    ],
    ids=["none", "0-0", "empty", "8-0", "9-1"],
)
@isolated()
def test_who_speaks(tmp_path, environment, levels):
    os.environ.update(environment)
    tree = ops_tree(tmp_path)
    engine = engine_for(
        patch("fixed", target(tree, known="fixed")),
        patch("drifted", target(None, known=None)),
        patch("absent", target(None, f"{OPS}_two:f", known=None)),
        patch("tenfold", target(tree)),
    )
    log = Records()
    for _ in range(3):
        engine.apply()
        engine.status()
    module()
    engine.apply()
    assert {level for level, _ in log.lines()} == levels
    assert len(log.lines()) == len(levels), "each once in a process"
    if levels == {"ERROR"}:
        assert log.lines()[0][1].startswith("drifted: DRIFTED:")


@isolated()
def test_nothing_is_said_of_what_went_well(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path), build=times(2))))
    log = Records()
    engine.apply()
    module()
    engine.apply()
    engine.revert()
    assert log.lines() == []
