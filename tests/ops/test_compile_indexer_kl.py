"""Compile-only: the kernels of indexer_kl assemble, fit shared memory and keep their registers. And their tiles."""

from typing import Any

import pytest
import torch

from mcore_patches.ops.block_topk.design import REGISTERS
from mcore_patches.ops.device import HOPPER, HOPPER_SHARED_BYTES
from mcore_patches.ops.indexer_kl.design import (
    CHUNK_BYTES,
    MANY_HEADS_THREADS,
    QUERY_GRADIENT_ROWS,
    ROWS_PER_WORD,
    STUDENT_THREADS,
    Shape,
    many_heads_shared_bytes,
    rows_at_once,
    rows_of_all_blocks,
    shape_of,
    student_blocks_per_sm,
    student_shared_bytes,
    teacher_shared_bytes,
    teacher_slots,
)
from mcore_patches.ops.indexer_kl.tilelang_kernels import specifications
from tests.ops.compiling import Report, compile_report

BF16 = torch.bfloat16
REAL: dict[str, Any] = {
    "arch": HOPPER,
    "shared_bytes": HOPPER_SHARED_BYTES,
    "index_dtype": BF16,
    "dtype": BF16,
    "heads": 4,
    "channels": 128,
    "q_heads": 24,
    "kv_heads": 2,
    "dim": 256,
    "ratio": 4,
    "topk": 512,
    "weighted": False,
    "relu": True,
    "ranks": False,
}
LARGE = {"heads": 8, "channels": 256, "topk": 4096, "ratio": 1, "q_heads": 32, "kv_heads": 1, "dim": 128}
SMALL = {"heads": 3, "channels": 64, "q_heads": 2, "dim": 64, "ratio": 16, "dtype": torch.float16, "relu": False}


TOKENS = {"heads": 64, "ratio": 1, "topk": 2048, "q_heads": 16, "dim": 128, "weighted": True}  # DSA's indexer


def shape_with(**changes: Any) -> Shape:
    shape = shape_of(**(REAL | changes))
    assert isinstance(shape, Shape), shape
    return shape


def report_of(shape: Shape, name: str, arch: str = HOPPER, **extra: Any) -> Report:
    module, builder, arguments = specifications(shape, HOPPER_SHARED_BYTES)[name]
    return compile_report(module, builder, arguments | extra, arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("changes", [{}, LARGE, SMALL, {"ranks": True}], ids=["real", "large", "small", "ranks"])
def test_teacher_fits(changes: dict[str, Any], arch: str) -> None:
    shape = shape_with(**changes)
    report = report_of(shape, "teacher", arch, wgmma=arch == HOPPER)
    slots = teacher_slots(HOPPER_SHARED_BYTES, shape.q_heads, shape.dim)
    assert report.shared_bytes + 1024 <= teacher_shared_bytes(slots, shape.q_heads, shape.dim) <= HOPPER_SHARED_BYTES
    assert report.spilled == 0
    assert report.warnings == ()
    # A warp group that asks for more registers than the others left waits for ever: two consumers and a producer.
    consumer, producer = report.split
    assert report.registers <= 65536 // 384
    assert 2 * consumer + producer <= 3 * report.registers


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("changes", [{}, LARGE | {"weighted": True}], ids=["real", "large-weights"])
def test_student_fits(changes: dict[str, Any], arch: str) -> None:
    shape = shape_with(**changes)
    report = report_of(shape, "student", arch)
    assert report.registers * STUDENT_THREADS * student_blocks_per_sm(shape) <= REGISTERS
    assert report.shared_bytes <= student_shared_bytes(shape) <= HOPPER_SHARED_BYTES
    assert report.spilled == 0


@pytest.mark.parametrize(
    "changes",
    [TOKENS, {"heads": 9, "channels": 64, "topk": 4096, "relu": False}],
    ids=["tokens", "nine-linear"],
)
def test_student_of_many_heads_fits(changes: dict[str, Any]) -> None:
    shape = shape_with(**changes)
    report = report_of(shape, "many_heads")
    assert report.shared_bytes <= many_heads_shared_bytes(shape) <= HOPPER_SHARED_BYTES
    assert report.registers * MANY_HEADS_THREADS * 2 <= REGISTERS
    assert report.spilled == 0
    assert report.warnings == ()
    assert report_of(shape, "sum").spilled == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ["union", "gather", "blocks", "mark", "rank", "locate"])
def test_other_kernels_fit(name: str, arch: str) -> None:
    report = report_of(shape_with(), name, arch)
    assert report.shared_bytes <= 100 * 1024
    assert report.spilled == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows_kernel_fits(arch: str) -> None:
    report = report_of(shape_with(topk=None), "rows", arch)
    assert report.shared_bytes <= 4096
    assert report.spilled == 0


@pytest.mark.parametrize(
    "changes",
    [{}, LARGE | {"topk": None, "weighted": True}, LARGE | {"topk": None, "weighted": True, "heads": 64}],
    ids=["real", "large-weights", "64-heads"],
)
@pytest.mark.parametrize("name", ["query_gradient", "key_gradient"])
def test_gradient_kernels_fit(name: str, changes: dict[str, Any]) -> None:
    report = report_of(shape_with(**({"topk": None} | changes)), name)
    assert report.shared_bytes + 1024 <= HOPPER_SHARED_BYTES
    assert report.spilled <= 64
    assert report.warnings == ()
    consumer, producer = report.split
    assert 2 * consumer + producer <= 3 * report.registers


def test_few_shapes_serve_every_number_of_columns() -> None:
    assert shape_with(topk=1) == shape_with(topk=512) != shape_with(topk=513)


@pytest.mark.parametrize(
    ("q_heads", "dim", "slots"), [(24, 256, 2), (8, 128, 4), (32, 128, 4), (64, 128, 2), (2, 64, 4), (32, 256, 1)]
)
def test_slots_are_what_fits_beside_the_queries(q_heads: int, dim: int, slots: int) -> None:
    assert teacher_slots(HOPPER_SHARED_BYTES, q_heads, dim) == slots


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topk": None, "index_dtype": torch.float16}, "must be bfloat16 where block_ids is None, got float16"),
        *(
            ({"arch": arch, "shared_bytes": kilobytes * 1024}, f"written for sm_90a, this GPU is {arch}")
            for arch, kilobytes in (("sm_80", 163), ("sm_89", 99), ("sm_100a", 227), ("sm_103a", 227), ("sm_120a", 99))
        ),
        ({"index_dtype": torch.float32}, "q_idx must be bfloat16 or float16, got float32"),
        ({"dtype": torch.float64}, "q must be bfloat16 or float16, got float64"),
        ({"channels": 96}, "channels of q_idx must be one of 64, 128, 256, got 96"),
        ({"dim": 192}, "channels of q must be one of 64, 128, 256, got 192"),
        ({"ratio": 3}, "ratio must be one of 1, 2, 4, 8, 16, got 3"),
        ({"heads": 65}, "heads of q_idx must be at most 64, got 65"),
        (
            {"heads": 9, "index_dtype": torch.float16},
            "q_idx must be bfloat16 where block_ids are given and q_idx has more",
        ),
        (
            {"heads": 9, "channels": 256},
            "must be at most 128 where block_ids are given and q_idx has more than 8 heads",
        ),
        ({"topk": 4097}, "columns of block_ids must be at most 4096, got 4097"),
        ({"q_heads": 33, "kv_heads": 1}, "query heads of one key head must be at most 32, got 33"),
        ({"q_heads": 64}, "too few for 64 heads of 256"),
        ({"shared_bytes": 99 * 1024}, "101376 bytes of shared memory"),
    ],
)
def test_declines_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    answer = shape_of(**(REAL | changes))
    assert isinstance(answer, str) and reason in answer


def test_chunks_are_bounded_and_whole_words() -> None:
    for rows, topk, blocks in ((1, 1, 1), (700, 512, 175), (262144, 512, 65536), (2**20, 512, 262144)):
        for masses in (1, 4):
            at_once = rows_at_once(rows, topk, blocks, masses)
            assert at_once % ROWS_PER_WORD == 0
            assert at_once - ROWS_PER_WORD < rows
            assert (at_once - ROWS_PER_WORD) * topk * 4 * (8 + 9 * masses) <= CHUNK_BYTES
    assert rows_at_once(262144, 512, 65536, 1) > 8192
    shape = shape_with(**TOKENS)
    at_once = rows_at_once(65536, 2048, 65536, 1, shape.part_bytes)
    assert at_once > 512
    assert (at_once - ROWS_PER_WORD) * 2048 * (4 * 17 + 2 * shape.channels) <= CHUNK_BYTES
    for rows, width in ((1, 128), (700, 256), (65536, 16384), (262144, 65536)):
        at_once = rows_of_all_blocks(rows, width, 1)
        assert at_once % QUERY_GRADIENT_ROWS == 0
        assert at_once - QUERY_GRADIENT_ROWS < rows
        assert (at_once - QUERY_GRADIENT_ROWS) * width * 10 <= 2 * CHUNK_BYTES
