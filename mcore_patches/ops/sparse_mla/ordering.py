"""When the backward adds up dKV in a fixed order, and how many rows of it at a time."""

from __future__ import annotations

from mcore_patches.ops.device import HOPPER, Device

BY_ITSELF = True
"""Set it to False to keep atomics wherever no order is asked for: less memory, and sums of fp32 parts."""

# An fp32 dKV above this leaves a Hopper's L2 cache (50 MB) too often for atomics: storing parts and adding them up is
# faster. Measured at 32k and 48k tokens with 2048 ids a row (gpu_ci/kernels/NOTES.md): the ratio of both crosses 1 at
# 55 to 58 MiB with 16 heads and at 94 with 64; with 128, where there are twice the parts, straight lines do so at 136
# to 145.
MOST_ATOMIC_BYTES_OF_FEW_HEADS = 60 * 2**20
MOST_ATOMIC_BYTES = 96 * 2**20
MOST_ATOMIC_BYTES_OF_MANY_HEADS = 144 * 2**20
FEW_HEADS = 16  # have a backward of their own, which adds faster than device memory takes it
MANY_HEADS = 65  # more than one block of the Hopper backward
# Ordering looks at every key once a chunk of rows, so keys must be used this often on average. Not measured.
USES_OF_A_KEY = 4

PARTS_BYTES = 2 * 2**30  # parts of dKV that are stored before they are summed
BITS_BYTES = 512 * 2**20  # the two bit matrices that number a chunk's parts
ROWS_PER_WORD = 32


def order_is_faster(device: Device, rows: int, topk: int, keys: int, width: int, heads: int) -> bool:
    """Whether adding up stored parts of dKV beats atomics: it is too large for the cache, and keys are used often.

    Measured on Hopper only, so other GPUs take atomics.
    """
    if heads <= FEW_HEADS:
        most = MOST_ATOMIC_BYTES_OF_FEW_HEADS
    else:
        most = MOST_ATOMIC_BYTES_OF_MANY_HEADS if heads >= MANY_HEADS else MOST_ATOMIC_BYTES
    often = rows * topk >= USES_OF_A_KEY * keys
    return BY_ITSELF and device.arch == HOPPER and 4 * keys * width > most and often


def rows_in_order(rows: int, topk: int, keys: int, width: int, head_blocks: int, multiprocessors: int) -> int:
    """Rows of a chunk of the ordered backward: parts of about `PARTS_BYTES`, whole waves of blocks.

    Where keys are many and rows select few, the bit matrices set the limit; they hold at least one word of 32 rows.
    Parts are numbered by int32.
    """
    by_parts = min(PARTS_BYTES // (2 * topk * width * head_blocks), (2**31 - 1) // (topk * head_blocks))
    by_bits = max(1, BITS_BYTES // (2 * 4 * keys)) * ROWS_PER_WORD
    most = min(by_parts, by_bits)
    if most >= rows:
        return rows
    wave = -(-multiprocessors // head_blocks)
    return max(1, most // wave * wave or most)
