"""Shared by all tests."""

import os
from collections.abc import Iterator

import pytest

import mcore_patches
from tests.leaks import patches_in_place

# The tests run side by side: one thread each, set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_patch_is_left_behind() -> Iterator[None]:
    yield
    if left := patches_in_place():
        mcore_patches.revert()
        pytest.fail(f"the test left patches in place: {', '.join(left)}")
