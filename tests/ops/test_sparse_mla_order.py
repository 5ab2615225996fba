"""When the sparse MLA backward adds up dKV in order without being asked to, and how many rows of it at a time."""

import csv
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.device import Device
from mcore_patches.ops.sparse_mla import ordering, tilelang_kernels
from mcore_patches.ops.sparse_mla.ordering import order_is_faster, rows_in_order
from tests.ops import kernels_in_torch
from tests.ops.assertions import assert_identical

H200 = Device("sm_90a", 227 * 1024, 132)
RESULTS = Path(__file__).parents[2] / "gpu_ci" / "bench" / "results.csv"
RATIO = "backward, deterministic / atomic"


@pytest.mark.parametrize(("heads", "mib"), [(1, 60), (16, 60), (17, 96), (64, 96), (65, 144), (128, 144)])
def test_only_beyond_the_cache(heads: int, mib: int) -> None:
    keys = mib * 2**20 // (4 * 512)
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_call_takes_order_by_its_shapes_or_because_it_is_asked_to(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilelang_kernels, "_device", lambda _: H200)

    def takes(rows: int, topk: int, keys: int, heads: int, width: int) -> bool:
        sizes = (1, rows, heads, width), (1, keys, 1, width), (1, rows, topk)
        return tilelang_kernels.takes_order(*(torch.empty(s, device="meta") for s in sizes), deterministic)

    shapes = itertools.product((64, 2**16), (128, 2048), (2**12, 2**16), (16, 64), (512, 576))
    for rows, topk, keys, heads, width in shapes:
        expected = deterministic or order_is_faster(H200, rows, topk, keys, width, heads)
        assert takes(rows, topk, keys, heads, width) == expected
    assert takes(2**16, 2048, 2**16, 64, 576)
    assert takes(64, 2048, 2**16, 64, 576) == deterministic  # few uses of a key


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


KERNELS = {
    "mark": kernels_in_torch.mark,
    "rank": kernels_in_torch.rank,
    "locate": kernels_in_torch.locate,
    "sum": kernels_in_torch.add_parts,
}


@pytest.mark.parametrize(("rows", "chunk"), [(70, 33), (64, 32), (37, 37), (5, 1)])
def test_parts_of_all_chunks_are_summed(rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launches around kernels in torch; of the backward as much as matters: it stores by slot, and writes dq."""
    keys, topk, heads, width = 90, 6, 3, 8
    monkeypatch.setattr(tilelang_kernels, "kernel", lambda name, device, width, **shape: KERNELS[name])
    monkeypatch.setattr(tilelang_kernels, "head_blocks_of", lambda *_: 1)
    monkeypatch.setattr(tilelang_kernels, "rows_in_order", lambda *_: chunk)
    # Whole numbers: sums are exact in any order. Rows repeat ids, and name none.
    ids = torch.randint(-1, keys, (1, rows, topk), dtype=torch.int32)
    ids[0, ::4, 1] = ids[0, ::4, 0]
    q, dout = (torch.randint(-3, 4, (1, rows, heads, width)).bfloat16() for _ in range(2))
    kv, lse, delta = torch.zeros(1, keys, width).bfloat16(), torch.zeros(1, rows, heads), torch.zeros(1, rows, heads)
    extent = torch.full((1, rows), topk, dtype=torch.int32)
    stored: list[int] = []

    def part(q: Tensor, ids: Tensor) -> Tensor:
        """Of every row and id, the same wherever an id stands twice in a row."""
        return q.sum(dim=2)[:, :, None] + ids[..., None] % 5

    def run(
        q: Tensor, kv: Tensor, dout: Tensor, ids: Tensor, slots: Tensor, extent: Tensor, lse: Tensor, delta: Tensor,
        scale: float, dq: Tensor, parts: Tensor,
    ) -> None:  # fmt: skip
        assert q.shape[1] == ids.shape[1] == slots.shape[1] == extent.shape[1] == lse.shape[1] == delta.shape[1]
        assert torch.equal(slots < 0, ids < 0)
        dq.copy_(2 * q + dout)
        parts[0, slots[slots >= 0].long()] = part(q, ids)[slots >= 0].to(parts.dtype)
        stored.append(ids.shape[1])

    dq, dkv = torch.empty_like(q), torch.zeros(1, keys, width)
    tilelang_kernels._backward_in_order(run, H200, q, kv, dout, ids, extent, lse, delta, 1.0, dq, dkv, 0)
    chosen = ids[0] >= 0
    expected = torch.zeros(keys, width).index_add_(0, ids[0][chosen].long(), part(q, ids)[0][chosen].float())
    assert_identical("dkv", expected, dkv[0])
    assert_identical("dq", 2 * q + dout, dq)
    assert sum(stored) == rows and max(stored) == min(chunk, rows) and len(stored) == -(-rows // chunk)
