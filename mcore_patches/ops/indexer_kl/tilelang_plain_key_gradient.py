# The language of kernels is not typed.
# mypy: ignore-errors
"""What :mod:`tilelang_key_gradient` does, for any GPU with bf16 matrix units: all threads load, then all multiply."""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import KEY_GRADIENT_ROWS as ROWS
from mcore_patches.ops.indexer_kl.design import PADDING
from mcore_patches.ops.tilelang_warp import PLAIN_PASS_CONFIGS as PASS_CONFIGS  # noqa: F401


def plain_key_gradient_kernel(*, heads: int, channels: int, tile_blocks: int, slots: int, weighted: bool, relu: bool):
    """Build a kernel with the arguments and results of `key_gradient_kernel`, for tiles of `tile_blocks` blocks.

    `slots`: tiles of one head's queries in shared memory, 1 or 2.
    """
    threads = 2 * tile_blocks  # a warp has 16 blocks
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = threads // lanes  # that are loaded at a time
    pieces = tile_blocks // 8  # of a row of gradients
    lines = threads // pieces
    tq, nb, tw, tiles, width = (T.dynamic(n) for n in ("tq", "nb", "tw", "tiles", "width"))
    full_row = T.GemmWarpPolicy.FullRow
    dtype = "bfloat16"

    @T.macro
    def load_queries(q, row_count, q_shared, slot, h, row0, tq, tx):
        """Zeros for rows that may hold anything."""
        for p in T.unroll(ROWS // vectors, unroll_factor=4):
            row = T.min(row0 + p * vectors + tx // lanes, tq - 1)
            T.ptx_cp_async(
                T.access_ptr(q_shared[slot, p * vectors + tx // lanes, tx % lanes * 8], "w", 8),
                T.access_ptr(q[row, h, tx % lanes * 8], "r", 8),
                8,
                row_count[row] > 0,
            )

    @T.prim_func
    def indexer_kl_plain_key_gradient(
        q: T.Tensor((tq, heads, channels), dtype),
        k: T.Tensor((nb, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        row_count: T.Tensor((tq,), "int32"),
        begin: T.Tensor((tiles,), "int32"),
        end: T.Tensor((tiles,), "int32"),
        gradient: T.Tensor((tq, width), dtype),
        dk: T.Tensor((nb, channels), "float32"),
    ):
        with T.Kernel(T.ceildiv(nb, tile_blocks), threads=threads) as place:
            k_shared = T.alloc_shared((tile_blocks, channels), dtype)
            q_shared = T.alloc_shared((slots, ROWS, channels), dtype)
            g_shared = T.alloc_shared((ROWS, tile_blocks + PADDING), dtype)
            w_shared = T.alloc_shared((heads, ROWS), "float32")
            products = T.alloc_fragment((tile_blocks, ROWS), "float32")
            scores = T.alloc_fragment((tile_blocks, ROWS), dtype)
            flow = T.alloc_fragment((tile_blocks, ROWS), dtype)
            total = T.alloc_fragment((tile_blocks, channels), "float32")
            tx = T.get_thread_binding()
            used = T.alloc_var("int32", init=0)
            block0 = T.alloc_var("int32", init=place * tile_blocks)

            T.fill(total, 0)
            # Memory that is not read again may be given to another buffer before copies into it have ended.
            if relu:
                for p in T.unroll(tile_blocks // vectors, unroll_factor=4):
                    b = p * vectors + tx // lanes
                    T.ptx_cp_async(
                        T.access_ptr(k_shared[b, tx % lanes * 8], "w", 8),
                        T.access_ptr(k[T.cast(T.min(block0 + b, nb - 1), "int64"), tx % lanes * 8], "r", 8),
                        8,
                    )
            T.ptx_commit_group()
            for tile in T.serial(tiles):
                if begin[tile] < block0 + tile_blocks and end[tile] > block0:
                    used = 1
                    row0 = tile * ROWS
                    T.sync_threads()  # the last tile has been read
                    for p in T.unroll(ROWS // lines, unroll_factor=4):
                        i = p * lines + tx // pieces
                        T.ptx_cp_async(
                            T.access_ptr(g_shared[i, tx % pieces * 8], "w", 8),
                            T.access_ptr(gradient[T.min(row0 + i, tq - 1), block0 + tx % pieces * 8], "r", 8),
                            8,
                            row0 + i < tq,
                        )
                    if weighted and tx < ROWS:
                        for h in T.serial(heads):
                            w_shared[h, tx] = T.if_then_else(
                                row_count[T.min(row0 + tx, tq - 1)] > 0, weights[T.min(row0 + tx, tq - 1), h], 0
                            )
                    if slots > 1:
                        load_queries(q, row_count, q_shared, 0, 0, row0, tq, tx)
                    T.ptx_commit_group()
                    for h in T.serial(heads):
                        T.sync_threads()  # what the next copies overwrite has been read
                        ahead = h + slots - 1
                        if ahead < heads:
                            load_queries(q, row_count, q_shared, ahead % slots, ahead, row0, tq, tx)
                        # Behind the last head too: one group of copies a head keeps the count.
                        T.ptx_commit_group()
                        T.ptx_wait_group(slots - 1)
                        T.sync_threads()
                        if h == 0:
                            for i, j in T.Parallel(tile_blocks, ROWS):
                                scores[i, j] = g_shared[j, i]
                        if relu:
                            T.gemm(
                                k_shared,
                                q_shared[h % slots, :, :],
                                products,
                                transpose_B=True,
                                clear_accum=True,
                                policy=full_row,
                            )
                        for i, j in T.Parallel(tile_blocks, ROWS):
                            if weighted:
                                flow[i, j] = scores[i, j] * w_shared[h, j]
                            else:
                                flow[i, j] = scores[i, j]
                            if relu:
                                flow[i, j] = T.if_then_else(products[i, j] > 0, flow[i, j], 0)
                        T.gemm(flow, q_shared[h % slots, :, :], total, policy=full_row)
            T.ptx_wait_group(0)
            if used > 0:
                for i, c in T.Parallel(tile_blocks, channels):
                    if block0 + i < nb:
                        dk[block0 + i, c] += total[i, c]

    return indexer_kl_plain_key_gradient
