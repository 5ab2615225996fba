"""The command: output, --json and exit status of every subcommand, each in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import zipfile

import pytest

from tests import releases
from tests.overlay.isolation import ROOT, isolated

EAV = "megatron.core.transformer.experimental_attention_variant"
DSA = f"{EAV}.ops.tilelang_dsa"


def cli(*arguments):
    """Run the command in this process: (exit status, stdout, stderr)."""
    from mcore_patches.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as exit:  # argparse
            status = exit.code
    return status, out.getvalue(), err.getvalue()


def use_release(release):
    sys.path.insert(0, str(releases.path(release)))


def edited_release(root, edit):
    """A tree whose tilelang_dsa is that of 0.19.2 after `edit`, beside upstream's other files."""
    source = releases.path("0.19.2").joinpath(*DSA.split(".")).with_suffix(".py")
    text = source.read_text()
    changed = edit(text)
    assert changed != text
    tree = root / "tree"
    core = tree / "megatron" / "core"
    core.mkdir(parents=True)
    upstream = releases.path("0.19.2") / "megatron" / "core"
    for path in sorted(upstream.rglob("*")):
        target = core / path.relative_to(upstream)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif path == source:
            target.write_text(changed)
        elif "__pycache__" not in path.parts:
            target.symlink_to(path)
    sys.path.insert(0, str(tree))
    return tree


def row_of(out, patch_id="sparse_mla_nope"):
    return next(row for row in json.loads(out)["rows"] if row["id"] == patch_id)


# status ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", releases.RELEASES)
@isolated()
def test_status_json_of_every_release(release):
    use_release(release)
    status, out, err = cli("status", "--json")
    row = row_of(out)
    assert (status, err) == (0, "")
    assert json.loads(out)["megatron"]["release"] == release
    if release.startswith("0.19"):
        assert (row["state"], row["decision"]) == ("NOT_APPLIED", "PENDING")
        assert row["targets"][0]["before"].startswith(str(releases.path(release)))
        assert row["targets"][0]["verdict"] == "needs"
    else:
        assert (row["state"], row["decision"]) == ("OUT_OF_RANGE", None)
        assert f"is for >=0.19.0, megatron-core is {release}" in row["reason"]


@isolated()
def test_status_for_people():
    use_release("0.19.2")
    status, out, err = cli("status")
    assert (status, err) == (0, "")
    assert "sparse_mla_nope" in out
    assert "NOT_APPLIED (would be PENDING)" in out
    assert "NVIDIA/Megatron-LM#7617" in out


@isolated("before-0.19.2")
def test_status_of_a_release_edited_by_one_token_is_an_error(tmp_path):
    import mcore_patches
    from mcore_patches.overlay.errors import NotAppliedError

    edited_release(
        tmp_path, lambda text: text.replace("topk_indices.size(-1) % 64 != 0", "topk_indices.size(-1) % 32 != 0")
    )
    status, out, _ = cli("status", "--json")
    row = row_of(out)
    assert (status, row["state"]) == (1, "DRIFTED")
    assert "probe: it declines width 512 and declines an unaligned top-k of 65" in row["reason"]
    with pytest.raises(NotAppliedError, match="sparse_mla_nope is DRIFTED"):
        mcore_patches.apply_patches(strict=True)
    function = sys.modules[DSA].fused_sparse_mla_absorbed
    assert "__mcore_patches__" not in vars(function)
    assert cli("apply", "--dry-run", "sparse_mla_nope", "--force", "sparse_mla_nope")[0] == 0


@isolated()
def test_status_without_megatron():
    sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
    status, out, _ = cli("status", "--json")
    assert status == 0
    assert json.loads(out)["megatron"]["text"] is None
    assert row_of(out)["state"] == "TARGET_ABSENT"


# apply ----------------------------------------------------------------------------------------------------------------


@isolated()
def test_apply_wants_dry_run():
    status, _, err = cli("apply")
    assert status == 2
    assert "--dry-run" in err


@isolated()
def test_apply_dry_run_changes_nothing():
    use_release("0.19.2")
    status, out, _ = cli("apply", "--dry-run", "--json", "sparse_mla_nope")
    assert status == 0
    assert row_of(out)["decision"] == "PENDING"
    assert {row["state"] for row in json.loads(out)["rows"] if row["id"] != "sparse_mla_nope"} <= {"DISABLED"}
    status, out, _ = cli("apply", "--dry-run", "--exclude", "sparse_mla_nope", "--json")
    assert row_of(out)["state"] == "DISABLED"
    assert DSA not in sys.modules


@pytest.mark.parametrize("arguments", [("delta",), ("--force", "delta"), ("--exclude", "delta")], ids=" ".join)
@isolated()
def test_an_unknown_id_is_one_line_and_exit_status_2(arguments):
    status, out, err = cli("apply", "--dry-run", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("mcore-patches: ")
    assert "names 'delta'; known ids are" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [("status",), ("apply", "--dry-run"), ("status", "--json")], ids=" ".join)
@isolated(MCORE_PATCHES_STRICT="maybe")
def test_a_faulty_switch_is_one_line_and_exit_status_2(command):
    status, out, err = cli(*command)
    assert (status, out) == (2, "")
    assert err == "mcore-patches: MCORE_PATCHES_STRICT='maybe'; allowed are 0 and 1\n"


# doctor ---------------------------------------------------------------------------------------------------------------


@isolated("before-0.19.2")
def test_doctor_on_the_installed_release():
    status, out, err = cli("doctor", "--json")
    diagnosis = json.loads(out)
    by_name = {check["name"]: check for check in diagnosis["checks"]}
    assert (status == 0) == diagnosis["ok"]
    assert diagnosis["ok"] == all(check["level"] != "error" for check in diagnosis["checks"])
    assert by_name["megatron-core"]["level"] in ("ok", "warning")
    assert by_name["sparse_mla_nope"]["level"] == "ok"
    assert "sparse_mla_nope" in cli("doctor")[1]
    assert err == ""


@isolated("torch", MCORE_PATCHES="maybe")
def test_doctor_reports_a_faulty_switch_and_exits_with_1():
    use_release("0.19.2")
    status, out, _ = cli("doctor")
    assert status == 1
    assert "error" in out
    assert "names 'maybe'" in out


# fingerprint ----------------------------------------------------------------------------------------------------------


def wheel(path, release, *, without=(), version=None):
    """A wheel with the targets' files of an unpacked release."""
    root = releases.path(release)
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted((root / "megatron").rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if not any(part in name for part in without):
                archive.write(file, name)
        archive.writestr(
            f"megatron_core-{release}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version or release}\n",
        )
    return path


@pytest.mark.parametrize("release", ["0.18.2", "0.19.2"])
@isolated()
def test_fingerprint_of_a_wheel(tmp_path, release):
    path = wheel(tmp_path / "w.whl", release)
    status, out, err = cli("fingerprint", str(path), "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert data["version"] == release
    rows = {row["target"]: row for row in data["targets"]}
    row = rows[f"{DSA}:fused_sparse_mla_absorbed"]
    if release == "0.19.2":
        assert (row["verdict"], len(row["fingerprint"]), row["module"]) == ("needs", 64, DSA)
    else:
        assert (row["verdict"], row["fingerprint"]) == ("absent", None)
        assert "the wheel has no" in row["reason"]
    assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "megatron")]
    status, out, _ = cli("fingerprint", str(path))
    assert status == 0
    assert out.splitlines()[0] == f"megatron-core {release}"
    assert len(out.splitlines()) == 1 + len(data["targets"])


@isolated()
def test_fingerprint_of_a_wheel_without_the_kernel(tmp_path):
    path = wheel(tmp_path / "w.whl", "0.19.2", without=("ops/sparse_mla.py",))
    status, out, _ = cli("fingerprint", str(path))
    kernel = DSA.replace("tilelang_dsa", "sparse_mla")
    assert status == 0
    assert f"unknown  relies on {kernel}:SparseMLA, but the wheel has no {kernel}" in out


@isolated()
def test_a_version_with_control_characters_does_not_reach_the_terminal(tmp_path):
    path = wheel(tmp_path / "w.whl", "0.18.2", version="0.19\x1b[31m")
    status, out, _ = cli("fingerprint", str(path))
    assert (status, out.splitlines()[0]) == (0, "megatron-core 0.19\\x1b[31m")
    assert "\x1b" not in cli("fingerprint", str(path), "--json")[1]


@isolated()
def test_fingerprint_of_what_is_no_wheel_of_megatron(tmp_path):
    (tmp_path / "text.whl").write_text("no zip")
    for path in (tmp_path / "absent.whl", tmp_path, tmp_path / "text.whl"):
        status, out, err = cli("fingerprint", str(path))
        assert (status, out) == (2, "")
        assert err.startswith(f"mcore-patches: {path}: ")
        assert err.count("\n") == 1
    assert cli("fingerprint")[0] == 2


# The command itself ---------------------------------------------------------------------------------------------------


@isolated()
def test_help_and_version_say_what_there_is():
    import mcore_patches

    status, out, _ = cli("--help")
    assert status == 0
    for word in ("status", "apply", "doctor", "fingerprint", "demo", "exit status: 0 fine; 1"):
        assert word in out
    assert cli("--version") == (0, f"mcore-patches {mcore_patches.__version__}\n", "")
    for command in ("status", "apply", "doctor", "fingerprint", "demo"):
        status, out, _ = cli(command, "--help")
        assert status == 0
        assert "--json" in out


@isolated()
def test_no_command_and_an_unknown_one():
    for arguments in ((), ("unheard-of",), ("status", "--unheard-of")):
        status, out, err = cli(*arguments)
        assert (status, out) == (2, "")
        assert "usage: mcore-patches" in err


def run_with_stdout(stdout, *arguments, shell=""):
    """(exit status, stderr) of the command in an interpreter of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{releases.path('0.19.2')}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "mcore_patches.cli", *arguments]
    if shell:
        command = ["sh", "-c", f'exec "$0" "$@" {shell}', *command]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("status", "--json"), ("status",)], ids=" ".join)
def test_a_reader_that_goes_away_is_no_error(arguments):
    """`mcore-patches status | head -n 1`, with a reader that reads nothing at all."""
    reader, writer = os.pipe()
    os.close(reader)
    assert run_with_stdout(writer, *arguments) == (0, "")
    os.close(writer)


@pytest.mark.parametrize("arguments", [("status", "--json"), ("status",)], ids=" ".join)
def test_a_full_disk_is_one_line_and_exit_status_2(arguments):
    with open("/dev/full", "w") as full:
        status, err = run_with_stdout(full, *arguments)
    assert (status, err) == (2, "mcore-patches: [Errno 28] No space left on device\n")


def test_a_closed_stdout_is_one_line_and_exit_status_2():
    assert run_with_stdout(None, "status", shell=">&-") == (2, "mcore-patches: stdout is closed\n")


@isolated(MCORE_PATCHES_STRICT="\x1b[31mred\x1b[0m\nx")
def test_control_characters_do_not_reach_the_terminal():
    status, out, err = cli("status")
    assert (status, out) == (2, "")
    assert "\x1b" not in err
    assert err.count("\n") == 1
    assert cli("fingerprint", "\x1b[31mred.whl")[2].startswith("mcore-patches: \\x1b[31mred.whl: ")
