"""When the sparse MLA backward adds up dKV in order without being asked to, and how many rows of it at a time."""

import csv
import itertools
import re
from pathlib import Path

import pytest

from mcore_patches.ops.device import Device
from mcore_patches.ops.sparse_mla import ordering
from mcore_patches.ops.sparse_mla.ordering import order_is_faster, rows_in_order

H200 = Device("sm_90a", 227 * 1024, 132)
RESULTS = Path(__file__).parents[2] / "gpu_ci" / "bench" / "results.csv"
RATIO = "backward, deterministic / atomic"


@pytest.mark.parametrize(("heads", "most"), [(16, 96 * 2**20), (64, 96 * 2**20), (65, 144 * 2**20), (128, 144 * 2**20)])
def test_only_beyond_the_cache(heads: int, most: int) -> None:
    keys = most // (4 * 512)
    assert not order_is_faster(H200, keys, 2048, keys, 512, heads)
    assert order_is_faster(H200, keys + 1, 2048, keys + 1, 512, heads)
    assert order_is_faster(H200, keys, 2048, keys, 576, heads)


def test_it_loses_in_no_case_that_was_measured() -> None:
    """In results.csv: where a call takes the ordered backward by itself, that was no slower than atomics."""
    with RESULTS.open(newline="") as file:
        ratios = {row["case"]: float(row["value"]) for row in csv.DictReader(file) if row["metric"] == RATIO}
    taken = {}
    for case, ratio in ratios.items():
        tokens, heads, width, topk = map(int, re.fullmatch(r"T(\d+)-H(\d+)-D(\d+)-K(\d+)", case).groups())  # type: ignore[union-attr]
        taken[case] = order_is_faster(H200, tokens, topk, tokens, width, heads)
        assert not (taken[case] and ratio > 1), f"{case}: {ratio} of the atomics' time"
        assert taken[case] or ratio > 0.9, f"{case}: {ratio} of the atomics' time, and not taken"
    assert set(taken.values()) == {False, True}


def test_not_for_few_rows_over_many_keys() -> None:
    """Ordering looks at every key once a chunk; a few additions are cheaper."""
    assert order_is_faster(H200, 1024, 256, 2**16, 576, 64)
    assert not order_is_faster(H200, 1023, 256, 2**16, 576, 64)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
def test_only_where_it_was_measured(arch: str) -> None:
    assert not order_is_faster(Device(arch, 227 * 1024, 132), 2**16, 2048, 2**16, 576, 64)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order_is_faster(H200, 2**16, 2048, 2**16, 576, 64)
    monkeypatch.setattr(ordering, "BY_ITSELF", False)
    assert not order_is_faster(H200, 2**16, 2048, 2**16, 576, 64)


@pytest.mark.parametrize(("topk", "width", "blocks"), list(itertools.product((64, 2048, 4096), (512, 576), (1, 2))))
def test_rows_of_a_chunk_fill_whole_waves(topk: int, width: int, blocks: int) -> None:
    rows = rows_in_order(10**6, topk, 2**16, width, blocks, 132)
    assert rows * blocks % 132 == 0
    assert rows * topk * width * blocks * 2 <= ordering.PARTS_BYTES


@pytest.mark.parametrize("keys", [1, 1000, 2**16, 2**18, 2**20, 10**7])
@pytest.mark.parametrize("topk", [1, 64, 2048])
def test_what_numbers_the_parts_is_bounded_too(keys: int, topk: int) -> None:
    rows = rows_in_order(10**6, topk, keys, 512, 1, 132)
    words = -(-rows // 32)
    assert 2 * 4 * words * keys <= ordering.BITS_BYTES
    assert rows * topk < 2**31
    assert rows_in_order(100, topk, keys, 512, 1, 132) == 100 or topk * keys > 10**7


def test_more_keys_than_the_bound_leave_a_word_of_rows() -> None:
    assert rows_in_order(10**6, 64, 10**9, 512, 1, 132) == 32
    assert rows_in_order(10, 64, 10**9, 512, 1, 132) == 10
