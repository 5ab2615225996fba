# The language of kernels is not typed.
# mypy: ignore-errors
"""The attention's mass on selected blocks: probabilities summed over all query heads, the largest of a block's tokens.

A tile of ``TILE_ROWS`` rows takes the union of the rows' blocks at once, which costs little where neighbouring rows
select alike and is bound by the gather of keys where they do not. Scores are ``K Q^T``: tokens are the rows of the
matrix units, and columns run over heads, within a head over the rows of the tile. So a thread holds all heads of what
it sums. What a row did not select is computed too, and never read.
"""

import tilelang.language as T

from mcore_patches.ops import tilelang_warp
from mcore_patches.ops.indexer_kl.design import TILE_ROWS

LOG2E = 1.4426950408889634
WARPGROUP = 128
CONSUMERS = 256
TOKENS = 128  # of a step: 64 for each of two consumer warpgroups
# Two consumer warpgroups and a producer share the 504 registers a lane that 384 threads are launched with.
CONSUMER_REGISTERS = 224
PRODUCER_REGISTERS = 56

PASS_CONFIGS = tilelang_warp.PASS_CONFIGS | {"tl.enable_fast_math": True}


def teacher_kernel(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    ratio: int,
    slots: int,
    dtype: str,
    per_token: bool = False,
):
    """Build the kernel ``(q, k, lse, begin, count, tokens, mass, scale, splits)``.

    ``q [Tq, heads, dim]``, ``k [Tk, kv_heads, dim]``, ``lse [Tq, heads]`` fp32 natural logarithms. A tile of rows takes
    the ``count[tile]`` blocks whose first tokens are ``tokens[begin[tile]]`` onwards. Writes ``mass [tiles, padded,
    TILE_ROWS]`` fp32, that of each of them for every row of the tile, or with `per_token` of each of their tokens;
    ``padded`` is a multiple of ``TOKENS / ratio``, or of ``TOKENS``. A tile is dealt to ``splits`` blocks of threads.

    slots: tiles of one head's keys held in shared memory.
    """
    group = heads // kv_heads
    columns = group * TILE_ROWS
    entries = TOKENS // ratio
    lanes = dim // 8  # 16-byte pieces of a vector
    vectors = WARPGROUP // lanes  # that the producer loads at a time
    tq, tk, tiles, listed, padded = (T.dynamic(n) for n in ("tq", "tk", "tiles", "listed", "padded"))
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def indexer_kl_teacher(
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
        with T.Kernel(splits, tiles, threads=CONSUMERS + WARPGROUP) as (split, from_last):
            q_shared = T.alloc_shared((kv_heads, columns, dim), dtype)
            k_shared = T.alloc_shared((slots, TOKENS, dim), dtype)
            lse_shared = T.alloc_shared((kv_heads, columns), "float32")
            # Two slots: a warp may write the tokens of the next step while another still reads those of this one.
            token_shared = T.alloc_shared((2, TOKENS), "int32")
            k_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * slots)
            k_free = T.alloc_barrier(arrive_count=[CONSUMERS] * slots)
            scores = T.alloc_fragment((TOKENS, columns), "float32")
            probs = T.alloc_fragment((TOKENS, group, TILE_ROWS), "float32")
            part = T.alloc_fragment((TOKENS, TILE_ROWS), "float32")
            total = T.alloc_fragment((TOKENS, TILE_ROWS), "float32")
            of_blocks = T.alloc_fragment((entries, ratio, TILE_ROWS), "int32")
            best = T.alloc_fragment((entries, TILE_ROWS), "int32")

            tx = T.get_thread_binding()
            # The longest rows of a document come last: their tiles start first.
            tile = tiles - 1 - from_last
            n = count[tile]
            first = begin[tile]
            steps = T.ceildiv(T.max(T.ceildiv(n, entries) - split, 0), splits)
            row0 = T.alloc_var("int32", init=tile * TILE_ROWS)

            if tx < CONSUMERS:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                for g in T.unroll(kv_heads):
                    for p in T.serial(T.ceildiv(columns * lanes, CONSUMERS)):
                        c = (p * CONSUMERS + tx) // lanes
                        if c < columns:
                            T.ptx_cp_async(
                                T.access_ptr(q_shared[g, c, tx % lanes * 8], "w", 8),
                                T.access_ptr(
                                    q[
                                        T.min(row0 + c % TILE_ROWS, tq - 1),
                                        g * group + c // TILE_ROWS,
                                        tx % lanes * 8,
                                    ],
                                    "r",
                                    8,
                                ),
                                8,
                            )
                    for p in T.serial(T.ceildiv(columns, CONSUMERS)):
                        c = p * CONSUMERS + tx
                        if c < columns:
                            lse_shared[g, c] = (
                                lse[T.min(row0 + c % TILE_ROWS, tq - 1), g * group + c // TILE_ROWS] * LOG2E
                            )
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads(1, CONSUMERS)
                for s in T.serial(steps):
                    T.fill(total, 0)
                    for g in T.unroll(kv_heads):
                        turn = s * kv_heads + g
                        T.barrier_wait(k_ready[turn % slots], (turn // slots) & 1)
                        T.fence_proxy_async()  # asynchronous copies write as threads do, products read otherwise
                        T.wgmma_gemm(
                            k_shared[turn % slots, :, :],
                            q_shared[g, :, :],
                            scores,
                            transpose_B=True,
                            clear_accum=True,
                            policy=full_row,
                        )
                        T.wait_wgmma(0)
                        T.barrier_arrive(k_free[turn % slots])
                        for i, j in T.Parallel(TOKENS, columns):
                            probs[i, j // TILE_ROWS, j % TILE_ROWS] = T.exp2(
                                scores[i, j] * (scale * LOG2E) - lse_shared[g, j]
                            )
                        T.reduce_sum(probs, part, dim=1)
                        for i, c in T.Parallel(TOKENS, TILE_ROWS):
                            total[i, c] += part[i, c]
                    if per_token:
                        for i, c in T.Parallel(TOKENS, TILE_ROWS):
                            mass[tile, (split + s * splits) * TOKENS + i, c] = total[i, c]
                    else:
                        for i, c in T.Parallel(TOKENS, TILE_ROWS):
                            # Bits of numbers >= 0 have their order, and NaN comes last: a maximum of floats drops it.
                            of_blocks[i // ratio, i % ratio, c] = T.reinterpret("int32", total[i, c])
                        T.reduce_max(of_blocks, best, dim=1)
                        for e, c in T.Parallel(entries, TILE_ROWS):
                            mass[tile, (split + s * splits) * entries + e, c] = T.reinterpret("float32", best[e, c])
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                lane = tx - CONSUMERS
                for s in T.serial(steps):
                    place = (split + s * splits) * entries + lane // ratio
                    token_shared[s % 2, lane] = T.if_then_else(
                        place < n, tokens[first + T.min(place, n - 1)] + lane % ratio, -1
                    )
                    T.sync_threads(2, WARPGROUP)
                    for g in T.unroll(kv_heads):
                        turn = s * kv_heads + g
                        T.barrier_wait(k_free[turn % slots], ((turn // slots) & 1) ^ 1)
                        for p in T.unroll(TOKENS // vectors, unroll_factor=4):
                            token = token_shared[s % 2, p * vectors + lane // lanes]
                            T.ptx_cp_async(
                                T.access_ptr(
                                    k_shared[turn % slots, p * vectors + lane // lanes, lane % lanes * 8], "w", 8
                                ),
                                T.access_ptr(k[T.max(token, 0), g, lane % lanes * 8], "r", 8),
                                8,
                                token >= 0,
                            )
                        T.cp_async_barrier_noinc(k_ready[turn % slots])

    return indexer_kl_teacher
