"""One process with the patch, on the installed megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mcore_patches
from mcore_patches.cpu import parallel


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Model parallelism of one rank on a CPU, with the patch in place until the module's tests are done."""
    with parallel.model_parallel(), mcore_patches.applied("qsa", strict=True):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
