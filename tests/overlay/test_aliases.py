"""Names that modules have imported, and references that no rebinding reaches."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import types

import pytest

from mcore_patches.overlay.patch import State
from tests.overlay.isolation import import_targets, isolated
from tests.overlay.stubs import OPS, OPS_TEXT, Records, engine_for, module, ops_tree, patch, target, times

FROM_IMPORTS = f"from {OPS} import f\nfrom {OPS} import f as renamed\n"


def module_of(root, name, text):
    """A module outside megatron."""
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def applied(engine, patch_id="tenfold"):
    row = engine.apply(strict=True)[patch_id]
    assert row.state is State.APPLIED
    return row.targets[0]


@isolated()
def test_from_imports_below_megatron_are_rebound_under_every_name_and_restored(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.user", FROM_IMPORTS).write("megatron.training", FROM_IMPORTS)
    engine = engine_for(patch("tenfold", target(tree)))
    ops, user, training = module(), module("megatron.core.user"), module("megatron.training")
    ops.also = ops.f
    upstream = ops.f
    row = applied(engine)
    assert row.rebound == (
        "megatron.core.ops.also",
        "megatron.core.user.f",
        "megatron.core.user.renamed",
        "megatron.training.f",
        "megatron.training.renamed",
    )
    assert row.unreachable == ()
    names = [ops.f, ops.also, user.f, user.renamed, training.f, training.renamed]
    assert {id(f) for f in names} == {id(ops.f)}
    assert user.f(1) == 20
    engine.revert()
    assert all(f is upstream for f in [ops.f, ops.also, user.f, user.renamed, training.f, training.renamed])


@pytest.mark.parametrize("prefixes", ["", "worker", "worker.inner, other", "worker."])
@isolated()
def test_other_modules_are_listed_unless_a_prefix_names_them(tmp_path, prefixes):
    import os

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    upstream = module().f
    worker = module_of(tmp_path, "worker.inner", FROM_IMPORTS)
    similar = module_of(tmp_path, "worker_two", FROM_IMPORTS)
    if prefixes:
        os.environ["MCORE_PATCHES_PREFIXES"] = prefixes
    row = applied(engine)
    listed = [text for text in row.unreachable if text.startswith("worker")]
    assert similar.f is upstream, "worker is no prefix of worker_two"
    assert all("MCORE_PATCHES_PREFIXES adds one" in text for text in listed)
    names = {text.split()[0] for text in listed}
    if prefixes:
        assert worker.renamed(1) == 20
        assert names == {"worker_two.f", "worker_two.renamed"}
        assert "worker.inner.f" in row.rebound
    else:
        assert worker.renamed is upstream
        assert names == {"worker.inner.f", "worker.inner.renamed", "worker_two.f", "worker_two.renamed"}
    engine.revert()
    assert worker.f is upstream


@isolated()
def test_names_that_keep_the_original_are_warned_of_once(tmp_path):
    """`from megatron... import f` in the script itself, above the call."""
    import __main__

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    __main__.renamed = module().f
    partials = [functools.partial(module().f, i) for i in range(9)]
    log = Records()
    applied(engine)
    engine.apply()
    (line,) = log.lines()
    assert line[0] == "WARNING"
    assert line[1].startswith("tenfold: in place, but not for __main__.renamed (its module is under no prefix")
    assert line[1].count("functools.partial over") == 1
    assert line[1].endswith("call apply_patches() before they are made")
    assert __main__.renamed(1) == partials[0]() + 1 == 2
    assert module().f(1) == 20


@isolated()
def test_a_long_list_of_names_that_keep_the_original_is_cut_in_the_warning(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    text = "".join(f"from {OPS} import f as f{i}\n" for i in range(8))
    module_of(tmp_path, "worker", text)
    log = Records()
    assert len(applied(engine).unreachable) == 8
    ((_, line),) = log.lines()
    assert line.count("worker.f") == 5
    assert " and 3 more; " in line


@isolated()
def test_what_was_imported_while_patched_goes_back_whatever_its_module(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    upstream = module().f
    applied(engine)
    worker = module_of(tmp_path, "worker", FROM_IMPORTS)
    main = types.ModuleType("made_by_hand")
    sys.modules["made_by_hand"] = main
    main.kept = module().f
    assert worker.f(1) == 20
    engine.revert("tenfold")
    assert (worker.f, worker.renamed, main.kept) == (upstream, upstream, upstream)


@isolated()
def test_names_follow_when_a_second_layer_comes_and_goes(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.user", FROM_IMPORTS)
    engine = engine_for(patch("tenfold", target(tree)), patch("upper", target(tree, build=times(3), level=1)))
    user = module("megatron.core.user")
    upstream = user.f
    engine.apply("tenfold")
    worker = module_of(tmp_path, "worker", FROM_IMPORTS)
    engine.apply("upper")
    assert (user.f(1), worker.renamed(1), module().f(1)) == (60, 60, 60)
    engine.revert("tenfold")
    assert (user.f(1), worker.renamed(1), module().f(1)) == (6, 6, 6)
    engine.revert("upper")
    assert user.f is worker.f is worker.renamed is upstream


HOLDERS = f"""\
import functools
import types

from {OPS} import f

partial = functools.partial(f, 1)
argument = functools.partial(map, f)
keyword = functools.partial(map, function=f)


def default(x, function=f):
    return function(x)


def keyword_default(x, *, function=f):
    return function(x)


def enclosing():
    inner = f

    def closure(x):
        return inner(x)

    return closure


closure = enclosing()
listed = [f, 0]
tabled = {{"name": f}}
paired = (f, 2)
grouped = frozenset({{f}})


class Holder:
    method = f

    def __init__(self):
        self.function = f


instance = Holder()


def attributed():
    pass


attributed.fallback = f


class Slotted:
    __slots__ = ("function",)


slotted = Slotted()
slotted.function = f
bound = types.MethodType(f, 5)
"""


@isolated()
def test_references_that_are_no_module_level_names_are_listed_once_each(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.holders", HOLDERS)
    engine = engine_for(patch("tenfold", target(tree)))
    holders = module("megatron.core.holders")
    row = applied(engine)
    assert row.rebound == ("megatron.core.holders.f",)
    name = "megatron.core.holders"
    assert set(row.unreachable) == {
        f"functools.partial over {OPS}.f",
        "argument of functools.partial over builtins.map",
        "argument 'function' of functools.partial over builtins.map",
        f"default argument of {name}.default",
        f"keyword default of {name}.keyword_default",
        f"closure of {name}.enclosing.<locals>.closure",
        "a list of 2 items",
        "a dict, under the key 'name'",
        "a tuple of 2 items",
        "a frozenset of 1 items",
        f"attribute 'method' of class {name}.Holder",
        f"attribute 'function' of an instance of {name}.Holder",
        f"attribute 'fallback' of function {name}.attributed",
        f"an instance of {name}.Slotted",
        "bound method of builtins.int",
    }
    assert holders.default(1) == 2
    assert holders.f(1) == 20


@isolated()
def test_the_engine_s_own_references_are_not_listed(tmp_path):
    """Layers below, helpers that build() defines, wrapped objects, and what a revert has left behind."""

    def build(below):
        call, kept = below.call, {"original": below.original}

        def helper(x):
            return 10 * call(x)

        partial = functools.partial(helper)

        def replacement(x, shortcut=below.original):
            return partial(x) if kept else shortcut(x)

        return replacement

    tree = ops_tree(tmp_path, METHOD)
    names = [f"{OPS}:f", f"{OPS}:C.static", f"{OPS}:C.method"]
    engine = engine_for(
        patch("first", *(target(tree, n, build) for n in names)),
        patch("second", *(target(tree, n, build, level=1) for n in names)),
    )
    module()
    for _ in range(3):
        engine.apply("first", strict=True)
        report = engine.apply("second", strict=True)
        assert [t.unreachable for row in report for t in row.targets] == [()] * 6
        engine.revert("first")
        report = engine.apply(strict=True)
        assert [t.unreachable for row in report for t in row.targets] == [()] * 6
        engine.revert()
    gc.collect()


METHOD = (
    OPS_TEXT
    + "\n\nclass C:\n    @staticmethod\n    def static(x):\n        return x\n\n    def method(x):\n        return x\n"
)


@isolated()
def test_hostile_objects_that_hold_the_original_are_described_and_not_asked(tmp_path):
    class Proxy:
        def __init__(self, function):
            object.__setattr__(self, "held", function)

        @property
        def __class__(self):
            raise RuntimeError("asked for its class")

        def __getattribute__(self, name):
            raise RuntimeError(f"asked for {name}")

    class Meta(type):
        @property
        def __module__(cls):
            raise RuntimeError("asked for its module")

    class Odd(metaclass=Meta):
        __slots__ = ("held",)

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    odd = Odd()
    odd.held = ops.f
    kept = [Proxy(ops.f), odd]
    row = applied(engine)
    assert any("Proxy" in text for text in row.unreachable)
    assert len(row.unreachable) == 2
    assert kept


@isolated("before-0.19.2")
def test_every_patch_s_report_on_the_installed_release_is_clean():
    """Nothing of torch, megatron or the overlay itself keeps an original that a rebinding does not reach."""
    import mcore_patches

    import_targets()
    report = mcore_patches.apply_patches(strict=True)
    assert [(row.id, t.name, t.unreachable) for row in report for t in row.targets if t.unreachable] == []
    mcore_patches.revert()
    report = mcore_patches.apply_patches(strict=True)
    assert [(row.id, t.name, t.unreachable) for row in report for t in row.targets if t.unreachable] == []


@isolated("before-0.19.2")
def test_signatures_of_every_patch_s_replacements_are_upstream_s():
    import mcore_patches

    def signatures():
        for row in mcore_patches.status():
            for t in row.targets:
                qualname = t.name.removesuffix("+fields").partition(":")[2]
                if t.name.endswith(("+fields", "+module")) or t.module is None:
                    continue
                obj = sys.modules[t.module]
                for part in qualname.split("."):
                    obj = vars(obj)[part]
                yield t.name, str(inspect.signature(obj))

    import_targets()
    before = dict(signatures())
    mcore_patches.apply_patches(strict=True)
    assert before
    assert dict(signatures()) == before
