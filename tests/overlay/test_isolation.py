"""The runner that the other tests rely on: it must report what goes wrong in the child, and keep children apart."""

from __future__ import annotations

import os
import sys

import pytest

from tests import releases
from tests.overlay.isolation import ChildFailed, call, isolated

HERE = f"{__name__}:"


def fails_an_assertion(number):
    assert number == 2, "two was wanted"


def ends_without_an_answer():
    os._exit(0)


def answers_what_cannot_be_sent():
    return lambda: None


def leaves_a_mark():
    before = hasattr(sys, "marked_by_a_test")
    sys.marked_by_a_test = True
    return before


def what_is_loaded():
    return sorted({"torch", "megatron"} & set(sys.modules)), {k for k in os.environ if k.startswith("MCORE_PATCHES")}


def test_a_failed_assertion_is_a_failure_that_shows_the_values():
    with pytest.raises(ChildFailed, match=r"(?s)two was wanted.*assert 1 == 2"):
        call(HERE + "fails_an_assertion", {"number": 1})


def test_a_child_that_vanishes_is_a_failure():
    with pytest.raises(ChildFailed, match="without an answer"):
        call(HERE + "ends_without_an_answer", {})


def test_a_result_that_does_not_pickle_is_a_failure():
    with pytest.raises(ChildFailed, match="pickle"):
        call(HERE + "answers_what_cannot_be_sent", {})


def test_children_share_nothing():
    assert [call(HERE + "leaves_a_mark", {}) for _ in range(2)] == [False, False]
    assert not hasattr(sys, "marked_by_a_test")


def test_a_child_starts_clean(monkeypatch):
    monkeypatch.setenv("MCORE_PATCHES", "off")
    loaded, switches = call(HERE + "what_is_loaded", {})
    assert loaded == []
    assert switches <= {releases.FOLDER_VARIABLE}


@isolated(MCORE_PATCHES="off")
def test_the_environment_of_a_test_is_its_own(tmp_path):
    assert os.environ["MCORE_PATCHES"] == "off"
    assert tmp_path.is_dir()
