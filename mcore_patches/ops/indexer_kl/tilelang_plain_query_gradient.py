# The language of kernels is not typed.
# mypy: ignore-errors
"""What :mod:`tilelang_query_gradient` does, for any GPU with bf16 matrix units: all threads load, then all multiply."""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import PADDING
from mcore_patches.ops.tilelang_warp import PLAIN_PASS_CONFIGS as PASS_CONFIGS  # noqa: F401


def plain_query_gradient_kernel(
    *, heads: int, channels: int, rows: int, tile_blocks: int, stages: int, weighted: bool, relu: bool
):
    """Build a kernel with the arguments and results of `query_gradient_kernel`, for tiles of `rows` rows."""
    threads = 2 * rows  # a warp has 16 rows
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = threads // lanes  # that are loaded at a time
    pieces = tile_blocks // 8  # of a row of gradients
    lines = threads // pieces
    tq, nb, tw, tiles, width = (T.dynamic(n) for n in ("tq", "nb", "tw", "tiles", "width"))
    full_row = T.GemmWarpPolicy.FullRow
    dtype = "bfloat16"

    @T.macro
    def load(k, gradient, k_shared, g_shared, stage, block0, first, last, row0, tq, nb, tx):
        """Index keys that some row sees, zeros for the others, and the gradients with respect to their scores."""
        for p in T.unroll(tile_blocks // vectors, unroll_factor=4):
            b = p * vectors + tx // lanes
            T.ptx_cp_async(
                T.access_ptr(k_shared[stage, b, tx % lanes * 8], "w", 8),
                T.access_ptr(k[T.cast(T.min(block0 + b, nb - 1), "int64"), tx % lanes * 8], "r", 8),
                8,
                block0 + b >= first and block0 + b < last,
            )
        for p in T.unroll(rows // lines, unroll_factor=4):
            i = p * lines + tx // pieces
            T.ptx_cp_async(
                T.access_ptr(g_shared[stage, i, tx % pieces * 8], "w", 8),
                T.access_ptr(gradient[T.min(row0 + i, tq - 1), block0 + tx % pieces * 8], "r", 8),
                8,
            )

    @T.prim_func
    def indexer_kl_plain_query_gradient(
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
        with T.Kernel(heads, tiles, threads=threads) as (head, from_last):
            q_shared = T.alloc_shared((rows, channels), dtype)
            k_shared = T.alloc_shared((stages, tile_blocks, channels), dtype)
            g_shared = T.alloc_shared((stages, rows, tile_blocks + PADDING), dtype)
            products = T.alloc_fragment((rows, tile_blocks), "float32")
            flow = T.alloc_fragment((rows, tile_blocks), dtype)
            total = T.alloc_fragment((rows, channels), "float32")
            scaled = T.alloc_fragment((rows, channels), "float32")
            dw = T.alloc_fragment((rows,), "float32")
            counts = T.alloc_fragment((rows,), "int32")
            tx = T.get_thread_binding()
            tile = tiles - 1 - from_last
            row0 = T.alloc_var("int32", init=tile * rows)
            first = begin[tile]
            last = end[tile]
            steps = T.max(T.ceildiv(last, tile_blocks) - first // tile_blocks, 0)

            T.fill(total, 0)
            # Memory that is not read again may be given to another buffer before copies into it have ended.
            if relu or weighted:
                for p in T.unroll(rows // vectors, unroll_factor=4):
                    i = p * vectors + tx // lanes
                    T.ptx_cp_async(
                        T.access_ptr(q_shared[i, tx % lanes * 8], "w", 8),
                        T.access_ptr(q[T.min(row0 + i, tq - 1), head, tx % lanes * 8], "r", 8),
                        8,
                    )
            if stages > 1 and steps > 0:
                block0 = first // tile_blocks * tile_blocks
                load(k, gradient, k_shared, g_shared, 0, block0, first, last, row0, tq, nb, tx)
            T.ptx_commit_group()
            for s in T.serial(steps):
                T.sync_threads()  # what the next copies overwrite has been read
                ahead = s + stages - 1
                if ahead < steps:
                    block0 = (first // tile_blocks + ahead) * tile_blocks
                    load(k, gradient, k_shared, g_shared, ahead % stages, block0, first, last, row0, tq, nb, tx)
                # Behind the last step too: one group of copies a step keeps the count.
                T.ptx_commit_group()
                T.ptx_wait_group(stages - 1)
                T.sync_threads()
                if relu:
                    T.gemm(
                        q_shared,
                        k_shared[s % stages, :, :],
                        products,
                        transpose_B=True,
                        clear_accum=True,
                        policy=full_row,
                    )
                    for i, j in T.Parallel(rows, tile_blocks):
                        flow[i, j] = T.if_then_else(products[i, j] > 0, g_shared[s % stages, i, j], 0)
                else:
                    for i, j in T.Parallel(rows, tile_blocks):
                        flow[i, j] = g_shared[s % stages, i, j]
                T.gemm(flow, k_shared[s % stages, :, :], total, policy=full_row)
            T.ptx_wait_group(0)
            T.sync_threads()  # without a step the queries have not been waited for
            for i in T.Parallel(rows):
                counts[i] = row_count[T.min(row0 + i, tq - 1)]
            if weighted:
                for i, c in T.Parallel(rows, channels):
                    scaled[i, c] = total[i, c] * q_shared[i, c]
                T.reduce_sum(scaled, dw, dim=1)
                for i in T.Parallel(rows):
                    if row0 + i < tq:
                        dweights[row0 + i, head] = T.if_then_else(counts[i] > 0, dw[i], 0)
                for i, c in T.Parallel(rows, channels):
                    total[i, c] *= weights[T.min(row0 + i, tq - 1), head]
            for i, c in T.Parallel(rows, channels):
                if row0 + i < tq:
                    dq[row0 + i, head, c] = T.if_then_else(counts[i] > 0, total[i, c], 0)

    return indexer_kl_plain_query_gradient
