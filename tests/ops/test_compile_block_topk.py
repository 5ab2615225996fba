"""Compile-only: the kernels of select_blocks assemble, fit shared memory and keep their registers."""

import pytest

from mcore_patches.ops.block_topk.design import (
    REGISTERS,
    plain_threads,
    score_shared_bytes,
    score_specification,
    select_shared_bytes,
    select_tiles,
)
from tests.ops.architectures import SHARED_BYTES
from tests.ops.compiling import compile_report
from tests.ops.test_block_topk_design import tiles_of

PACKAGE = "mcore_patches.ops.block_topk."
# Bytes of spill loads and stores of a thread, together: none but where a thread holds 32 keys of 4096 blocks' groups.
SPILLED_AT_MOST = {4096: 512}


@pytest.mark.parametrize(
    ("arch", "heads", "channels", "dtype", "weighted", "relu"),
    [
        ("sm_90a", 4, 128, "bfloat16", False, True),
        ("sm_90a", 64, 128, "bfloat16", True, True),
        ("sm_90a", 3, 64, "float16", True, False),
        ("sm_90a", 4, 256, "bfloat16", False, False),
        ("sm_100a", 4, 128, "bfloat16", False, True),
        ("sm_100a", 64, 128, "bfloat16", True, True),
        ("sm_100a", 3, 64, "float16", True, False),
        ("sm_89", 4, 256, "bfloat16", True, True),
    ],
)
def test_score_kernel_fits(arch: str, heads: int, channels: int, dtype: str, weighted: bool, relu: bool) -> None:
    tiles = tiles_of(heads, channels, arch)
    settings = {"heads": heads, "channels": channels, "dtype": dtype, "weighted": weighted, "relu": relu}
    report = compile_report(*score_specification(tiles, **settings), arch)
    assert report.shared_bytes + 1024 <= score_shared_bytes(tiles, heads, channels) <= SHARED_BYTES[arch]
    assert report.spilled == 0
    assert report.warnings == ()
    if tiles.plain:
        assert report.registers * plain_threads(tiles.rows) <= REGISTERS
        assert report.split == ()
        return
    # A warp group that asks for more registers than the others left waits for ever.
    consumer, producer = report.split
    groups = tiles.rows // 64
    assert report.registers <= REGISTERS // (128 * (groups + 1))
    assert groups * consumer + producer <= (groups + 1) * report.registers


@pytest.mark.parametrize(
    ("arch", "capacity"),
    [*(("sm_90a", capacity) for capacity in (512, 2048, 4096)), ("sm_100a", 512), ("sm_100a", 4096), ("sm_89", 1024)],
)
def test_select_kernel_fits(arch: str, capacity: int) -> None:
    tiles = select_tiles(capacity)
    arguments = {"capacity": capacity, "threads": tiles.threads, "blocks_per_sm": tiles.blocks_per_sm}
    report = compile_report(PACKAGE + "tilelang_select", "select_kernel", arguments, arch)
    assert report.shared_bytes <= select_shared_bytes(capacity) <= SHARED_BYTES[arch]
    assert report.spilled <= SPILLED_AT_MOST.get(capacity, 0)
    assert report.registers * tiles.threads * tiles.blocks_per_sm <= REGISTERS
