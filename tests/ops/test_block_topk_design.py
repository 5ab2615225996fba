"""How the kernels of select_blocks cut their work on each architecture, and what they decline."""

import pytest
import torch

from mcore_patches.ops.block_topk.design import (
    ScoreTiles,
    rows_at_once,
    score_shared_bytes,
    score_specification,
    score_tiles,
    splits_of_a_tile,
    topk_capacity,
)
from mcore_patches.ops.device import HOPPER, HOPPER_SHARED_BYTES
from tests.ops.architectures import SHARED_BYTES

BF16 = torch.bfloat16


def tiles_of(heads: int, channels: int, arch: str = HOPPER) -> ScoreTiles:
    tiles = score_tiles(arch, SHARED_BYTES[arch], BF16, heads, channels, 512)
    assert isinstance(tiles, ScoreTiles), tiles
    return tiles


@pytest.mark.parametrize(
    ("heads", "channels", "tiles"),
    [
        (4, 128, ScoreTiles(128, 128, stages=2, slots=4)),  # all heads stay
        (8, 64, ScoreTiles(128, 128, stages=2, slots=8)),
        (64, 128, ScoreTiles(128, 128, stages=2, slots=4)),  # a ring
        (128, 128, ScoreTiles(128, 128, stages=2, slots=3)),
        (4, 256, ScoreTiles(128, 64, stages=2, slots=2)),
        (1, 256, ScoreTiles(128, 128, stages=2, slots=1)),
    ],
)
def test_tiles_follow_from_the_shape(heads: int, channels: int, tiles: ScoreTiles) -> None:
    assert tiles_of(heads, channels) == tiles


@pytest.mark.parametrize(
    ("arch", "heads", "channels", "tiles"),
    [
        *((arch, 4, 128, (128, 128, 4)) for arch in ("sm_100a", "sm_103a")),
        *((arch, 4, 128, (64, 64, 4)) for arch in ("sm_80", "sm_86", "sm_89", "sm_120a")),
        ("sm_100a", 64, 128, (128, 128, 2)),
        ("sm_89", 64, 128, (64, 64, 2)),
        ("sm_80", 4, 256, (64, 64, 2)),
        ("sm_89", 4, 256, (64, 32, 2)),
        ("sm_89", 64, 256, (32, 32, 2)),
        ("sm_89", 1, 64, (128, 128, 1)),
    ],
)
def test_plain_tiles_follow_from_the_architecture(arch: str, heads: int, channels: int, tiles: tuple) -> None:
    rows, blocks, slots = tiles
    found = tiles_of(heads, channels, arch)
    assert found == ScoreTiles(rows, blocks, stages=2, slots=slots, plain=True)
    assert score_shared_bytes(found, heads, channels) <= SHARED_BYTES[arch]
    settings = {"heads": heads, "channels": channels, "dtype": "bfloat16", "weighted": False, "relu": True}
    assert score_specification(found, **settings)[1] == "plain_score_kernel"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": "sm_75", "shared_bytes": 64 * 1024}, "sm_75 has no bfloat16 matrix units"),
        ({"arch": "sm_89", "shared_bytes": 99 * 1024, "topk": 1025}, "101376 bytes of shared memory, too few for 1025"),
        ({"arch": "sm_120a", "shared_bytes": 99 * 1024, "heads": 512, "channels": 256}, "too few for 512 heads of 256"),
        ({"shared_bytes": 32 * 1024}, "32768 bytes of shared memory, too few for 512 blocks a row"),
        ({"dtype": torch.float32}, "must be bfloat16 or float16, got float32"),
        ({"channels": 96}, "64, 128, 256 channels, got 96"),
        ({"topk": 4097}, "at most 4096, got 4097"),
        ({"heads": 256, "channels": 256}, "too few for 256 heads of 256"),
    ],
)
def test_declines_with_a_reason(change: dict, reason: str) -> None:
    arguments = {
        "arch": HOPPER,
        "shared_bytes": HOPPER_SHARED_BYTES,
        "dtype": BF16,
        "heads": 4,
        "channels": 128,
        "topk": 512,
    }
    answer = score_tiles(**(arguments | change))
    assert isinstance(answer, str) and reason in answer


@pytest.mark.parametrize(("topk", "capacity"), [(1, 512), (512, 512), (513, 1024), (2048, 2048), (2049, 4096)])
def test_few_kernels_serve_every_topk(topk: int, capacity: int) -> None:
    assert topk_capacity(topk) == capacity


def test_chunks_are_bounded_and_whole_tiles() -> None:
    tiles = tiles_of(4, 128)
    for rows, width in ((1, 128), (700, 256), (262144, 65536), (10**6, 128), (2**20, 2**22)):
        at_once = rows_at_once(rows, tiles, width)
        assert at_once % tiles.rows == 0
        assert at_once - tiles.rows < rows
        assert at_once * width * 4 <= 2**29 or at_once == tiles.rows


def test_tiles_are_split_among_idle_multiprocessors_alone() -> None:
    tiles = tiles_of(4, 128)
    assert splits_of_a_tile(2048, tiles, 65536, 132) == 33
    assert splits_of_a_tile(16384, tiles, 4096, 132) == 5
    assert splits_of_a_tile(128, tiles, 128, 132) == 1
