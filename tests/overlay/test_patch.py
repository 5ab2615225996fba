"""A descriptor that cannot work is refused when it is made, with the patch, the field and what is allowed."""

from __future__ import annotations

import pytest

from mcore_patches.overlay.patch import ERRORS, IN_PLACE, ConfigField, FieldsTarget, State, Target
from tests.overlay.stubs import patch, times

GOOD = Target(modules=("megatron.core.ops",), qualname="f", build=times(2))


def good(**changes):
    return Target(**{"modules": ("megatron.core.ops",), "qualname": "f", "build": times(2), **changes})


def test_a_good_one():
    made = patch("good", GOOD, needs_patches=("other",), instances_of=("megatron.core.a:B",), late_safe=False)
    assert made.targets[0].name == "megatron.core.ops:f"
    assert FieldsTarget(modules=("m",), qualname="C", fields=(ConfigField("x", int, 1),)).name == "m:C+fields"


@pytest.mark.parametrize("id", ["", "Alpha", "1a", "a-b", "a b", "a" * 65, "all", "off", 5, "ä"])
def test_ids(id):
    with pytest.raises(ValueError, match=r"Patch\.id is .* allowed are lower-case letters"):
        patch(id, GOOD) if isinstance(id, str) else patch_with_id(id)


def patch_with_id(id):
    import dataclasses

    return dataclasses.replace(patch("good", GOOD), id=id)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (good(modules=()), "allowed are tuples of names"),
        (good(modules="megatron.core"), "allowed are tuples of names"),
        (good(modules=("megatron core",)), "'megatron core' is no dotted name"),
        (good(modules=("megatron..core",)), "is no dotted name"),
        (good(qualname=""), "'' is no dotted name"),
        (good(qualname="f()"), "is no dotted name"),
        (good(qualname="outer.<locals>.f"), "is no dotted name"),
        (good(relies_on="g"), "allowed are tuples of names"),
        (
            good(relies_on=("g g",)),
            "relies_on holds 'g g'; allowed are 'name', 'package.module:name' and '.module:name'",
        ),
        (good(relies_on=("..up:g",)), "relies_on holds '..up:g'"),
        (good(relies_on=("a.b:",)), "relies_on holds 'a.b:'"),
        (good(relies_on=(":g",)), "relies_on holds ':g'"),
        (good(relies_on=("a.b:g:h",)), "relies_on holds 'a.b:g:h'"),
        (good(relies_on=(5,)), "relies_on holds 5"),
        (good(relies_on=("g", "g")), "allowed is each name once, without the target's own"),
        (good(relies_on=("f",)), "allowed is each name once, without the target's own"),
        (good(relies_on=("a.b:g", "a.b:g")), "allowed is each name once"),
        (good(build=None), "build is None; allowed is a function"),
        (good(known={"0" * 64: "maybe"}), "known verdict 'maybe'; allowed are 'needs' and 'fixed'"),
        (good(known={"abc": "needs"}), "known fingerprint 'abc'; allowed are 64 hexadecimal digits"),
        (FieldsTarget(modules=("m",), qualname="C", fields=()), "allowed is a tuple of at least one ConfigField"),
        (FieldsTarget(modules=("m",), qualname="C", fields=("x",)), "at least one ConfigField"),
        ("megatron.core.ops:f", "is of type str; allowed are Target, FieldsTarget and ModuleTarget"),
    ],
)
def test_targets(target, message):
    with pytest.raises(ValueError, match="patch bad") as caught:
        patch("bad", target)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needs_patches": "other"}, "needs_patches is 'other'; allowed is a tuple"),
        ({"needs_packages": ["tilelang"]}, "allowed is a tuple"),
        ({"conflicts": "x"}, "conflicts is 'x'"),
        ({"releases": "0.19"}, "allowed is a Releases"),
        ({"late_safe": False}, "instances_of must name the classes"),
        ({"instances_of": ("megatron.core.Model",)}, "allowed is 'module:Class'"),
        ({"instances_of": ("a:b:c",)}, "allowed is 'module:Class'"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match="patch bad") as caught:
        patch("bad", GOOD, **options)
    assert message in str(caught.value)


def test_no_targets_and_the_same_twice():
    with pytest.raises(ValueError, match="targets is empty"):
        patch("bad")
    with pytest.raises(ValueError, match="is there twice"):
        patch("bad", GOOD, good(level=3))


@pytest.mark.parametrize("name", ["", "a b", "1a", 5])
def test_names_of_fields(name):
    with pytest.raises(ValueError, match="allowed is an identifier"):
        ConfigField(name, int, 1)


def test_every_state_is_of_one_kind():
    harmless = {State.NOT_APPLIED, State.UPSTREAM_FIXED, State.OUT_OF_RANGE, State.TARGET_ABSENT, State.DISABLED}
    assert {State.PENDING} | harmless | ERRORS | IN_PLACE == set(State)
    assert [s for s in State if s in ERRORS and s in IN_PLACE] == [State.INERT]
    assert not harmless & (ERRORS | IN_PLACE)
