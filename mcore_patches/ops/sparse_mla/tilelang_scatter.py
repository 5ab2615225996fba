"""How the Hopper backwards of sparse MLA write pieces of dKV from the registers of the matrix unit.

A thread has two neighbouring channels of each eight. So that it can write 16 bytes at once, the buffers keep the
channels of each group of `group(reduction)` in another order; `tilelang_kernels` beside this puts them back.
"""

from typing import Any

import tilelang.language as T

KEYS_PER_BLOCK = 64  # the M of one wgmma
PIECE = 64  # channels of dKV that one product makes
WGMMA_COLUMNS = 8  # of one 8-column tile of an accumulator each thread of a quad holds two columns
LANES_OF_KEY = 4  # of a warp, that hold one row of an accumulator: a quad
ELEMENTS = KEYS_PER_BLOCK * PIECE // 128  # of a piece that a thread has
REDUCTIONS = ("atomic", "store")

# C++ of a store whose line leaves the L2 cache first: nobody reads parts until all of a chunk are there, by when they
# have left it anyway, and keys stay in their place.
STORE_ONCE = """
__device__ __forceinline__ void store_16_bytes_once(void* to, const void* from) {
  __stcs(static_cast<uint4*>(to), *static_cast<const uint4*>(from));
}
"""


def group(reduction: str) -> int:
    """Channels that are reordered together: what a quad of threads writes with 16 bytes each.

    Channel 8 * t + 2 * c + e of a group lies at c * (group // 4) + 2 * t + e.
    """
    return 16 if reduction == "atomic" else 32


def element_type(reduction: str) -> Any:
    """What dKV, or its parts, are kept in."""
    return T.float32 if reduction == "atomic" else T.bfloat16


def place_type(reduction: str) -> Any:
    """What `even` and `odd` of `scattering` hold: for additions, where in DKV an element is, else a key."""
    return T.int64 if reduction == "atomic" else T.int32


def scattering(reduction: str) -> tuple[Any, Any]:
    """Macros (scatter, copy_targets).

    scatter(DKV, b, even, odd, piece, mine, first, second, column) adds or stores `piece` [64 keys, 64 channels from
    `column`] of batch entry b. A thread has channels of two pairs of keys: even, odd [2] tell where the even and the
    odd key of each are, negative for nowhere, as copy_targets(DKV, b, targets, stage, even, odd) takes them from
    `targets` [stages, 64], keys of DKV. Local are even and odd of `place_type`, mine [2 * run], and first and second
    [`ELEMENTS` // 2]; run = group // 4. A kernel that stores needs `STORE_ONCE` as its prelude.
    """
    columns_of_group = group(reduction)
    run = columns_of_group // 4
    groups = PIECE // (2 * columns_of_group)
    dtype = element_type(reduction)

    def channel_of_thread():
        lane = T.get_thread_binding() % 32
        return lane // LANES_OF_KEY % 2 * columns_of_group + lane % LANES_OF_KEY * run

    def place(DKV, b, target):
        if reduction == "store":
            return target
        # The whole place, once a block of keys: made anew for every addition it would take longer than that.
        keys, width = DKV.shape[1:]
        row = T.cast(b, T.int64) * keys + T.cast(target, T.int64)
        return T.if_then_else(target >= 0, row * width + T.cast(channel_of_thread(), T.int64), T.int64(-1))

    @T.macro
    def take(piece, k, g, c, mine):
        for t in T.unroll(2 * columns_of_group // WGMMA_COLUMNS):
            for e in T.unroll(2):
                mine[2 * t + e] = piece[k, 2 * g * columns_of_group + t * WGMMA_COLUMNS + 2 * c + e]

    @T.macro
    def add(DKV, place, channel, values, start):
        if place >= 0:
            T.atomic_addx4(DKV[0, 0, place + channel], values[start])

    @T.macro
    def scatter_sums(DKV, b, even, odd, piece, mine, first, second, column):
        # Two neighbouring keys lie four lanes apart. Their lanes swap halves, so that eight lanes add to one line of
        # 128 bytes at once, of the even key first and then of the odd one: by half lines it takes a fifth longer.
        # All swaps come before the first addition: they go through the same queue, and would wait behind it.
        for k, g, c in T.Parallel(KEYS_PER_BLOCK, groups, 4):
            take(piece, k, g, c, mine)
            pair = k // 8 % 2
            start = (pair * groups + g) * run
            for j in T.unroll(run):
                other = T.shfl_xor(T.if_then_else(k % 2 == 0, mine[run + j], mine[j]), LANES_OF_KEY)
                first[start + j] = T.if_then_else(k % 2 == 0, mine[j], other)
                second[start + j] = T.if_then_else(k % 2 == 0, other, mine[run + j])
        for pair in T.unroll(2):
            for g in T.unroll(groups):
                add(DKV, even[pair], column + 2 * g * columns_of_group, first, (pair * groups + g) * run)
            for g in T.unroll(groups):
                add(DKV, odd[pair], column + 2 * g * columns_of_group, second, (pair * groups + g) * run)

    @T.macro
    def scatter_parts(DKV, b, even, odd, piece, mine, first, second, column):
        # Stores need no whole lines: each lane stores what it has of its own key.
        for k, g, c in T.Parallel(KEYS_PER_BLOCK, groups, 4):
            take(piece, k, g, c, mine)
            pair = k // 8 % 2
            key = T.if_then_else(k % 2 == 0, even[pair], odd[pair])
            for j in T.unroll(2 * run):
                first[j] = T.cast(mine[j], dtype)
            if key >= 0:
                for half in T.unroll(2):
                    channel = column + (2 * g + half) * columns_of_group + T.get_thread_binding() % LANES_OF_KEY * run
                    T.call_extern(
                        "handle",
                        "store_16_bytes_once",
                        T.address_of(DKV[b, key, channel]),
                        T.address_of(first[half * run]),
                    )

    @T.macro
    def copy_targets(DKV, b, targets, stage, even, odd):
        key = T.get_thread_binding() // 32 % 4 * 16 + T.get_thread_binding() % 32 // 8 * 2
        for pair in T.unroll(2):
            even[pair] = place(DKV, b, targets[stage, key + 8 * pair])
            odd[pair] = place(DKV, b, targets[stage, key + 8 * pair + 1])

    return scatter_sums if reduction == "atomic" else scatter_parts, copy_targets
