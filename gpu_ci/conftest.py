"""GPU tests: marked h100, skipped only where there is no CUDA device; gpu_ci/run.sh fails when all were skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "h100" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """Workers share one GPU: give cached blocks back after every test."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
