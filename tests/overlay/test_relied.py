"""Names in other modules that a replacement relies on: their text, and the live objects of that text."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest

from mcore_patches.overlay.errors import NotAppliedError
from mcore_patches.overlay.patch import ConfigField, State
from mcore_patches.overlay.registry import Registry
from mcore_patches.overlay.sites import Site
from mcore_patches.overlay.wheels import wheel_fingerprints
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, OPS_TEXT, Tree, engine_for, entry, fields_target, module, ops_tree, patch, target
from tests.overlay.test_wheels import wheel

KERNEL = "megatron.core.kernel"
KERNEL_TEXT = """\
import functools


def same(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Kernel:
    WIDTH = 576

    @staticmethod
    def forward(x):
        return x

    @classmethod
    def backward(cls, x):
        return x

    @same
    def decorated(self):
        return [i for i in range(3)]

    @property
    def wide(self):
        return True

    @functools.cached_property
    def heads(self):
        return 16

    def __private(self):
        return (lambda: 1)()

    if False:

        def not_taken(self):
            pass


def run(x):
    return Kernel.forward(x)


class Missing:
    def apply(self):
        pass


Missing = None
"""
RELIED = (".kernel:Kernel", f"{KERNEL}:run")


def kernel_tree(root, text=KERNEL_TEXT):
    return ops_tree(root).write(KERNEL, text)


def relying(root, relies_on=RELIED):
    """A patch that knows the tree's texts as they are now."""
    return patch("tenfold", target(kernel_tree(root), relies_on=relies_on))


def row(p):
    return engine_for(p).apply()["tenfold"]


@isolated()
def test_known_texts_are_read_and_not_imported(tmp_path):
    p = relying(tmp_path)
    assert row(p).state is State.PENDING
    assert KERNEL not in sys.modules
    assert module().f(1) == 20
    module(KERNEL)
    assert engine_for(p).apply()["tenfold"].state is State.ALREADY_APPLIED


EDITS = {
    "class": ("return x\n\n    @classmethod", "return 2 * x\n\n    @classmethod"),
    "function": ("Kernel.forward(x)", "Kernel.forward(+x)"),
}


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("edit", EDITS)
@isolated()
def test_one_edited_token_is_drift_that_names_the_file(tmp_path, edit, imported):
    p = relying(tmp_path)
    text = KERNEL_TEXT.replace(*EDITS[edit], 1)
    assert text != KERNEL_TEXT
    tree = kernel_tree(tmp_path, text)
    ops = module() if imported else None
    found = row(p)
    assert found.state is State.DRIFTED
    lines = [1 + text.split("\n").index(line) for line in ("class Kernel:", "def run(x):")]
    kernel, run = (f"({tree.path(KERNEL)}:{line})" for line in lines)
    assert f"together with Kernel {kernel}, run {run} has the fingerprint " in found.reason
    with pytest.raises(NotAppliedError, match="DRIFTED"):
        engine_for(p).apply(strict=True)
    assert (ops or module()).f(1) == 2


@isolated()
def test_text_beside_those_names_does_not_count(tmp_path):
    p = relying(tmp_path)
    kernel_tree(tmp_path, KERNEL_TEXT.replace("Missing = None", "Missing = 5"))
    module()
    assert row(p).state is State.APPLIED


def remove(tree):
    tree.path(KERNEL).unlink()


def blocked(tree):
    sys.modules[KERNEL] = None


def without_source(tree):
    tree.path(KERNEL).unlink()
    tree.path(KERNEL).with_suffix("").mkdir()


def without_name(tree):
    tree.write(KERNEL, KERNEL_TEXT.replace("def run", "def go"))


LACKING = {
    remove: f"relies on {KERNEL}:run, but no module {KERNEL} below megatron.core",
    blocked: f"relies on {KERNEL}:run, but the import of {KERNEL} is blocked",
    without_source: f"relies on {KERNEL}:run, but {KERNEL} is a namespace package",
    without_name: f"relies on {KERNEL}:run, but ",
}


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("change", LACKING, ids=lambda change: change.__name__)
@isolated()
def test_a_release_that_lacks_it_is_drift_with_a_reason(tmp_path, change, imported):
    p = relying(tmp_path)
    ops = module() if imported else None
    change(kernel_tree(tmp_path))
    found = row(p)
    assert found.state is State.DRIFTED
    assert f"f ({tmp_path}" in found.reason
    assert LACKING[change] in found.reason
    assert found.targets[0].fingerprint is None
    assert (ops or module()).f(1) == 2
    forced = engine_for(p).apply(force="tenfold")["tenfold"]
    assert forced.state is State.APPLIED
    assert "FORCED" in forced.reason


@isolated()
def test_source_that_does_not_parse_is_named(tmp_path):
    p = relying(tmp_path)
    tree = kernel_tree(tmp_path, "def run(:\n")
    found = row(p)
    assert found.state is State.IMPORT_FAILED
    assert found.reason.startswith(f"{tree.path(KERNEL)}: not valid Python")


@isolated()
def test_a_module_beside_the_target_s_moves_with_it(tmp_path):
    tree = kernel_tree(tmp_path)
    known = target(tree, relies_on=(".kernel:Kernel",))
    elsewhere = tree.write("megatron.core.new.ops", OPS_TEXT).write("megatron.core.new.kernel", KERNEL_TEXT)
    for name in (OPS, KERNEL):
        elsewhere.path(name).unlink()
    moved = dataclasses.replace(known, modules=(OPS, "megatron.core.new.ops"))
    site = Site(moved)
    assert (site.module_name, site.verdict) == ("megatron.core.new.ops", "needs")
    assert row(patch("tenfold", moved)).state is State.PENDING


PASSES_ON = "import sys\n\nfrom megatron.core.new import ops as _impl\n\nsys.modules[__name__] = _impl\n"


@pytest.mark.parametrize("first", [OPS, "megatron.core.new.ops"])
@pytest.mark.parametrize("imported", [False, True])
@isolated()
def test_a_module_that_passes_on_to_the_new_place(tmp_path, first, imported):
    tree = kernel_tree(tmp_path)
    known = dataclasses.replace(target(tree, relies_on=(".kernel:Kernel",)), modules=(OPS, "megatron.core.new.ops"))
    tree.write("megatron.core.new.ops", OPS_TEXT).write("megatron.core.new.kernel", KERNEL_TEXT).write(OPS, PASSES_ON)
    path = wheel(tmp_path / "w.whl", **{m: tree.text(m) for m in (OPS, *known.modules[1:], "megatron.core.new.kernel")})
    engine = engine_for(patch("tenfold", known))
    if imported:
        module(first)
    assert engine.apply(strict=True)["tenfold"].state is (State.APPLIED if imported else State.PENDING)
    module(first), module(OPS)
    assert module(OPS) is module("megatron.core.new.ops")
    assert module(OPS).f(1) == 20
    assert engine.apply(strict=True)["tenfold"].state is State.ALREADY_APPLIED
    assert engine.revert()["tenfold"].state is State.NOT_APPLIED
    assert module(OPS).f(1) == 2
    found = read(path, patch("tenfold", known))
    assert (found["module"], found["verdict"]) == ("megatron.core.new.ops", "needs")


# Live objects ---------------------------------------------------------------------------------------------------------


@isolated()
def test_every_kind_of_member_is_what_its_text_defines(tmp_path):
    p = relying(tmp_path, (".kernel:Kernel", ".kernel:run", ".kernel:same", ".kernel:Missing"))
    module()
    assert module(KERNEL).Missing is None
    assert row(p).state is State.APPLIED


def theirs(*args):
    return None


def other_forward(kernel):
    kernel.Kernel.forward = staticmethod(theirs)


def other_backward(kernel):
    kernel.Kernel.backward = classmethod(theirs)


def other_decorated(kernel):
    kernel.Kernel.decorated = theirs


def no_function(kernel):
    kernel.Kernel.forward = 5


def other_class(kernel):
    kernel.Kernel = type("Kernel", (), {"forward": staticmethod(theirs)})


def subclass(kernel):
    kernel.Kernel = type("Kernel", (kernel.Kernel,), {"__module__": "tests.other"})


def no_class(kernel):
    kernel.Kernel = None


def other_function(kernel):
    kernel.run = theirs


def class_for_function(kernel):
    kernel.run = kernel.Kernel


def deleted(kernel):
    del kernel.run


CHANGES = (
    other_forward,
    other_backward,
    other_decorated,
    no_function,
    other_class,
    subclass,
    no_class,
    other_function,
    class_for_function,
    deleted,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@isolated()
def test_another_tool_changed_it_in_the_process(tmp_path, change):
    p = relying(tmp_path)
    ops = module()
    change(module(KERNEL))
    found = row(p)
    assert found.state is State.CONFLICT
    assert "another tool has changed it" in found.reason
    assert ("Kernel" in found.reason) or ("run" in found.reason)
    assert ops.f(1) == 2


@isolated()
def test_the_file_was_replaced_after_the_import(tmp_path):
    p = relying(tmp_path)
    kernel_tree(tmp_path, KERNEL_TEXT.replace(*EDITS["class"], 1))
    module(), module(KERNEL)
    kernel_tree(tmp_path)
    found = row(p)
    assert found.state is State.CONFLICT
    assert f"the live Kernel.forward is a function at {tmp_path}" in found.reason


@isolated()
def test_patches_of_ours_on_it_are_no_conflict(tmp_path):
    tree = kernel_tree(tmp_path)
    config = "megatron.core.config"
    tree.write(
        config, "import dataclasses\n\n\n@dataclasses.dataclass\nclass Config:\n    def __init__(self):\n        pass\n"
    )
    on_kernel = patch("on_kernel", target(tree, f"{KERNEL}:Kernel.forward"), target(tree, f"{KERNEL}:run"))
    on_config = patch("on_config", fields_target(ConfigField("speed", int, 1)))
    relies_on = (*RELIED, f"{config}:Config")
    engine = engine_for(on_kernel, on_config, patch("tenfold", target(tree, relies_on=relies_on)))
    module(), module(KERNEL), module(config)
    assert [r.state for r in engine.apply(strict=True)] == [State.APPLIED] * 3


COMPILED = """\
class Compiled:
    def __init__(self, function):
        self.inner = type("Inner", (), {})()
        self.inner.function = function


@Compiled
def run(x):
    return x


@Compiled
def walk(x):
    return x + 1
"""


@pytest.mark.parametrize(("live", "state"), [("run", State.APPLIED), ("walk", State.CONFLICT)])
@isolated()
def test_a_decorator_may_make_an_object_that_holds_the_function(tmp_path, live, state):
    """As tilelang.jit does; the object of another function is another tool's doing."""
    p = patch("tenfold", target(kernel_tree(tmp_path, COMPILED), relies_on=(f"{KERNEL}:run",)))
    module()
    kernel = module(KERNEL)
    kernel.run = getattr(kernel, live)
    assert row(p).state is state


@isolated()
def test_an_object_of_no_module_is_not_examined(tmp_path):
    p = relying(tmp_path)
    module()
    by_hand = sys.modules[KERNEL] = ModuleType(KERNEL)
    by_hand.Kernel = theirs
    found = row(p)
    assert found.state is State.DRIFTED
    assert "has no file" in found.reason


# Wheels ---------------------------------------------------------------------------------------------------------------


def read(path, p):
    (found,) = wheel_fingerprints(path, Registry([entry(p)]))["targets"]
    return found


@isolated()
def test_a_wheel_has_the_fingerprint_of_the_same_files(tmp_path):
    p = relying(tmp_path)
    found = read(wheel(tmp_path / "w.whl", **{OPS: OPS_TEXT, KERNEL: KERNEL_TEXT}), p)
    assert (found["verdict"], found["fingerprint"]) == ("needs", Site(p.targets[0]).fingerprint)
    text = KERNEL_TEXT.replace(*EDITS["class"], 1)
    found = read(wheel(tmp_path / "edited.whl", **{OPS: OPS_TEXT, KERNEL: text}), p)
    assert (found["verdict"], len(found["fingerprint"]), found["reason"]) == ("unknown", 64, "")


@isolated()
def test_a_wheel_that_lacks_it_says_so(tmp_path):
    p = relying(tmp_path)
    found = read(wheel(tmp_path / "w.whl", **{OPS: OPS_TEXT}), p)
    reason = f"relies on {KERNEL}:Kernel, but the wheel has no {KERNEL}"
    assert (found["verdict"], found["fingerprint"], found["reason"]) == ("unknown", None, reason)
    text = KERNEL_TEXT.replace("def run", "def go")
    found = read(wheel(tmp_path / "other.whl", **{OPS: OPS_TEXT, KERNEL: text}), p)
    assert found["reason"] == f"relies on {KERNEL}:run, but {KERNEL} does not define run"


def test_a_helper_of_the_same_module_that_a_wheel_lacks_is_named(tmp_path):
    tree = Tree(tmp_path).write(OPS, OPS_TEXT)
    p = patch("tenfold", target(tree, relies_on=("g",)))
    found = read(wheel(tmp_path / "w.whl", **{OPS: OPS_TEXT.replace("def g", "def h")}), p)
    assert (found["verdict"], found["reason"]) == ("unknown", f"relies on {OPS}:g, but {OPS} does not define g")
