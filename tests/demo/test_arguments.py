"""Bad arguments and surroundings: one clear line, exit code 2, nothing trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_patches import cli, demo
from mcore_patches.demo import DemoError
from tests import releases

ROOT = Path(__file__).parents[2]


def message(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "unknown demo 'nope'; known are sparse_mla_nope, qsa, dsa_parallel"),
        (["sparse_mla_nope", "--steps", "0"], "steps=0; allowed for sparse_mla_nope are 1 to 100"),
        (["qsa", "--steps", "9"], "steps=9; allowed for qsa are 10 to 1000"),
        (["--steps", "9"], "steps=9; allowed for sparse_mla_nope and qsa are 10 to 100"),
        (["--steps", "-1", "sparse_mla_nope"], "steps=-1; allowed for sparse_mla_nope are 1 to 100"),
        (["--steps", "101"], "steps=101; allowed for sparse_mla_nope and qsa are 10 to 100"),
        (["qsa", "--steps", "1001"], "steps=1001; allowed for qsa are 10 to 1000"),
        (["--out", ""], "out=''; allowed is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *arguments]) == 2
    assert says in message(capsys)
    assert not list(tmp_path.glob("**/*.png"))


def test_steps_that_are_no_number(capsys):
    assert cli.main(["demo", "--steps", "many"]) == 2
    assert "argument --steps: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [True, 2.0, "2"], ids=repr)
def test_steps_of_another_type(steps):
    with pytest.raises(DemoError, match=r"steps=.*; allowed for sparse_mla_nope are 1 to 100"):
        demo.run("sparse_mla_nope", steps=steps)


def test_out_is_a_file(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    assert cli.main(["demo", "qsa", "--out", str(file)]) == 2
    assert f"out={str(file)!r} cannot be a folder" in message(capsys)
    assert file.read_text() == "kept"


def test_out_without_write_permission(capsys, tmp_path, monkeypatch):
    # Not by chmod: root may write everywhere.
    monkeypatch.setattr(demo.os, "access", lambda path, mode: path != tmp_path)
    assert cli.main(["demo", "qsa", "--out", str(tmp_path)]) == 2
    assert f"out={str(tmp_path)!r} is a folder without write permission" in message(capsys)


def test_without_megatron(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "installed", lambda: None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "megatron-core is not installed and the demos train its models: pip install megatron-core" in message(capsys)


@pytest.mark.parametrize("package", ["torch", "matplotlib"])
def test_without_a_package(package, capsys, tmp_path, monkeypatch):
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest)
    )
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert f"{package} is not installed and the demos need it: pip install" in message(capsys)


def test_patches_switched_off(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES", "off")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    line = message(capsys)
    assert "demo sparse_mla_nope: its patch would be DISABLED here: MCORE_PATCHES=off switches every patch off" in line
    assert "demo qsa: its patch would be DISABLED here" in line


@pytest.mark.parametrize(("variable", "value"), [("MCORE_PATCHES", "typo"), ("MCORE_PATCHES_STRICT", "yes")])
def test_bad_switch(variable, value, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert f"{variable}={value!r}" in message(capsys)


def test_started_by_torchrun(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["demo", "qsa", "--out", str(tmp_path)]) == 2
    assert "WORLD_SIZE=4 is set, but the demos run in one process: start them without torchrun" in message(capsys)


def test_release_too_old(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mcore_patches.cli", "demo", "sparse_mla_nope", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{releases.path('0.18.2')}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mcore-patches: demo sparse_mla_nope: needs megatron-core >=0.19.0, found 0.18.2 (")


def test_import_is_light():
    code = (
        "import sys, mcore_patches.demo\n"
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy'} & {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
