"""Patches and the import system: hooks, reloads, second imports, shadowed and odd modules, other tools' patches."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types

import pytest

from mcore_patches.overlay.errors import NotAppliedError, NotRevertedError
from mcore_patches.overlay.patch import ConfigField, State
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, OPS_TEXT, Tree, engine_for, fields_target, module, ops_tree, patch, target, times

USER = "megatron.core.user"


def user_of_f(tree: Tree, name: str = USER) -> Tree:
    return tree.write(name, f"from {OPS} import f as renamed\n")


def state(engine, patch_id="tenfold"):
    return engine.status()[patch_id].state


# Reload, second import ------------------------------------------------------------------------------------------------


@isolated()
def test_reload_takes_the_patch_off_and_status_sees_it(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    engine.apply()
    importlib.reload(ops)
    assert ops.f(1) == 2
    assert state(engine) is State.NOT_APPLIED
    with pytest.raises(NotAppliedError):
        engine.require("tenfold")
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert ops.f(1) == 20


@isolated()
def test_revert_after_a_reload_reaches_aliases_of_the_older_replacement(tmp_path):
    tree = user_of_f(ops_tree(tmp_path))
    engine = engine_for(patch("tenfold", target(tree)))
    ops = module()
    before = ops.f
    engine.apply()
    user = module(USER)
    older = user.renamed
    assert older(1) == 20
    importlib.reload(ops)
    engine.apply()
    assert user.renamed is older, "the alias belongs to the older module contents and keeps them"
    engine.revert()
    assert user.renamed is before
    assert ops.f(1) == 2


@isolated()
def test_revert_without_reapplying_after_a_reload_reaches_them_too(tmp_path):
    tree = user_of_f(ops_tree(tmp_path))
    engine = engine_for(patch("tenfold", target(tree)), patch("second", target(tree, build=times(3))))
    ops = module()
    before = ops.f
    engine.apply()
    user = module(USER)
    importlib.reload(ops)
    engine.revert("tenfold")
    assert user.renamed(1) == 6, "the other layer stays on the older contents"
    engine.revert("second")
    assert user.renamed is before


@isolated()
def test_deleted_from_sys_modules_and_imported_again(tmp_path):
    tree = user_of_f(ops_tree(tmp_path))
    engine = engine_for(patch("tenfold", target(tree)))
    before = module().f
    engine.apply()
    user = module(USER)
    del sys.modules[OPS]
    assert state(engine) is State.NOT_APPLIED
    assert engine.status()["tenfold"].decision is State.PENDING
    fresh = module()
    assert fresh.f(1) == 2
    assert engine.apply()["tenfold"].state is State.APPLIED
    assert fresh.f(1) == 20
    assert user.renamed(1) == 20
    engine.revert()
    assert fresh.f(1) == 2
    assert user.renamed is before


@isolated()
def test_deleted_then_reverted_while_it_is_not_imported(tmp_path):
    tree = user_of_f(ops_tree(tmp_path))
    engine = engine_for(patch("tenfold", target(tree)))
    before = module().f
    engine.apply()
    user = module(USER)
    del sys.modules[OPS]
    engine.revert()
    assert user.renamed is before


METHODS = """

from dataclasses import dataclass


class C:
    @staticmethod
    def static(x):
        return x

    def method(self, x):
        return x


@dataclass
class Config:
    layers: int = 1
"""


@pytest.mark.parametrize("left_by", ["deletion", "reload", "both"])
@isolated()
def test_revert_reaches_a_module_that_has_left_sys_modules(tmp_path, left_by):
    tree = ops_tree(tmp_path, OPS_TEXT + METHODS)
    names = (f"{OPS}:f", f"{OPS}:C.static", f"{OPS}:C.method")
    fields = fields_target(ConfigField("speed", int, 3), module=OPS)
    engine = engine_for(
        patch("tenfold", *(target(tree, name) for name in names), fields), patch("second", target(tree, build=times(3)))
    )
    older = module()
    classes = older.C, older.Config
    before = older.f, vars(older.C)["static"], older.C.method
    engine.apply(strict=True)
    assert (older.f(1), older.C.static(1), older.Config(speed=1).speed) == (60, 10, 1)
    if left_by != "reload":
        del sys.modules[OPS]
        module()
    if left_by != "deletion":
        importlib.reload(module())
    engine.apply(strict=True)
    engine.revert("tenfold")
    assert older.f(1) == 6, "the other layer stays, on the older contents or the newer ones"
    engine.revert()
    assert "speed" not in classes[1].__dataclass_fields__
    if left_by != "reload":
        assert (older.f, vars(classes[0])["static"], classes[0].method) == before
    assert not hasattr(module().f, "__mcore_patches__")


@isolated()
def test_pending_after_a_deletion_is_applied_by_a_fresh_hook(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    engine.apply()
    assert module().f(1) == 20
    del sys.modules[OPS]
    assert engine.apply()["tenfold"].state is State.PENDING
    assert module().f(1) == 20


# Hooks ----------------------------------------------------------------------------------------------------------------


@isolated()
def test_a_target_that_its_module_deletes_again_does_not_loop_or_raise(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("tenfold", target(tree)))
    tree.write(OPS, OPS_TEXT + "\n\ndel f\n")
    assert engine.apply()["tenfold"].state is State.PENDING
    module()
    row = engine.status()["tenfold"]
    assert row.state is State.TARGET_ABSENT
    assert "is imported but has no f" in row.reason


@isolated()
def test_a_target_that_its_module_deletes_again_takes_the_patch_off_the_others(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree), target(tree, "megatron.core.late:f")))
    tree.write("megatron.core.late", OPS_TEXT + "\n\ndel f\n")
    ops = module()
    assert engine.apply()["tenfold"].state is State.PENDING
    assert ops.f(1) == 20
    module("megatron.core.late")
    assert ops.f(1) == 2, "at the import already, without another call"


@isolated()
def test_a_module_that_replaces_itself_in_sys_modules(tmp_path):
    tree = ops_tree(tmp_path)
    known = target(tree)
    tree.write(OPS, OPS_TEXT + "\n\nimport sys\n\nsys.modules[__name__] = object()\n")
    engine = engine_for(patch("tenfold", known))
    engine.apply()
    assert type(module()) is object
    row = engine.status()["tenfold"]
    assert row.state is State.TARGET_ABSENT
    assert "no source file" in row.reason


@isolated()
def test_an_object_with_a_file_in_place_of_the_module_is_no_target(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("tenfold", target(tree)))
    sys.modules[OPS] = types.SimpleNamespace(__file__=str(tree.path(OPS)))
    row = engine.apply()["tenfold"]
    assert row.state is State.TARGET_ABSENT
    assert "an object of types.SimpleNamespace as megatron.core.ops, not a module" in row.reason


@isolated()
def test_a_build_that_imports_the_target_of_another_pending_patch(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)

    def build(below):
        importlib.import_module("megatron.core.late")
        return times(10)(below)

    engine = engine_for(
        patch("tenfold", target(tree, build=build)),
        # Shares the first one's target, so that it would change it while that is being built.
        patch("waits", target(tree, build=times(3)), target(tree, "megatron.core.late:f", times(5))),
    )
    module()
    assert engine.apply("waits")["waits"].state is State.PENDING
    engine.apply(strict=True)
    assert {row.state for row in engine.status()} == {State.APPLIED}
    assert module().f(1) == 60
    assert module("megatron.core.late").f(1) == 10
    assert module().f.__mcore_patches__.ids == ("tenfold", "waits")


@pytest.mark.parametrize("pending", [True, False])
@isolated()
def test_a_build_that_imports_another_target_of_its_own_patch(tmp_path, pending):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)

    def build(below):
        importlib.import_module("megatron.core.late")
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(tree, build=build), target(tree, "megatron.core.late:f")))
    if pending:
        assert engine.apply()["tenfold"].state is State.PENDING
        module()
    else:
        module()
        assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert engine.status()["tenfold"].state is State.APPLIED
    assert (module().f(1), module("megatron.core.late").f(1)) == (20, 20)


@isolated()
def test_a_build_that_applies_patches_itself(tmp_path):
    """Importing whatever build() needs may run code that calls apply_patches(), as a worker's module does."""
    tree = ops_tree(tmp_path)

    def build(below):
        if not engine.status()["second"].targets[0].layers:
            engine.apply("second")
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(tree, build=build)), patch("second", target(tree, build=times(3))))
    ops = module()
    engine.apply("tenfold", strict=True)
    assert ops.f(1) == 60
    engine.revert("second")
    assert ops.f(1) == 20


@isolated()
def test_a_hook_waits_for_another_thread_and_the_import_returns_patched(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    building, go_on = threading.Event(), threading.Event()

    def slow(below):
        building.set()
        assert go_on.wait(30)
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(tree, build=slow)), patch("late", target(tree, "megatron.core.late:f")))
    module()
    engine.apply("late")
    applying = threading.Thread(target=engine.apply)
    applying.start()
    assert building.wait(30)
    results = []
    importing = threading.Thread(target=lambda: results.append(importlib.import_module("megatron.core.late").f(1)))
    importing.start()
    importing.join(0.2)
    assert importing.is_alive(), "it waits for the operation in the other thread"
    go_on.set()
    importing.join(30)
    applying.join(30)
    assert results == [20]


@isolated()
def test_a_hook_that_an_operation_waits_for_does_not_wait_forever(tmp_path):
    """Thread A builds a patch and waits for thread B's import, whose hook waits for A: B must give way."""
    import mcore_patches.overlay.engine as engine_module

    engine_module._HOOK_WAIT_SECONDS = 0.1
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    building, imported = threading.Event(), threading.Event()

    def waits_for_the_import(below):
        building.set()
        assert imported.wait(30), "the import in the other thread never came to its end"
        return times(10)(below)

    engine = engine_for(
        patch("tenfold", target(tree, build=waits_for_the_import)), patch("late", target(tree, "megatron.core.late:f"))
    )
    module()
    engine.apply("late")
    applying = threading.Thread(target=engine.apply, args=("tenfold",))
    applying.start()
    assert building.wait(30)
    importlib.import_module("megatron.core.late")
    imported.set()
    applying.join(30)
    assert {row.state for row in engine.status()} == {State.APPLIED}
    assert module("megatron.core.late").f(1) == 20, "whoever held the lock has seen to the module"


# Odd modules ----------------------------------------------------------------------------------------------------------


@isolated()
def test_a_package_attribute_that_shadows_the_submodule(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.__init__", f"import {OPS}\nops = 'not the module'\n")
    engine = engine_for(patch("tenfold", target(tree)))
    core = module("megatron.core")
    assert core.ops == "not the module"
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert sys.modules[OPS].f(1) == 20
    assert core.ops == "not the module"


@pytest.mark.parametrize("before_import", [True, False])
@isolated()
def test_a_target_below_namespace_packages(tmp_path, before_import):
    name = "megatron.core.variant.ops.kernels"
    tree = Tree(tmp_path).write(name, OPS_TEXT).use()
    engine = engine_for(patch("tenfold", target(tree, f"{name}:f")))
    if not before_import:
        module(name)
    engine.apply(strict=True)
    assert module(name).f(1) == 20
    assert getattr(module("megatron.core.variant"), "__file__", None) is None


@isolated()
def test_the_first_candidate_that_exists_is_taken(tmp_path):
    tree = ops_tree(tmp_path)
    moved = target(tree)
    moved = type(moved)(**{**vars(moved), "modules": ("megatron.core.elsewhere.ops", OPS)})
    engine = engine_for(patch("tenfold", moved))
    assert module().f(1) == 2
    row = engine.apply(strict=True)["tenfold"]
    assert row.state is State.APPLIED
    assert row.targets[0].module == OPS


@isolated()
def test_foreign_objects_in_sys_modules(tmp_path):
    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError(f"looked at {name}")

    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError(f"would import {name}")

    sys.modules["hostile"] = Hostile()
    sys.modules["megatron.core.lazy"] = Lazy("megatron.core.lazy")
    sys.modules["blocked"] = None
    sys.modules[5] = odd = types.ModuleType("odd")
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    odd.f = module().f
    row = engine.apply(strict=True)["tenfold"]
    assert row.state is State.APPLIED
    assert [text.split(" ")[0] for text in row.targets[0].unreachable] == ["sys.modules[5].f"]
    engine.revert()


@isolated()
def test_megatron_inside_a_zip_archive(tmp_path):
    import zipfile

    tree = Tree(tmp_path / "tree").write(OPS, OPS_TEXT)
    with zipfile.ZipFile(tmp_path / "megatron.zip", "w") as archive:
        for path in sorted(tree.root.rglob("*")):  # entries of folders too: zipimport wants them for namespaces
            archive.write(path, path.relative_to(tree.root))
    sys.path.insert(0, str(tmp_path / "megatron.zip"))
    engine = engine_for(patch("tenfold", target(tree)))
    report = engine.status()
    assert report.megatron["text"] == "0.19.2"
    assert (report["tenfold"].state, report["tenfold"].decision) == (State.NOT_APPLIED, State.PENDING)
    assert report["tenfold"].targets[0].before == f"{tmp_path}/megatron.zip/megatron/core/ops.py:1"
    assert module().f(1) == 2
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert module().f(1) == 20
    engine.revert()
    module().__file__ = f"{tmp_path}/megatron.zip/megatron/core/gone.py"
    row = engine.apply()["tenfold"]
    assert row.state is State.IMPORT_FAILED
    assert row.reason.startswith(f"{module().__file__}: cannot be read: ")


@isolated()
def test_a_lazily_loaded_user_module_is_not_loaded_by_looking_for_aliases(tmp_path):
    import importlib.util

    tree = ops_tree(tmp_path).write(USER, "raise RuntimeError('was loaded')\n")
    spec = importlib.util.find_spec(USER)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    sys.modules[USER] = lazy
    spec.loader.exec_module(lazy)
    engine = engine_for(patch("tenfold", target(tree)))
    module()
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED


# Other tools ----------------------------------------------------------------------------------------------------------


def monkey_patch(ops, *, wraps):
    original = ops.f
    decorate = functools.wraps(original) if wraps else lambda function: function

    @decorate
    def theirs(x):
        return original(x) + 1000

    ops.f = theirs
    return theirs


@pytest.mark.parametrize("wraps", [True, False])
@isolated()
def test_another_tool_was_there_first(tmp_path, wraps):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    theirs = monkey_patch(ops, wraps=wraps)
    row = engine.apply()["tenfold"]
    assert row.state is State.CONFLICT
    assert "test_imports.py" in row.reason, "it says where the other function is"
    assert ops.f is theirs
    with pytest.raises(NotAppliedError, match="CONFLICT"):
        engine.apply(strict=True, force="tenfold")
    assert ops.f is theirs


@isolated()
def test_another_tool_changed_what_the_replacement_relies_on(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path), relies_on=("g",))))
    ops = module()
    ops.g = lambda x: x
    row = engine.apply()["tenfold"]
    assert row.state is State.CONFLICT
    assert "the live g is a function at" in row.reason


@isolated()
def test_a_patch_of_ours_on_what_another_relies_on_is_no_conflict(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("on_g", target(tree, f"{OPS}:g")), patch("tenfold", target(tree, relies_on=("g",))))
    module()
    assert [row.state for row in engine.apply(strict=True)] == [State.APPLIED, State.APPLIED]


@isolated()
def test_another_tool_wraps_the_replacement(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("tenfold", target(tree)), patch("second", target(tree, build=times(3))))
    ops = module()
    engine.apply("tenfold")
    ours = ops.f
    theirs = ops.kept_by_them = monkey_patch(ops, wraps=True)
    row = engine.status()["tenfold"]
    assert row.state is State.APPLIED, "functools.wraps copied our mark, but the layer below is ours still"
    assert "wraps the patched f" in row.reason
    assert engine.apply("second")["second"].state is State.CONFLICT
    with pytest.raises(NotRevertedError, match=r"tenfold stays in place: .*undo that first"):
        engine.revert()
    assert ops.f is theirs
    ops.f = ours
    assert engine.revert()["tenfold"].state is State.NOT_APPLIED
    assert ops.f(1) == 2
    assert ops.kept_by_them is theirs, "it has a copy of our mark, and is theirs all the same"


@isolated()
def test_another_tool_replaces_the_replacement(tmp_path):
    tree = user_of_f(ops_tree(tmp_path))
    engine = engine_for(patch("tenfold", target(tree)))
    ops = module()
    before = ops.f
    user = module(USER)
    engine.apply()
    theirs = monkey_patch(ops, wraps=False)
    assert state(engine) is State.CONFLICT
    engine.revert()
    assert ops.f is theirs
    assert user.renamed is before, "aliases of ours go back all the same"


DECORATED = """\
import functools


def twice(function):
    @functools.wraps(function)
    def wrapper(x):
        return 2 * function(x)

    return wrapper


@twice
def f(x):
    return x + 1


def h(x):
    return x + 1


h = twice(h)


@functools.lru_cache
def cached(x):
    return x + 1
"""


@pytest.mark.parametrize(("name", "value"), [("f", 40), ("h", 40), ("cached", 20)])
@isolated()
def test_upstream_s_own_decorators_are_no_conflict(tmp_path, name, value):
    tree = ops_tree(tmp_path, DECORATED)
    engine = engine_for(patch("tenfold", target(tree, f"{OPS}:{name}")))
    ops = module()
    before = getattr(ops, name)
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert getattr(ops, name)(1) == value
    engine.revert()
    assert getattr(ops, name) is before


@isolated()
def test_tracing_and_monitoring_do_not_make_upstream_s_code_look_foreign(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    tool = sys.monitoring.DEBUGGER_ID
    sys.monitoring.use_tool_id(tool, "test")
    sys.monitoring.register_callback(tool, sys.monitoring.events.LINE, lambda code, line: None)
    sys.monitoring.set_local_events(tool, ops.f.__code__, sys.monitoring.events.LINE)
    for _ in range(5000):
        ops.f(1)
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED


@isolated()
def test_the_file_changed_after_the_import(tmp_path):
    tree = ops_tree(tmp_path, OPS_TEXT.replace("x + 1", "x + 7"))
    ops = module()
    tree.write(OPS, OPS_TEXT)
    row = engine_for(patch("tenfold", target(tree))).apply()["tenfold"]
    assert row.state is State.CONFLICT
    assert "the file was replaced after the import" in row.reason
    assert ops.f(1) == 8


@isolated()
def test_code_exec_d_under_upstream_s_file_name_does_not_pass_for_upstream_s(tmp_path):
    tree = ops_tree(tmp_path)
    ops = module()
    text = OPS_TEXT.replace("x + 1", "x + 7")
    exec(compile(text, ops.__file__, "exec"), vars(ops))
    assert engine_for(patch("tenfold", target(tree))).apply()["tenfold"].state is State.CONFLICT
    assert ops.f(1) == 8


@isolated()
def test_a_second_engine_sees_and_takes_off_what_the_first_put_on(tmp_path):
    """As after a reload of mcore_patches: no flag is left, the live object tells."""
    p = patch("tenfold", target(ops_tree(tmp_path)))
    first, second = engine_for(p), engine_for(p)
    ops = module()
    first.apply()
    assert ops.f(1) == 20
    assert second.apply()["tenfold"].state is State.ALREADY_APPLIED
    assert second.status()["tenfold"].counters["calls"] == 1, "the counters are those of the live layer"
    second.revert()
    assert ops.f(1) == 2
    assert state(first) is State.NOT_APPLIED
