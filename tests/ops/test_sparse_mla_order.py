"""When the sparse MLA backward adds up dKV in order without being asked to."""

import pytest

from mcore_patches.ops.device import Device
from mcore_patches.ops.sparse_mla.tilelang_kernels import MOST_ATOMIC_BYTES, order_is_faster

H200 = Device("sm_90a", 227 * 1024, 132)


def test_only_beyond_the_cache() -> None:
    most = MOST_ATOMIC_BYTES // (4 * 512)
    assert not order_is_faster(H200, most, 2048, most, 512)
    assert order_is_faster(H200, most + 1, 2048, most + 1, 512)
    assert order_is_faster(H200, most, 2048, most, 576)


def test_not_for_few_rows_over_many_keys() -> None:
    """Ordering looks at every key once a chunk; a few additions are cheaper."""
    assert order_is_faster(H200, 1024, 256, 2**16, 576)
    assert not order_is_faster(H200, 1023, 256, 2**16, 576)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
def test_only_where_it_was_measured(arch: str) -> None:
    assert not order_is_faster(Device(arch, 227 * 1024, 132), 2**16, 2048, 2**16, 576)
