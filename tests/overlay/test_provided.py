"""Modules that a patch provides: where the release has none, where it has another, before and after its import."""

from __future__ import annotations

import importlib
import pickle
import sys

import pytest

from mcore_patches.overlay.errors import NotAppliedError
from mcore_patches.overlay.patch import ModuleTarget, State
from mcore_patches.overlay.preflight import diagnose
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, engine_for, module, ops_tree, patch, provided_target, target

EXTRA = "megatron.core.extra"
OURS = "class Thing:\n    ours = True\n\n\nlimit = 5\n"
THEIRS = "class Thing:\n    ours = False\n\n    def call(self):\n        return 1\n\n\nlimit = 3\nother = 7\n"
EDITED = THEIRS.replace("return 1", "return 2")


def tree_with_provider(root, text=None, **version):
    tree = ops_tree(root, **version)
    (root / "acme_extra.py").write_text(OURS)
    if text is not None:
        tree.write(EXTRA, text)
    importlib.invalidate_caches()
    return tree


@isolated()
def test_a_module_that_the_release_lacks(tmp_path):
    tree_with_provider(tmp_path)
    engine = engine_for(patch("extra", provided_target()))
    row = engine.status()["extra"]
    assert (row.state, row.decision, row.targets[0].before) == (State.NOT_APPLIED, State.APPLIED, "no such module")
    with pytest.raises(ModuleNotFoundError):
        module(EXTRA)
    assert engine.apply(strict=True)["extra"].state is State.APPLIED
    assert not {"acme_extra", EXTRA} & set(sys.modules), "nothing is imported before it is asked for"
    assert engine.apply()["extra"].state is State.ALREADY_APPLIED
    extra = module(EXTRA)
    from megatron.core import extra as by_attribute

    assert by_attribute is extra
    assert (extra.Thing.ours, extra.limit, extra.__all__) == (True, 5, ["Thing", "limit"])
    assert pickle.loads(pickle.dumps(extra.Thing)) is extra.Thing
    row = engine.require("extra")
    assert (row.state, row.targets[0].after, row.targets[0].layers) == (State.APPLIED, "acme_extra", ("extra",))
    assert engine.revert("extra")["extra"].state is State.NOT_APPLIED
    assert not hasattr(sys.modules["megatron.core"], "extra")
    assert not any(type(finder).__name__ == "ProvidedFinder" for finder in sys.meta_path)
    with pytest.raises(ModuleNotFoundError):
        module(EXTRA)
    engine.apply(strict=True)
    assert module(EXTRA).Thing.ours
    engine.revert()


@isolated()
def test_the_doctor_does_not_miss_it(tmp_path):
    tree_with_provider(tmp_path)
    engine = engine_for(patch("extra", provided_target()))
    for done in ("not applied", "applied"):
        checks = [check for check in diagnose(engine).checks if check.name == "extra"]
        assert [check.level for check in checks] == ["ok"], (done, checks)
        engine.apply(strict=True)
    engine.revert()


@isolated()
def test_a_module_of_upstreams_not_imported_yet(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    tree.write("megatron.core.user", f"from {EXTRA} import Thing as Alias\n")
    engine = engine_for(patch("extra", provided_target(tree=tree)))
    engine.apply(strict=True)
    user = module("megatron.core.user")
    assert user.Alias is module(EXTRA).Thing is module("acme_extra").Thing
    assert not hasattr(module(EXTRA), "other"), "only what the patch names"
    engine.revert()
    assert module(EXTRA).Thing.ours is False
    assert module(EXTRA).other == 7
    assert user.Alias is module(EXTRA).Thing
    assert module("acme_extra").Thing.ours, "the provider keeps its own"


@isolated()
def test_a_module_of_upstreams_that_is_imported(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    tree.write("megatron.core.user", f"from {EXTRA} import Thing as Alias\n")
    extra, user = module(EXTRA), module("megatron.core.user")
    theirs = extra.Thing
    engine = engine_for(patch("extra", provided_target(EXTRA, "Thing", "added", tree=None)))
    (tmp_path / "acme_extra.py").write_text(OURS + "added = 9\n")
    assert engine.apply()["extra"].state is State.DRIFTED, "'added' is not in upstream's text"
    engine = engine_for(patch("extra", provided_target(tree=tree)))
    for _ in range(3):
        engine.apply(strict=True)
        assert extra is module(EXTRA)
        assert (extra.Thing.ours, extra.limit, extra.other) == (True, 5, 7)
        assert user.Alias is extra.Thing
        assert engine.status()["extra"].state is State.APPLIED
        engine.revert()
        assert (extra.Thing, extra.limit, user.Alias) == (theirs, 3, theirs)


@isolated()
def test_reload_gives_what_is_provided(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    extra = module(EXTRA)
    engine = engine_for(patch("extra", provided_target(tree=tree)))
    engine.apply(strict=True)
    importlib.reload(extra)
    assert extra.Thing.ours
    assert engine.status()["extra"].state is State.APPLIED
    engine.revert()
    assert module(EXTRA).Thing.ours is False


@isolated()
def test_text_that_is_not_known_is_left_alone(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    known = provided_target(tree=tree)
    tree.write(EXTRA, EDITED)
    row = engine_for(patch("extra", known)).apply()["extra"]
    assert row.state is State.DRIFTED
    assert "Thing" in row.reason
    assert module(EXTRA).Thing.ours is False
    assert engine_for(patch("extra", known)).apply(force="extra")["extra"].state is State.APPLIED
    assert module(EXTRA).Thing.ours
    fixed = ModuleTarget(
        modules=known.modules,
        provider=known.provider,
        names=known.names,
        known={provided_target(tree=tree).known.copy().popitem()[0]: "fixed"},
    )
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ProvidedFinder"]
    del sys.modules[EXTRA]
    assert engine_for(patch("extra", fixed)).apply()["extra"].state is State.UPSTREAM_FIXED


@isolated()
def test_another_tool_changed_it(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    extra = module(EXTRA)
    extra.Thing.call = lambda self: 3
    row = engine_for(patch("extra", provided_target(tree=tree))).apply()["extra"]
    assert row.state is State.CONFLICT
    assert extra.Thing.ours is False


@isolated()
def test_somebody_puts_upstreams_back(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    extra = module(EXTRA)
    theirs = extra.Thing
    engine = engine_for(patch("extra", provided_target(tree=tree)))
    engine.apply(strict=True)
    extra.Thing = theirs
    assert engine.status()["extra"].state is State.NOT_APPLIED, "the live module is asked, not a flag"
    engine.apply(strict=True)
    assert extra.Thing.ours
    engine.revert()
    assert extra.Thing is theirs


@isolated()
def test_two_patches_cannot_provide_one_module(tmp_path):
    tree_with_provider(tmp_path)
    engine = engine_for(patch("one", provided_target()), patch("two", provided_target()))
    report = engine.apply()
    assert report["one"].state is State.APPLIED
    assert report["two"].state is State.CONFLICT
    assert "the patches one, two all provide megatron.core.extra" in report["two"].reason
    engine.revert()


@isolated()
def test_a_provider_that_fails_changes_nothing(tmp_path):
    tree = tree_with_provider(tmp_path, THEIRS)
    (tmp_path / "acme_extra.py").write_text("raise ImportError('no kernels')\n")
    extra = module(EXTRA)
    engine = engine_for(patch("extra", provided_target(tree=tree)))
    with pytest.raises(NotAppliedError, match=r"IMPORT_FAILED.*no kernels"):
        engine.apply(strict=True)
    assert extra.Thing.ours is False
    # Not imported yet: the error comes where the module is asked for.
    del sys.modules[EXTRA]
    engine.apply(strict=True)
    with pytest.raises(ImportError, match="no kernels"):
        module(EXTRA)
    engine.revert()
    assert module(EXTRA).Thing.ours is False


@isolated()
def test_the_whole_patch_or_nothing(tmp_path):
    tree = tree_with_provider(tmp_path)

    def failing(below):
        raise RuntimeError("cannot build")

    engine = engine_for(patch("extra", provided_target(), target(tree, build=failing)))
    module(OPS)
    assert engine.apply()["extra"].state is State.CONFLICT
    with pytest.raises(ModuleNotFoundError):
        module(EXTRA)


@isolated()
def test_absent_package_and_range(tmp_path):
    tree_with_provider(tmp_path, version="0.18.0")
    engine = engine_for(patch("extra", provided_target("megatron.core.sub.extra")), patch("older", provided_target()))
    report = engine.apply()
    assert report["extra"].state is State.OUT_OF_RANGE
    # Known text overrules the range, and a release without the module is known to need it.
    assert report["older"].state is State.APPLIED
    engine.revert()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": ("a", "b")}, "allowed is a tuple of one name"),
        ({"names": ()}, "allowed is a tuple of names, each once"),
        ({"names": ("f", "f")}, "allowed is a tuple of names, each once"),
        ({"names": ("A.f",)}, "names holds 'A.f'; allowed are identifiers"),
        ({"provider": "no module"}, "provider is 'no module'; allowed is a dotted name"),
        ({"known": {"abc": "needs"}}, "allowed are 64 hexadecimal digits"),
    ],
)
def test_descriptors_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        patch("extra", ModuleTarget(**{"modules": ("m",), "provider": "acme", "names": ("f",), **changes}))


def test_name():
    assert provided_target().name == "megatron.core.extra:Thing, limit+module"
