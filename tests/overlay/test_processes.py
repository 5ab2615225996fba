"""Forked, spawned and fresh processes, and which release is decided on in each."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mcore_patches.overlay.patch import State
from tests import releases
from tests.overlay.isolation import ROOT, isolated
from tests.overlay.stubs import OPS, Tree, engine_for, module, ops_tree, patch, target, times


def in_a_fork(function):
    """Call in a forked child; returns what the function returns, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@isolated()
def test_a_forked_child_has_the_patch_and_may_take_it_off_for_itself(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    engine.apply()

    def child():
        before = (engine.status()["tenfold"].state.value, engine.apply()["tenfold"].state.value, ops.f(1))
        engine.revert()
        return before, ops.f(1), engine.status()["tenfold"].state.value

    assert in_a_fork(child) == "(('APPLIED', 'ALREADY_APPLIED', 20), 2, 'NOT_APPLIED')"
    assert ops.f(1) == 20


@isolated()
def test_a_forked_child_does_not_trust_the_parent_s_bookkeeping(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    upstream = ops.f
    engine.apply()

    def child():
        ops.f = upstream
        return engine.status()["tenfold"].state.value, engine.apply()["tenfold"].state.value, ops.f(1)

    assert in_a_fork(child) == "('NOT_APPLIED', 'APPLIED', 20)"


@isolated()
def test_a_pending_patch_is_applied_in_the_child_s_import(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    engine.apply()
    assert in_a_fork(lambda: (module().f(1), engine.status()["tenfold"].state.value)) == "(20, 'APPLIED')"
    assert engine.status()["tenfold"].state is State.PENDING


@isolated()
def test_a_fork_while_another_thread_holds_the_lock(tmp_path):
    building, go_on = threading.Event(), threading.Event()

    def slow(below):
        building.set()
        go_on.wait(30)
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path), build=slow)))
    ops = module()
    applying = threading.Thread(target=engine.apply)
    applying.start()
    assert building.wait(30)

    def child():
        go_on.set()  # the child's copy
        return engine.apply()["tenfold"].state.value, ops.f(1)

    assert in_a_fork(child) == "('APPLIED', 20)", "the child does not wait for a thread that it does not have"
    go_on.set()
    applying.join(30)
    assert ops.f(1) == 20


def state_in_a_spawned_process():
    import megatron.core.ops as ops

    import mcore_patches

    return ops.f(1), sorted({row.state for row in mcore_patches.status() if row.targets and row.targets[0].layers})


@isolated()
def test_a_spawned_child_does_not_inherit_the_patch_and_says_so(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    assert module().f(1) == 2
    engine.apply()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(state_in_a_spawned_process) == (2, [])


@isolated()
def test_ray_s_hook_is_importable_by_name_and_may_run_again():
    """Ray takes "module.function" and calls it without arguments in each worker."""
    import importlib

    sys.path.insert(0, str(releases.path("0.19.2")))
    import mcore_patches

    module_name, _, function = "mcore_patches.ray_setup_hook".rpartition(".")
    hook = getattr(importlib.import_module(module_name), function)
    assert [hook(), hook()] == [None, None]
    assert mcore_patches.status()["sparse_mla_nope"].state is State.PENDING


# Which release --------------------------------------------------------------------------------------------------------

# Version in the stub, PRE_RELEASE and what __version__ appends -> whether a patch for [0.19, 0.20) is in range.
VERSIONS = [
    ("0.19.2", "", "", True),
    ("0.19.2", "", "+abc1234", True),
    ("0.19.0", "rc1", "", True),
    ("0.19.0", "rc1", "+abc", True),
    ("0.19.2", ".post1", "", True),
    ("0.19.0", ".dev3", "", True),
    ("0.20.0", "", "+abc1234", False),
    ("0.20.0", "rc0", "", False),
    ("0.18.2", "", "", False),
    ("0.18.99", ".post9", "", False),
]


def decisions(root):
    """For each of VERSIONS: states before and after the import of package_info, and what the report says."""
    import packaging

    found = []
    for i, (version, suffix, local, _) in enumerate(VERSIONS):
        Tree(Path(root) / str(i), version, suffix, local).use()
        engine = engine_for(patch("p", target(None, known=None)))
        states = [engine.apply()["p"].state]
        module("megatron.core.package_info")
        report = engine.apply()
        states.append(report["p"].state)
        found.append((states, report.megatron["text"], report.megatron["local"], packaging.__version__))
        del sys.path[0]
        for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
            del sys.modules[name]
    return found


@pytest.mark.parametrize("packaging", ["24.2", "newest"])
def test_the_range_holds_for_every_kind_of_version(tmp_path, packaging, packaging_24_2, fresh_python):
    """The target is absent, so that the range alone decides."""
    code = f"import json; from {__name__} import decisions; print(json.dumps(decisions({str(tmp_path)!r})))"
    found = fresh_python(code, path=[packaging_24_2] if packaging == "24.2" else [])
    for (version, suffix, local, inside), (states, text, seen_local, release) in zip(VERSIONS, found, strict=True):
        assert states == ["TARGET_ABSENT" if inside else "OUT_OF_RANGE"] * 2, (version, suffix, local)
        assert (text, seen_local) == (version + suffix, local[1:] or None)
        assert (release == "24.2") == (packaging == "24.2")


@pytest.mark.parametrize("release", releases.RELEASES)
@isolated()
def test_another_release_in_front_of_the_installed_one(release):
    """As with PYTHONPATH: what an import would take decides, and nothing is imported to find out."""
    sys.path.insert(0, str(releases.path(release)))
    import mcore_patches

    report = mcore_patches.status()
    assert report.megatron["release"] == release
    assert report.megatron["file"].startswith(str(releases.path(release)))
    row = report["sparse_mla_nope"]
    inside = release >= "0.19"
    assert (row.state, row.decision) == ((State.NOT_APPLIED, State.PENDING) if inside else (State.OUT_OF_RANGE, None))
    assert not [name for name in sys.modules if name.startswith("megatron.")], "nothing was imported to find out"


@isolated()
def test_a_source_tree_beside_the_metadata_of_the_installed_release(tmp_path):
    ops_tree(tmp_path, version="0.18.2")
    report = engine_for(patch("tenfold", target(None, f"{OPS}_two:f", known=None))).apply()
    assert (report.megatron["release"], report.megatron["metadata"]) == ("0.18.2", "0.19.2")
    assert report["tenfold"].state is State.OUT_OF_RANGE
    assert any("does not own that file" in warning for warning in report.warnings)
    assert "warning: " in str(report)


def test_a_checkout_inside_another_git_repository(tmp_path):
    """package_info appends the hash of whatever repository encloses it, here one of ours."""
    shell = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    subprocess.run([*shell, "init", "-q"], check=True)
    subprocess.run([*shell, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run([*shell, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    site = tmp_path / "venv" / "site-packages" / "megatron" / "core"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    real = releases.path("0.19.2") / "megatron" / "core"
    (site / "package_info.py").write_text((real / "package_info.py").read_text())
    code = """
import megatron.core.package_info as info, mcore_patches
report = mcore_patches.status()
print(info.__version__, report.megatron["release"], report.megatron["local"], report["sparse_mla_nope"].state)
"""
    environment = {**os.environ, "PYTHONPATH": f"{site.parents[1]}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    full, release, local, state = done.stdout.split()
    assert full.startswith(f"0.19.2+{head.strip()[:7]}")
    assert release == "0.19.2"
    assert local == full.partition("+")[2]
    assert state == "TARGET_ABSENT"
