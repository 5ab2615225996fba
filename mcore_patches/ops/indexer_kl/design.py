"""How the TileLang kernels of `indexer_kl` cut their work: pure functions of plain values."""

from dataclasses import dataclass, replace

import torch

from mcore_patches.ops.block_topk.design import (
    ALIGNMENT,
    RESERVED_BYTES,
    SHARED_BYTES_OF_A_MULTIPROCESSOR,
    ScoreTiles,
    score_tiles,
    topk_capacity,
)
from mcore_patches.ops.device import BARRIER_BYTES, has_matrix_units, takes_hopper_kernels

TILE_ROWS = 8  # rows that share what they select: the narrowest step of a matrix unit's columns
TEACHER_TOKENS = 128  # of a step of the teacher: 64 for each of two warpgroups
UNION_THREADS = 256
UNION_WORDS = 8192  # bits of the bitmap of blocks, in words
STUDENT_THREADS = 256
ROWS_PER_WORD = 32  # of the bit matrix of rows and blocks
QUERY_GRADIENT_ROWS = 128  # of a tile of the queries' gradient over all blocks
KEY_GRADIENT_ROWS = 64  # of a step of the keys'
PADDING = 8  # elements behind a row of gradients, so that rows begin in different banks
UNION_BYTES = 72 * 1024  # the union kernel's: bitmap and prefix sums, and a few sums

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
DIMS = (64, 128, 256)
RATIOS = (1, 2, 4, 8, 16)
FEW_INDEX_HEADS = 8  # whose queries a thread of the student holds in registers
MANY_HEADS = 64  # that more are padded to, for the matrix units
MANY_HEADS_KEYS = 64  # of a step of theirs, for one warpgroup
MANY_HEADS_THREADS = 128
MOST_COLUMNS = 256  # of a matrix unit
MOST_TOPK = 4096
CHUNK_BYTES = 512 * 2**20  # of what is kept for a chunk of rows


@dataclass(frozen=True)
class PlainTiles:
    """How the kernels for GPUs other than Hopper cut a shape.

    keys, stages: tokens of a step of the teacher, and steps of one head's in shared memory; resident: the queries of
    all key heads stay there. query_rows, query_blocks, query_stages: of the gradient of the queries; key_blocks,
    key_slots: blocks of a tile of the index keys' gradient, and tiles of one head's queries in shared memory; all 0
    where blocks are selected.
    """

    keys: int
    stages: int
    resident: bool
    query_rows: int = 0
    query_blocks: int = 0
    query_stages: int = 0
    key_blocks: int = 0
    key_slots: int = 0


# Of the teacher, and of the two gradients; the best first.
PLAIN_TEACHER_TILES = ((128, 2, True), (64, 2, True), (64, 1, True), (64, 1, False), (32, 1, False))
PLAIN_QUERY_TILES = ((128, 128, 2), (128, 64, 2), (64, 64, 2), (64, 64, 1))
PLAIN_KEY_TILES = ((128, 2), (64, 2), (64, 1))


@dataclass(frozen=True)
class Shape:
    """What the code of the kernels depends on, beside the architecture. heads, channels: of the indexer; capacity:
    see `topk_capacity`, 0 for all visible blocks; ranks: the heads of several ranks are summed; slots: of the teacher,
    see `teacher_slots`; plain: the tiles for GPUs other than Hopper, which have no slots."""

    heads: int
    channels: int
    q_heads: int
    kv_heads: int
    dim: int
    ratio: int
    capacity: int
    index_dtype: str
    dtype: str
    weighted: bool
    relu: bool
    ranks: bool
    slots: int = 0
    plain: PlainTiles | None = None

    @property
    def many_heads(self) -> bool:
        """Whether selected blocks are multiplied by the matrix units, and a pair's part of its block's gradient is kept
        whole."""
        return self.capacity > 0 and self.heads > FEW_INDEX_HEADS

    @property
    def query_gradient_rows(self) -> int:
        """Rows of a tile of the queries' gradient over all blocks."""
        return QUERY_GRADIENT_ROWS if self.plain is None else self.plain.query_rows

    @property
    def part_bytes(self) -> int:
        """What is kept whole of a pair."""
        return 2 * self.channels if self.many_heads else 0

    @property
    def masses_of_a_block(self) -> int:
        """The sum over ranks comes before the largest of a block's tokens: until then each has its own."""
        return self.ratio if self.ranks else 1


def shape_of(
    arch: str,
    shared_bytes: int,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    heads: int,
    channels: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    ratio: int,
    topk: int | None,
    weighted: bool,
    relu: bool,
    ranks: bool,
) -> Shape | str:
    """The shape that kernels are built for, or the reason why they do not take these arguments.

    topk: columns of block_ids, None for all visible blocks.
    """
    for name, value in (("q_idx", index_dtype), ("q", dtype)):
        if value not in DTYPES:
            return f"{name} must be bfloat16 or float16, got {str(value).removeprefix('torch.')}"
    if topk is None and index_dtype != torch.bfloat16:
        return f"q_idx must be bfloat16 where block_ids is None, got {str(index_dtype).removeprefix('torch.')}"
    for what, number, allowed in (
        ("channels of q_idx", channels, DIMS),
        ("channels of q", dim, DIMS),
        ("ratio", ratio, RATIOS),
    ):
        if number not in allowed:
            return f"{what} must be one of {', '.join(map(str, allowed))}, got {number}"
    for what, number, most in (
        ("heads of q_idx", heads, MANY_HEADS),
        ("columns of block_ids", topk or 0, MOST_TOPK),
        ("query heads of one key head", q_heads // kv_heads, MOST_COLUMNS // TILE_ROWS),
    ):
        if number > most:
            return f"{what} must be at most {most}, got {number}"
    if topk is not None and heads > FEW_INDEX_HEADS:
        what = f"where block_ids are given and q_idx has more than {FEW_INDEX_HEADS} heads, got"
        if index_dtype != torch.bfloat16:
            return f"q_idx must be bfloat16 {what} {str(index_dtype).removeprefix('torch.')}"
        if channels > 128:
            return f"channels of q_idx must be at most 128 {what} {channels}"
    if not has_matrix_units(arch):
        return f"{arch} has no bfloat16 matrix units"
    shape = Shape(
        heads=heads,
        channels=channels,
        q_heads=q_heads,
        kv_heads=kv_heads,
        dim=dim,
        ratio=ratio,
        capacity=0 if topk is None else topk_capacity(topk),
        index_dtype=DTYPES[index_dtype],
        dtype=DTYPES[dtype],
        weighted=weighted,
        relu=relu,
        ranks=ranks,
    )
    return _fitted(shape, arch, shared_bytes)


def _fitted(shape: Shape, arch: str, shared_bytes: int) -> Shape | str:
    """The shape with its tiles, or the reason why some kernel finds too little shared memory."""
    offered = f"{arch} lets a block have {shared_bytes} bytes of shared memory, too few for"
    of_index = f"{shape.heads} index heads of {shape.channels}"
    if shape.capacity:
        student = many_heads_shared_bytes if shape.many_heads else student_shared_bytes
        if max(student(shape), UNION_BYTES) > shared_bytes:
            return f"{offered} {shape.capacity} blocks a row and {of_index}"
    else:
        score = score_tiles(arch, shared_bytes, torch.bfloat16, shape.heads, shape.channels, topk=1)
        if not isinstance(score, ScoreTiles):
            return score
    slots = teacher_slots(shared_bytes, shape.q_heads, shape.dim)
    teachers = [t for t in PLAIN_TEACHER_TILES if plain_teacher_bytes(shape, *t) <= shared_bytes]
    if takes_hopper_kernels(arch, shared_bytes):
        return replace(shape, slots=slots) if slots >= 2 else f"{offered} {shape.q_heads} heads of {shape.dim}"
    if not teachers:
        return f"{offered} {shape.q_heads} heads of {shape.dim}"
    if shape.capacity:
        return replace(shape, plain=PlainTiles(*teachers[0]))
    of_queries = [t for t in PLAIN_QUERY_TILES if plain_query_bytes(shape.channels, *t) <= shared_bytes]
    of_keys = [t for t in PLAIN_KEY_TILES if plain_key_bytes(shape.heads, shape.channels, *t) <= shared_bytes]
    if not of_queries or not of_keys:
        return f"{offered} {of_index}"
    return replace(shape, plain=PlainTiles(*teachers[0], *of_queries[0], *of_keys[0]))


def plain_teacher_bytes(shape: Shape, keys: int, stages: int, resident: bool) -> int:
    """Shared memory of the plain teacher: queries of all key heads or of one, steps of one head's keys, lse."""
    columns = shape.q_heads * TILE_ROWS
    vectors = (columns if resident else columns // shape.kv_heads) + stages * keys
    return 2 * vectors * shape.dim + -(-4 * columns // ALIGNMENT) * ALIGNMENT + BARRIER_BYTES


def plain_query_bytes(channels: int, rows: int, blocks: int, stages: int) -> int:
    """Shared memory of the queries' plain gradient: queries, stages of index keys and of scores' gradients."""
    elements = rows * channels + stages * (blocks * channels + rows * (blocks + PADDING))
    return 2 * elements + BARRIER_BYTES


def plain_key_bytes(heads: int, channels: int, blocks: int, slots: int) -> int:
    """Shared memory of the index keys' plain gradient: index keys, slots of queries, scores' gradients, weights."""
    rows = KEY_GRADIENT_ROWS
    elements = (blocks + slots * rows) * channels + rows * (blocks + PADDING)
    return 2 * elements + 4 * heads * rows + BARRIER_BYTES


def teacher_shared_bytes(slots: int, q_heads: int, dim: int) -> int:
    """Shared memory of the teacher: a tile of queries, slots of one head's keys, lse, and the tokens of two steps."""
    vectors = q_heads * TILE_ROWS + slots * TEACHER_TOKENS
    small = 4 * (q_heads * TILE_ROWS + 2 * TEACHER_TOKENS)
    return 2 * vectors * dim + -(-small // ALIGNMENT) * ALIGNMENT + BARRIER_BYTES


def teacher_slots(shared_bytes: int, q_heads: int, dim: int) -> int:
    """Tiles of one head's keys that fit shared memory beside the queries, at most 4."""
    return max((s for s in range(5) if teacher_shared_bytes(s, q_heads, dim) <= shared_bytes), default=0)


def student_shared_bytes(shape: Shape) -> int:
    """Shared memory of the student: number, score, mass and heads of each block; each warp's share of the query's
    gradient."""
    warps = STUDENT_THREADS // 32
    return 4 * (4 * shape.capacity + warps + warps * shape.heads * shape.channels)


def student_blocks_per_sm(shape: Shape) -> int:
    """Blocks of threads that a multiprocessor takes: three have 80 registers a thread each, enough for four heads."""
    by_memory = SHARED_BYTES_OF_A_MULTIPROCESSOR // (student_shared_bytes(shape) + RESERVED_BYTES)
    return min(by_memory, 3 if shape.heads <= 4 else 1)


def many_heads_shared_bytes(shape: Shape) -> int:
    """Shared memory of the student of many heads: queries, keys, gradient of the scores; block, number and score of
    each slot; weights and a few sums."""
    vectors = (MANY_HEADS + MANY_HEADS_KEYS) * shape.channels + MANY_HEADS * MANY_HEADS_KEYS
    return 2 * vectors + 4 * (3 * shape.capacity + MANY_HEADS + MANY_HEADS_THREADS) + 2 * ALIGNMENT


def rows_at_once(rows: int, topk: int, num_blocks: int, masses: int, part_bytes: int = 0) -> int:
    """Rows whose pairs with blocks are kept at once: whole words of bits.

    Of each pair the block, its place in the union, its number, row, coefficient, heads and multiplicity, and `masses`;
    its token in the list of the tile and, for each row of the tile, `masses`; and `part_bytes`. Of each row bits and
    counts for every block.
    """
    row_bytes = topk * (4 * (8 + masses * (TILE_ROWS + 1)) + part_bytes) + 2 * 4 * num_blocks // ROWS_PER_WORD
    most = min(CHUNK_BYTES // row_bytes, rows)
    return max(1, -(-most // ROWS_PER_WORD)) * ROWS_PER_WORD


@dataclass(frozen=True)
class GradientTiles:
    """Of the gradients over all blocks: blocks and stages of a step of the query's, slots of queries of the key's."""

    blocks: int
    stages: int
    slots: int


def gradient_tiles(channels: int) -> GradientTiles:
    """Tiles that fit 227 KiB and 224 registers a thread."""
    narrow = channels <= 128
    return GradientTiles(blocks=128 if narrow else 64, stages=2, slots=4 if narrow else 2)


def rows_of_all_blocks(rows: int, width: int, masses: int) -> int:
    """Rows whose `masses`, score, gradient and largest score of eight against `width` blocks are held at once: whole
    tiles. Twice the memory of a selection's chunk, as a tile of the teacher takes long."""
    row_bytes = width * (4 * (masses + (masses > 1)) + 4 + 2) + width // 2
    most = min(2 * CHUNK_BYTES // row_bytes, rows)
    return max(1, -(-most // QUERY_GRADIENT_ROWS)) * QUERY_GRADIENT_ROWS


def splits_of_a_tile(tiles: int, multiprocessors: int) -> int:
    """Blocks of threads that share one tile of the teacher: eight rounds of the GPU."""
    return max(1, 8 * multiprocessors // tiles)
