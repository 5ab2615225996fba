"""Built-in patches by module, third-party ones by entry point."""

from __future__ import annotations

import sys

import pytest

from mcore_patches.overlay.errors import NotAppliedError, OverlayError
from mcore_patches.overlay.patch import State
from mcore_patches.overlay.registry import Registry
from tests.overlay.isolation import isolated
from tests.overlay.stubs import entry, ops_tree, patch, target

PATCHES = """\
from tests.overlay.stubs import patch, target, times, Tree
from pathlib import Path

TREE = Tree(Path({root!r}) / "tree")
def make(id, **options):
    text = Path({root!r}, "megatron/core/ops.py").read_text()
    return patch(id, target(TREE.write("megatron.core.ops", text)), **options)
THEIRS = make("theirs")
QUIET = make("quiet")
CLASH = make("sparse_mla_nope")
NOT_A_PATCH = 3
"""


def distribution(root, name, entry_points, version="1.0"):
    """A distribution on sys.path: metadata and entry points, as pip leaves them."""
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)
    sys.path.insert(0, str(root))


def install(tmp_path, text):
    ops_tree(tmp_path)
    (tmp_path / "their_patches.py").write_text(PATCHES.format(root=str(tmp_path)))
    distribution(tmp_path, "their-package", f"[mcore_patches.patches]\n{text}")


def without_builtin_ids():
    import mcore_patches

    builtin = mcore_patches._engine().registry.builtin
    return [row for row in mcore_patches.status() if row.id not in builtin]


@isolated()
def test_a_third_party_patch_is_listed_and_applied_only_when_named(tmp_path):
    import mcore_patches

    install(tmp_path, "theirs = their_patches:THEIRS\nquiet = their_patches:QUIET\n")
    import megatron.core.ops as ops

    (quiet, theirs) = without_builtin_ids()
    assert (quiet.id, theirs.id, theirs.source) == ("quiet", "theirs", "their-package 1.0")
    assert theirs.state is State.DISABLED
    assert "applied only when they are named" in theirs.reason
    assert mcore_patches.apply_patches()["theirs"].state is State.DISABLED
    assert ops.f(1) == 2
    assert mcore_patches.apply_patches("theirs", strict=True)["theirs"].state is State.APPLIED
    assert ops.f(1) == 20
    assert mcore_patches.status()["theirs"].state is State.APPLIED
    mcore_patches.revert()
    assert ops.f(1) == 2


@isolated(MCORE_PATCHES="all,theirs")
def test_the_environment_names_one(tmp_path):
    import mcore_patches

    install(tmp_path, "theirs = their_patches:THEIRS\nquiet = their_patches:QUIET\n")
    import megatron.core.ops as ops

    report = mcore_patches.apply_patches()
    assert (report["theirs"].state, report["quiet"].state) == (State.APPLIED, State.DISABLED)
    assert ops.f(1) == 20


BROKEN = {
    "no_module": ("does_not_exist:PATCH", "failed to load: ModuleNotFoundError"),
    "no_attribute": ("their_patches:MISSING", "failed to load: AttributeError"),
    "no_patch": ("their_patches:NOT_A_PATCH", "is int, not a mcore_patches.overlay.patch.Patch"),
    "raises": ("raises_on_import:PATCH", "failed to load: RuntimeError: no license"),
    "exits": ("exits_on_import:PATCH", "failed to load: SystemExit: no GPU"),
}


@pytest.mark.parametrize("kind", BROKEN)
@isolated()
def test_a_broken_one_is_listed_with_its_error_and_harms_nobody(tmp_path, kind):
    import mcore_patches

    value, message = BROKEN[kind]
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('no license')\n")
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit('no GPU')\n")
    install(tmp_path, f"theirs = their_patches:THEIRS\n{kind} = {value}\n")
    row = mcore_patches.status()[kind]
    assert row.state is State.DISABLED
    assert message in row.reason
    assert "their-package 1.0" in row.reason
    assert mcore_patches.apply_patches(strict=True)[kind].state is State.DISABLED
    assert mcore_patches.apply_patches("theirs", strict=True)["theirs"].state is State.PENDING
    row = mcore_patches.apply_patches(kind)[kind]
    assert row.state is State.IMPORT_FAILED
    assert message in row.reason
    with pytest.raises(NotAppliedError, match=kind):
        mcore_patches.apply_patches(kind, strict=True)
    mcore_patches.revert()


@isolated()
def test_an_id_that_is_taken_is_listed_under_another_name(tmp_path):
    import mcore_patches

    install(
        tmp_path, "sparse_mla_nope = their_patches:CLASH\nagain = their_patches:THEIRS\ntheirs = their_patches:THEIRS\n"
    )
    rows = {row.id: row for row in without_builtin_ids()}
    assert set(rows) == {"sparse_mla_nope@their_patches:CLASH", "theirs", "theirs@their_patches:THEIRS"}
    assert "registers the id 'sparse_mla_nope', which is taken" in rows["sparse_mla_nope@their_patches:CLASH"].reason
    ours = mcore_patches.status()["sparse_mla_nope"]
    assert ours.source == "mcore_patches"


@isolated()
def test_two_entry_points_of_one_object_whose_id_is_taken_are_both_listed(tmp_path):
    install(tmp_path, "sparse_mla_nope = their_patches:CLASH\nwrong = their_patches:CLASH\n")
    ids = {row.id for row in without_builtin_ids()}
    assert ids == {"sparse_mla_nope@their_patches:CLASH", "sparse_mla_nope@wrong=their_patches:CLASH"}


@pytest.mark.parametrize("word", ["all", "off"])
@isolated()
def test_words_of_the_switch_are_no_ids(tmp_path, word):
    import mcore_patches

    install(tmp_path, f"{word} = does_not_exist:PATCH\n")
    (row,) = without_builtin_ids()
    assert row.id == f"{word}@does_not_exist:PATCH"
    assert "ModuleNotFoundError" in row.reason
    mcore_patches.status()


@isolated()
def test_a_distribution_whose_entry_points_cannot_be_read(tmp_path):
    install(tmp_path, "theirs = their_patches:THEIRS\n")
    distribution(tmp_path / "other", "unreadable", "[mcore_patches.patches]\nthis is no entry point\n")
    assert [row.id for row in without_builtin_ids()] == ["theirs"]


def test_two_built_in_patches_of_one_id():
    p = patch("same", target(None, known=None))
    with pytest.raises(OverlayError, match="two patches have the id 'same'"):
        Registry([entry(p), entry(p)])


@isolated()
def test_a_module_without_a_patch_in_the_package_of_patches(tmp_path):
    package = tmp_path / "their_collection"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "empty.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(OverlayError, match=r"their_collection\.empty has no PATCH"):
        Registry.discover("their_collection")


def test_the_order_is_that_of_the_modules_and_every_module_is_there():
    import importlib
    import pkgutil

    import mcore_patches.patches as package

    registry = Registry.discover("mcore_patches.patches")
    builtin = [e.patch for e in registry.entries.values() if e.builtin]
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    assert names
    assert builtin == [importlib.import_module(f"{package.__name__}.{name}").PATCH for name in names]
