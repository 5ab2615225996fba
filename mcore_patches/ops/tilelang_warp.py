# The language of kernels is not typed.
# mypy: ignore-errors
"""What kernels do among the threads of a warp or a block, in words that TileLang has not."""

import tilelang.language as T

EVERY_LANE = 0xFFFFFFFF
LOWEST = -(2.0**127)  # below any score that is worth a thought, yet finite

# For kernels that write every barrier and guard every access by hand.
PASS_CONFIGS = {
    # Barriers that TileLang would add sit inside the loops that load.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
}

# For those of any GPU: they multiply by `mma.sync` on Hopper too, where tests run them.
PLAIN_PASS_CONFIGS = PASS_CONFIGS | {"tl.disable_wgmma": True}


def atomic(name, element, value):
    """Call `name` ("atomicAdd") on an element of shared memory: T.atomic_* emit instructions that fault there."""
    T.evaluate(T.call_extern("int32", name, T.address_of(element), value))


def votes(condition):
    """The lanes of a warp for which `condition` holds, as bits."""
    return T.call_extern("int32", "__ballot_sync", T.uint32(EVERY_LANE), condition)


def popcount(bits):
    """Number of set bits; TileLang has no lowering of TVM's popcount to CUDA."""
    return T.call_extern("int32", "__popc", bits)


def below(bits, place):
    """Number of set bits below bit `place`."""
    return popcount(bits & ((1 << place) - 1))


@T.macro
def sum_before(mine, before, sums, tx, threads):
    """before[0] = the sum of mine[0] over all lower threads; `sums [threads / 32]` in shared memory is scratch.

    Ends with a barrier: TileLang lets buffers whose uses do not overlap in the text share memory.
    """
    lower = T.alloc_var("int32")
    before[0] = mine[0]
    for e in T.unroll(5):
        lower = T.shfl_up(before[0], 1 << e)
        if tx % 32 >= 1 << e:
            before[0] += lower
    if tx % 32 == 31:
        sums[tx // 32] = before[0]
    T.sync_threads()
    before[0] -= mine[0]
    for w in T.unroll(threads // 32):
        if w < tx // 32:
            before[0] += sums[w]
    T.sync_threads()
