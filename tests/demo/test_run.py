"""What `run` prints and returns, with demos that take no time."""

import json
import math
import sys
import types
from pathlib import Path

import pytest

from mcore_patches import cli, demo
from mcore_patches.demo import Demo
from mcore_patches.demo.outcome import Check, Outcome


@pytest.fixture
def quick(monkeypatch):
    """Replaces the demos by a passing and a failing one, named after patches; returns the calls that they get."""
    calls = []

    def add(name: str, ok: bool, number: float) -> Demo:
        module = types.ModuleType(f"quick_{name}")

        def train(steps, png, progress):
            calls.append((name, steps, png))
            progress.begin(f"{name} trains", 2)
            progress.step("half")
            progress.step("done")
            return Outcome(f"{name} in a table", (Check("two is two", ok, "2", "2"),), png, {"number": number})

        module.train = train
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return Demo(name, module.__name__, default_steps=7, least_steps=2, most_steps=9)

    demos = {"sparse_mla_nope": add("sparse_mla_nope", True, 1.5), "qsa": add("qsa", False, math.nan)}
    monkeypatch.setattr(demo, "DEMOS", demos)
    return calls


def test_one_that_passes(quick, tmp_path, capsys):
    assert cli.main(["demo", "sparse_mla_nope", "--out", str(tmp_path / "new" / "folder")]) == 0
    assert quick == [("sparse_mla_nope", 7, tmp_path / "new" / "folder" / "sparse_mla_nope.png")]
    text = capsys.readouterr().out
    assert "sparse_mla_nope in a table" in text
    assert "ok      two is two: 2 (must be 2)" in text
    assert f"sparse_mla_nope: ok in 0 s; {tmp_path}" in text
    assert "sparse_mla_nope trains  2/2  done" in text


def test_all_of_them_and_one_fails(quick, tmp_path, capsys):
    assert cli.main(["demo", "--steps", "3", "--out", str(tmp_path)]) == 1
    assert [call[:2] for call in quick] == [("sparse_mla_nope", 3), ("qsa", 3)]
    text = capsys.readouterr().out
    assert "FAILED  two is two" in text
    assert "qsa: FAILED in 0 s" in text


def test_json_is_all_that_stdout_gets(quick, tmp_path, capsys):
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert result["ok"] is False
    assert result["mcore_patches"]
    assert result["megatron_core"].startswith("0.")
    assert result["not_run"] == {}
    first, second = result["demos"]["sparse_mla_nope"], result["demos"]["qsa"]
    assert first["ok"] is True
    assert first["number"] == 1.5
    assert first["png"] == str(tmp_path / "sparse_mla_nope.png")
    assert second["ok"] is False
    assert second["number"] is None  # NaN is not JSON
    assert second["checks"] == [{"name": "two is two", "ok": False, "measured": "2", "allowed": "2"}]


def test_a_demo_that_the_release_cannot_run_is_left_out(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES", "all,-qsa")
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["demos"]) == ["sparse_mla_nope"]
    assert result["not_run"] == {"qsa": "its patch would be DISABLED here: MCORE_PATCHES=all,-qsa excludes it"}


def test_a_demo_named_that_cannot_run_is_an_error(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES", "-qsa")
    assert cli.main(["demo", "qsa", "--out", str(tmp_path)]) == 2
    assert "its patch would be DISABLED here" in capsys.readouterr().err
    assert quick == []


def test_every_demo_is_named_after_its_patch():
    from mcore_patches import _engine

    for name, listed in demo.DEMOS.items():
        assert listed.name == name
        assert name in _engine().registry.entries
        assert 1 <= listed.least_steps <= listed.default_steps <= listed.most_steps
        assert Path(demo.__file__).parent.joinpath(name, "__init__.py").is_file()
