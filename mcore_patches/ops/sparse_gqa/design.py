"""Which kernels sparse GQA takes on a GPU and how they cut a shape. Pure functions of plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_patches.ops.device import has_matrix_units, takes_hopper_kernels

DIMS = (64, 128, 256)
# Rows of a step times heads must be a multiple of 16, the least reduction of a matrix product, in the backward.
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)
# Whole blocks make up a step of keys, and one block of tokens has its bits in two neighbouring words.
BLOCK_SIZES = (1, 2, 4, 8, 16)
MASK_BITS = 16  # rows of a tile: a word holds who selected a block and whose incomplete one it is
PLAN_THREADS = 256
WINDOW = 64  # tokens of a window of keys: two words of bits
LISTED_BYTES = 28  # of a row in a window: two words of bits, its rank, and all of these once more in its entry
WINDOW_VECTORS = 48  # rows times heads of a step of the window kernel: three steps fit shared memory
PLAIN_HEADS = 16  # matrix rows of the plain kernels: the query heads of a KV head, and zeros
PLAIN_REST_BYTES = 2048  # who sees a key, sums across warps, the alignment of the first tile


@dataclass(frozen=True)
class Tiles:
    """How a shape is cut. rows: query rows of a tile; keys: tokens of a step; share: largest union worth sharing, in
    rows; words: bits of the plan's bitmap, in words of 32 blocks of a document."""

    rows: int
    keys: int = 64
    stages: int = 2
    k_stages: int = 2
    v_stages: int = 1
    blocks_per_sm: int = 2
    share: float = 4.0
    words: int = 8192

    def limit(self, topk: int) -> int:
        """Entries of the largest union that is shared."""
        return int(self.share * (topk + 1))

    def capacity(self, topk: int, block_size: int) -> int:
        """Entries that a tile's list can hold: the limit, rounded up to whole steps."""
        step = self.keys // block_size
        return -(-self.limit(topk) // step) * step

    def plan_shared_bytes(self, topk: int, block_size: int) -> int:
        """Shared memory of the plan kernel: bitmap, its prefix sums, a mask for every entry, and a few words a row."""
        return 4 * (2 * self.words + self.capacity(topk, block_size) + PLAN_THREADS + 8 * MASK_BITS)


def even_group(group: int) -> int:
    """Heads by which P and dS are stored: an even number, as an asynchronous copy moves two of them at least."""
    return group + group % 2


@dataclass(frozen=True)
class BackwardTiles:
    """How the backward cuts a shape.

    union: tiles of rows that share blocks; steps: steps of 64 keys whose partial sums the scratch holds; slots: most
    tiles of a chunk; window_rows, window_stages: rows of a step of the window kernel, and steps in shared memory;
    gathered_bytes: of Q and dO of one KV head in a chunk of single rows; stored_bytes: most bytes of P and dS, and of
    the rows' bits in all windows, of a chunk.
    """

    union: Tiles
    window_rows: int
    window_stages: int = 3
    steps: int = 16384
    slots: int = 512
    gathered_bytes: int = 64 * 2**20
    stored_bytes: int = 2**30

    def chunk_rows(self, shape: RowShape, rows: int, tokens: int, topk: int, multiprocessors: int) -> int:
        """Rows of a chunk of single rows, a multiple of the union's rows: whole waves of blocks, two a multiprocessor.

        A window loads and stores its sums once a chunk, so chunks are as large as the scratch for P and dS allows: that
        saves more than rows that stay in the L2 cache between windows (gpu_ci/kernels/NOTES.md).
        """
        wave = max(1, 2 * multiprocessors // shape.kv_heads) * self.union.rows
        best = max(1, round(self.gathered_bytes / (4 * shape.group * shape.dim * wave))) * wave
        listed_bytes = LISTED_BYTES * -(-tokens // WINDOW)
        most = min(self.stored_bytes // shape.stored_bytes(topk), self.stored_bytes // listed_bytes)
        unit = wave if most >= wave else self.union.rows
        chunk = max(1, min(best, most) // unit) * unit
        return min(chunk, -(-rows // self.union.rows) * self.union.rows)


@dataclass(frozen=True)
class RowShape:
    """What the bytes of a row follow from."""

    kv_heads: int
    group: int
    dim: int
    block_size: int

    def ranks(self, topk: int) -> int:
        """Tokens that P and dS are stored for: those of all blocks and an incomplete one, in whole steps of 64."""
        return -(-(topk + 1) * self.block_size // WINDOW) * WINDOW

    def stored_bytes(self, topk: int) -> int:
        """Bytes of P and dS of a row, bf16."""
        return 4 * self.kv_heads * self.ranks(topk) * even_group(self.group)


@dataclass(frozen=True)
class PlainTiles:
    """How the kernels for any GPU cut a shape: keys of a step of the forward, steps that the window kernel holds."""

    forward_keys: int
    window_stages: int
    row_keys: int = 64
    threads: int = 128
    window_threads: int = 256  # sums of dK and dV, 64 tokens by 256 channels, take 128 registers a thread

    def shared_bytes(self, dim: int) -> int:
        """Shared memory of the kernel that takes most: forward, rows and windows of the backward."""
        forward = PLAIN_HEADS * (dim + self.forward_keys) + 4 * self.forward_keys * dim
        row = PLAIN_HEADS * (2 * dim + self.row_keys) + 2 * self.row_keys * dim
        window = self.window_stages * 2 * WINDOW_VECTORS * (dim + WINDOW)
        return 2 * max(forward, row, window) + PLAIN_REST_BYTES


# More shared memory first.
PLAIN_TILES = (PlainTiles(64, 2), PlainTiles(32, 1))


@dataclass(frozen=True)
class Design:
    """The tiles of both directions, and of the kernels for GPUs other than Hopper: then no tile of rows shares."""

    forward: Tiles
    backward: BackwardTiles
    plain: PlainTiles | None = None


def sparse_gqa_design(
    arch: str, shared_bytes: int, dtype: torch.dtype, dim: int, group: int, block_size: int, topk: int
) -> Design | str:
    """The kernels' tiles for a GPU, a head width, query heads a KV head and a selection, or why there are none."""
    if dtype != torch.bfloat16:
        return f"q, k and v must be bfloat16, got {str(dtype).removeprefix('torch.')}"
    if dim not in DIMS:
        return f"the head width must be one of {_spell(DIMS)}, got {dim}"
    if group not in GROUPS:
        return f"query heads a KV head must be one of {_spell(GROUPS)}, got {group}"
    if block_size not in BLOCK_SIZES:
        return f"block_size must be one of {_spell(BLOCK_SIZES)}, got {block_size}"
    if not has_matrix_units(arch):
        return f"{arch} has no bfloat16 matrix units"
    forward, backward = _forward_tiles(group), _backward_tiles(group)
    if takes_hopper_kernels(arch, shared_bytes):
        needed = max(t.plan_shared_bytes(topk, block_size) for t in (forward, backward.union))
        if needed > shared_bytes:
            return f"lists of {topk} blocks a row need {needed} bytes of shared memory, a block may have {shared_bytes}"
        return Design(forward, backward)
    fitting = [tiles for tiles in PLAIN_TILES if tiles.shared_bytes(dim) <= shared_bytes]
    if not fitting:
        return f"{arch} lets a block have {shared_bytes} bytes of shared memory, too few for head width {dim}"
    return Design(forward, backward, fitting[0])


def _spell(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _forward_tiles(group: int) -> Tiles:
    """As many rows as fit 128 matrix rows, at most one mask bit each."""
    return Tiles(rows=min(MASK_BITS, 128 // group))


def _backward_tiles(group: int) -> BackwardTiles:
    """A union step holds Q and dO of at most 96 vectors (48 KiB each at 256 channels) beside two stages of K and one of
    V: a reduction width, a multiple of 16.
    """
    union_rows = max(r for r in range(1, MASK_BITS + 1) if r * group <= 96 and r * group % 16 == 0)
    return BackwardTiles(union=Tiles(rows=union_rows), window_rows=WINDOW_VECTORS // even_group(group))
