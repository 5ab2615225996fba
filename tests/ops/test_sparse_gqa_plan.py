"""How tiles of the backward are dealt to chunks of partial sums."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.sparse_gqa.design import BackwardTiles, Tiles
from mcore_patches.ops.sparse_gqa.tilelang_backward import Chunks, deal_chunks
from mcore_patches.ops.sparse_gqa.tilelang_kernels import topk_class
from tests.ops.qsa_helpers import no_host_reads

TILES = BackwardTiles(union=Tiles(rows=8), window_rows=4, window_stages=3, steps=1000, slots=32)
TOPK, BLOCK_SIZE = 512, 4
CAPACITY = TILES.union.capacity(TOPK, BLOCK_SIZE)
ENTRIES = TILES.union.keys // BLOCK_SIZE


def counts(kind: str, n_tiles: int) -> Tensor:
    """Entries of each tile's union, -1 for tiles that do not share."""
    full = torch.full((n_tiles,), CAPACITY, dtype=torch.int32)
    match kind:
        case "full":
            return full
        case "none":
            return torch.full_like(full, -1)
        case "tiny":
            return torch.ones_like(full)
        case "empty":
            return torch.zeros_like(full)
        case _:
            return torch.randint(-1, CAPACITY + 1, (n_tiles,), dtype=torch.int32)


@pytest.mark.parametrize("n_tiles", [1, 2, 31, 500])
@pytest.mark.parametrize("kind", ["full", "none", "tiny", "empty", "mixed"])
@pytest.mark.parametrize("change", [{}, {"steps": 1}, {"steps": 130, "slots": 512}, {"steps": 10**6}], ids=str)
def test_every_shared_tile_has_a_slot_and_room_of_its_own(kind: str, n_tiles: int, change: dict[str, int]) -> None:
    tiles = dataclasses.replace(TILES, **change)
    count = counts(kind, n_tiles)
    with no_host_reads():
        chunks = deal_chunks(count, tiles, TOPK, BLOCK_SIZE)
    check(chunks, count, tiles)


def check(chunks: Chunks, count: Tensor, tiles: BackwardTiles) -> None:
    assert chunks.tile_of.shape[1] == tiles.slots
    dealt = [tile for chunk in chunks.tile_of.tolist() for tile in chunk if tile >= 0]
    # Ascending over chunks and slots: the order in which a token's partial sums are added.
    assert dealt == (count >= 0).nonzero().flatten().tolist()
    assert chunks.tiles.tolist() == [sum(tile >= 0 for tile in chunk) for chunk in chunks.tile_of.tolist()]
    for chunk in chunks.tile_of.tolist():
        at = 0
        for tile in (tile for tile in chunk if tile >= 0):
            offset = int(chunks.offset[tile])
            assert offset >= at
            at = offset + -(-int(count[tile]) // ENTRIES)
        assert at <= chunks.steps


@pytest.mark.parametrize(
    ("topk", "bound"), [(1, 512), (16, 512), (512, 512), (513, 1024), (1024, 1024), (2048, 2048), (4096, 4096)]
)
def test_columns_have_few_bounds(topk: int, bound: int) -> None:
    assert topk_class(topk) == bound
