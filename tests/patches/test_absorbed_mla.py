"""The patch `absorbed_mla`: its state on each release, what it provides and takes back, an upstream that has it.

That the layers work is tested in `tests/attention/test_absorbed_mla.py`.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

import mcore_patches
from mcore_patches.overlay.patch import State
from mcore_patches.patches.absorbed_mla import MODULE, NAMES, PATCH
from tests import releases
from tests.overlay.isolation import call

OLD = tuple(release for release in releases.RELEASES if not releases.at_least(release, "0.19.0"))
WITHOUT, UNUSABLE = OLD[0], OLD[1:]


@pytest.mark.parametrize("release", OLD)
def test_provided_and_taken_back(release: str) -> None:
    call(f"{__name__}:provide_and_take_back", {"release": release}, f"before-{release}")


def provide_and_take_back(release: str) -> None:
    assert mcore_patches.status()["absorbed_mla"].decision is State.APPLIED
    row = mcore_patches.apply_patches("absorbed_mla", strict=True)["absorbed_mla"]
    assert row.state is State.APPLIED
    assert {target.verdict for target in row.targets} == {"needs"}
    module = importlib.import_module(MODULE)
    ours = importlib.import_module("mcore_patches.attention.dsa")
    assert all(getattr(module, name) is getattr(ours, name) for name in NAMES)
    fields = module.AbsorbedMLASelfAttentionSubmodules.__dataclass_fields__
    assert {"linear_kv_up_proj", "linear_k_up_proj", "linear_v_up_proj"} <= fields.keys()
    assert mcore_patches.require_applied("absorbed_mla").state is State.APPLIED

    assert mcore_patches.revert("absorbed_mla")["absorbed_mla"].state is State.NOT_APPLIED
    if release == WITHOUT:
        with pytest.raises(ModuleNotFoundError, match="absorbed_mla"):
            importlib.import_module(MODULE)
    else:
        theirs = importlib.import_module(MODULE)
        assert theirs.AbsorbedMLASelfAttention.__module__ == MODULE
        # In place over upstream's live module, and off again.
        mcore_patches.apply_patches("absorbed_mla", strict=True)
        assert theirs.AbsorbedMLASelfAttention is ours.AbsorbedMLASelfAttention
        mcore_patches.revert("absorbed_mla")
        assert theirs.AbsorbedMLASelfAttention.__module__ == MODULE
    mcore_patches.apply_patches("absorbed_mla", strict=True)
    assert importlib.import_module(MODULE).AbsorbedMLASelfAttention is ours.AbsorbedMLASelfAttention


@pytest.mark.parametrize("release", [r for r in releases.RELEASES if r not in OLD])
def test_upstreams_own_is_left_alone(release: str) -> None:
    call(f"{__name__}:left_alone", {"release": release}, f"before-{release}")


def left_alone(release: str) -> None:
    del release
    row = mcore_patches.apply_patches("absorbed_mla", strict=True)["absorbed_mla"]
    assert row.state is State.UPSTREAM_FIXED
    assert not any(type(finder).__name__ == "ProvidedFinder" for finder in sys.meta_path)


def test_descriptor_loads_neither_torch_nor_megatron() -> None:
    call(f"{__name__}:no_heavy_import", {})


def no_heavy_import() -> None:
    importlib.import_module("mcore_patches.patches.absorbed_mla")
    importlib.import_module("mcore_patches.attention.dsa")
    sys.path.insert(0, str(releases.path(WITHOUT)))
    assert mcore_patches.apply_patches("absorbed_mla", strict=True)["absorbed_mla"].state is State.APPLIED
    assert not {"torch", "megatron.core"} & set(sys.modules)


def edited(release: str, folder: Path, old: str, new: str) -> Path:
    """A copy of a release with one edit in the module; other files are shared with the original."""
    source = releases.path(release)
    shutil.copytree(
        source / "megatron", folder / "megatron", copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__")
    )
    path = folder / (MODULE.replace(".", "/") + ".py")
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))
    return folder


def state_and_reason(folder: Path) -> tuple[State, str]:
    sys.path.insert(0, str(folder))
    row = mcore_patches.apply_patches("absorbed_mla")["absorbed_mla"]
    changed = importlib.import_module(MODULE).AbsorbedMLASelfAttention.__module__ != MODULE
    assert changed == (row.state is State.APPLIED)
    return row.state, row.reason


def test_edited_text_of_an_unusable_class_is_left_alone(tmp_path: Path) -> None:
    folder = edited(UNUSABLE[-1], tmp_path, '"""Multi-latent self-attention layer', '"""Edited')
    state, reason = call(f"{__name__}:state_and_reason", {"folder": folder}, "torch")
    assert state is State.DRIFTED
    assert "it lacks linear_kv_up_proj and does not hand x, qr and up_v_weight to the core attention" in reason


def test_edited_text_of_a_working_class_counts_as_fixed(tmp_path: Path) -> None:
    folder = edited(releases.RELEASES[-1], tmp_path, '"""Multi-latent self-attention layer', '"""Edited')
    state, reason = call(f"{__name__}:state_and_reason", {"folder": folder}, "torch")
    assert state is State.UPSTREAM_FIXED
    assert "it has linear_kv_up_proj and hands x, qr and up_v_weight to the core attention" in reason


def test_targets_are_known_on_every_release() -> None:
    assert all(
        (tuple(map(int, release.split("."))) in PATCH.releases) == (release in OLD) for release in releases.RELEASES
    )
