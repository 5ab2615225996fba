"""How the TileLang kernels of `select_blocks` cut their work: pure functions of plain values."""

from dataclasses import dataclass
from typing import Any

import torch

from mcore_patches.ops.device import BARRIER_BYTES, has_matrix_units, takes_hopper_kernels

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
# Rows and blocks of a tile of scores, and slots of queries, 0 for those of all heads; the best first.
HOPPER_SCORE_TILES = ((128, 128, 0), (128, 128, 4), (128, 128, 3), (128, 128, 2), (128, 64, 2))
# Queries that stay are worth more than large tiles: those that go round are loaded again for every tile of blocks.
PLAIN_SCORE_TILES = ((128, 128, 0), (64, 64, 0), (128, 128, 2), (64, 64, 2), (64, 32, 2), (32, 32, 2))


@dataclass(frozen=True)
class ScoreTiles:
    """rows, blocks: size of a tile of scores. stages, slots: tiles of index keys and of one head's queries in shared
    memory. plain: for the kernel of GPUs other than Hopper."""

    rows: int
    blocks: int
    stages: int
    slots: int
    plain: bool = False


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
    go round in a ring. Hopper has a kernel of its own; elsewhere the tiles are the first of ``PLAIN_SCORE_TILES`` that
    fit.
    """
    if dtype not in DTYPES:
        return f"q_idx must be bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    if channels not in CHANNELS:
        return f"q_idx must have {', '.join(map(str, CHANNELS))} channels, got {channels}"
    if topk > MOST_TOPK:
        return f"topk must be at most {MOST_TOPK}, got {topk}"
    if not has_matrix_units(arch):
        return f"{arch} has no bfloat16 matrix units"
    offered = f"{arch} lets a block have {shared_bytes} bytes of shared memory"
    if select_shared_bytes(topk_capacity(topk)) > shared_bytes:
        return f"{offered}, too few for {topk} blocks a row"
    plain = not takes_hopper_kernels(arch, shared_bytes)
    for rows, blocks, slots in PLAIN_SCORE_TILES if plain else HOPPER_SCORE_TILES:
        tiles = ScoreTiles(rows, blocks, stages=2, slots=min(slots or heads, heads), plain=plain)
        if score_shared_bytes(tiles, heads, channels) <= shared_bytes:
            return tiles
    return f"{offered}, too few for {heads} heads of {channels}"


def score_specification(
    tiles: ScoreTiles, *, heads: int, channels: int, dtype: str, weighted: bool, relu: bool
) -> tuple[str, str, dict[str, Any]]:
    """Module, builder and the builder's arguments of the scoring kernel."""
    arguments = {
        "heads": heads,
        "channels": channels,
        "tile_rows": tiles.rows,
        "tile_blocks": tiles.blocks,
        "stages": tiles.stages,
        "slots": tiles.slots,
        "dtype": dtype,
        "weighted": weighted,
        "relu": relu,
    }
    name = "plain_score" if tiles.plain else "score"
    return f"{__package__}.tilelang_{name}", f"{name}_kernel", arguments


def plain_threads(rows: int) -> int:
    """Threads of the plain scoring kernel: a warp for 16 rows, four at least."""
    return max(128, 2 * rows)


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
