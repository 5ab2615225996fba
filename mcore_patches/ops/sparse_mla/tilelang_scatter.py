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
REDUCTIONS = ("atomic", "store")


def group(reduction: str) -> int:
    """Channels that are reordered together: what a quad of threads writes with 16 bytes each.

    Channel 8 * t + 2 * c + e of a group lies at c * (group // 4) + 2 * t + e.
    """
    return 16 if reduction == "atomic" else 32


def element_type(reduction: str) -> Any:
    """What dKV, or its parts, are kept in."""
    return T.float32 if reduction == "atomic" else T.bfloat16


def scattering(reduction: str) -> tuple[Any, Any]:
    """Macros (scatter, copy_targets).

    scatter(DKV, b, even, odd, piece, mine, first, second, column) adds or stores `piece` [64 keys, 64 channels from
    `column`] of batch entry b. even, odd: for each key the place in DKV of the even and of the odd one of its pair,
    negative for none, as copy_targets(targets, stage, even, odd) takes them from `targets` [stages, 64]. Local are mine
    [2 * run], first and second [run]; run = group // 4.
    """
    columns_of_group = group(reduction)
    run = columns_of_group // 4
    dtype = element_type(reduction)

    @T.macro
    def write(DKV, b, target, channel, values):
        if reduction == "atomic":
            T.atomic_addx4(DKV[b, target, channel], values[0])
        else:
            DKV[b, target, T.Ramp(channel, 1, run)] = values[T.Ramp(0, 1, run)]

    @T.macro
    def scatter(DKV, b, even, odd, piece, mine, first, second, column):
        # Two neighbouring keys lie four lanes apart. Their lanes swap halves, so that eight lanes write one line of 128
        # bytes at once, of the even key first and then of the odd one: by half lines it takes a fifth longer.
        for k, g, c in T.Parallel(KEYS_PER_BLOCK, PIECE // (2 * columns_of_group), 4):
            for t in T.unroll(2 * columns_of_group // WGMMA_COLUMNS):
                for e in T.unroll(2):
                    mine[2 * t + e] = piece[k, 2 * g * columns_of_group + t * WGMMA_COLUMNS + 2 * c + e]
            for j in T.unroll(run):
                other = T.shfl_xor(T.if_then_else(k % 2 == 0, mine[run + j], mine[j]), LANES_OF_KEY)
                first[j] = T.cast(T.if_then_else(k % 2 == 0, mine[j], other), dtype)
                second[j] = T.cast(T.if_then_else(k % 2 == 0, other, mine[run + j]), dtype)
            channel = column + (2 * g + k % 2) * columns_of_group + c * run
            if even[k] >= 0:
                write(DKV, b, even[k], channel, first)
            if odd[k] >= 0:
                write(DKV, b, odd[k], channel, second)

    @T.macro
    def copy_targets(targets, stage, even, odd):
        for k in T.Parallel(KEYS_PER_BLOCK):
            even[k] = targets[stage, k - k % 2]
            odd[k] = targets[stage, k - k % 2 + 1]

    return scatter, copy_targets
