import zlib

import pytest
import torch


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Random inputs of each test's own, the same in every run and in every order of tests."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value
