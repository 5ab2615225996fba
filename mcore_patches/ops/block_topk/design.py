"""How the TileLang kernels of `select_blocks` cut their work: pure functions of plain values."""

from dataclasses import dataclass

import torch

from mcore_patches.ops.device import BARRIER_BYTES, HOPPER

GROUP = 8  # neighbouring blocks whose best score is written beside them: one 32-byte sector of scores
INVISIBLE = -(2**31)  # the key of a block that a row does not see; no score has it

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
CHANNELS = (64, 128, 256)
MOST_TOPK = 4096  # whose candidates fill shared memory
# Scores of a chunk of rows: large enough to fill a GPU many times, and nothing beside the keys and values of a sequence
# for which it takes several chunks.
SCORE_BYTES = 512 * 2**20
MOST_ROWS = 16384
SHARED_BYTES_OF_A_MULTIPROCESSOR = 228 * 1024
RESERVED_BYTES = 1024  # that the driver takes of it for every block
ALIGNMENT = 1024  # of tiles that the matrix units read
REGISTERS = 65536


@dataclass(frozen=True)
class ScoreTiles:
    """rows, blocks: size of a tile of scores. stages, slots: tiles of index keys and of one head's queries in shared
    memory."""

    rows: int
    blocks: int
    stages: int
    slots: int


@dataclass(frozen=True)
class SelectTiles:
    """Threads that select for one row, and how many such blocks of threads share a multiprocessor."""

    threads: int
    blocks_per_sm: int


def score_tiles(
    arch: str, shared_bytes: int, dtype: torch.dtype, heads: int, channels: int, topk: int
) -> ScoreTiles | str:
    """Tiles of the scoring kernel, or the reason why the kernels do not take these arguments.

    The queries of all heads stay in shared memory if they fit: each tile of index keys then costs one load. Else they
    go round in a ring.
    """
    if dtype not in DTYPES:
        return f"q_idx must be bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    if channels not in CHANNELS:
        return f"q_idx must have {', '.join(map(str, CHANNELS))} channels, got {channels}"
    if topk > MOST_TOPK:
        return f"topk must be at most {MOST_TOPK}, got {topk}"
    if arch != HOPPER:
        return f"the kernels are written for {HOPPER}, this GPU is {arch}"
    for slots, blocks in ((heads, 128), (4, 128), (3, 128), (2, 128), (2, 64)):
        tiles = ScoreTiles(rows=128, blocks=blocks, stages=2, slots=min(slots, heads))
        if score_shared_bytes(tiles, heads, channels) <= shared_bytes:
            return tiles
    return f"{arch} lets a block have {shared_bytes} bytes of shared memory, too few for {heads} heads of {channels}"


def score_shared_bytes(tiles: ScoreTiles, heads: int, channels: int) -> int:
    """Shared memory of the scoring kernel: queries, index keys, head weights, each row's range and that of all."""
    vectors = tiles.slots * tiles.rows + tiles.stages * tiles.blocks
    small = 4 * tiles.rows * (heads + 2) + 16
    return 2 * vectors * channels + -(-small // ALIGNMENT) * ALIGNMENT + BARRIER_BYTES


def topk_capacity(topk: int) -> int:
    """What the kernels that serve `topk` have room for: one of few values, as short batches ask for fewer blocks."""
    return 512 << max(0, (topk - 1).bit_length() - 9)


def select_tiles(capacity: int) -> SelectTiles:
    """About 16 blocks of the chosen groups a thread, and as many rows at once as fit."""
    threads = min(1024, capacity // 2)
    by_memory = SHARED_BYTES_OF_A_MULTIPROCESSOR // (select_shared_bytes(capacity) + RESERVED_BYTES)
    by_registers = REGISTERS // (threads * 48)
    return SelectTiles(threads, max(1, min(by_memory, by_registers)))


def select_shared_bytes(capacity: int) -> int:
    """Shared memory of the selection: keys and places of candidates, groups, the histogram, and a few sums."""
    return GROUP * capacity * 6 + 4 * capacity + 4 * max(2048, capacity) + 512


def rows_at_once(rows: int, tiles: ScoreTiles, width: int) -> int:
    """Rows whose scores against `width` blocks are held at once: whole tiles."""
    most = min(SCORE_BYTES // (4 * width), MOST_ROWS, rows)
    return max(1, -(-most // tiles.rows)) * tiles.rows


def splits_of_a_tile(rows: int, tiles: ScoreTiles, width: int, multiprocessors: int) -> int:
    """Blocks of threads that share one tile of rows: four rounds of the GPU, four tiles of blocks each at least."""
    tiles_of_rows = -(-rows // tiles.rows)
    return max(1, min(-(-4 * multiprocessors // tiles_of_rows), width // tiles.blocks // 4))
