"""Verdicts on the targets in a wheel that is only read."""

from __future__ import annotations

import zipfile

import pytest

from mcore_patches.overlay.errors import SettingsError
from mcore_patches.overlay.fingerprint import WheelError
from mcore_patches.overlay.patch import ConfigField
from mcore_patches.overlay.registry import Entry, Registry
from mcore_patches.overlay.wheels import wheel_fingerprints
from tests.overlay.stubs import OPS, OPS_TEXT, Tree, entry, fields_target, patch, provided_target, target

CONFIG = "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    layers: int = 1\n    label: str = ''\n"


def wheel(path, **files):
    with zipfile.ZipFile(path, "w") as archive:
        for module, text in files.items():
            archive.writestr(module.replace(".", "/") + ".py", text)
        archive.writestr(
            "megatron_core-0.21.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.21.0\n"
        )
    return path


def verdicts(path, *patches):
    found = wheel_fingerprints(path, Registry(entry(p) for p in patches))
    assert found["version"] == "0.21.0"
    return {row["patch"]: (row["verdict"], row["reason"]) for row in found["targets"]}


def test_every_verdict(tmp_path):
    tree = Tree(tmp_path).write(OPS, OPS_TEXT)
    path = wheel(tmp_path / "w.whl", **{OPS: OPS_TEXT, "megatron.core.config": CONFIG})
    found = verdicts(
        path,
        patch("needs", target(tree)),
        patch("fixed", target(tree, known="fixed")),
        patch("unknown", target(None, known=None)),
        patch("relies", target(tree, relies_on=("g",))),
        patch("no_function", target(None, f"{OPS}:absent", known=None)),
        patch("no_module", target(None, "megatron.core.absent:f", known=None)),
        patch("new_fields", fields_target(ConfigField("speed", int, 1))),
        patch("its_fields", fields_target(ConfigField("label", str, ""))),
        patch("provided", provided_target("megatron.core.absent")),
        patch("no_package", provided_target("megatron.no.package")),
        patch("half", fields_target(ConfigField("label", str, ""), ConfigField("speed", int, 1))),
    )
    assert {i: verdict for i, (verdict, _) in found.items()} == {
        "needs": "needs",
        "fixed": "fixed",
        "unknown": "unknown",
        "relies": "needs",
        "no_function": "absent",
        "no_module": "absent",
        "new_fields": "needs",
        "its_fields": "fixed",
        "provided": "needs",
        "no_package": "absent",
        "half": "unknown",
    }
    assert found["no_function"][1] == f"{OPS} does not define absent"
    assert found["no_module"][1] == "the wheel has no megatron.core.absent"


def test_the_first_module_that_the_wheel_has_is_taken(tmp_path):
    import dataclasses

    tree = Tree(tmp_path).write(OPS, OPS_TEXT)
    path = wheel(tmp_path / "w.whl", **{OPS: OPS_TEXT})
    moved = dataclasses.replace(target(tree), modules=("megatron.core.elsewhere", OPS))
    (row,) = wheel_fingerprints(path, Registry([entry(patch("moved", moved))]))["targets"]
    assert (row["module"], row["verdict"]) == (OPS, "needs")


def test_a_third_party_patch_that_did_not_load_has_no_rows(tmp_path):
    path = wheel(tmp_path / "w.whl", **{OPS: OPS_TEXT})
    broken = Entry("theirs", None, "somebody 1.0", False, "failed to load")
    assert wheel_fingerprints(path, Registry([broken])) == {"version": "0.21.0", "targets": []}


@pytest.mark.parametrize("path", [None, 5, b"megatron_core.whl", ["megatron_core.whl"]], ids=repr)
def test_what_is_no_path_is_one_error(path):
    with pytest.raises(SettingsError, match=r"path is .*; allowed is the path of a wheel"):
        wheel_fingerprints(path, Registry([]))


def test_source_that_does_not_parse_is_one_error(tmp_path):
    path = wheel(tmp_path / "w.whl", **{OPS: "def f(:\n"})
    with pytest.raises(WheelError, match=r"w\.whl: .*not valid Python"):
        verdicts(path, patch("needs", target(None, known=None)))
