"""One process with the patch, on the installed megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mcore_patches
from mcore_patches.cpu import parallel


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Model parallelism of one rank on a CPU, until the module's tests are done."""
    with parallel.model_parallel():
        yield


@pytest.fixture
def megatron(one_rank: None) -> Iterator[None]:
    """The patch in place for one test."""
    with mcore_patches.applied("qsa", strict=True):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
