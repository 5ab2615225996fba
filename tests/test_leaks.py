"""The detector of patches that a test leaves behind finds each kind of them."""

from __future__ import annotations

from mcore_patches.overlay.patch import ConfigField
from tests.leaks import patches_in_place
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, Tree, engine_for, fields_target, module, ops_tree, patch, target

TEXT = """\
from dataclasses import dataclass


def f(x):
    return x


@dataclass
class Config:
    layers: int = 1

    @staticmethod
    def s(x):
        return x
"""


@isolated()
def test_functions_methods_fields_and_aliases(tmp_path):
    tree = ops_tree(tmp_path, TEXT).write("megatron.core.user", f"from {OPS} import f as renamed\n")
    engine = engine_for(
        patch(
            "whole",
            target(tree),
            target(tree, f"{OPS}:Config.s"),
            fields_target(ConfigField("speed", int, 1), module=OPS),
        )
    )
    module(), module("megatron.core.user")
    assert patches_in_place() == []
    engine.apply(strict=True)
    assert sorted(patches_in_place()) == [
        "megatron.core.ops.Config.s",
        "megatron.core.ops.Config: fields speed",
        "megatron.core.ops.f",
        "megatron.core.user.renamed",
    ]
    engine.revert()
    assert patches_in_place() == []


@isolated()
def test_what_waits_for_an_import(tmp_path):
    import sys

    import mcore_patches
    from tests import releases

    assert Tree(tmp_path)
    sys.path.insert(0, str(releases.path("0.19.2")))
    mcore_patches.apply_patches("sparse_mla_nope")
    assert patches_in_place() == ["sparse_mla_nope waits for an import"]
    mcore_patches.revert()
    assert patches_in_place() == []
