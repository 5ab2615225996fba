# The language of kernels is not typed.
# mypy: ignore-errors
"""What :mod:`tilelang_teacher` does, for any GPU with bf16 matrix units: all threads load, then all of them multiply.

The queries of all key heads stay in shared memory if they fit. Else those of one key head are loaded for each product.
"""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import TILE_ROWS
from mcore_patches.ops.tilelang_warp import PLAIN_PASS_CONFIGS

LOG2E = 1.4426950408889634

PASS_CONFIGS = PLAIN_PASS_CONFIGS | {"tl.enable_fast_math": True}


def plain_teacher_kernel(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    ratio: int,
    dtype: str,
    per_token: bool,
    keys: int,
    stages: int,
    resident: bool,
):
    """Build a kernel with the arguments and results of `teacher_kernel`.

    keys: tokens of a step. stages: steps of one head's keys in shared memory, 1 unless `resident`. resident: the
    queries of all key heads stay there.
    """
    group = heads // kv_heads
    columns = group * TILE_ROWS
    entries = keys // ratio
    threads = 2 * keys  # a warp has 16 tokens
    lanes = dim // 8  # 16-byte pieces of a vector
    vectors = threads // lanes  # that are loaded at a time
    held = kv_heads if resident else 1
    tq, tk, tiles, listed, padded = (T.dynamic(n) for n in ("tq", "tk", "tiles", "listed", "padded"))
    full_row = T.GemmWarpPolicy.FullRow

    @T.macro
    def load_queries(q, q_shared, place, g, row0, tq, tx):
        for p in T.serial(T.ceildiv(columns * lanes, threads)):
            c = (p * threads + tx) // lanes
            if c < columns:
                T.ptx_cp_async(
                    T.access_ptr(q_shared[place, c, tx % lanes * 8], "w", 8),
                    T.access_ptr(
                        q[T.min(row0 + c % TILE_ROWS, tq - 1), g * group + c // TILE_ROWS, tx % lanes * 8], "r", 8
                    ),
                    8,
                )

    @T.macro
    def load_keys(k, tokens, k_shared, stage, g, entry0, first, n, tx):
        """The tokens of the entries from `entry0` on, zeros behind the last entry."""
        token = T.alloc_var("int32")
        for p in T.unroll(keys // vectors, unroll_factor=4):
            i = p * vectors + tx // lanes
            token = -1
            if entry0 + i // ratio < n:
                token = tokens[first + entry0 + i // ratio] + i % ratio
            T.ptx_cp_async(
                T.access_ptr(k_shared[stage, i, tx % lanes * 8], "w", 8),
                T.access_ptr(k[T.max(token, 0), g, tx % lanes * 8], "r", 8),
                8,
                token >= 0,
            )

    @T.prim_func
    def indexer_kl_plain_teacher(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        begin: T.Tensor((tiles,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        tokens: T.Tensor((listed,), "int32"),
        mass: T.Tensor((tiles, padded, TILE_ROWS), "float32"),
        scale: T.float32,
        splits: T.int32,
    ):
        with T.Kernel(splits, tiles, threads=threads) as (split, from_last):
            q_shared = T.alloc_shared((held, columns, dim), dtype)
            k_shared = T.alloc_shared((stages, keys, dim), dtype)
            lse_shared = T.alloc_shared((kv_heads, columns), "float32")
            scores = T.alloc_fragment((keys, columns), "float32")
            probs = T.alloc_fragment((keys, group, TILE_ROWS), "float32")
            part = T.alloc_fragment((keys, TILE_ROWS), "float32")
            total = T.alloc_fragment((keys, TILE_ROWS), "float32")
            of_blocks = T.alloc_fragment((entries, ratio, TILE_ROWS), "int32")
            best = T.alloc_fragment((entries, TILE_ROWS), "int32")

            tx = T.get_thread_binding()
            # The longest rows of a document come last: their tiles start first.
            tile = tiles - 1 - from_last
            n = count[tile]
            first = begin[tile]
            steps = T.ceildiv(T.max(T.ceildiv(n, entries) - split, 0), splits)
            row0 = T.alloc_var("int32", init=tile * TILE_ROWS)

            if steps > 0:
                for g in T.serial(kv_heads):
                    if resident:
                        load_queries(q, q_shared, g, g, row0, tq, tx)
                    for p in T.serial(T.ceildiv(columns, threads)):
                        c = p * threads + tx
                        if c < columns:
                            lse_shared[g, c] = (
                                lse[T.min(row0 + c % TILE_ROWS, tq - 1), g * group + c // TILE_ROWS] * LOG2E
                            )
                if stages > 1:
                    load_keys(k, tokens, k_shared, 0, 0, split * entries, first, n, tx)
                T.ptx_commit_group()
            for s in T.serial(steps):
                T.fill(total, 0)
                for g in T.serial(kv_heads):
                    turn = s * kv_heads + g
                    T.sync_threads()  # what the next copies overwrite has been read
                    ahead = turn + stages - 1
                    load_keys(
                        k,
                        tokens,
                        k_shared,
                        ahead % stages,
                        ahead % kv_heads,
                        (split + ahead // kv_heads * splits) * entries,
                        first,
                        n,
                        tx,
                    )
                    if not resident:
                        load_queries(q, q_shared, 0, g, row0, tq, tx)
                    T.ptx_commit_group()
                    T.ptx_wait_group(stages - 1)
                    T.sync_threads()
                    T.gemm(
                        k_shared[turn % stages, :, :],
                        q_shared[g % held, :, :],
                        scores,
                        transpose_B=True,
                        clear_accum=True,
                        policy=full_row,
                    )
                    for i, j in T.Parallel(keys, columns):
                        probs[i, j // TILE_ROWS, j % TILE_ROWS] = T.exp2(
                            scores[i, j] * (scale * LOG2E) - lse_shared[g, j]
                        )
                    T.reduce_sum(probs, part, dim=1)
                    for i, c in T.Parallel(keys, TILE_ROWS):
                        total[i, c] += part[i, c]
                if per_token:
                    for i, c in T.Parallel(keys, TILE_ROWS):
                        mass[tile, (split + s * splits) * keys + i, c] = total[i, c]
                else:
                    for i, c in T.Parallel(keys, TILE_ROWS):
                        # Bits of numbers >= 0 have their order, and NaN comes last: a maximum of floats drops it.
                        of_blocks[i // ratio, i % ratio, c] = T.reinterpret("int32", total[i, c])
                    T.reduce_max(of_blocks, best, dim=1)
                    for e, c in T.Parallel(entries, TILE_ROWS):
                        mass[tile, (split + s * splits) * entries + e, c] = T.reinterpret("float32", best[e, c])
            T.ptx_wait_group(0)

    return indexer_kl_plain_teacher
