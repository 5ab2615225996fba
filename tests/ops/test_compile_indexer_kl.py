"""Compile-only: the kernels of indexer_kl assemble, fit shared memory and keep their registers."""

from typing import Any

import pytest

from mcore_patches.ops.block_topk.design import REGISTERS
from mcore_patches.ops.device import HOPPER, HOPPER_SHARED_BYTES
from mcore_patches.ops.indexer_kl.design import (
    MANY_HEADS_THREADS,
    STUDENT_THREADS,
    UNION_BYTES,
    Shape,
    many_heads_shared_bytes,
    plain_key_bytes,
    plain_query_bytes,
    plain_teacher_bytes,
    student_blocks_per_sm,
    student_shared_bytes,
    teacher_shared_bytes,
)
from mcore_patches.ops.indexer_kl.tilelang_kernels import specifications
from tests.ops.architectures import SHARED_BYTES
from tests.ops.compiling import Report, compile_report
from tests.ops.test_indexer_kl_design import LARGE, SMALL, TOKENS, shape_with

# Bytes of spill loads and stores of a thread, together, of the kernels that ptxas gives all registers there are.
SPILLED_AT_MOST = 128


def report_of(shape: Shape, name: str, arch: str = HOPPER) -> Report:
    module, builder, arguments = specifications(shape)[name]
    return compile_report(module, builder, arguments, arch)


@pytest.mark.parametrize("changes", [{}, LARGE, SMALL, {"ranks": True}], ids=["real", "large", "small", "ranks"])
def test_teacher_fits(changes: dict[str, Any]) -> None:
    shape = shape_with(**changes)
    report = report_of(shape, "teacher")
    assert report.shared_bytes + 1024 <= teacher_shared_bytes(shape.slots, shape.q_heads, shape.dim)
    assert teacher_shared_bytes(shape.slots, shape.q_heads, shape.dim) <= HOPPER_SHARED_BYTES
    assert report.spilled == 0
    assert report.warnings == ()
    # A warp group that asks for more registers than the others left waits for ever: two consumers and a producer.
    consumer, producer = report.split
    assert report.registers <= 65536 // 384
    assert 2 * consumer + producer <= 3 * report.registers


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("sm_100a", {}), ("sm_100a", LARGE), ("sm_100a", SMALL), ("sm_100a", {"ranks": True}), ("sm_89", {})],
    ids=["sm_100a-real", "sm_100a-large", "sm_100a-small", "sm_100a-ranks", "sm_89-real"],
)
def test_plain_teacher_fits(arch: str, changes: dict[str, Any]) -> None:
    shape = shape_with(arch=arch, **changes)
    assert shape.plain is not None
    report = report_of(shape, "teacher", arch)
    most = plain_teacher_bytes(shape, shape.plain.keys, shape.plain.stages, shape.plain.resident)
    assert report.shared_bytes + 1024 <= most <= SHARED_BYTES[arch]
    assert report.spilled <= SPILLED_AT_MOST
    assert report.split == ()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("changes", [{}, LARGE | {"weighted": True}], ids=["real", "large-weights"])
def test_student_fits(changes: dict[str, Any], arch: str) -> None:
    shape = shape_with(arch=arch, **changes)
    report = report_of(shape, "student", arch)
    assert report.registers * STUDENT_THREADS * student_blocks_per_sm(shape) <= REGISTERS
    assert report.shared_bytes <= student_shared_bytes(shape) <= HOPPER_SHARED_BYTES
    assert report.spilled == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "changes",
    [TOKENS, {"heads": 9, "channels": 64, "topk": 4096, "relu": False}],
    ids=["tokens", "nine-linear"],
)
def test_student_of_many_heads_fits(changes: dict[str, Any], arch: str) -> None:
    shape = shape_with(arch=arch, **changes)
    report = report_of(shape, "many_heads", arch)
    assert report.shared_bytes <= many_heads_shared_bytes(shape) <= SHARED_BYTES[arch]
    assert report.registers * MANY_HEADS_THREADS * 2 <= REGISTERS
    assert report.spilled <= (0 if arch == HOPPER else SPILLED_AT_MOST)
    assert report.warnings == ()
    assert report_of(shape, "sum", arch).spilled == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ["union", "gather", "blocks", "mark", "rank", "locate"])
def test_other_kernels_fit(name: str, arch: str) -> None:
    report = report_of(shape_with(arch=arch), name, arch)
    assert report.shared_bytes <= (UNION_BYTES if name == "union" else 16 * 1024)
    assert report.spilled == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows_kernel_fits(arch: str) -> None:
    report = report_of(shape_with(arch=arch, topk=None), "rows", arch)
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


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sm_100a", {}),
        ("sm_100a", LARGE | {"weighted": True}),
        ("sm_100a", TOKENS),
        ("sm_80", LARGE | {"weighted": True}),
        ("sm_89", {}),
    ],
    ids=["sm_100a-real", "sm_100a-large-weights", "sm_100a-64-heads", "sm_80-large-weights", "sm_89-real"],
)
@pytest.mark.parametrize("name", ["query_gradient", "key_gradient"])
def test_plain_gradient_kernels_fit(name: str, arch: str, changes: dict[str, Any]) -> None:
    shape = shape_with(arch=arch, **(changes | {"topk": None}))
    tiles = shape.plain
    assert tiles is not None
    report = report_of(shape, name, arch)
    if name == "query_gradient":
        most = plain_query_bytes(shape.channels, tiles.query_rows, tiles.query_blocks, tiles.query_stages)
    else:
        most = plain_key_bytes(shape.heads, shape.channels, tiles.key_blocks, tiles.key_slots)
    assert report.shared_bytes + 1024 <= most <= SHARED_BYTES[arch]
    assert report.spilled <= SPILLED_AT_MOST
    assert report.split == ()
