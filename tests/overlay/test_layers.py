"""Several patches on one target, all-or-nothing changes, and what a replacement looks like from outside."""

from __future__ import annotations

import inspect
import itertools
import pickle
import threading

import pytest

from mcore_patches.overlay.errors import NotAppliedError, NotRevertedError
from mcore_patches.overlay.patch import ConfigField, State
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, OPS_TEXT, Tree, engine_for, fields_target, module, ops_tree, patch, target, times

CONFIG = "megatron.core.config"
CONFIG_TEXT = "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    layers: int = 1\n"


def appended(letter):
    """build() of a layer that shows the order of layers: it appends its letter to what is below."""

    def build(below):
        call = below.call

        def replacement(x):
            return f"{call(x)}{letter}"

        return replacement

    return build


# Order ----------------------------------------------------------------------------------------------------------------


@isolated()
def test_levels_decide_who_sees_the_call_first_and_ids_break_ties(tmp_path):
    tree = ops_tree(tmp_path)
    specs = {"a": 1, "b": 0, "c": 1}
    patches = [patch(i, target(tree, build=appended(i), level=level)) for i, level in specs.items()]
    ops = module()
    for order in itertools.permutations(specs):
        engine = engine_for(*patches)
        for i in order:
            engine.apply(i, strict=True)
        assert ops.f(1) == "2bac", order
        assert engine.status()["a"].targets[0].layers == ("b", "a", "c")
        engine.revert()
        assert ops.f(1) == 2


def de_bruijn(alphabet, length):
    """A cyclic sequence in which every word of this length occurs once."""
    k, sequence = len(alphabet), []
    a = [0] * k * length

    def extend(t, p):
        if t > length:
            if length % p == 0:
                sequence.extend(a[1 : p + 1])
            return
        a[t] = a[t - p]
        extend(t + 1, p)
        for j in range(a[t - p] + 1, k):
            a[t] = j
            extend(t + 1, t)

    extend(1, 1)
    return [alphabet[i] for i in sequence + sequence[: length - 1]]


def test_the_walk_holds_every_word():
    walk = de_bruijn("abcd", 3)
    assert {tuple(walk[i : i + 3]) for i in range(len(walk) - 2)} == set(itertools.product("abcd", repeat=3))


@pytest.mark.parametrize("levels", [(0, 0), (0, 1), (1, 0)])
@isolated()
def test_apply_and_revert_of_two_patches_on_one_target_in_every_order(tmp_path, levels):
    """One walk in which every three successive operations occur, the same one twice included."""
    tree = ops_tree(tmp_path)
    first = patch("a", target(tree, build=appended("a"), level=levels[0]))
    second = patch("b", target(tree, build=appended("b"), level=levels[1]))
    upper = "ba" if levels[0] > levels[1] else "ab"
    ops = module()
    upstream = ops.f
    operations = [("apply", "a"), ("apply", "b"), ("revert", "a"), ("revert", "b")]
    engine = engine_for(first, second)
    there, done = set(), []
    for operation, i in de_bruijn(operations, 3):
        done.append((operation, i))
        report = getattr(engine, operation)(i)
        (there.add if operation == "apply" else there.discard)(i)
        assert ops.f(1) == (f"2{''.join(x for x in upper if x in there)}" if there else 2), done
        assert {r.id for r in report if i in r.targets[0].layers} == ({"a", "b"} if i in there else set()), done
        assert there or ops.f is upstream, done
    engine.revert()
    assert ops.f is upstream


@isolated()
def test_a_layer_sees_what_is_below_and_upstream_s_own(tmp_path):
    seen = {}

    def build(below):
        seen.update(call=below.call, original=below.original, module=below.module, counters=below.counters)
        return times(3)(below)

    tree = ops_tree(tmp_path)
    engine = engine_for(patch("lower", target(tree)), patch("upper", target(tree, build=build, level=1)))
    ops = module()
    upstream = ops.f
    engine.apply(strict=True)
    assert seen["original"] is upstream
    assert seen["module"] is ops
    assert seen["call"](1) == 20
    assert seen["counters"].patch_id == "upper"
    assert ops.f(1) == 60


@isolated()
def test_counters_survive_a_change_of_layers(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("lower", target(tree)), patch("upper", target(tree, build=times(3), level=1)))
    ops = module()
    engine.apply("lower")
    ops.f(1)
    engine.apply("upper")
    ops.f(1)
    engine.revert("upper")
    ops.f(1)
    report = engine.status()
    assert (report["lower"].counters["hits"], report["upper"].counters["hits"]) == (3, 1)


# All or nothing -------------------------------------------------------------------------------------------------------


def three_targets(tree, **options):
    """A patch on a function, a dataclass and a second function, the last of which does what `options` say."""
    return patch(
        "whole",
        target(tree),
        fields_target(ConfigField("speed", int, 3)),
        target(tree, f"{OPS}:g", **options),
    )


@isolated()
def test_a_build_that_raises_leaves_every_target_as_it_was(tmp_path):
    tree = ops_tree(tmp_path).write(CONFIG, CONFIG_TEXT)
    fails = [True]

    def build(below):
        if fails:
            raise RuntimeError("no kernel")
        return times(100)(below)

    engine = engine_for(three_targets(tree, build=build), patch("other", target(tree, build=times(3))))
    ops, config = module(), module(CONFIG)
    engine.apply("other")
    f, g, init = ops.f, ops.g, config.Config.__init__
    row = engine.apply("whole")["whole"]
    assert row.state is State.CONFLICT
    assert "RuntimeError: no kernel" in row.reason
    assert "every target was left as it was" in row.reason
    assert (ops.f, ops.g, config.Config.__init__) == (f, g, init)
    assert vars(config.Config).keys() & {"speed", "__mcore_patches__", "__mcore_patches_fields__"} == set()
    with pytest.raises(NotAppliedError, match="no kernel"):
        engine.apply("whole", strict=True)
    fails.clear()
    assert engine.apply("whole", strict=True)["whole"].state is State.APPLIED
    assert (ops.f(1), ops.g(1), config.Config(speed=4).speed) == (60, 6000, 4)
    engine.revert("whole")
    assert (ops.f(1), ops.g(1)) == (6, 6)


@pytest.mark.parametrize("at", range(4))
@isolated()
def test_a_failure_while_placing_is_undone(tmp_path, at):
    """place() is not expected to fail; whatever it is, nothing may stay half done."""
    from mcore_patches.overlay import layers, rebind

    tree = (
        ops_tree(tmp_path).write(CONFIG, CONFIG_TEXT).write("megatron.core.user", f"from {OPS} import f as renamed\n")
    )
    engine = engine_for(three_targets(tree))
    ops, config, user = module(), module(CONFIG), module("megatron.core.user")
    before = (ops.f, ops.g, user.renamed, config.Config.__init__)
    calls = []

    def failing(function):
        def wrapper(*args, **kwargs):
            calls.append(function)
            result = function(*args, **kwargs)
            if len(calls) == at + 1:
                raise KeyboardInterrupt
            return result

        return wrapper

    layers.Change.place = failing(layers.Change.place)
    layers.FieldsChange.place = failing(layers.FieldsChange.place)
    rebind.rebind = failing(rebind.rebind)
    with pytest.raises(KeyboardInterrupt):
        engine.apply()
    if at < 3:
        assert (ops.f, ops.g, user.renamed, config.Config.__init__) == before
    else:  # everything was in place when it came, and rebind() undoes its own part
        assert (ops.f, ops.g, config.Config.__init__) == (before[0], before[1], before[3])
    assert "speed" not in vars(config.Config)


@isolated()
def test_a_layer_that_cannot_be_built_anew_keeps_the_other_in_place(tmp_path):
    """Taking `first` off builds `second` anew; when that fails, nothing changes and the error names the patch."""
    fails = []

    def build(below):
        if fails:
            raise RuntimeError("out of memory")
        return times(3)(below)

    tree = ops_tree(tmp_path)
    engine = engine_for(patch("first", target(tree)), patch("second", target(tree, build=build)))
    ops = module()
    engine.apply(strict=True)
    replacement = ops.f
    fails.append(True)
    with pytest.raises(NotRevertedError, match=r"first stays in place: RuntimeError: out of memory"):
        engine.revert("first")
    assert ops.f is replacement
    assert ops.f(1) == 60
    engine.revert("second")
    fails.clear()
    engine.revert("first")
    assert ops.f(1) == 2


WRONG = {
    "below": (lambda below: below.call, "build() returned f again"),
    "original": (lambda below: below.original, "build() returned f again"),
    "int": (lambda below: 3, "build() returned int"),
    "none": (lambda below: None, "build() returned NoneType"),
    "callable": (lambda below: type("C", (), {"__call__": lambda self, x: x})(), "a replacement is a plain function"),
}


@pytest.mark.parametrize("wrong", WRONG)
@isolated()
def test_what_build_may_not_return(tmp_path, wrong):
    build, message = WRONG[wrong]
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path), build=build)))
    ops = module()
    row = engine.apply()["tenfold"]
    assert row.state is State.CONFLICT
    assert message in row.reason
    assert ops.f(1) == 2


@isolated()
def test_a_function_that_build_returns_twice(tmp_path):
    def once(x):
        return 5

    tree = ops_tree(tmp_path).write("megatron.core.late", OPS_TEXT)
    engine = engine_for(
        patch("one", target(tree, build=lambda below: once)),
        patch("two", target(tree, "megatron.core.late:f", build=lambda below: once)),
    )
    module(), module("megatron.core.late")
    report = engine.apply()
    assert [row.state for row in report] == [State.APPLIED, State.CONFLICT]
    assert "is a new function" in report["two"].reason


# From outside ---------------------------------------------------------------------------------------------------------


@isolated()
def test_name_module_docstring_signature_and_source(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path, SIGNATURE_TEXT))))
    ops = module()
    upstream = ops.f
    signature = inspect.signature(upstream)
    engine.apply(strict=True)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(ops.f, attribute) == getattr(upstream, attribute)
    assert inspect.signature(ops.f) == signature
    assert "factor * call(x)" in inspect.getsource(ops.f), "our text for our code"
    assert inspect.getsourcefile(ops.f).endswith("stubs.py")
    assert type(ops.f) is type(upstream)


SIGNATURE_TEXT = 'def f(x: int, *, mode: str = "a") -> int:\n    """Upstream\'s."""\n    return x + 1\n'


@isolated()
def test_functools_wraps_in_build_does_not_show_upstream_s_source(tmp_path):
    import functools

    def build(below):
        @functools.wraps(below.call)
        def replacement(x):
            return 7

        return replacement

    tree = ops_tree(tmp_path)
    engine = engine_for(patch("lower", target(tree)), patch("wraps", target(tree, build=build, level=1)))
    ops = module()
    engine.apply(strict=True)
    assert "return 7" in inspect.getsource(ops.f)
    assert not hasattr(ops.f, "__wrapped__")
    assert engine.status()["wraps"].targets[0].layers == ("lower", "wraps")


@isolated()
def test_pickle_carries_the_name_and_not_the_patch(tmp_path):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path))))
    ops = module()
    engine.apply()
    data = pickle.dumps(ops.f)
    assert pickle.loads(data) is ops.f
    engine.revert()
    assert pickle.loads(data)(1) == 2


METHODS = """\
class Base:
    def plain(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x + 1)

    class Inner:
        def deep(self, x):
            return x + 1


class Sub(Base):
    pass
"""


@isolated()
def test_methods_are_replaced_in_the_class_and_reach_subclasses_and_instances(tmp_path):
    tree = ops_tree(tmp_path, METHODS)

    def of_class(below):
        call = below.call

        def replacement(cls, x):
            return ("ours", *call(cls, x))

        return replacement

    def method(below):
        call = below.call

        def replacement(self, x):
            return 10 * call(self, x)

        return replacement

    engine = engine_for(
        patch(
            "methods",
            target(tree, f"{OPS}:Base.plain", method),
            target(tree, f"{OPS}:Base.static"),
            target(tree, f"{OPS}:Base.of_class", of_class),
            target(tree, f"{OPS}:Base.Inner.deep", method),
        )
    )
    ops = module()
    before = [{k: id(v) for k, v in vars(cls).items()} for cls in (ops.Base, ops.Base.Inner)]
    instance = ops.Sub()
    row = engine.apply(strict=True)["methods"]
    assert (instance.plain(1), instance.static(1), ops.Base.static(1)) == (20, 20, 20)
    assert (instance.of_class(1), ops.Base.of_class(1)) == (("ours", "Sub", 2), ("ours", "Base", 2))
    assert ops.Sub.Inner().deep(1) == 20
    assert ops.Base.plain.__qualname__ == "Base.plain"
    assert [t.unreachable for t in row.targets] == [()] * 4
    engine.revert()
    after = [{k: id(v) for k, v in vars(cls).items()} for cls in (ops.Base, ops.Base.Inner)]
    assert after == before, "the very same objects, wrappers included"


# Threads --------------------------------------------------------------------------------------------------------------


@isolated()
def test_threads_that_apply_and_revert_at_once(tmp_path):
    tree = ops_tree(tmp_path)
    patches = [patch(f"p{i}", target(tree, build=times(1), level=i)) for i in range(4)]
    engine = engine_for(*patches)
    ops = module()
    upstream = ops.f
    start = threading.Barrier(4)
    errors = []

    def work(mine):
        try:
            start.wait(30)
            for _ in range(5):
                engine.apply(mine, strict=True)
                assert mine in engine.status()[mine].targets[0].layers
                engine.revert(mine)
                assert mine not in engine.status()[mine].targets[0].layers
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(p.id,)) for p in patches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert ops.f is upstream


@isolated()
def test_two_threads_that_apply_everything_at_once(tmp_path):
    tree = ops_tree(tmp_path)
    ops = module()
    built = []

    def build(below):
        built.append(1)
        return times(10)(below)

    engine = engine_for(patch("tenfold", target(tree, build=build)))
    start = threading.Barrier(2)
    reports = []

    def work():
        start.wait(30)
        reports.append(engine.apply(strict=True))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {r["tenfold"].state for r in reports} == {State.APPLIED, State.ALREADY_APPLIED}
    assert len(built) == 1
    assert ops.f(1) == 20


@isolated()
def test_a_class_is_not_swapped(tmp_path):
    tree = ops_tree(tmp_path, METHODS)
    engine = engine_for(patch("swap", target(tree, f"{OPS}:Base")))
    ops = module()
    row = engine.apply(force="swap")["swap"]
    assert row.state is State.DRIFTED
    assert row.reason == "Base is a class; classes are changed in place, by targets that name their methods"
    assert type(ops.Base) is type


@pytest.mark.parametrize("known", [None, "needs"])
@isolated()
def test_what_the_text_binds_to_something_else_than_a_function(tmp_path, known):
    engine = engine_for(patch("tenfold", target(ops_tree(tmp_path, "f = 5\n"), known=known)))
    ops = module()
    row = engine.apply(force="tenfold")["tenfold"]
    assert (row.state, row.reason) == (State.DRIFTED, "f is an object of builtins.int, not a function")
    assert ops.f == 5


@isolated()
def test_a_replacement_may_rely_on_a_class_and_a_constant(tmp_path):
    tree = ops_tree(tmp_path, METHODS + "\n\nLIMIT = 3\n")
    engine = engine_for(patch("methods", target(tree, f"{OPS}:Base.static", relies_on=("Sub", "LIMIT"))))
    module()
    assert engine.apply(strict=True)["methods"].state is State.APPLIED


@isolated()
def test_a_tree_without_the_second_target_changes_nothing(tmp_path):
    tree = Tree(tmp_path).write(OPS, OPS_TEXT).use()
    engine = engine_for(patch("both", target(tree), target(None, "megatron.core.absent:f", known=None)))
    ops = module()
    assert engine.apply()["both"].state is State.TARGET_ABSENT
    assert ops.f(1) == 2
