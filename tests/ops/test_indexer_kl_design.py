"""How the kernels of indexer_kl cut their work on each architecture, and what they decline."""

from typing import Any

import pytest
import torch

from mcore_patches.ops.device import HOPPER, HOPPER_SHARED_BYTES
from mcore_patches.ops.indexer_kl.design import (
    CHUNK_BYTES,
    QUERY_GRADIENT_ROWS,
    ROWS_PER_WORD,
    PlainTiles,
    Shape,
    plain_key_bytes,
    plain_query_bytes,
    plain_teacher_bytes,
    rows_at_once,
    rows_of_all_blocks,
    shape_of,
    teacher_slots,
)
from mcore_patches.ops.indexer_kl.tilelang_kernels import specifications
from tests.ops.architectures import SHARED_BYTES

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
    arch = changes.get("arch", HOPPER)
    shape = shape_of(**(REAL | {"shared_bytes": SHARED_BYTES[arch]} | changes))
    assert isinstance(shape, Shape), shape
    return shape


REAL_ON = {
    # The queries of both key heads beside two steps of 128 tokens; the widest steps of the gradients.
    "sm_100a": PlainTiles(128, 2, True, 128, 128, 2, 128, 2),
    "sm_103a": PlainTiles(128, 2, True, 128, 128, 2, 128, 2),
    "sm_80": PlainTiles(64, 2, True, 128, 64, 2, 128, 2),
    # The queries of one key head beside one step.
    "sm_86": PlainTiles(64, 1, False, 64, 64, 2, 128, 2),
    "sm_89": PlainTiles(64, 1, False, 64, 64, 2, 128, 2),
    "sm_120a": PlainTiles(64, 1, False, 64, 64, 2, 128, 2),
}


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_tiles_follow_from_the_architecture(arch: str) -> None:
    everywhere, selected = (shape_with(arch=arch, topk=topk) for topk in (None, 512))
    if arch == HOPPER:
        assert everywhere.plain is selected.plain is None
        assert everywhere.slots == selected.slots == teacher_slots(HOPPER_SHARED_BYTES, 24, 256) == 2
        return
    assert everywhere.plain == REAL_ON[arch]
    teacher = REAL_ON[arch]
    assert selected.plain == PlainTiles(teacher.keys, teacher.stages, teacher.resident)
    assert everywhere.slots == selected.slots == 0
    modules = {module.rpartition(".tilelang_")[2] for module, _, _ in specifications(everywhere).values()}
    assert modules == {"plain_teacher", "rows", "plain_query_gradient", "plain_key_gradient"}
    many = specifications(shape_with(arch=arch, heads=64, topk=512))["many_heads"]
    assert many[1] == "plain_many_heads_kernel"


@pytest.mark.parametrize("arch", [arch for arch in SHARED_BYTES if arch != HOPPER])
@pytest.mark.parametrize(
    "changes", [{}, SMALL, LARGE | {"weighted": True}, TOKENS], ids=["real", "small", "large", "tokens"]
)
def test_plain_tiles_fit_or_the_reason_says_what_does_not(arch: str, changes: dict[str, Any]) -> None:
    for topk in (None, 512, 4096):
        answer = shape_of(**(REAL | {"arch": arch, "shared_bytes": SHARED_BYTES[arch]} | changes | {"topk": topk}))
        if isinstance(answer, str):
            assert f"{arch} lets a block have {SHARED_BYTES[arch]} bytes of shared memory, too few for" in answer
            assert SHARED_BYTES[arch] < HOPPER_SHARED_BYTES
            continue
        tiles = answer.plain
        assert tiles is not None
        assert plain_teacher_bytes(answer, tiles.keys, tiles.stages, tiles.resident) <= SHARED_BYTES[arch]
        assert tiles.resident or tiles.stages == 1
        assert tiles.keys % answer.ratio == 0
        if topk is None:
            assert QUERY_GRADIENT_ROWS % tiles.query_rows == 0
            of_query = tiles.query_rows, tiles.query_blocks, tiles.query_stages
            assert plain_query_bytes(answer.channels, *of_query) <= SHARED_BYTES[arch]
            of_key = tiles.key_blocks, tiles.key_slots
            assert plain_key_bytes(answer.heads, answer.channels, *of_key) <= SHARED_BYTES[arch]


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
        ({"arch": "sm_75", "shared_bytes": 64 * 1024}, "sm_75 has no bfloat16 matrix units"),
        (
            {"arch": "sm_89", "shared_bytes": 99 * 1024, "topk": 4096, "heads": 8, "channels": 256},
            "101376 bytes of shared memory, too few for 4096",
        ),
        (
            {"arch": "sm_89", "shared_bytes": 99 * 1024, "q_heads": 32, "kv_heads": 1},
            "too few for 32 heads of 256",
        ),
        ({"shared_bytes": 64 * 1024}, "65536 bytes of shared memory, too few for 512 blocks a row"),
        ({"topk": None, "heads": 64, "channels": 256, "shared_bytes": 48 * 1024}, "too few for 64 heads of 256"),
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
