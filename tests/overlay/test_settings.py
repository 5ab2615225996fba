"""Every faulty environment value and argument is one clear error, and changes nothing."""

from __future__ import annotations

import os

import pytest

from mcore_patches.overlay import settings
from mcore_patches.overlay.errors import OverlayError, SettingsError
from mcore_patches.overlay.patch import State
from tests.overlay.isolation import isolated
from tests.overlay.stubs import engine_for, module, ops_tree, patch, target

KNOWN = ("alpha", "beta", "gamma")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MCORE_PATCHES"):
            monkeypatch.delenv(name)


FAULTY = [
    ("MCORE_PATCHES", "Off", "names 'Off'; known ids are all, alpha, beta, gamma, off"),
    ("MCORE_PATCHES", "none", "names 'none'"),
    ("MCORE_PATCHES", "alpha,,beta", "names ''"),
    ("MCORE_PATCHES", "alpha,", "names ''"),
    ("MCORE_PATCHES", ",", "names ''"),
    ("MCORE_PATCHES", "-", "names '-'"),
    ("MCORE_PATCHES", "--alpha", "names '--alpha'"),
    ("MCORE_PATCHES", "+alpha", "names"),
    ("MCORE_PATCHES", "alpha beta", "names 'alpha beta'"),
    ("MCORE_PATCHES", "alpha,-alpha", "names and excludes alpha"),
    ("MCORE_PATCHES", "off,alpha", "write 'off' alone"),
    ("MCORE_PATCHES", "-off", "write 'off' alone"),
    ("MCORE_PATCHES", "-all", "write 'off' alone"),
    ("MCORE_PATCHES", "all,-all", "write 'off' alone"),
    ("MCORE_PATCHES_STRICT", "true", "allowed are 0 and 1"),
    ("MCORE_PATCHES_STRICT", "2", "allowed are 0 and 1"),
    ("MCORE_PATCHES_FORCE", "delta", "names 'delta'; known ids are alpha, beta, gamma"),
    ("MCORE_PATCHES_FORCE", "all", "names 'all'"),
    ("MCORE_PATCHES_FORCE", "-alpha", "excludes '-alpha'; only ids to force are allowed"),
    ("MCORE_PATCHES_ON_DECLINE", "Raise", "allowed are fallback and raise"),
    ("MCORE_PATCHES_ON_DECLINE", "1", "allowed are fallback and raise"),
    ("MCORE_PATCHES_PREFIXES", "verl,", "holds ''"),
    ("MCORE_PATCHES_PREFIXES", "my-package", "holds 'my-package'; allowed are dotted module names"),
    ("MCORE_PATCHES_PREFIXES", "a..b", "holds 'a..b'"),
    ("MCORE_PATCHES_PREFIXES", "*", "holds '*'"),
    ("MCORE_PATCHES_STRIKT", "1", "is not a switch; known are MCORE_PATCHES, MCORE_PATCHES_FORCE"),
    ("MCORE_PATCHES_", "1", "is not a switch"),
    ("MCORE_PATCHES_DISABEL", "qsa", "the nearest is MCORE_PATCHES"),
    ("MCORE_PATCHES_STRIKT", "1", "the nearest is MCORE_PATCHES_STRICT"),
    ("MCORE_PATCH", "off", "the nearest is MCORE_PATCHES"),
    ("MCOREPATCHES", "off", "the nearest is MCORE_PATCHES"),
    ("MCORE_PATCHS", "off", "the nearest is MCORE_PATCHES"),
    ("mcore_patches", "off", "the nearest is MCORE_PATCHES"),
    ("MCORE_PATCH_STRICT", "1", "the nearest is MCORE_PATCHES_STRICT"),
    ("MCORE_PATCH_ON_DECLIN", "raise", "the nearest is MCORE_PATCHES_ON_DECLINE"),
]

OTHERS = (
    "MCORE_PATH",
    "MCORE_PATCH_DIR",
    "MCORE_PATCHED",
    "MCORE_PATCHER",
    "MCORE_STRICT",
    "PATCHES",
    "MEGATRON_PATCHES",
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_people_s_variables_are_theirs(monkeypatch, name):
    monkeypatch.setenv(name, "off")
    settings.check(KNOWN)


@pytest.mark.parametrize(
    "name", ["MCORE_PATCHES", *(f"MCORE_PATCHES_{s}" for s in ("STRICT", "FORCE", "ON_DECLINE", "PREFIXES"))]
)
def test_a_long_value_is_cut(monkeypatch, name):
    monkeypatch.setenv(name, "no-such-id\x1b[31m" * 10_000)
    with pytest.raises(SettingsError) as caught:
        settings.check(KNOWN)
    assert len(str(caught.value)) < 400
    assert "no-such-id" in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(("name", "value", "message"), FAULTY)
def test_a_faulty_value_is_one_error_that_names_it(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        settings.check(KNOWN)
    assert name in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OverlayError)


@pytest.mark.parametrize("operation", ["apply", "apply_dry", "status", "revert", "applied", "require"])
@pytest.mark.parametrize(("name", "value"), [case[:2] for case in FAULTY if case[1] != "none"][::5])
@isolated()
def test_no_operation_does_anything_with_a_faulty_environment(tmp_path, operation, name, value):
    engine = engine_for(patch("alpha", target(ops_tree(tmp_path))))
    ops = module()
    patched = operation == "revert"
    if patched:
        engine.apply()
    function = ops.f
    os.environ[name] = value
    operations = {
        "apply_dry": lambda: engine.apply(dry_run=True),
        "require": lambda: engine.require("alpha"),
        "applied": lambda: engine.applied().__enter__(),
    }
    with pytest.raises(SettingsError, match=name):
        operations.get(operation, lambda: getattr(engine, operation)())()
    assert ops.f is function
    del os.environ[name]
    assert engine.status()["alpha"].state is (State.APPLIED if patched else State.NOT_APPLIED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": "delta"}, "ids names 'delta'; known ids are alpha"),
        ({"ids": ["alpha", "delta"]}, "ids names 'delta'"),
        ({"ids": "alpha,beta"}, "ids names 'alpha,beta'"),
        ({"ids": ""}, "ids names ''"),
        ({"ids": 5}, "ids is 5; allowed is an id or several"),
        ({"ids": [5]}, "ids names 5"),
        ({"ids": [["alpha"]]}, "ids names ['alpha']"),
        ({"exclude": "delta"}, "exclude names 'delta'"),
        ({"exclude": None}, "exclude is None"),
        ({"force": ("delta",)}, "force names 'delta'"),
        ({"force": True}, "force is True"),
        ({"strict": "yes"}, "strict is 'yes'; allowed are True, False and None"),
        ({"strict": 1}, "strict is 1"),
        ({"dry_run": "no"}, "dry_run is 'no'; allowed are True and False"),
    ],
    ids=str,
)
@isolated()
def test_a_faulty_argument_is_one_error_that_names_it(tmp_path, arguments, message):
    engine = engine_for(patch("alpha", target(ops_tree(tmp_path))))
    ops = module()
    with pytest.raises(SettingsError) as caught:
        engine.apply(**arguments)
    assert message in str(caught.value)
    with pytest.raises(SettingsError), engine.applied(**arguments):
        pytest.fail("entered the block")
    assert ops.f(1) == 2


@isolated()
def test_faulty_ids_of_the_other_operations(tmp_path):
    engine = engine_for(patch("alpha", target(ops_tree(tmp_path))))
    ops = module()
    engine.apply()
    for faulty in ("delta", 5, ["alpha", "delta"]):
        with pytest.raises(SettingsError):
            engine.revert(faulty)
    for faulty in ("delta", 5, None, ["alpha"]):
        with pytest.raises(SettingsError):
            engine.require(faulty)
    assert ops.f(1) == 20


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (None, "alpha beta gamma"),
        ("", "alpha beta gamma"),
        ("  ", "alpha beta gamma"),
        ("all", "alpha beta gamma"),
        ("off", ""),
        (" off ", ""),
        ("alpha", "alpha"),
        (" alpha , gamma ", "alpha gamma"),
        ("-beta", "alpha gamma"),
        ("all,-beta,-gamma", "alpha"),
        ("alpha,beta,-gamma", "alpha beta"),
        ("alpha,alpha", "alpha"),
    ],
)
def test_which_patches_a_value_allows(monkeypatch, value, allowed):
    if value is not None:
        monkeypatch.setenv("MCORE_PATCHES", value)
    selection = settings.selection(KNOWN)
    assert [i for i in KNOWN if selection.refuses(i) is None] == allowed.split()


@pytest.mark.parametrize(("value", "explicit"), [("all,gamma", {"gamma"}), ("all", set()), ("alpha", {"alpha"})])
def test_ids_that_are_written_out_may_be_third_party(monkeypatch, value, explicit):
    monkeypatch.setenv("MCORE_PATCHES", value)
    assert settings.selection(KNOWN).explicit == explicit


def test_values_that_are_in_order(monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES_STRICT", " 1 ")
    monkeypatch.setenv("MCORE_PATCHES_FORCE", "alpha , beta")
    monkeypatch.setenv("MCORE_PATCHES_ON_DECLINE", "raise")
    monkeypatch.setenv("MCORE_PATCHES_PREFIXES", "verl, skyrl.workers.")
    settings.check(KNOWN)
    assert settings.strict()
    assert settings.force(KNOWN) == {"alpha", "beta"}
    assert settings.on_decline() == "raise"
    assert settings.prefixes() == ("megatron", "verl", "skyrl.workers")
    for name in ("STRICT", "FORCE", "ON_DECLINE", "PREFIXES"):
        monkeypatch.setenv(f"MCORE_PATCHES_{name}", "")
    settings.check(KNOWN)
    assert (settings.strict(), settings.force(KNOWN), settings.on_decline()) == (False, frozenset(), "fallback")
    assert settings.prefixes() == ("megatron",)
