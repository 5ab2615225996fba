# The language of kernels is not typed.
# mypy: ignore-errors
"""What :mod:`tilelang_score` does, for any GPU with bf16 matrix units: all threads load, then all of them multiply.

The next tile of index keys, and of queries where they go round, are loaded while this one is multiplied.
"""

import tilelang.language as T

from mcore_patches.ops.block_topk.design import GROUP, INVISIBLE, plain_threads
from mcore_patches.ops.tilelang_warp import PLAIN_PASS_CONFIGS as PASS_CONFIGS  # noqa: F401
from mcore_patches.ops.tilelang_warp import atomic


def plain_score_kernel(
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
    """Build a kernel with the arguments and results of `score_kernel`."""
    resident = slots == heads
    threads = plain_threads(tile_rows)
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = threads // lanes  # that are loaded at a time
    tq, nb, tw, tiles = (T.dynamic(n) for n in ("tq", "nb", "tw", "tiles"))

    @T.macro
    def load_keys(k, k_shared, stage, block0, nb, tx):
        for p in T.unroll(tile_blocks // vectors, unroll_factor=4):
            b = p * vectors + tx // lanes
            T.ptx_cp_async(
                T.access_ptr(k_shared[stage, b, tx % lanes * 8], "w", 8),
                T.access_ptr(k[T.cast(T.min(block0 + b, nb - 1), "int64"), tx % lanes * 8], "r", 8),
                8,
                block0 + b < nb,
            )

    @T.macro
    def load_queries(q, q_shared, slot, h, row0, tq, tx):
        for p in T.unroll(tile_rows // vectors, unroll_factor=4):
            i = p * vectors + tx // lanes
            T.ptx_cp_async(
                T.access_ptr(q_shared[slot, i, tx % lanes * 8], "w", 8),
                T.access_ptr(q[T.min(row0 + i, tq - 1), h, tx % lanes * 8], "r", 8),
                8,
            )

    @T.prim_func
    def block_topk_plain_score(
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
        with T.Kernel(splits, T.ceildiv(tq, tile_rows), threads=threads) as (split, from_last):
            q_shared = T.alloc_shared((slots, tile_rows, channels), dtype)
            k_shared = T.alloc_shared((stages, tile_blocks, channels), dtype)
            w_shared = T.alloc_shared((heads, tile_rows), "float32")
            first = T.alloc_shared((tile_rows,), "int32")
            end = T.alloc_shared((tile_rows,), "int32")
            seen = T.alloc_shared((2,), "int32")
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
            T.sync_threads()  # before copies into memory that may have been `seen`'s

            if steps > 0:
                load_keys(k, k_shared, 0, begin * tile_blocks, nb, tx)
                for h in T.serial(heads if resident else 1):
                    load_queries(q, q_shared, h, h, row0, tq, tx)
                T.ptx_commit_group()
            for s in T.serial(steps):
                tile = begin + s * splits
                block0 = tile * tile_blocks
                T.fill(total, 0)
                for h in T.serial(heads):
                    turn = T.if_then_else(resident, h, s * heads + h)
                    if not resident or h == 0:
                        T.sync_threads()  # what the next copies overwrite has been read
                        if h == 0 and s + 1 < steps:
                            load_keys(k, k_shared, (s + 1) % stages, block0 + splits * tile_blocks, nb, tx)
                        if not resident:
                            load_queries(q, q_shared, (turn + 1) % slots, (h + 1) % heads, row0, tq, tx)
                        # Behind the last step too: one group of copies a turn keeps the count.
                        T.ptx_commit_group()
                        T.ptx_wait_group(1)
                        T.sync_threads()
                    T.gemm(
                        q_shared[turn % slots, :, :],
                        k_shared[s % stages, :, :],
                        products,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    for i, j in T.Parallel(tile_rows, tile_blocks):
                        if relu:  # a maximum would drop NaN
                            products[i, j] = T.if_then_else(products[i, j] < 0, 0.0, products[i, j])
                        if weighted:
                            products[i, j] = T.ieee_mul(products[i, j], w_shared[h, i])
                        total[i, j] += products[i, j]
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
            T.ptx_wait_group(0)

    return block_topk_plain_score
