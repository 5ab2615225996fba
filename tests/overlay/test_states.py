"""What becomes of a patch, one test a state and a way to get there, on a stub megatron in a process of its own."""

from __future__ import annotations

import importlib
import sys

import pytest

from mcore_patches.overlay.errors import NotAppliedError
from mcore_patches.overlay.patch import Finding, State
from mcore_patches.overlay.versions import Releases
from tests.overlay.isolation import isolated
from tests.overlay.stubs import (
    OPS,
    OPS_TEXT,
    Records,
    Tree,
    engine_for,
    module,
    ops_tree,
    patch,
    target,
    times,
)

FIXED_TEXT = OPS_TEXT.replace("return x + 1", "return 10 * (x + 1)")
HALF_TEXT = OPS_TEXT.replace("return x + 1", "return 5 * (x + 1)")


def probe(probing):
    """Calls upstream's function, as probes do: fixed is what multiplies by ten."""
    (original,) = probing.originals.values()
    factor = original(0)
    return Finding(factor == 10, f"it multiplies by {factor}")


def unchanged(text=OPS_TEXT):
    """The live function is what the text says, under every name."""
    ops = module()
    namespace = {}
    exec(text, namespace)
    return ops.f(3) == namespace["f"](3) and ops.g(3) == namespace["g"](3)


def row_after_import(engine):
    module()
    return engine.status()["tenfold"]


@isolated()
def test_a_target_that_needs_the_fix_is_patched(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    assert engine.status()["tenfold"].state is State.NOT_APPLIED
    assert engine.status()["tenfold"].decision is State.APPLIED
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert (ops.f(1), ops.g(1)) == (20, 20)
    assert engine.status()["tenfold"].state is State.APPLIED


@isolated()
def test_applying_fifty_times_is_applying_once(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    engine.apply()
    replacement = ops.f
    for _ in range(50):
        assert engine.apply(strict=True)["tenfold"].state is State.ALREADY_APPLIED
    assert ops.f is replacement
    assert ops.f(1) == 20
    engine.revert()
    assert ops.f(1) == 2


@isolated()
def test_a_dry_run_changes_nothing(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    row = engine.apply(dry_run=True, strict=True)["tenfold"]
    assert (row.state, row.decision) == (State.NOT_APPLIED, State.PENDING)
    module()
    row = engine.apply(dry_run=True, strict=True)["tenfold"]
    assert (row.state, row.decision) == (State.NOT_APPLIED, State.APPLIED)
    assert unchanged()


@isolated()
def test_text_that_is_known_to_be_fixed(tmp_path):
    tree = ops_tree(tmp_path, FIXED_TEXT)
    engine = engine_for(patch("tenfold", target(tree, known="fixed")))
    log = Records()
    for _ in range(3):
        assert engine.apply(strict=True)["tenfold"].state is State.UPSTREAM_FIXED
    assert unchanged(FIXED_TEXT)
    assert [level for level, _ in log.lines()] == ["WARNING"]
    assert "can be deleted" in log.lines()[0][1]
    assert OPS in sys.modules, "unchanged() imported it; apply() had no need to"


@isolated()
def test_known_text_is_not_imported(tmp_path):
    engine = engine_for(
        patch("fixed", target(ops_tree(tmp_path), known="fixed"), probe=probe),
        patch("needs", target(Tree(tmp_path), known="needs"), probe=probe),
    )
    assert [row.state for row in engine.apply()] == [State.UPSTREAM_FIXED, State.PENDING]
    assert OPS not in sys.modules


@isolated()
def test_text_that_a_probe_finds_fixed(tmp_path):
    ops_tree(tmp_path, FIXED_TEXT)
    engine = engine_for(patch("tenfold", target(None, known=None), probe=probe))
    log = Records()
    row = engine.apply(strict=True)["tenfold"]
    assert row.state is State.UPSTREAM_FIXED
    assert "it multiplies by 10" in row.reason
    assert unchanged(FIXED_TEXT)
    assert [level for level, _ in log.lines()] == ["WARNING"]


@pytest.mark.parametrize("text", [OPS_TEXT.replace("x + 1", "x + 2"), OPS_TEXT.replace("x + 1", "x  + 1")])
@isolated()
def test_one_edited_token_is_drift(tmp_path, text):
    known = target(ops_tree(tmp_path))
    ops_tree(tmp_path, text)
    engine = engine_for(patch("tenfold", known))
    log = Records()
    row = engine.apply()["tenfold"]
    assert row.state is State.DRIFTED
    assert "MCORE_PATCHES_FORCE=tenfold" in row.reason
    assert str(tmp_path) in row.reason
    with pytest.raises(NotAppliedError, match="tenfold is DRIFTED"):
        engine.apply(strict=True)
    assert [level for level, _ in log.lines()] == ["ERROR"]
    assert unchanged(text)


@isolated()
def test_a_changed_helper_that_the_replacement_relies_on_is_drift(tmp_path):
    known = target(ops_tree(tmp_path), relies_on=("g",))
    text = OPS_TEXT.replace("return f(x)", "return f(x) + 0")
    ops_tree(tmp_path, text)
    assert engine_for(patch("tenfold", known)).apply()["tenfold"].state is State.DRIFTED
    assert unchanged(text)


@pytest.mark.parametrize(
    ("text", "finding"),
    [(HALF_TEXT, "it multiplies by 5"), (OPS_TEXT.replace("x + 1", "int('no')"), "it raised ValueError")],
    ids=["half", "raises"],
)
@isolated()
def test_a_probe_that_does_not_find_the_fix_leaves_drift_with_its_finding(tmp_path, text, finding):
    ops_tree(tmp_path, text)
    engine = engine_for(patch("tenfold", target(None, known=None), probe=probe))
    row = engine.apply()["tenfold"]
    assert row.state is State.DRIFTED
    assert finding in row.reason
    assert "__mcore_patches__" not in vars(module().f)


@isolated()
def test_drift_is_seen_before_the_import_and_raised_at_once(tmp_path):
    ops_tree(tmp_path, HALF_TEXT)
    engine = engine_for(patch("tenfold", target(None, known=None)))
    with pytest.raises(NotAppliedError, match="DRIFTED"):
        engine.apply(strict=True)
    assert OPS not in sys.modules
    assert unchanged(HALF_TEXT)


@pytest.mark.parametrize("before_import", [True, False])
@isolated()
def test_force_applies_over_drift_loudly(tmp_path, before_import):
    ops_tree(tmp_path, HALF_TEXT)
    engine = engine_for(patch("tenfold", target(None, known=None)))
    log = Records()
    if not before_import:
        module()
    state = engine.apply(force="tenfold", strict=True)["tenfold"].state
    assert state is (State.PENDING if before_import else State.APPLIED)
    assert module().f(1) == 100
    row = engine.status()["tenfold"]
    assert row.state is State.APPLIED
    assert "FORCED over text that is not known" in row.reason
    assert all(level == "WARNING" and "FORCED" in text for level, text in log.lines())
    assert log.lines()


@isolated(MCORE_PATCHES_FORCE="tenfold")
def test_force_from_the_environment(tmp_path):
    ops_tree(tmp_path, HALF_TEXT)
    engine = engine_for(patch("tenfold", target(None, known=None)), patch("other", target(None, known=None)))
    module()
    report = engine.apply()
    assert [row.state for row in report] == [State.APPLIED, State.DRIFTED]


@isolated()
def test_a_probe_s_word_beats_force(tmp_path):
    ops_tree(tmp_path, FIXED_TEXT)
    engine = engine_for(patch("tenfold", target(None, known=None), probe=probe))
    assert engine.apply(force=["tenfold"])["tenfold"].state is State.UPSTREAM_FIXED
    assert unchanged(FIXED_TEXT)


@isolated()
def test_absent_inside_the_range_and_outside(tmp_path):
    Tree(tmp_path, "0.19.2").use()
    inside = patch("inside", target(None, known=None))
    outside = patch("outside", target(None, known=None), releases=Releases((0, 20, 0), None))
    log = Records()
    report = engine_for(inside, outside).apply(strict=True)
    assert [row.state for row in report] == [State.TARGET_ABSENT, State.OUT_OF_RANGE]
    assert f"no module {OPS}" in report["inside"].reason
    assert "is for >=0.20.0, megatron-core is 0.19.2" in report["outside"].reason
    assert [level for level, _ in log.lines()] == ["INFO", "WARNING"]


@isolated()
def test_absent_because_the_module_does_not_define_it(tmp_path):
    ops_tree(tmp_path, "def other():\n    pass\n")
    row = engine_for(patch("tenfold", target(None, known=None))).apply(strict=True)["tenfold"]
    assert row.state is State.TARGET_ABSENT
    assert "does not define f" in row.reason


@isolated()
def test_absent_because_the_imported_module_lost_it(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    del module().f
    row = engine.apply()["tenfold"]
    assert row.state is State.TARGET_ABSENT
    assert "is imported but has no f" in row.reason


@isolated()
def test_megatron_is_not_installed():
    sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
    report = engine_for(patch("tenfold", target(None, known=None))).apply(strict=True)
    assert report["tenfold"].state is State.TARGET_ABSENT
    assert report.megatron["text"] is None
    assert any("was not found" in warning for warning in report.warnings)


@isolated()
def test_a_target_only_for_other_releases_is_left_out(tmp_path):
    tree = ops_tree(tmp_path, version="0.18.2")
    mine = target(tree)
    absent = target(None, "megatron.core.later:h", known=None, releases=Releases((0, 19, 0), None))
    both = patch("both", mine, absent, releases=Releases((0, 16, 0), None))
    only = patch("only", absent, releases=Releases((0, 16, 0), None))
    module()
    report = engine_for(both, only).apply()
    assert [row.state for row in report] == [State.APPLIED, State.OUT_OF_RANGE]
    assert [t.name for t in report["both"].targets] == [f"{OPS}:f"]


@isolated()
def test_known_text_overrules_the_range(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path, version="0.20.0"))))
    module()
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED


@isolated()
def test_drift_outside_the_range_says_so(tmp_path):
    ops_tree(tmp_path, version="0.20.0")
    row = engine_for(patch("tenfold", target(None, known=None))).apply()["tenfold"]
    assert row.state is State.DRIFTED
    assert "is for >=0.19.0, <0.20.0, megatron-core is 0.20.0" in row.reason


@isolated()
def test_a_syntax_error_in_the_target_s_file(tmp_path):
    known = target(ops_tree(tmp_path))
    ops_tree(tmp_path, OPS_TEXT + "def broken(:\n")
    engine = engine_for(patch("tenfold", known))
    row = engine.apply()["tenfold"]
    assert row.state is State.IMPORT_FAILED
    assert "not valid Python" in row.reason
    assert f"{OPS.rpartition('.')[2]}.py" in row.reason
    with pytest.raises(NotAppliedError, match="IMPORT_FAILED"):
        engine.apply(strict=True)


@isolated()
def test_an_import_that_raises_while_a_probe_needs_it(tmp_path):
    ops_tree(tmp_path, OPS_TEXT + "raise RuntimeError('no driver')\n")
    engine = engine_for(patch("tenfold", target(None, known=None), probe=probe))
    row = engine.apply()["tenfold"]
    assert row.state is State.IMPORT_FAILED
    assert "RuntimeError: no driver" in row.reason
    with pytest.raises(NotAppliedError, match="no driver"):
        engine.apply(strict=True)
    # The cause is gone: the next look does not believe the old error.
    ops_tree(tmp_path, FIXED_TEXT)
    assert engine.apply()["tenfold"].state is State.UPSTREAM_FIXED


@isolated()
def test_an_import_that_raises_while_the_patch_is_pending(tmp_path):
    text = OPS_TEXT + "import does_not_exist_anywhere\n"
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path, text))))
    assert engine.apply()["tenfold"].state is State.PENDING
    with pytest.raises(NotAppliedError, match=r"IMPORT_FAILED.*does_not_exist_anywhere"):
        engine.require("tenfold")
    with pytest.raises(ModuleNotFoundError):
        module()
    assert engine.status()["tenfold"].state is State.PENDING


@isolated()
def test_pending_then_applied_by_the_hook(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    row = engine.apply(strict=True)["tenfold"]
    assert row.state is State.PENDING
    assert OPS in row.reason
    assert OPS not in sys.modules
    assert engine.status()["tenfold"].state is State.PENDING
    assert module().f(1) == 20
    assert engine.status()["tenfold"].state is State.APPLIED
    assert engine.apply()["tenfold"].state is State.ALREADY_APPLIED


@isolated()
def test_pending_then_reverted_leaves_the_import_alone(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    engine.apply()
    assert engine.revert()["tenfold"].state is State.NOT_APPLIED
    assert unchanged()
    engine.apply()
    assert module().f(1) == 20


@isolated()
def test_pending_then_drift_found_at_import(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("tenfold", target(tree)))
    log = Records()
    assert engine.apply()["tenfold"].state is State.PENDING
    tree.write(OPS, HALF_TEXT)
    assert unchanged(HALF_TEXT)
    row = engine.status()["tenfold"]
    assert row.state is State.DRIFTED
    assert [level for level, _ in log.lines()] == ["ERROR"]
    with pytest.raises(NotAppliedError, match="DRIFTED"):
        engine.require("tenfold")
    with pytest.raises(NotAppliedError, match="DRIFTED"):
        engine.apply(strict=True)


@isolated()
def test_pending_over_two_modules_is_taken_off_the_first_when_the_second_drifts(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree), target(tree, "megatron.core.late:f")))
    module()
    row = engine.apply(strict=True)["tenfold"]
    assert row.state is State.PENDING
    assert "in place on f" in row.reason
    assert module().f(1) == 20
    tree.write("megatron.core.late", HALF_TEXT)
    importlib.import_module("megatron.core.late")
    assert engine.status()["tenfold"].state is State.DRIFTED
    assert unchanged()


@isolated()
def test_pending_over_two_modules(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    engine = engine_for(patch("tenfold", target(tree), target(tree, "megatron.core.late:f")))
    engine.apply()
    late = importlib.import_module("megatron.core.late")
    assert late.f(1) == 20
    assert engine.status()["tenfold"].state is State.PENDING
    assert module().f(1) == 20
    assert engine.status()["tenfold"].state is State.APPLIED


@pytest.mark.parametrize("raises", [RuntimeError("no such thing"), ImportError("no kernels")], ids=["error", "import"])
@isolated()
def test_a_failure_in_the_hook_is_recorded_and_raised_later(tmp_path, raises):
    healthy = []

    def build(below):
        if not healthy:
            raise raises
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path), build=build)))
    log = Records()
    assert engine.apply(strict=True)["tenfold"].state is State.PENDING
    assert unchanged(), "the import succeeds, with upstream's function"
    row = engine.status()["tenfold"]
    assert row.state is (State.IMPORT_FAILED if isinstance(raises, ImportError) else State.CONFLICT)
    assert str(raises) in row.reason
    assert [level for level, _ in log.lines()] == ["ERROR"]
    with pytest.raises(NotAppliedError, match=str(raises)):
        engine.require("tenfold")
    with pytest.raises(NotAppliedError, match=str(raises)):
        engine.apply(strict=True)
    healthy.append(True)
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert engine.require("tenfold").state is State.APPLIED


@isolated()
def test_require_applied_imports_the_target_of_a_pending_patch(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    with pytest.raises(NotAppliedError, match="NOT_APPLIED"):
        engine.require("tenfold")
    engine.apply()
    assert engine.require("tenfold").state is State.APPLIED
    assert sys.modules[OPS].f(1) == 20
    engine.revert()
    with pytest.raises(NotAppliedError):
        engine.require("tenfold")


@isolated(MCORE_PATCHES="off")
def test_require_applied_says_that_the_environment_switched_it_off(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    engine.apply()
    with pytest.raises(NotAppliedError, match="NOT_APPLIED: lacks the fix; MCORE_PATCHES=off switches every patch off"):
        engine.require("tenfold")


@isolated()
def test_require_applied_is_content_when_upstream_has_it(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path), known="fixed")))
    assert engine.require("tenfold").state is State.UPSTREAM_FIXED


@isolated()
def test_needs_unmet(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    base = patch("base", target(tree, "megatron.core.late:f"))
    above = patch("above", target(tree), needs_patches=("base",))
    package = patch("package", target(tree), needs_packages=("does_not_exist_anywhere",))
    lost = patch("lost", target(tree), needs_patches=("unheard_of",))
    engine = engine_for(above, base, package, lost)
    module()
    report = engine.apply(exclude="base")
    assert report["above"].state is State.NEEDS_UNMET
    assert "needs the patches base" in report["above"].reason
    assert report["package"].state is State.NEEDS_UNMET
    assert "does_not_exist_anywhere" in report["package"].reason
    assert report["lost"].state is State.NEEDS_UNMET
    assert unchanged()
    # What it needs is put on first, whatever the order of the registry; status and dry run foresee it.
    assert engine.status()["above"].decision is State.APPLIED
    assert engine.apply(["above", "base"], dry_run=True, strict=True)["above"].decision is State.APPLIED
    assert engine.apply("above", dry_run=True)["above"].state is State.NEEDS_UNMET
    assert engine.apply(["above", "base"], strict=True)["above"].state is State.APPLIED
    # Without its base it stays, and says so.
    engine.revert("base")
    row = engine.status()["above"]
    assert row.state is State.APPLIED
    assert "needs base, which is no longer in place" in row.reason


@isolated()
def test_what_a_patch_needs_may_be_upstream_s_own(tmp_path):
    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    base = patch("base", target(tree, "megatron.core.late:f", known="fixed"))
    above = patch("above", target(tree), needs_patches=("base",))
    module()
    assert engine_for(base, above).apply(strict=True)["above"].state is State.APPLIED


@isolated()
def test_patches_that_need_each_other_are_unmet_instead_of_endless(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(
        patch("chicken", target(tree), needs_patches=("egg",)), patch("egg", target(tree), needs_patches=("chicken",))
    )
    module()
    assert [row.state for row in engine.apply()] == [State.NEEDS_UNMET, State.NEEDS_UNMET]
    assert unchanged()


@pytest.mark.parametrize("declares", ["first", "second"])
@isolated()
def test_patches_in_conflict(tmp_path, declares):
    tree = ops_tree(tmp_path)
    first = patch("first", target(tree), conflicts=("second",) if declares == "first" else ())
    second = patch("second", target(tree), conflicts=("first",) if declares == "second" else ())
    engine = engine_for(first, second)
    module()
    dry = engine.apply(dry_run=True)
    assert (dry["first"].decision, dry["second"].state) == (State.APPLIED, State.CONFLICT)
    report = engine.apply()
    assert [row.state for row in report] == [State.APPLIED, State.CONFLICT]
    assert "cannot be combined with first" in report["second"].reason
    assert module().f(1) == 20
    with pytest.raises(NotAppliedError, match="second is CONFLICT"):
        engine.apply(strict=True)
    engine.revert("first")
    assert engine.apply("second", strict=True)["second"].state is State.APPLIED


MODEL_TEXT = (
    OPS_TEXT + "\n\nclass Model:\n    def forward(self, x):\n        return f(x)\n\n\nclass Sub(Model):\n    pass\n"
)


@pytest.mark.parametrize("kind", ["Model", "Sub"])
@isolated()
def test_too_late_when_an_instance_lives(tmp_path, kind):
    early = patch("early", target(ops_tree(tmp_path, MODEL_TEXT)), late_safe=False, instances_of=(f"{OPS}:Model",))
    engine = engine_for(early)
    model = getattr(module(), kind)()
    row = engine.apply()["early"]
    assert row.state is State.TOO_LATE
    assert f"1 live instance(s) of {kind}" in row.reason
    with pytest.raises(NotAppliedError, match="before the model is built"):
        engine.apply(strict=True)
    assert model.forward(1) == 2
    del model
    assert engine.apply(strict=True)["early"].state is State.APPLIED
    # In place in good time, it does not become too late.
    model = module().Model()
    assert model.forward(1) == 20
    assert engine.apply(strict=True)["early"].state is State.ALREADY_APPLIED
    assert engine.status()["early"].state is State.APPLIED


@isolated()
def test_a_pending_patch_that_was_in_time_stays_although_a_model_exists_now(tmp_path):
    tree = ops_tree(tmp_path, MODEL_TEXT).write("megatron.core.late", OPS_TEXT)
    early = patch(
        "early",
        target(tree),
        target(tree, "megatron.core.late:f"),
        late_safe=False,
        instances_of=(f"{OPS}:Model",),
    )
    engine = engine_for(early)
    module()
    assert engine.apply()["early"].state is State.PENDING
    model = module().Model()
    assert engine.status()["early"].state is State.PENDING
    assert importlib.import_module("megatron.core.late").f(1) == 20
    assert engine.status()["early"].state is State.APPLIED
    assert model.forward(1) == 20


@isolated()
def test_inert_is_in_place_and_an_error(tmp_path):
    missing = ["no kernel for CUDA tensors"]
    engine = engine_for(
        patch("tenfold", target(ops_tree(tmp_path)), health=lambda probing: missing[0] if missing else None)
    )
    module()
    assert engine.apply()["tenfold"].state is State.INERT
    assert module().f(1) == 20
    assert engine.status()["tenfold"].state is State.INERT
    assert engine.apply()["tenfold"].state is State.INERT, "applying again does not make it healthy"
    with pytest.raises(NotAppliedError, match="no kernel"):
        engine.apply(strict=True)
    with pytest.raises(NotAppliedError, match="no kernel"):
        engine.require("tenfold")
    missing.clear()
    assert engine.apply(strict=True)["tenfold"].state is State.ALREADY_APPLIED


@pytest.mark.parametrize("before_import", [True, False])
@isolated()
def test_a_health_check_that_raises_is_inert_and_does_not_escape(tmp_path, before_import):
    def health(probing):
        raise OSError("driver")

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path)), health=health))
    if not before_import:
        module()
    engine.apply()
    assert module().f(1) == 20
    row = engine.status()["tenfold"]
    assert row.state is State.INERT
    assert "OSError: driver" in row.reason


@pytest.mark.parametrize(
    ("environment", "arguments", "reason"),
    [
        ({}, {"exclude": "tenfold"}, "excluded by the caller"),
        ({}, {"ids": "other"}, "the caller named other patches"),
        ({"MCORE_PATCHES": "off"}, {}, "switches every patch off"),
        ({"MCORE_PATCHES": "other"}, {}, "does not name it"),
        ({"MCORE_PATCHES": "-tenfold"}, {}, "excludes it"),
        ({"MCORE_PATCHES": "all,-tenfold"}, {"ids": "tenfold"}, "excludes it"),
    ],
    ids=["exclude", "ids", "off", "named", "minus", "all-minus"],
)
@isolated()
def test_disabled(tmp_path, environment, arguments, reason):
    import os

    os.environ.update(environment)
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("tenfold", target(tree)), patch("other", target(tree)))
    module()
    row = engine.apply(strict=True, **arguments)["tenfold"]
    assert row.state is State.DISABLED
    assert reason in row.reason
    assert "tenfold" not in (engine.status()["tenfold"].targets[0].layers)
    if environment:
        assert engine.status()["tenfold"].state is State.DISABLED, "status() says what apply_patches() would do"


@isolated()
def test_switching_off_does_not_take_off(tmp_path):
    import os

    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    module()
    engine.apply()
    os.environ["MCORE_PATCHES"] = "off"
    assert engine.apply()["tenfold"].state is State.APPLIED
    assert engine.status()["tenfold"].state is State.APPLIED
    assert module().f(1) == 20
    assert engine.revert()["tenfold"].state is State.DISABLED
    assert unchanged()


@isolated()
def test_strict_applies_what_it_can(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("drifted", target(None, known=None)), patch("tenfold", target(tree)))
    module()
    with pytest.raises(NotAppliedError, match="drifted is DRIFTED") as caught:
        engine.apply(strict=True)
    assert "tenfold" not in str(caught.value)
    assert module().f(1) == 20


@isolated(MCORE_PATCHES_STRICT="1")
def test_strict_from_the_environment(tmp_path):
    ops_tree(tmp_path)
    engine = engine_for(patch("drifted", target(None, known=None)))
    with pytest.raises(NotAppliedError):
        engine.apply()
    assert engine.apply(strict=False)["drifted"].state is State.DRIFTED
