"""Fields added to a dataclass at run time: everything that people do with a config, before and after a revert."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
import pickle
import sys
import typing
from dataclasses import KW_ONLY, dataclass, field

import pytest

from mcore_patches.overlay import fields
from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.fields import install
from mcore_patches.overlay.patch import ConfigField, State
from tests import releases
from tests.overlay.isolation import call, isolated
from tests.overlay.stubs import Tree, engine_for, fields_target, module, patch

SPEED = ConfigField("speed", int, 3)
LABEL = ConfigField("label", "str | None", None)


def family():
    """Fresh classes: a root, a subclass with a field, one below that, an undecorated one and a frozen one."""

    @dataclass
    class Base:
        layers: int = 1

    @dataclass
    class Root(Base):
        """Configuration."""

        width: int = 2

        def __post_init__(self):
            self.seen = getattr(self, "speed", "none")

    @dataclass
    class Sub(Root):
        depth: int = 4

    @dataclass
    class Below(Sub):
        pass

    class Plain(Sub):
        pass

    return Base, Root, Sub, Below, Plain


def state_of(*classes):
    """Everything that install() may touch, by identity."""
    names = ("__init__", "__repr__", "__eq__", "__hash__", "speed", "label", fields.ADDED, fields.PRISTINE)
    return [
        (
            {n: id(vars(c)[n]) for n in names if n in vars(c)},
            list(c.__dataclass_fields__),
            dict(vars(c).get("__annotations__", {})),
            str(inspect.signature(c)),
        )
        for c in classes
    ]


def names_of(cls):
    return [f.name for f in dataclasses.fields(cls)]


# What people do with a config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(1, 5), ids=["Root", "Sub", "Below", "Plain"])
def test_an_added_field_behaves_as_a_declared_one(which):
    classes = family()
    cls = classes[which]
    install(classes[1], [SPEED, LABEL])
    config = cls(width=5, speed=7)
    assert (config.width, config.speed, config.label) == (5, 7, None)
    assert config.seen == 7, "__post_init__ sees it"
    assert cls().speed == 3
    assert vars(cls()).keys() >= {"speed", "label"}
    assert names_of(cls)[-2:] == ["speed", "label"]
    assert dataclasses.asdict(config)["speed"] == 7
    assert dataclasses.replace(config, speed=8).speed == 8
    assert dataclasses.replace(config, width=9).speed == 7
    assert copy.deepcopy(config).speed == copy.copy(config).speed == 7
    assert repr(config).endswith("speed=7, label=None)")
    assert repr(config).startswith(f"{cls.__qualname__}(layers=1, width=5")
    assert cls(speed=7) == cls(speed=7)
    assert cls(speed=7) != cls(speed=8)
    assert cls(speed=7) != 7
    parameters = inspect.signature(cls).parameters
    assert parameters["speed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert (parameters["speed"].default, parameters["speed"].annotation) == (3, int)
    assert typing.get_type_hints(cls, localns={"str": str})["speed"] is int
    with pytest.raises(TypeError, match="unexpected keyword argument 'spede'"):
        cls(spede=1)
    with pytest.raises(TypeError):
        cls(1, 2, 4, 5)  # added fields are not positional


def test_bases_above_the_root_are_not_touched():
    base, root, *_ = family()
    before = state_of(base)
    install(root, [SPEED])
    assert state_of(base) == before
    with pytest.raises(TypeError):
        base(speed=1)


def test_instances_made_before_have_the_default():
    _, root, *_ = family()
    old = root()
    install(root, [SPEED])
    assert old.speed == 3
    assert old == root()
    assert dataclasses.replace(old, width=3).speed == 3
    old.speed = 9
    install(root, [])
    assert old.speed == 9
    assert dataclasses.replace(old, width=3).width == 3


@pytest.mark.parametrize("which", range(1, 5))
def test_taking_them_away_restores_every_class_exactly(which):
    classes = family()
    before = state_of(*classes)
    install(classes[1], [SPEED, LABEL])
    config = classes[which](speed=7)
    install(classes[1], [SPEED])
    assert names_of(classes[which])[-1] == "speed"
    install(classes[1], [])
    assert state_of(*classes) == before
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        classes[which](speed=1)
    assert "speed" not in repr(classes[which]())
    assert "speed" not in repr(config)
    assert dataclasses.replace(config, width=3).width == 3


def test_a_different_default_reaches_everybody():
    _, root, sub, *_ = family()
    install(root, [SPEED])
    install(root, [ConfigField("speed", int, 5)])
    assert (root().speed, sub().speed, root.speed) == (5, 5, 5)


# Subclasses defined later ---------------------------------------------------------------------------------------------


def late_family(root):
    @dataclass
    class Late(root):
        own: int = 6

    @dataclass
    class LateBelow(Late):
        more: int = 8

    class LatePlain(Late):
        pass

    return Late, LateBelow, LatePlain


@pytest.mark.parametrize("which", range(3), ids=["Late", "LateBelow", "LatePlain"])
def test_a_subclass_defined_while_they_are_there(which):
    _, root, *_ = family()
    install(root, [SPEED, LABEL])
    cls = late_family(root)[which]
    assert cls(speed=7, own=1) == cls(own=1, speed=7)
    assert cls(speed=7) != cls(speed=8)
    assert cls().seen == 3

    install(root, [])
    assert "speed" not in names_of(cls)
    assert "speed" not in inspect.signature(cls).parameters
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        cls(speed=7)
    config = cls(own=1)
    assert "speed" not in vars(config)
    assert not hasattr(config, "speed")
    assert "speed" not in repr(config)
    assert repr(config).startswith(f"{cls.__qualname__}(layers=1")
    assert config == cls(own=1)
    assert config != cls(own=2)
    assert dataclasses.replace(config, own=3).own == 3
    assert pickle.loads(pickle.dumps(vars(config))) == vars(config)

    install(root, [ConfigField("speed", int, 5)])
    assert (cls().speed, cls(speed=9).speed) == (5, 9)
    assert "speed=9" in repr(cls(speed=9))
    assert cls(speed=7) != cls(speed=8)
    install(root, [])
    assert cls() == cls()


def test_a_subclass_defined_between_two_changes():
    _, root, *_ = family()
    install(root, [SPEED])
    late = late_family(root)[0]
    install(root, [SPEED, LABEL])
    assert late(speed=1, label="a").label == "a"
    install(root, [LABEL])
    with pytest.raises(TypeError, match="'speed'"):
        late(speed=1)
    assert late(label="b").label == "b"
    later = late_family(root)[0]
    install(root, [])
    for cls in (late, later):
        for name in ("speed", "label"):
            with pytest.raises(TypeError, match=f"'{name}'"):
                cls(**{name: 1})
        assert names_of(cls) == ["layers", "width", "own"]


def test_a_late_subclass_with_slots():
    _, root, *_ = family()
    install(root, [SPEED])

    @dataclass(slots=True)
    class Slotted(root):
        own: int = 1

    assert Slotted(speed=4).speed == 4
    install(root, [])
    assert not hasattr(Slotted(), "speed")
    with pytest.raises(TypeError):
        Slotted(speed=4)
    install(root, [SPEED])
    assert Slotted(speed=4).speed == 4
    install(root, [])
    assert not hasattr(Slotted(own=2), "speed")


# Roots above each other -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["+root", "+sub", "-root", "-sub"])))
def test_two_roots_in_one_line_of_inheritance_in_any_order(order):
    _, root, sub, below, _ = classes = family()
    before = state_of(*classes)
    there = {"root": False, "sub": False}
    for step in order:
        name = step[1:]
        cls, added = (root, SPEED) if name == "root" else (sub, LABEL)
        install(cls, [added] if step[0] == "+" else [])
        there[name] = step[0] == "+"
        assert ("speed" in names_of(root)) == there["root"]
        assert ("speed" in names_of(below)) == there["root"]
        assert ("label" in names_of(below)) == there["sub"]
        assert "label" not in names_of(root)
        wanted = {n: 9 for n, on in (("speed", there["root"]), ("label", there["sub"])) if on}
        config = below(**wanted)
        assert {n: getattr(config, n) for n in wanted} == wanted
        assert config != below() or not wanted
    install(root, [])
    install(sub, [])
    assert state_of(*classes) == before


# Classes of other kinds -----------------------------------------------------------------------------------------------


def test_a_handwritten_init_with_fixed_arguments_keeps_the_value_that_it_is_given():
    _, root, *_ = family()

    @dataclass(init=False)
    class Own(root):
        def __init__(self, width=2):
            super().__init__(width=width)

    install(root, [SPEED])
    assert Own(speed=7).speed == 7
    assert Own().speed == 3
    assert dataclasses.asdict(Own(speed=7))["speed"] == 7
    install(root, [])
    with pytest.raises(TypeError):
        Own(speed=7)


def test_a_handwritten_init_that_passes_keywords_on_is_left_alone():
    _, root, *_ = family()

    @dataclass
    class Own(root):
        def __init__(self, **keywords):
            self.given = sorted(keywords)
            super().__init__(**keywords)

    init = Own.__init__
    install(root, [SPEED])
    assert Own.__init__ is init
    assert Own(speed=7).speed == 7
    assert Own(speed=7).given == ["speed"]


def test_frozen_keyword_only_and_hashed_classes():
    @dataclass(frozen=True)
    class Root:
        width: int = 2
        _: KW_ONLY
        names: tuple = field(default=(), compare=False, repr=False)

    install(Root, [SPEED])
    config = Root(3, speed=7)
    assert hash(config) == hash(Root(3, speed=8))
    assert config != Root(3, speed=8)
    assert "names" not in repr(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.speed = 3
    install(Root, [])
    assert Root(3) == Root(3, names=("a",))


def test_repr_and_eq_that_the_author_wrote_stay():
    @dataclass
    class Root:
        width: int = 2

        def __repr__(self):
            return "mine"

        def __eq__(self, other):
            return True

        __hash__ = None

    install(Root, [SPEED])
    assert repr(Root(speed=7)) == "mine"
    assert Root(speed=7) == Root(speed=8)


def test_a_recursive_instance_prints():
    @dataclass
    class Root:
        child: object = None

    install(Root, [SPEED])
    config = Root()
    config.child = config
    assert "..." in repr(config)


def test_a_subclass_that_has_the_field_itself_keeps_its_own():
    _, root, *_ = family()

    @dataclass
    class Mine(root):
        speed: int = 50

    @dataclass
    class MineBelow(Mine):
        pass

    before = state_of(Mine, MineBelow)
    install(root, [SPEED, LABEL])
    assert (Mine().speed, MineBelow().speed, root().speed) == (50, 50, 3)
    assert MineBelow(speed=1, label="a").label == "a"

    @dataclass
    class LateBelow(MineBelow):
        pass

    assert LateBelow().speed == 50
    install(root, [])
    assert state_of(Mine, MineBelow) == before
    assert LateBelow(speed=4).speed == 4
    with pytest.raises(TypeError):
        LateBelow(label="a")


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(root, added, message):
    before = state_of(root)
    with pytest.raises(OverlayError, match=message):
        install(root, added)
    assert state_of(root) == before


def test_what_cannot_be_done_is_refused_before_anything_changes():
    _, root, sub, _, plain = family()

    class NoDataclass:
        pass

    @dataclass(slots=True)
    class Slots:
        width: int = 2

    with pytest.raises(OverlayError, match="NoDataclass is not a dataclass"):
        install(NoDataclass, [SPEED])
    with pytest.raises(OverlayError, match="Plain is not a dataclass"):
        install(plain, [SPEED])
    refused(Slots, [SPEED], "no room for a further field")
    refused(root, [SPEED, ConfigField("width", int, 1)], "has the fields width of its own")
    refused(sub, [ConfigField("layers", int, 1)], "has the fields layers of its own")


@pytest.mark.parametrize("where", ["root", "base", "sub"])
def test_an_attribute_that_is_no_field_is_not_shadowed(where):
    base, root, sub, *_ = family()
    {"root": root, "base": base, "sub": sub}[where].speed = property(lambda self: 1)
    refused(root, [LABEL, SPEED], "has an attribute 'speed' that is no field")


def test_another_tool_s_init_on_top_of_ours_is_not_thrown_away():
    _, root, *_ = family()
    install(root, [SPEED])
    ours = root.__init__

    def theirs(self, **keywords):
        ours(self, **keywords)

    root.__init__ = theirs
    refused(root, [], r"__init__ was replaced by other code since; undo that first")
    root.__init__ = ours
    install(root, [])


def test_a_mutable_default_is_refused():
    with pytest.raises(ValueError, match="mutable"):
        ConfigField("speed", list, [])


# Through the engine ---------------------------------------------------------------------------------------------------

CONFIG = "megatron.core.config"
TEXT = """\
from dataclasses import dataclass


@dataclass
class Config:
    layers: int = 1


@dataclass
class Sub(Config):
    depth: int = 2
"""


def two_patches():
    return patch("fast", fields_target(SPEED)), patch("named", fields_target(LABEL, SPEED))


@pytest.mark.parametrize("order", list(itertools.permutations(["+fast", "+named", "-fast", "-named"])))
@isolated()
def test_two_patches_on_one_class_in_any_order(tmp_path, order):
    Tree(tmp_path).write(CONFIG, TEXT).use()
    engine = engine_for(*two_patches())
    config = module(CONFIG)
    before = state_of(config.Config, config.Sub)
    there = set()
    for step in order:
        name = step[1:]
        report = (engine.apply if step[0] == "+" else engine.revert)(name)
        (there.add if step[0] == "+" else there.discard)(name)
        assert {r.id for r in report if r.state in (State.APPLIED, State.ALREADY_APPLIED)} == there
        assert ("speed" in names_of(config.Sub)) == bool(there)
        assert ("label" in names_of(config.Sub)) == ("named" in there)
    engine.revert()
    assert state_of(config.Config, config.Sub) == before
    assert "__mcore_patches__" not in vars(config.Config)


@pytest.mark.parametrize("before_import", [True, False])
@isolated()
def test_fields_before_and_after_the_import(tmp_path, before_import):
    Tree(tmp_path).write(CONFIG, TEXT).use()
    engine = engine_for(patch("fast", fields_target(SPEED)))
    if before_import:
        assert engine.apply(strict=True)["fast"].state is State.PENDING
    config = module(CONFIG)
    row = engine.apply(strict=True)["fast"]
    assert row.targets[0].after == "fields speed"
    assert config.Sub(speed=4).speed == 4
    assert engine.status()["fast"].state is State.APPLIED
    data = pickle.dumps(config.Sub(speed=4))
    engine.revert()
    assert pickle.loads(data).speed == 4, "a value travels in the instance, whatever the class knows"
    assert engine.status()["fast"].state is State.NOT_APPLIED


@pytest.mark.parametrize("before_import", [True, False])
@isolated()
def test_fields_that_the_release_has_on_its_own(tmp_path, before_import):
    Tree(tmp_path).write(CONFIG, TEXT.replace("layers: int = 1", "layers: int = 1\n    speed: int = 9")).use()
    engine = engine_for(*two_patches())
    if not before_import:
        module(CONFIG)
    report = engine.apply()
    assert [row.state for row in report] == [State.UPSTREAM_FIXED, State.DRIFTED]
    assert module(CONFIG).Config().speed == 9
    assert engine.apply("named", force="named", strict=True)["named"].state in (State.APPLIED, State.PENDING)
    config = module(CONFIG)
    assert (config.Config().speed, config.Sub(label="a").label) == (9, "a")
    engine.revert()
    assert config.Config().speed == 9


@isolated()
def test_patches_that_disagree_on_a_field(tmp_path):
    Tree(tmp_path).write(CONFIG, TEXT).use()
    engine = engine_for(patch("fast", fields_target(SPEED)), patch("slow", fields_target(ConfigField("speed", int, 0))))
    config = module(CONFIG)
    report = engine.apply()
    assert [row.state for row in report] == [State.APPLIED, State.CONFLICT]
    assert "disagree on the field speed" in report["slow"].reason
    assert config.Config().speed == 3


@pytest.mark.parametrize("what", ["deleted", "no dataclass", "swapped", "no class"])
@isolated()
def test_a_live_class_that_is_not_what_the_text_says(tmp_path, what):
    tree = Tree(tmp_path).write(CONFIG, TEXT).use()
    config = module(CONFIG)
    if what == "deleted":
        del config.Config
    elif what == "no dataclass":
        del config.Config.__dataclass_fields__
    elif what == "swapped":
        config.Config = type("Theirs", (config.Config,), {})
    else:
        config.Config = 3
    engine = engine_for(patch("fast", fields_target(SPEED)))
    row = engine.apply()["fast"]
    assert row.state is (State.TARGET_ABSENT if what == "deleted" else State.CONFLICT)
    assert row.targets, "the row is there all the same"
    assert engine.status()["fast"].state is not State.APPLIED
    assert tree


# The real configs -----------------------------------------------------------------------------------------------------

MINIMAL = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8}
ADDED = (
    ConfigField("overlay_test_heads", "int | None", None),
    ConfigField("overlay_test_budget", int, 2048),
    ConfigField("overlay_test_mode", str, "none"),
)


def check_the_real_configs(release):
    """In a process of its own: every use of TransformerConfig and MLATransformerConfig, with fields and without."""
    sys.path.insert(0, str(releases.path(release)))
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    assert configs.__file__.startswith(str(releases.path(release)))
    root, mla = configs.TransformerConfig, configs.MLATransformerConfig
    known = list(type.__subclasses__(root))
    before = state_of(root, *known)

    @dataclass
    class Early(root):
        own: int = 1

    target = fields_target(*ADDED, module=configs.__name__, qualname="TransformerConfig")
    engine = engine_for(patch("fields", target, releases=patch_range()))
    assert engine.apply(strict=True)["fields"].state is State.APPLIED

    @dataclass
    class Late(mla):
        own: int = 2

    for cls, options in ((root, {}), (Early, {"own": 5}), (mla, MLA), (Late, {**MLA, "own": 6})):
        config = cls(**MINIMAL, **options, overlay_test_heads=8)
        assert (config.overlay_test_heads, config.overlay_test_budget) == (8, 2048)
        assert config.hidden_size == 64
        assert [n for n in names_of(cls) if n.startswith("overlay_test_")] == [f.name for f in ADDED]
        assert copy.deepcopy(config).overlay_test_heads == 8
        assert copy.copy(config) == config
        other = cls(**MINIMAL, **options, overlay_test_heads=9)
        assert config != other
        assert "overlay_test_heads=8" in repr(config)
        assert inspect.signature(cls).parameters["overlay_test_mode"].default == "none"
        if cls in (root, mla):
            assert pickle.loads(pickle.dumps(config)).overlay_test_heads == 8
            replaced = dataclasses.replace(cls(**MINIMAL, **options), overlay_test_mode="x")
            assert (replaced.overlay_test_mode, replaced.num_layers) == ("x", 1)
        with pytest.raises(TypeError):
            cls(**MINIMAL, **options, overlay_test_heds=8)
    engine.revert()
    after = state_of(root, *known)
    assert after == before
    for cls, options in ((root, {}), (Early, {"own": 5}), (mla, MLA), (Late, {**MLA, "own": 6})):
        with pytest.raises(TypeError, match="overlay_test_heads"):
            cls(**MINIMAL, **options, overlay_test_heads=8)
        config = cls(**MINIMAL, **options)
        assert "overlay_test" not in repr(config)
        assert copy.copy(config) == config
    assert engine.apply(strict=True)["fields"].state is State.APPLIED
    assert Late(**MINIMAL, **MLA, overlay_test_heads=8).overlay_test_heads == 8
    engine.revert()


def patch_range():
    from mcore_patches.overlay.versions import Releases

    return Releases((0, 16, 1), None)


@pytest.mark.parametrize("release", releases.RELEASES)
def test_the_configs_of_every_release(release):
    call(f"{__name__}:check_the_real_configs", {"release": release}, "torch")
