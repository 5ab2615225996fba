import dataclasses
from typing import Any

import pytest
import torch

from mcore_patches.ops.sparse_gqa.design import (
    BLOCK_SIZES,
    DIMS,
    GROUPS,
    LISTED_BYTES,
    MASK_BITS,
    PLAIN_TILES,
    Design,
    PlainTiles,
    RowShape,
    even_group,
    sparse_gqa_design,
)

KIB = 1024
REAL: dict[str, Any] = {
    "arch": "sm_90a",
    "shared_bytes": 227 * KIB,
    "dtype": torch.bfloat16,
    "dim": 256,
    "group": 12,
    "block_size": 4,
    "topk": 512,
}


def design(**change: Any) -> Design:
    result = sparse_gqa_design(**(REAL | change))
    assert isinstance(result, Design), result
    return result


def test_real_shape_by_hand() -> None:
    """Ten rows of twelve heads in 128 matrix rows; eight in 96 vectors; four in 48."""
    tiles = design()
    assert (tiles.forward.rows, tiles.backward.union.rows, tiles.backward.window_rows) == (10, 8, 4)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
def test_tiles_suit_the_matrix_unit(group: int, dim: int) -> None:
    tiles = design(group=group, dim=dim)
    forward, union, window = tiles.forward.rows, tiles.backward.union.rows, tiles.backward.window_rows
    assert 1 <= forward <= MASK_BITS and forward * group <= 128
    assert 1 <= union <= MASK_BITS and union * group <= 96 and union * group % 16 == 0
    assert window >= 1 and window * even_group(group) == 48
    # One row more would not fit, or would need another mask bit.
    assert forward == MASK_BITS or (forward + 1) * group > 128


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", [64, 2048, 4096])
def test_lists_hold_the_largest_union_that_is_shared(block_size: int, budget: int) -> None:
    topk = budget // block_size
    tiles = design(block_size=block_size, topk=topk)
    for union in (tiles.forward, tiles.backward.union):
        assert union.limit(topk) == 4 * (topk + 1)
        assert union.limit(topk) <= union.capacity(topk, block_size)
        assert union.capacity(topk, block_size) % (union.keys // block_size) == 0
        assert union.plan_shared_bytes(topk, block_size) <= 227 * KIB


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "q, k and v must be bfloat16, got float16"),
        ({"dim": 80}, "the head width must be one of 64, 128, 256, got 80"),
        ({"group": 5}, "query heads a KV head must be one of 1, 2, 3, 4, 6, 8, 12, 16, got 5"),
        ({"block_size": 32}, "block_size must be one of 1, 2, 4, 8, 16, got 32"),
        ({"block_size": 1, "topk": 16384}, "lists of 16384 blocks a row need .* bytes of shared memory"),
        ({"arch": "sm_75", "shared_bytes": 64 * KIB}, "sm_75 has no bfloat16 matrix units"),
        ({"arch": "sm_80", "shared_bytes": 48 * KIB}, "sm_80 lets .* 49152 bytes of shared memory, too few for .* 256"),
    ],
)
def test_reason_names_what_does_not_fit(change: dict[str, Any], reason: str) -> None:
    result = sparse_gqa_design(**(REAL | change))
    assert isinstance(result, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(result)


@pytest.mark.parametrize(
    ("arch", "kib", "tiles"),
    [
        ("sm_80", 163, PLAIN_TILES[0]),
        ("sm_86", 99, PLAIN_TILES[1]),
        ("sm_89", 99, PLAIN_TILES[1]),
        ("sm_90a", 227, None),
        ("sm_90a", 163, PLAIN_TILES[0]),
        ("sm_100a", 227, PLAIN_TILES[0]),
        ("sm_103a", 227, PLAIN_TILES[0]),
        ("sm_120a", 99, PLAIN_TILES[1]),
    ],
)
def test_hopper_has_kernels_of_its_own_and_others_plain_ones_that_fit(
    arch: str, kib: int, tiles: PlainTiles | None
) -> None:
    plain = design(arch=arch, shared_bytes=kib * KIB).plain
    assert plain == tiles
    if plain is not None:
        assert plain.shared_bytes(256) <= kib * KIB
        assert 2 * plain.shared_bytes(64) <= plain.shared_bytes(256)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_plain_tiles_suit_the_matrix_unit(block_size: int) -> None:
    for tiles in PLAIN_TILES:
        warps = tiles.threads // 32
        # Warps lie side by side along the keys, 8 each at least; a step is whole blocks.
        assert min(tiles.forward_keys, tiles.row_keys) >= 8 * warps
        assert tiles.forward_keys % block_size == tiles.row_keys % block_size == 0
        # Ranks are stored in whole steps.
        assert 64 % tiles.row_keys == 0


def test_plain_shared_bytes_by_hand() -> None:
    """Two steps of 64 keys and values of the forward take most; with few keys, K, V, Q and dO of the backward."""
    assert PLAIN_TILES[0].shared_bytes(256) == 2 * (16 * 256 + 16 * 64 + 4 * 64 * 256) + 2048
    assert PLAIN_TILES[1].shared_bytes(256) == 2 * (2 * 16 * 256 + 16 * 64 + 2 * 64 * 256) + 2048


def test_tiles_are_values() -> None:
    """Equal arguments give equal designs: kernels are kept by what they are built from."""
    assert design() == design()
    assert hash(design()) == hash(design())
    assert dataclasses.replace(design().forward, rows=3) != design().forward


@pytest.mark.parametrize("multiprocessors", [132, 114, 1])
@pytest.mark.parametrize("rows", [1, 8, 100, 4096, 2**20])
@pytest.mark.parametrize("tokens", [1, 65536, 2**20])
@pytest.mark.parametrize(("dim", "group", "kv_heads"), [(256, 12, 2), (64, 1, 8), (128, 16, 1), (64, 3, 64)])
def test_chunks_of_single_rows_fit_the_scratch(
    rows: int, tokens: int, multiprocessors: int, dim: int, group: int, kv_heads: int
) -> None:
    tiles, shape = design(dim=dim, group=group).backward, RowShape(kv_heads, group, dim, 4)
    chunk = tiles.chunk_rows(shape, rows, tokens, 512, multiprocessors)
    assert chunk % tiles.union.rows == 0
    assert 1 <= chunk < rows + tiles.union.rows
    assert chunk * shape.stored_bytes(512) <= tiles.stored_bytes
    assert chunk * LISTED_BYTES * (tokens // 64) <= tiles.stored_bytes


def test_chunk_of_the_real_shape_by_hand() -> None:
    """Five waves of 132 tiles of 8 rows for each of two KV heads: 65 MB of Q and dO, 1.07 GB of P and dS."""
    tiles, shape = design().backward, RowShape(2, 12, 256, 4)
    assert shape.ranks(512) == 2112
    assert shape.stored_bytes(512) == 2 * 2 * 2 * 2112 * 12
    assert tiles.chunk_rows(shape, 65536, 65536, 512, 132) == 5 * 132 * 8
    # A scratch that holds no wave: whole tiles, as many as fit, one at least.
    small = dataclasses.replace(tiles, stored_bytes=100 * shape.stored_bytes(512))
    assert small.chunk_rows(shape, 65536, 65536, 512, 132) == 96
    assert dataclasses.replace(tiles, stored_bytes=1).chunk_rows(shape, 65536, 65536, 512, 132) == 8
