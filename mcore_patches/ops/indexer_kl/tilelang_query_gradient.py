# The language of kernels is not typed.
# mypy: ignore-errors
"""Gradient of the index queries over all blocks: dq = (dI [q . k > 0]) K, for one head and 128 rows at a time.

The products q . k are computed again for their signs alone. A producer warpgroup loads index keys and gradients of
scores; two consumer warpgroups hold 64 rows each.
"""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import PADDING
from mcore_patches.ops.indexer_kl.design import QUERY_GRADIENT_ROWS as ROWS
from mcore_patches.ops.tilelang_warp import PASS_CONFIGS  # noqa: F401

WARPGROUP = 128
CONSUMERS = 256
CONSUMER_REGISTERS = 224
PRODUCER_REGISTERS = 56


def query_gradient_kernel(*, heads: int, channels: int, tile_blocks: int, stages: int, weighted: bool, relu: bool):
    """Build the kernel ``(q, k, weights, row_count, begin, end, gradient, dq, dweights)`` on bfloat16.

    ``q [Tq, heads, channels]``, ``k [Nb, channels]``, ``weights [Tq, heads]`` fp32 (not read unless `weighted`);
    ``row_count [Tq]``, 0 for rows that may hold anything; blocks ``begin[tile] .. end[tile] - 1`` are those that some
    row of a tile of ``ROWS`` rows sees; ``gradient [Tq, width]`` is 0 where a row does not see a block, ``width`` a
    multiple of `tile_blocks`. Writes ``dq`` like ``q`` and, if `weighted`, ``dweights`` like ``weights``.
    """
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = WARPGROUP // lanes  # that the producer loads at a time
    pieces = tile_blocks // 8  # of a row of gradients
    lines = WARPGROUP // pieces
    tq, nb, tw, tiles, width = (T.dynamic(n) for n in ("tq", "nb", "tw", "tiles", "width"))
    full_row = T.GemmWarpPolicy.FullRow
    dtype = "bfloat16"

    @T.prim_func
    def indexer_kl_query_gradient(
        q: T.Tensor((tq, heads, channels), dtype),
        k: T.Tensor((nb, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        row_count: T.Tensor((tq,), "int32"),
        begin: T.Tensor((tiles,), "int32"),
        end: T.Tensor((tiles,), "int32"),
        gradient: T.Tensor((tq, width), dtype),
        dq: T.Tensor((tq, heads, channels), dtype),
        dweights: T.Tensor((tw, heads), "float32"),
    ):
        with T.Kernel(heads, tiles, threads=CONSUMERS + WARPGROUP) as (head, from_last):
            q_shared = T.alloc_shared((ROWS, channels), dtype)
            k_shared = T.alloc_shared((stages, tile_blocks, channels), dtype)
            g_shared = T.alloc_shared((stages, ROWS, tile_blocks + PADDING), dtype)
            q_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            ready = T.alloc_barrier(arrive_count=[WARPGROUP] * stages)
            free = T.alloc_barrier(arrive_count=[CONSUMERS] * stages)
            products = T.alloc_fragment((ROWS, tile_blocks), "float32")
            flow = T.alloc_fragment((ROWS, tile_blocks), dtype)
            total = T.alloc_fragment((ROWS, channels), "float32")
            scaled = T.alloc_fragment((ROWS, channels), "float32")
            dw = T.alloc_fragment((ROWS,), "float32")
            counts = T.alloc_fragment((ROWS,), "int32")
            tx = T.get_thread_binding()
            tile = tiles - 1 - from_last
            row0 = T.alloc_var("int32", init=tile * ROWS)
            first = begin[tile]
            last = end[tile]
            steps = T.max(T.ceildiv(last, tile_blocks) - first // tile_blocks, 0)

            if tx < CONSUMERS:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                T.fill(total, 0)
                T.barrier_wait(q_ready, 0)
                for s in T.serial(steps):
                    stage = s % stages
                    T.barrier_wait(ready[stage], (s // stages) & 1)
                    T.fence_proxy_async()  # asynchronous copies write as threads do, products read otherwise
                    if relu:
                        T.wgmma_gemm(
                            q_shared,
                            k_shared[stage, :, :],
                            products,
                            transpose_B=True,
                            clear_accum=True,
                            policy=full_row,
                        )
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(ROWS, tile_blocks):
                            flow[i, j] = T.if_then_else(products[i, j] > 0, g_shared[stage, i, j], 0)
                    else:
                        for i, j in T.Parallel(ROWS, tile_blocks):
                            flow[i, j] = g_shared[stage, i, j]
                    T.wgmma_gemm(flow, k_shared[stage, :, :], total, policy=full_row)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[stage])
                for i in T.Parallel(ROWS):
                    counts[i] = row_count[T.min(row0 + i, tq - 1)]
                if weighted:
                    for i, c in T.Parallel(ROWS, channels):
                        scaled[i, c] = total[i, c] * q_shared[i, c]
                    T.reduce_sum(scaled, dw, dim=1)
                    for i in T.Parallel(ROWS):
                        if row0 + i < tq:
                            dweights[row0 + i, head] = T.if_then_else(counts[i] > 0, dw[i], 0)
                    for i, c in T.Parallel(ROWS, channels):
                        total[i, c] *= weights[T.min(row0 + i, tq - 1), head]
                for i, c in T.Parallel(ROWS, channels):
                    if row0 + i < tq:
                        dq[row0 + i, head, c] = T.if_then_else(counts[i] > 0, total[i, c], 0)
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                lane = tx - CONSUMERS
                for p in T.unroll(ROWS // vectors, unroll_factor=4):
                    i = p * vectors + lane // lanes
                    T.ptx_cp_async(
                        T.access_ptr(q_shared[i, lane % lanes * 8], "w", 8),
                        T.access_ptr(q[T.min(row0 + i, tq - 1), head, lane % lanes * 8], "r", 8),
                        8,
                    )
                T.cp_async_barrier_noinc(q_ready)
                for s in T.serial(steps):
                    stage = s % stages
                    block0 = (first // tile_blocks + s) * tile_blocks
                    T.barrier_wait(free[stage], ((s // stages) & 1) ^ 1)
                    for p in T.unroll(tile_blocks // vectors, unroll_factor=4):
                        b = p * vectors + lane // lanes
                        T.ptx_cp_async(
                            T.access_ptr(k_shared[stage, b, lane % lanes * 8], "w", 8),
                            T.access_ptr(k[T.cast(T.min(block0 + b, nb - 1), "int64"), lane % lanes * 8], "r", 8),
                            8,
                            block0 + b >= first and block0 + b < last,
                        )
                    for p in T.unroll(ROWS // lines, unroll_factor=4):
                        i = p * lines + lane // pieces
                        T.ptx_cp_async(
                            T.access_ptr(g_shared[stage, i, lane % pieces * 8], "w", 8),
                            T.access_ptr(gradient[T.min(row0 + i, tq - 1), block0 + lane % pieces * 8], "r", 8),
                            8,
                        )
                    T.cp_async_barrier_noinc(ready[stage])

    return indexer_kl_query_gradient
