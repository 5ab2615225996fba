"""applied(): what was put on for a block goes again, and nothing else."""

from __future__ import annotations

import os

import pytest

from mcore_patches.overlay.errors import NotAppliedError, NotRevertedError
from mcore_patches.overlay.patch import State
from tests.overlay.isolation import isolated
from tests.overlay.stubs import engine_for, module, ops_tree, patch, target, times


def two(tmp_path):
    tree = ops_tree(tmp_path)
    return engine_for(patch("tenfold", target(tree)), patch("triple", target(tree, build=times(3))))


@isolated()
def test_in_the_block_and_after_it(tmp_path):
    engine = two(tmp_path)
    ops = module()
    upstream = ops.f
    with engine.applied("tenfold", strict=True) as report:
        assert report["tenfold"].state is State.APPLIED
        assert ops.f(1) == 20
    assert ops.f is upstream


@isolated()
def test_what_was_in_place_before_stays(tmp_path):
    engine = two(tmp_path)
    ops = module()
    engine.apply("tenfold")
    with engine.applied():
        assert ops.f(1) == 60
        with engine.applied():
            assert ops.f(1) == 60
        assert ops.f(1) == 60
    assert ops.f(1) == 20


@isolated()
def test_an_exception_in_the_block_passes_and_the_patch_goes(tmp_path):
    engine = two(tmp_path)
    ops = module()
    with pytest.raises(KeyError, match="mine"), engine.applied():
        raise KeyError("mine")
    assert ops.f(1) == 2


@isolated()
def test_strict_that_raises_leaves_nothing_behind(tmp_path):
    tree = ops_tree(tmp_path)
    engine = engine_for(patch("tenfold", target(tree)), patch("drifted", target(None, known=None)))
    ops = module()
    with pytest.raises(NotAppliedError, match="DRIFTED"), engine.applied(strict=True):
        pytest.fail("entered the block")
    assert ops.f(1) == 2


@isolated()
def test_pending_at_the_end_of_the_block_is_no_longer_pending(tmp_path):
    engine = two(tmp_path)
    with engine.applied("tenfold") as report:
        assert report["tenfold"].state is State.PENDING
    assert module().f(1) == 2


@isolated()
def test_imported_within_the_block(tmp_path):
    engine = two(tmp_path)
    with engine.applied("tenfold"):
        assert module().f(1) == 20
    assert module().f(1) == 2


@isolated()
def test_a_switch_that_became_faulty_within_the_block_does_not_keep_the_patch(tmp_path):
    engine = two(tmp_path)
    ops = module()
    with engine.applied("tenfold"):
        os.environ["MCORE_PATCHES_STRICT"] = "maybe"
    assert ops.f(1) == 2


@isolated()
def test_another_tool_s_wrapper_at_the_end_is_an_error(tmp_path):
    import functools

    engine = two(tmp_path)
    ops = module()
    with pytest.raises(NotRevertedError, match="tenfold stays in place"), engine.applied("tenfold"):
        ops.f = functools.wraps(ops.f)(lambda x: 0)
    assert ops.f(1) == 0
