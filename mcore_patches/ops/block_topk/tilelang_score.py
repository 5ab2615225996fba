# The language of kernels is not typed.
# mypy: ignore-errors
"""Index scores of a chunk of rows, as sortable integers, and the best of every eight neighbouring blocks.

A block of threads holds the queries of ``tile_rows`` neighbouring rows and walks the index keys that one of them sees,
``tile_blocks`` at a time. A producer warpgroup loads with ``cp.async``; each consumer warpgroup multiplies 64 rows, one
head after the other, into the same places of its registers, so that heads are added without moving. The sum of a
product over channels is taken in one order whatever the tile, hence scores do not depend on chunks.
"""

import tilelang.language as T

from mcore_patches.ops.block_topk.design import GROUP, INVISIBLE
from mcore_patches.ops.tilelang_warp import PASS_CONFIGS, atomic  # noqa: F401

WARPGROUP = 128
# Two consumer warpgroups and a producer share the 504 registers a lane that 384 threads are launched with.
CONSUMER_REGISTERS = 224
PRODUCER_REGISTERS = 56


def score_kernel(
    *,
    heads: int,
    channels: int,
    tile_rows: int,
    tile_blocks: int,
    stages: int,
    slots: int,
    dtype: str,
    weighted: bool,
    relu: bool,
):
    """Build the kernel ``(q, k, weights, row_first, row_count, keys, maxima, skipped, splits)``.

    ``q [Tq, heads, channels]``, ``k [Nb, channels]``, ``weights [Tq, heads]`` fp32 (not read unless `weighted`),
    ``row_first [Tq]`` and ``row_count [Tq]`` int32: the blocks ``row_first .. row_first + row_count - 1`` are visible.
    Writes ``keys [Tq, tiles, tile_blocks]``, int32 in the order of the scores (``INVISIBLE`` below all of them), and
    ``maxima [Tq, tiles, tile_blocks / GROUP]``, the largest of ``GROUP`` keys; both in those tiles of blocks alone that
    some row of the tile of rows sees, where rows with ``row_count <= skipped`` do not ask for any. A tile of rows is
    dealt to ``splits`` blocks of threads.

    `slots`: tiles of queries held, `heads` (loaded once) or fewer (a ring that is filled again for every tile of
    blocks). `stages`: tiles of index keys held.
    """
    resident = slots == heads
    consumers = 2 * tile_rows
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = WARPGROUP // lanes  # that the producer loads at a time
    tq, nb, tw, tiles = (T.dynamic(n) for n in ("tq", "nb", "tw", "tiles"))
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def block_topk_score(
        q: T.Tensor((tq, heads, channels), dtype),
        k: T.Tensor((nb, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        row_first: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        keys: T.Tensor((tq, tiles, tile_blocks), "int32"),
        maxima: T.Tensor((tq, tiles, tile_blocks // GROUP), "int32"),
        skipped: T.int32,
        splits: T.int32,
    ):
        with T.Kernel(splits, T.ceildiv(tq, tile_rows), threads=consumers + WARPGROUP) as (split, from_last):
            q_shared = T.alloc_shared((slots, tile_rows, channels), dtype)
            k_shared = T.alloc_shared((stages, tile_blocks, channels), dtype)
            w_shared = T.alloc_shared((heads, tile_rows), "float32")
            first = T.alloc_shared((tile_rows,), "int32")
            end = T.alloc_shared((tile_rows,), "int32")
            seen = T.alloc_shared((2,), "int32")
            q_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * slots)
            q_free = T.alloc_barrier(arrive_count=[consumers] * slots)
            k_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * stages)
            k_free = T.alloc_barrier(arrive_count=[consumers] * stages)
            products = T.alloc_fragment((tile_rows, tile_blocks), "float32")
            total = T.alloc_fragment((tile_rows, tile_blocks), "float32")
            key = T.alloc_fragment((tile_rows, tile_blocks), "int32")
            grouped = T.alloc_fragment((tile_rows, tile_blocks // GROUP, GROUP), "int32")
            best = T.alloc_fragment((tile_rows, tile_blocks // GROUP), "int32")

            tx = T.get_thread_binding()
            # The longest rows of a document come last: their tiles start first.
            row0 = T.alloc_var("int32", init=(T.ceildiv(tq, tile_rows) - 1 - from_last) * tile_rows)

            if tx == 0:
                seen[0] = 2**31 - 1
                seen[1] = 0
            T.sync_threads()
            if tx < tile_rows:
                first[tx] = 0
                end[tx] = 0
                if row0 + tx < tq:
                    first[tx] = row_first[row0 + tx]
                    end[tx] = row_first[row0 + tx] + row_count[row0 + tx]
                    if row_count[row0 + tx] > skipped:
                        atomic("atomicMin", seen[0], first[tx])
                        atomic("atomicMax", seen[1], end[tx])
                    if weighted:
                        for h in T.serial(heads):
                            w_shared[h, tx] = weights[row0 + tx, h]
            T.sync_threads()
            begin = seen[0] // tile_blocks + split
            steps = T.ceildiv(T.max(T.ceildiv(seen[1], tile_blocks) - begin, 0), splits)

            if tx < consumers:
                if consumers > WARPGROUP:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                for s in T.serial(steps):
                    stage = s % stages
                    tile = begin + s * splits
                    block0 = tile * tile_blocks
                    T.barrier_wait(k_ready[stage], (s // stages) & 1)
                    T.fill(total, 0)
                    for h in T.serial(heads):
                        turn = T.if_then_else(resident, h, s * heads + h)
                        T.barrier_wait(q_ready[turn % slots], (turn // slots) & 1)
                        T.fence_proxy_async()  # asynchronous copies write as threads do, products read otherwise
                        T.wgmma_gemm(
                            q_shared[turn % slots, :, :],
                            k_shared[stage, :, :],
                            products,
                            transpose_B=True,
                            clear_accum=True,
                            policy=full_row,
                        )
                        T.wait_wgmma(0)
                        if not resident:
                            T.barrier_arrive(q_free[turn % slots])
                        for i, j in T.Parallel(tile_rows, tile_blocks):
                            if relu:  # a maximum would drop NaN
                                products[i, j] = T.if_then_else(products[i, j] < 0, 0.0, products[i, j])
                            if weighted:
                                products[i, j] = T.ieee_mul(products[i, j], w_shared[h, i])
                            total[i, j] += products[i, j]
                    T.barrier_arrive(k_free[stage])
                    for i, j in T.Parallel(tile_rows, tile_blocks):
                        # The bits of floats ascend from 0.0 and descend from -0.0, which becomes 0 here.
                        key[i, j] = T.reinterpret("int32", total[i, j])
                        key[i, j] = T.if_then_else(key[i, j] < 0, INVISIBLE - key[i, j], key[i, j])
                        key[i, j] = T.if_then_else(block0 + j >= first[i] and block0 + j < end[i], key[i, j], INVISIBLE)
                    for i, j in T.Parallel(tile_rows, tile_blocks):
                        grouped[i, j // GROUP, j % GROUP] = key[i, j]
                    T.reduce_max(grouped, best, dim=2)
                    for i, j in T.Parallel(tile_rows, tile_blocks):
                        if row0 + i < tq:
                            keys[row0 + i, tile, j] = key[i, j]
                    for i, j in T.Parallel(tile_rows, tile_blocks // GROUP):
                        if row0 + i < tq:
                            maxima[row0 + i, tile, j] = best[i, j]
            else:
                if consumers > WARPGROUP:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                lane = tx - consumers
                for s in T.serial(steps):
                    stage = s % stages
                    tile = begin + s * splits
                    block0 = tile * tile_blocks
                    T.barrier_wait(k_free[stage], ((s // stages) & 1) ^ 1)
                    for p in T.unroll(tile_blocks // vectors, unroll_factor=4):
                        b = p * vectors + lane // lanes
                        T.ptx_cp_async(
                            T.access_ptr(k_shared[stage, b, lane % lanes * 8], "w", 8),
                            T.access_ptr(k[T.cast(T.min(block0 + b, nb - 1), "int64"), lane % lanes * 8], "r", 8),
                            8,
                            block0 + b < nb,
                        )
                    T.cp_async_barrier_noinc(k_ready[stage])
                    for h in T.serial(heads):
                        if not resident or s == 0:
                            turn = T.if_then_else(resident, h, s * heads + h)
                            if not resident:
                                T.barrier_wait(q_free[turn % slots], ((turn // slots) & 1) ^ 1)
                            for p in T.unroll(tile_rows // vectors, unroll_factor=4):
                                i = p * vectors + lane // lanes
                                T.ptx_cp_async(
                                    T.access_ptr(q_shared[turn % slots, i, lane % lanes * 8], "w", 8),
                                    T.access_ptr(q[T.min(row0 + i, tq - 1), h, lane % lanes * 8], "r", 8),
                                    8,
                                )
                            T.cp_async_barrier_noinc(q_ready[turn % slots])

    return block_topk_score
