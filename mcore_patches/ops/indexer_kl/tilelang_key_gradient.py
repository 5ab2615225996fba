# The language of kernels is not typed.
# mypy: ignore-errors
"""Gradient of the index keys over all rows: dk = sum over heads of (w dI [q . k > 0])^T Q, for a tile of blocks.

Turned round against `tilelang_query_gradient`: blocks are the rows of the matrix units, and rows of queries come by,
head after head, in ascending order.
"""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import KEY_GRADIENT_ROWS as ROWS
from mcore_patches.ops.indexer_kl.design import PADDING
from mcore_patches.ops.tilelang_warp import PASS_CONFIGS  # noqa: F401

WARPGROUP = 128
CONSUMERS = 256
BLOCKS = 128
CONSUMER_REGISTERS = 224
PRODUCER_REGISTERS = 56


def key_gradient_kernel(*, heads: int, channels: int, slots: int, weighted: bool, relu: bool):
    """Build the kernel ``(q, k, weights, row_count, begin, end, gradient, dk)`` on bfloat16.

    ``q [Tq, heads, channels]``, ``k [Nb, channels]``, ``weights [Tq, heads]`` fp32 (not read unless `weighted`);
    ``row_count [Tq]``, 0 for rows that may hold anything; blocks ``begin[tile] .. end[tile] - 1`` are those that some
    row of a tile of ``ROWS`` rows sees; ``gradient [Tq, width]`` is 0 where a row does not see a block, ``width`` a
    multiple of ``BLOCKS``. Adds to ``dk [Nb, channels]`` fp32. `slots`: tiles of one head's queries in shared memory.
    """
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = WARPGROUP // lanes  # that the producer loads at a time
    pieces = BLOCKS // 8  # of a row of gradients
    lines = WARPGROUP // pieces
    tq, nb, tw, tiles, width = (T.dynamic(n) for n in ("tq", "nb", "tw", "tiles", "width"))
    full_row = T.GemmWarpPolicy.FullRow
    dtype = "bfloat16"

    @T.prim_func
    def indexer_kl_key_gradient(
        q: T.Tensor((tq, heads, channels), dtype),
        k: T.Tensor((nb, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        row_count: T.Tensor((tq,), "int32"),
        begin: T.Tensor((tiles,), "int32"),
        end: T.Tensor((tiles,), "int32"),
        gradient: T.Tensor((tq, width), dtype),
        dk: T.Tensor((nb, channels), "float32"),
    ):
        with T.Kernel(T.ceildiv(nb, BLOCKS), threads=CONSUMERS + WARPGROUP) as place:
            k_shared = T.alloc_shared((BLOCKS, channels), dtype)
            q_shared = T.alloc_shared((slots, ROWS, channels), dtype)
            g_shared = T.alloc_shared((2, ROWS, BLOCKS + PADDING), dtype)
            w_shared = T.alloc_shared((2, heads, ROWS), "float32")
            k_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            q_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * slots)
            q_free = T.alloc_barrier(arrive_count=[CONSUMERS] * slots)
            g_ready = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * 2)
            g_free = T.alloc_barrier(arrive_count=[CONSUMERS] * 2)
            products = T.alloc_fragment((BLOCKS, ROWS), "float32")
            scores = T.alloc_fragment((BLOCKS, ROWS), dtype)
            flow = T.alloc_fragment((BLOCKS, ROWS), dtype)
            total = T.alloc_fragment((BLOCKS, channels), "float32")
            tx = T.get_thread_binding()
            step = T.alloc_var("int32", init=0)
            turn = T.alloc_var("int32", init=0)
            block0 = T.alloc_var("int32", init=place * BLOCKS)

            if tx < CONSUMERS:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                T.fill(total, 0)
                T.barrier_wait(k_ready, 0)
                for tile in T.serial(tiles):
                    if begin[tile] < block0 + BLOCKS and end[tile] > block0:
                        T.barrier_wait(g_ready[step % 2], (step // 2) & 1)
                        for i, j in T.Parallel(BLOCKS, ROWS):
                            scores[i, j] = g_shared[step % 2, j, i]
                        for h in T.serial(heads):
                            T.barrier_wait(q_ready[turn % slots], (turn // slots) & 1)
                            T.fence_proxy_async()  # asynchronous copies write as threads do, products read otherwise
                            if relu:
                                T.wgmma_gemm(
                                    k_shared,
                                    q_shared[turn % slots, :, :],
                                    products,
                                    transpose_B=True,
                                    clear_accum=True,
                                    policy=full_row,
                                )
                                T.wait_wgmma(0)
                            for i, j in T.Parallel(BLOCKS, ROWS):
                                if weighted:
                                    flow[i, j] = scores[i, j] * w_shared[step % 2, h, j]
                                else:
                                    flow[i, j] = scores[i, j]
                                if relu:
                                    flow[i, j] = T.if_then_else(products[i, j] > 0, flow[i, j], 0)
                            T.wgmma_gemm(flow, q_shared[turn % slots, :, :], total, policy=full_row)
                            T.wait_wgmma(0)
                            T.barrier_arrive(q_free[turn % slots])
                            turn = turn + 1
                        T.barrier_arrive(g_free[step % 2])
                        step = step + 1
                if step > 0:
                    for i, c in T.Parallel(BLOCKS, channels):
                        if block0 + i < nb:
                            dk[block0 + i, c] += total[i, c]
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                lane = tx - CONSUMERS
                for p in T.unroll(BLOCKS // vectors, unroll_factor=4):
                    b = p * vectors + lane // lanes
                    T.ptx_cp_async(
                        T.access_ptr(k_shared[b, lane % lanes * 8], "w", 8),
                        T.access_ptr(k[T.cast(T.min(block0 + b, nb - 1), "int64"), lane % lanes * 8], "r", 8),
                        8,
                    )
                T.cp_async_barrier_noinc(k_ready)
                for tile in T.serial(tiles):
                    if begin[tile] < block0 + BLOCKS and end[tile] > block0:
                        T.barrier_wait(g_free[step % 2], ((step // 2) & 1) ^ 1)
                        for p in T.unroll(ROWS // lines, unroll_factor=4):
                            i = p * lines + lane // pieces
                            T.ptx_cp_async(
                                T.access_ptr(g_shared[step % 2, i, lane % pieces * 8], "w", 8),
                                T.access_ptr(
                                    gradient[T.min(tile * ROWS + i, tq - 1), block0 + lane % pieces * 8], "r", 8
                                ),
                                8,
                                tile * ROWS + i < tq,
                            )
                        if weighted and lane < ROWS:
                            for h in T.serial(heads):
                                w_shared[step % 2, h, lane] = T.if_then_else(
                                    row_count[T.min(tile * ROWS + lane, tq - 1)] > 0,
                                    weights[T.min(tile * ROWS + lane, tq - 1), h],
                                    0,
                                )
                        T.barrier_arrive(g_ready[step % 2])
                        T.cp_async_barrier_noinc(g_ready[step % 2])
                        for h in T.serial(heads):
                            T.barrier_wait(q_free[turn % slots], ((turn // slots) & 1) ^ 1)
                            for p in T.unroll(ROWS // vectors, unroll_factor=4):
                                row = T.min(tile * ROWS + p * vectors + lane // lanes, tq - 1)
                                T.ptx_cp_async(
                                    T.access_ptr(
                                        q_shared[turn % slots, p * vectors + lane // lanes, lane % lanes * 8], "w", 8
                                    ),
                                    T.access_ptr(q[row, h, lane % lanes * 8], "r", 8),
                                    8,
                                    row_count[row] > 0,
                                )
                            T.cp_async_barrier_noinc(q_ready[turn % slots])
                            turn = turn + 1
                        step = step + 1

    return indexer_kl_key_gradient
