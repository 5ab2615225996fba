"""doctor(): what it finds in environments that are broken in known ways."""

from __future__ import annotations

import json
import sys

import pytest

from mcore_patches.overlay.engine import Engine
from mcore_patches.overlay.preflight import KNOWN_BAD, Check, Diagnosis, diagnose
from mcore_patches.overlay.registry import Entry, Registry
from tests.overlay import stubs
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS_TEXT, engine_for, patch, target


def ops_tree(root, *arguments, **options):
    """The stub megatron, and a stub tilelang: importing the real one takes seconds."""
    (root / "tilelang.py").write_text("")
    return stubs.ops_tree(root, *arguments, **options)


def examined(*patches, **third_party):
    return diagnose(engine_for(*patches, **third_party))


def checks(diagnosis, name):
    return [(c.level, c.detail) for c in diagnosis.checks if c.name == name]


def package(root, name, version, text=""):
    """An installed package, as far as imports and metadata tell."""
    (root / f"{name}.py").write_text(text)
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sys.path.insert(0, str(root))


@isolated("torch")
def test_a_machine_without_cuda_is_in_order(tmp_path):
    import torch

    torch.cuda.is_available = lambda: False
    tree = ops_tree(tmp_path)
    package(tmp_path, "tilelang", "0.1.15")
    diagnosis = examined(patch("tenfold", target(tree)))
    assert diagnosis.ok, str(diagnosis)
    ((level, detail),) = checks(diagnosis, "device")
    assert level == "ok"
    assert detail.startswith("no CUDA device")
    assert checks(diagnosis, "tilelang") == [("ok", "0.1.15")]
    assert checks(diagnosis, "switches") == [("ok", "none set")]
    assert checks(diagnosis, "tenfold") == [("ok", "NOT_APPLIED: lacks the fix")]
    assert checks(diagnosis, "python")[0][0] == "ok"


@pytest.mark.parametrize("version", ["0.1.9", "0.1.9+cu128"])
@isolated("torch")
def test_a_tilelang_release_that_is_known_to_be_bad(tmp_path, version):
    tree = ops_tree(tmp_path)
    package(tmp_path, "tilelang", version, "raise RuntimeError('not imported when it is bad anyway')")
    diagnosis = examined(patch("tenfold", target(tree)))
    ((level, detail),) = checks(diagnosis, "tilelang")
    assert level == "error"
    assert version in detail
    assert KNOWN_BAD["tilelang"]["0.1.9"] in detail
    assert not diagnosis.ok


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import does_not_exist_anywhere", "ModuleNotFoundError: No module named 'does_not_exist_anywhere'"),
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
    ],
)
@isolated("torch")
def test_a_package_that_is_installed_and_does_not_import(tmp_path, text, said):
    package(tmp_path, "fast_hadamard_transform", "1.0", text)
    ((level, detail),) = checks(examined(patch("tenfold", target(ops_tree(tmp_path)))), "fast_hadamard_transform")
    assert level == "error"
    assert detail == f"1.0 is installed but importing it raised {said}"


@isolated()
def test_torch_that_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cuda.so: undefined symbol')")
    diagnosis = examined(patch("tenfold", target(ops_tree(tmp_path))))
    ((level, detail),) = checks(diagnosis, "device")
    assert level == "error"
    assert "undefined symbol" in detail


@isolated("torch")
def test_without_packaging(tmp_path):
    """The install with --no-deps leaves it to the reader to add it; a pre-release and other metadata want it."""
    tree = ops_tree(tmp_path, version="0.19.2", suffix="rc1")
    for name in [n for n in sys.modules if n.partition(".")[0] == "packaging"]:
        del sys.modules[name]
    sys.modules["packaging"] = None
    diagnosis = examined(patch("tenfold", target(tree)))
    assert any("without the package packaging" in text for _, text in checks(diagnosis, "megatron-core"))
    assert checks(diagnosis, "tenfold") == [("ok", "NOT_APPLIED: lacks the fix")]


@isolated("torch")
def test_control_characters_in_other_people_s_errors(tmp_path):
    package(tmp_path, "fast_hadamard_transform", "1.0", "raise OSError('\\x1b[31mred\\nline')")
    diagnosis = examined(patch("tenfold", target(ops_tree(tmp_path))))
    assert "OSError: \\x1b[31mred line" in str(diagnosis)
    assert "\x1b" not in str(diagnosis)


@isolated("torch")
def test_optional_packages_that_are_missing_are_warnings(tmp_path):
    ((level, detail),) = checks(examined(patch("tenfold", target(ops_tree(tmp_path)))), "transformer_engine")
    assert level == "warning"
    assert "needed for megatron-core's default layer specs" in detail


@isolated("torch")
def test_a_target_that_does_not_import(tmp_path):
    diagnosis = examined(patch("tenfold", target(ops_tree(tmp_path, OPS_TEXT + "import does_not_exist_anywhere\n"))))
    assert any(level == "error" and "does_not_exist_anywhere" in text for level, text in checks(diagnosis, "tenfold"))
    assert not diagnosis.ok


@isolated("torch", MCORE_PATCHES_STRIKT="1")
def test_a_switch_that_is_none(tmp_path):
    diagnosis = examined(patch("tenfold", target(ops_tree(tmp_path))))
    ((level, detail),) = checks(diagnosis, "switches")
    assert level == "error"
    assert "MCORE_PATCHES_STRIKT is not a switch" in detail
    assert checks(diagnosis, "tenfold") == []


@isolated("torch", MCORE_PATCHES="-tenfold", MCORE_PATCHES_STRICT="1")
def test_switches_are_shown(tmp_path):
    diagnosis = examined(patch("tenfold", target(ops_tree(tmp_path))))
    assert checks(diagnosis, "switches") == [("ok", "MCORE_PATCHES=-tenfold, MCORE_PATCHES_STRICT=1")]
    assert checks(diagnosis, "tenfold")[0] == ("ok", "DISABLED: MCORE_PATCHES=-tenfold excludes it")


@isolated("torch")
def test_megatron_that_is_missing_or_described_by_other_metadata(tmp_path):
    ops_tree(tmp_path, version="0.18.2")
    levels = dict(checks(examined(patch("tenfold", target(None, known=None))), "megatron-core"))
    assert "0.18.2" in levels["ok"]
    assert "0.19.2" in levels["warning"], "the metadata beside it describes the installed release"
    sys.path[:] = [e for e in sys.path if "site-packages" not in e and e != str(tmp_path)]
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    ((level, detail),) = checks(examined(patch("tenfold", target(None, known=None))), "megatron-core")
    assert (level, detail[:9]) == ("error", "not found")


@isolated("torch")
def test_a_third_party_patch_that_does_not_load_is_a_warning(tmp_path):
    ops_tree(tmp_path)
    broken = Entry("theirs", None, "their-package 1.0", False, "entry point x failed to load: ImportError: y")
    diagnosis = diagnose(Engine(lambda: Registry([broken]), "test"))
    ((level, detail),) = checks(diagnosis, "theirs")
    assert level == "warning"
    assert "ImportError: y" in detail


@isolated("torch")
def test_drift_is_an_error(tmp_path):
    ops_tree(tmp_path)
    diagnosis = examined(patch("tenfold", target(None, known=None)))
    assert checks(diagnosis, "tenfold")[0][0] == "error"
    assert checks(diagnosis, "tenfold")[0][1].startswith("DRIFTED: ")


def test_a_diagnosis_prints_and_has_json():
    diagnosis = Diagnosis((Check("python", "ok", "3.12.1"), Check("megatron-core", "warning", "two of them")))
    assert str(diagnosis) == "ok       python         3.12.1\nwarning  megatron-core  two of them"
    assert json.loads(diagnosis.to_json()) == {
        "ok": True,
        "checks": [
            {"name": "python", "level": "ok", "detail": "3.12.1"},
            {"name": "megatron-core", "level": "warning", "detail": "two of them"},
        ],
    }
    assert not Diagnosis((Check("x", "error", "y"),)).ok
