"""apply_patches() while a target's import is under way, in another thread or in a caller of ours.

The rule: a target counts from the end of its module's code. Until then the state is PENDING, and the patch is in place
when the import statement returns, also of a second try after a failure.
"""

from __future__ import annotations

import importlib.machinery
import random
import sys
import threading
import time

import pytest

from mcore_patches.overlay.errors import NotAppliedError
from mcore_patches.overlay.patch import ConfigField, Finding, State
from tests.overlay import stubs
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, OPS_TEXT, engine_for, fields_target, module, ops_tree, patch, target, times

LATE = "megatron.core.late"
FIRST = "def f(x):\n    return -1\n\n\n"


class Pauses:
    """Stops of a module's code: it reaches one, and goes on when it is told to."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.go_on.wait(30), "nobody let the import go on"


def paused_tree(root, before="", after=OPS_TEXT):
    """A stub whose target module stops between `before` and `after`."""
    pause = stubs.pause = Pauses()
    text = f"import tests.overlay.stubs as stubs\n\n\n{before}stubs.pause()\n\n\n{after}"
    return ops_tree(root, text), pause


class Importing(threading.Thread):
    """Imports a module; keeps what the importing thread gets from f(1) right after, or the error."""

    def __init__(self, name=OPS):
        super().__init__(daemon=True)
        self.module_name, self.value, self.error = name, None, None
        self.start()

    def run(self):
        try:
            self.value = importlib.import_module(self.module_name).f(1)
        except Exception as error:
            self.error = error

    def finish(self):
        self.join(30)
        assert not self.is_alive(), "the import hangs"
        return self.value


def state(engine, patch_id="tenfold"):
    return engine.status()[patch_id].state


# In another thread ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("before", ["", FIRST, OPS_TEXT], ids=["undefined", "other-text", "same-text"])
@isolated()
def test_a_target_that_is_defined_again_later(tmp_path, before, strict):
    tree, pause = paused_tree(tmp_path, before)
    engine = engine_for(patch("tenfold", target(tree)))
    importing = Importing()
    assert pause.reached.wait(30)
    seen = vars(sys.modules[OPS]).get("f")
    for row in (engine.apply(strict=strict)["tenfold"], engine.status()["tenfold"]):
        assert row.state is State.PENDING
        assert row.reason == f"waits for the import of {OPS} (under way)"
    assert vars(sys.modules[OPS]).get("f") is seen, "nothing is changed in the middle of the module's code"
    pause.go_on.set()
    assert importing.finish() == 20, "the importing thread never sees it unpatched"
    assert state(engine) is State.APPLIED
    assert engine.apply(strict=strict)["tenfold"].state is State.ALREADY_APPLIED
    assert engine.require("tenfold").state is State.APPLIED
    engine.revert()
    assert module().f(1) == 2


@isolated()
def test_a_dry_run_says_pending(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree)))
    importing = Importing()
    assert pause.reached.wait(30)
    row = engine.apply(dry_run=True)["tenfold"]
    assert (row.state, row.decision) == (State.NOT_APPLIED, State.PENDING)
    pause.go_on.set()
    assert importing.finish() == 2


FAILING = f"{OPS_TEXT}\n\nif stubs.failures:\n    stubs.failures -= 1\n    raise OSError('at the end')\n"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("failures", [1, 2])
@isolated()
def test_an_import_that_fails_and_is_tried_again(tmp_path, failures, strict):
    tree, pause = paused_tree(tmp_path, OPS_TEXT, FAILING)
    engine = engine_for(patch("tenfold", target(tree)))
    stubs.failures = failures
    importing = Importing()
    assert pause.reached.wait(30)
    assert engine.apply(strict=strict)["tenfold"].state is State.PENDING
    pause.go_on.set()
    importing.finish()
    assert isinstance(importing.error, OSError)
    row = engine.status()["tenfold"]
    assert (row.state, row.reason) == (State.PENDING, f"waits for the import of {OPS}")
    for _ in range(failures - 1):
        with pytest.raises(OSError, match="at the end"):
            module()
        assert state(engine) is State.PENDING
    assert module().f(1) == 20, "without another call"
    assert state(engine) is State.APPLIED


@isolated()
def test_a_thread_that_waits_for_an_import_that_fails_tries_again_and_finds_it_patched(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT, FAILING)
    engine = engine_for(patch("tenfold", target(tree)))
    stubs.failures = 1
    first = Importing()
    assert pause.reached.wait(30)
    second = Importing()
    engine.apply(strict=True)
    pause.go_on.set()
    assert (first.finish(), second.finish()) == (None, 20)
    assert state(engine) is State.APPLIED


@isolated()
def test_applied_before_the_import_that_fails(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT, FAILING)
    engine = engine_for(patch("tenfold", target(tree)))
    stubs.failures = 2
    pause.go_on.set()
    assert engine.apply(strict=True)["tenfold"].state is State.PENDING
    for _ in range(2):
        with pytest.raises(OSError, match="at the end"):
            module()
        assert state(engine) is State.PENDING
    assert module().f(1) == 20


@isolated()
def test_reverted_before_the_import_ends(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree)))
    importing = Importing()
    assert pause.reached.wait(30)
    engine.apply(strict=True)
    assert engine.revert()["tenfold"].decision is State.PENDING
    pause.go_on.set()
    assert importing.finish() == 2
    assert state(engine) is State.NOT_APPLIED


@isolated()
def test_one_target_is_there_and_the_other_under_way(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT)
    tree.write(LATE, OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree), target(tree, f"{LATE}:f")))
    late = module(LATE)
    importing = Importing()
    assert pause.reached.wait(30)
    row = engine.apply(strict=True)["tenfold"]
    assert row.state is State.PENDING
    assert "in place on f only" in row.reason
    assert late.f(1) == 20
    pause.go_on.set()
    assert importing.finish() == 20
    assert state(engine) is State.APPLIED


@isolated()
def test_fields_of_a_dataclass_that_is_defined_again(tmp_path):
    cls = "@dataclass\nclass Config:\n    layers: int = 1\n\n\ndef f(x):\n    return Config(speed=4).speed\n\n\n"
    _, pause = paused_tree(tmp_path, f"from dataclasses import dataclass\n\n\n{cls}", cls)
    engine = engine_for(patch("tenfold", fields_target(ConfigField("speed", int, 3), module=OPS)))
    importing = Importing()
    assert pause.reached.wait(30)
    assert engine.apply(strict=True)["tenfold"].state is State.PENDING
    pause.go_on.set()
    assert importing.finish() == 4
    assert state(engine) is State.APPLIED


class SlowLoader(importlib.machinery.SourceFileLoader):
    """Stops an import when the finders have been asked and the module is not in sys.modules yet."""

    pause = Pauses()

    def create_module(self, spec):
        if spec.name == OPS and not self.pause.reached.is_set():
            self.pause()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if name == OPS and spec:
            spec.loader = cls(name, spec.origin)
        return spec


@pytest.mark.parametrize("outcome", ["succeeds", "fails"])
@isolated()
def test_an_import_that_is_past_the_hook_s_finder_but_not_in_sys_modules(tmp_path, outcome):
    """The finder of post-import hooks is asked before the hook is there, so that hook sees nothing of this import."""
    tree, body = paused_tree(tmp_path, OPS_TEXT, FAILING)
    body.go_on.set()
    stubs.failures = int(outcome == "fails")
    sys.meta_path.insert(0, SlowLoader)
    engine = engine_for(patch("tenfold", target(tree)))
    importing = Importing()
    assert SlowLoader.pause.reached.wait(30)
    row = engine.apply(strict=True)["tenfold"]
    assert (row.state, row.reason) == (State.PENDING, f"waits for the import of {OPS}")
    SlowLoader.pause.go_on.set()
    importing.finish()
    if outcome == "fails":
        assert isinstance(importing.error, OSError)
        assert module().f(1) == 20
    else:
        assert importing.value == 20
    assert state(engine) is State.APPLIED


@isolated()
def test_an_operation_that_waits_for_the_import_and_an_import_that_waits_for_the_operation(tmp_path):
    """Thread A is in the middle of an import, and thread B's build() needs that module while B holds the engine."""
    import mcore_patches.overlay.engine as engine_module

    engine_module._HOOK_WAIT_SECONDS = 0.1
    tree, pause = paused_tree(tmp_path, OPS_TEXT)
    tree.write(LATE, OPS_TEXT)
    building = threading.Event()

    def imports_it(below):
        building.set()
        importlib.import_module(OPS)
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(tree)), patch("late", target(tree, f"{LATE}:f", imports_it)))
    module(LATE)
    importing = Importing()
    assert pause.reached.wait(30)
    assert engine.apply("tenfold", strict=True)["tenfold"].state is State.PENDING
    applying = threading.Thread(target=engine.apply)
    applying.start()
    assert building.wait(30)
    pause.go_on.set()
    importing.finish()
    applying.join(30)
    assert not applying.is_alive()
    assert {row.state for row in engine.status()} == {State.APPLIED}
    assert (module().f(1), module(LATE).f(1)) == (20, 20)


@isolated()
def test_requiring_a_patch_waits_for_the_import_in_the_other_thread(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree)))
    importing = Importing()
    assert pause.reached.wait(30)
    engine.apply()
    rows = []
    requiring = threading.Thread(target=lambda: rows.append(engine.require("tenfold")))
    requiring.start()
    requiring.join(0.2)
    assert requiring.is_alive()
    pause.go_on.set()
    requiring.join(30)
    assert rows[0].state is State.APPLIED
    assert importing.finish() == 20


@isolated()
def test_text_that_a_probe_decides_waits_for_the_import_in_the_other_thread(tmp_path):
    tree, pause = paused_tree(tmp_path, OPS_TEXT)
    fixed = patch("tenfold", target(tree, known=None), probe=lambda probing: Finding(True, "it is fixed"))
    engine = engine_for(fixed)
    importing = Importing()
    assert pause.reached.wait(30)
    rows = []
    applying = threading.Thread(target=lambda: rows.append(engine.apply(strict=True)["tenfold"]))
    applying.start()
    pause.go_on.set()
    applying.join(30)
    assert rows[0].state is State.UPSTREAM_FIXED
    assert importing.finish() == 2


@isolated()
def test_at_any_moment_of_an_import(tmp_path):
    """Imports that fail at times, and calls in two other threads, as they happen to fall.

    All three threads wait first, so that on any machine some calls come before the import and some after it.
    """
    sys.setswitchinterval(1e-5)
    rng = random.Random(0)
    text = f"import time\n{OPS_TEXT}\ntime.sleep(stubs_time)\n{OPS_TEXT}\nif next(stubs_fail):\n    raise OSError\n"
    text = "from tests.overlay.stubs import stubs_time, stubs_fail\n" + text
    tree = ops_tree(tmp_path, text)
    seen = set()
    for _ in range(100):
        sys.modules.pop(OPS, None)
        stubs.stubs_time = rng.choice([0, 0, 1e-4])
        stubs.stubs_fail = iter([True] * rng.choice([0, 0, 1, 2]) + [False] * 9)
        engine = engine_for(patch("tenfold", target(tree)))

        begin = threading.Barrier(3)
        delays = [rng.random() * 1e-3 for _ in range(3)]

        def import_it(begin=begin, delays=delays):
            begin.wait(30)
            time.sleep(delays.pop())
            while True:
                try:
                    return importlib.import_module(OPS).f(1)
                except OSError:
                    continue

        def apply_it(engine=engine, begin=begin, delays=delays):
            begin.wait(30)
            time.sleep(delays.pop())
            seen.add(engine.apply(strict=True)["tenfold"].state)

        threads = [threading.Thread(target=t) for t in (import_it, apply_it, apply_it)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert module().f(1) == 20
        assert state(engine) is State.APPLIED
        engine.revert()
    assert seen >= {State.PENDING, State.APPLIED}


# In a caller of ours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("before", ["", FIRST, OPS_TEXT], ids=["undefined", "other-text", "same-text"])
@isolated()
def test_from_within_the_target_s_own_import(tmp_path, before, strict):
    text = f"import tests.overlay.stubs as stubs\n\n\n{before}stubs.rows = stubs.calls()\n\n\n{OPS_TEXT}"
    tree = ops_tree(tmp_path, text)
    engine = engine_for(patch("tenfold", target(tree)))

    def calls():
        rows = [engine.apply(strict=strict)["tenfold"], engine.status()["tenfold"]]
        with pytest.raises(NotAppliedError, match="is PENDING: waits for the import of"):
            engine.require("tenfold")
        return rows

    stubs.calls = calls
    assert module().f(1) == 20
    assert [row.state for row in stubs.rows] == [State.PENDING] * 2
    assert state(engine) is State.APPLIED


@isolated()
def test_from_a_module_that_the_target_imports_and_that_imports_the_target(tmp_path):
    """The caller's own name for the function is changed as well when the import has ended."""
    user = f"import tests.overlay.stubs as stubs\nfrom {OPS} import f\n\nstubs.row = stubs.engine.apply(strict=True)\n"
    tree = ops_tree(tmp_path, f"{OPS_TEXT}\n\nimport {LATE}\n").write(LATE, user)
    engine = stubs.engine = engine_for(patch("tenfold", target(tree)))
    ops = module()
    assert stubs.row["tenfold"].state is State.PENDING
    assert state(engine) is State.APPLIED
    assert sys.modules[LATE].f is ops.f
    assert ops.f(1) == 20


@pytest.mark.parametrize("imports", ["", f"import {OPS}\n"], ids=["before", "around"])
@isolated()
def test_from_within_the_import_of_the_target_s_package(tmp_path, imports):
    call = "import tests.overlay.stubs as stubs\nstubs.row = stubs.engine.apply(strict=True)['tenfold']\n"
    tree = ops_tree(tmp_path).write("megatron.core.__init__", call + imports)
    engine = stubs.engine = engine_for(patch("tenfold", target(tree)))
    assert module().f(1) == 20
    assert stubs.row.state is State.PENDING
    assert state(engine) is State.APPLIED


@isolated()
def test_text_that_a_probe_decides_cannot_be_decided_before_the_import_ends(tmp_path):
    text = f"import tests.overlay.stubs as stubs\nstubs.row = stubs.engine.apply()['tenfold']\n\n\n{OPS_TEXT}"
    tree = ops_tree(tmp_path, text)
    fixed = patch("tenfold", target(tree, known=None), probe=lambda probing: Finding(True, "it is fixed"))
    stubs.engine = engine_for(fixed)
    module()
    assert stubs.row.state is State.DRIFTED
    assert f"no probe ran, for the import of {OPS} has not ended" in stubs.row.reason
    assert stubs.engine.apply(strict=True)["tenfold"].state is State.UPSTREAM_FIXED


# Between the end of the module's code and that of its import ----------------------------------------------------------


@isolated()
def test_another_tool_s_hook_behind_ours_finds_the_patch_in_place(tmp_path):
    import wrapt

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    engine.apply()
    seen = []

    def theirs(ops):
        seen.extend([engine.require("tenfold").state, state(engine), engine.apply(strict=True)["tenfold"].state])
        seen.append(ops.f(1))

    wrapt.register_post_import_hook(theirs, OPS)
    assert module().f(1) == 20
    assert seen == [State.APPLIED, State.APPLIED, State.APPLIED, 20]
    assert engine.apply(strict=True)["tenfold"].state is State.ALREADY_APPLIED


@isolated()
def test_another_tool_s_hook_behind_ours_fails_and_the_import_is_tried_again(tmp_path):
    import wrapt

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    engine.apply(strict=True)
    seen = []

    def theirs(ops):
        seen.append(engine.require("tenfold").state)
        raise OSError("theirs")

    wrapt.register_post_import_hook(theirs, OPS)
    with pytest.raises(OSError, match="theirs"):
        module()
    assert seen == [State.APPLIED]
    assert state(engine) is State.PENDING
    assert module().f(1) == 20
    assert state(engine) is State.APPLIED


@isolated()
def test_without_wrapt_nothing_is_changed(tmp_path):
    tree = ops_tree(tmp_path).write(LATE, OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree), target(tree, f"{LATE}:f")))
    ops = module()
    sys.modules["wrapt"] = None
    row = engine.apply()["tenfold"]
    assert row.state is State.IMPORT_FAILED
    assert "import of wrapt halted" in row.reason
    assert (ops.f(1), module(LATE).f(1)) == (2, 2)
