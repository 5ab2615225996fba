"""The runner that the other tests rely on: it must report what goes wrong in the child, and keep children apart."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from tests import releases
from tests.overlay.isolation import ChildFailed, call, isolated
from tests.overlay.stubs import Tree

HERE = f"{__name__}:"
INFO = "megatron.core.package_info"


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


class Imports:
    """An argument that imports a module where it is unpickled."""

    def __init__(self, module):
        self.module = module

    def __reduce__(self):
        return importlib.import_module, (self.module,)


def is_loaded(module, argument=None):
    return module in sys.modules


def imported_file(root):
    return Tree(root).use().imported(INFO).__file__


def import_of_a_second_tree(first, second):
    Tree(first).use().imported(INFO)
    Tree(second).use().imported(INFO)


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


def test_what_an_argument_imports_is_not_there_for_the_next_child():
    module = "xml.dom.pulldom"
    assert not call(HERE + "is_loaded", {"module": module})
    assert call(HERE + "is_loaded", {"module": module, "argument": Imports(module)})
    assert not call(HERE + "is_loaded", {"module": module})


def test_tensors_are_no_arguments():
    """Megatron's import makes a function of its own pickle them, in the process that collects tests."""
    import torch

    with pytest.raises(TypeError, match="is_loaded must not be given a tensor"):
        call(HERE + "is_loaded", {"module": "megatron", "argument": torch.tensor(0.5)})


def test_no_child_is_forked_where_megatron_is_loaded():
    """A test module that imports megatron: its tests would read that one in place of what they write."""
    with pytest.raises(ChildFailed, match=r"(?s)has imported megatron already: .*package_info\.py"):
        call("tests.overlay.imports_megatron:anything", {})
    assert call(HERE + "is_loaded", {"module": "megatron"}) is False


def test_a_tree_that_is_not_what_is_imported_is_a_failure(tmp_path):
    assert call(HERE + "imported_file", {"root": tmp_path}) == str(tmp_path / "megatron" / "core" / "package_info.py")
    with pytest.raises(ChildFailed, match=r"package_info was imported from \S*first\S*, not from \S*second"):
        call(HERE + "import_of_a_second_tree", {"first": tmp_path / "first", "second": tmp_path / "second"})


@isolated(MCORE_PATCHES="off")
def test_the_environment_of_a_test_is_its_own(tmp_path):
    assert os.environ["MCORE_PATCHES"] == "off"
    assert tmp_path.is_dir()
