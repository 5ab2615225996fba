# The language of kernels is not typed.
# mypy: ignore-errors
"""Forward of sparse GQA over the union of the blocks that a tile of neighbouring rows selected.

A tile holds ``rows`` consecutive query rows with all heads of one KV head: ``rows * group`` matrix rows. It walks the
union of the rows' blocks (written by :mod:`tilelang_plan`) once; a bit per row says who selected an entry, so that a
key is fetched once for every row that shares it. One producer warpgroup gathers keys and values with ``cp.async``,
the consumer warpgroups hold 64 matrix rows each and issue the scores of step t+1 before they finish step t.
"""

import tilelang.language as T

LOG2E = 1.4426950408889634
# A row maximum below any score, yet finite: exp2(-inf - LOWEST) is 0 where exp2(-inf + inf) would be NaN.
LOWEST = -(2.0**30)
WARPGROUP = 128
# Two consumer warpgroups and a producer share the 504 registers a lane that 384 threads are launched with.
CONSUMER_REGISTERS = 232
PRODUCER_REGISTERS = 40


def union_forward(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    block_size: int,
    dtype: str,
    keys: int,
    stages: int,
):
    """Build the kernel ``(q, k, v, count, first, info, row_pos, out, lse, scale_log2e)``.

    ``q [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``count``, ``first`` and ``info`` as the plan writes
    them (a tile with a negative count is left to the row kernel), ``row_pos [Tq]``, ``out`` like ``q``, ``lse [Tq,
    heads]`` fp32 natural log. Tokens that no row of the tile sees are not read.
    """
    group = heads // kv_heads
    used = rows * group
    tile_rows = -(-used // 64) * 64
    consumers = 2 * tile_rows
    entries = keys // block_size
    lanes = dim // 8  # 16-byte pieces of one token's head
    tokens_per_pass = WARPGROUP // lanes
    passes = keys // tokens_per_pass
    q_rows_per_pass = consumers // lanes
    q_passes = tile_rows // q_rows_per_pass
    tq, tk, tiles, capacity = T.dynamic("tq"), T.dynamic("tk"), T.dynamic("tiles"), T.dynamic("capacity")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def sparse_gqa_union_forward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        count: T.Tensor((tiles,), "int32"),
        first: T.Tensor((tiles, capacity), "int32"),
        info: T.Tensor((tiles, capacity), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        out: T.Tensor((tq, heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(tiles * kv_heads, threads=consumers + WARPGROUP) as program:
            tile, g = program // kv_heads, program % kv_heads
            q_shared = T.alloc_shared((tile_rows, dim), dtype)
            k_shared = T.alloc_shared((stages, keys, dim), dtype)
            v_shared = T.alloc_shared((stages, keys, dim), dtype)
            mask_shared = T.alloc_shared((stages, keys), "int32")
            # Two slots: a warp may write the tokens of the next step while another still reads those of this one.
            token_shared = T.alloc_shared((2, keys), "int32")
            tails = T.alloc_shared((rows,), "int32")
            k_ready = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * stages)
            v_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * stages)
            k_free = T.alloc_barrier(arrive_count=[consumers] * stages)
            v_free = T.alloc_barrier(arrive_count=[consumers] * stages)
            scores = T.alloc_fragment((tile_rows, keys), "float32")
            probs = T.alloc_fragment((tile_rows, keys), dtype)
            acc = T.alloc_fragment((tile_rows, dim), "float32")
            row_max = T.alloc_fragment((tile_rows,), "float32")
            row_max_old = T.alloc_fragment((tile_rows,), "float32")
            alpha = T.alloc_fragment((tile_rows,), "float32")
            row_sum = T.alloc_fragment((tile_rows,), "float32")
            part = T.alloc_fragment((tile_rows,), "float32")

            tx = T.get_thread_binding()
            n = count[tile]
            steps = T.ceildiv(n, entries)

            if n >= 0:
                if tx < consumers:
                    if consumers > WARPGROUP:
                        T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    for p in T.unroll(q_passes):
                        i = p * q_rows_per_pass + tx // lanes
                        T.ptx_cp_async(
                            T.access_ptr(q_shared[i, tx % lanes * 8], "w", 8),
                            T.access_ptr(
                                q[
                                    T.min(tile * rows + T.min(i // group, rows - 1), tq - 1),
                                    g * group + i % group,
                                    tx % lanes * 8,
                                ],
                                "r",
                                8,
                            ),
                            8,
                        )
                    T.ptx_commit_group()
                    T.fill(acc, 0)
                    T.fill(row_sum, 0)
                    T.fill(row_max, LOWEST)
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads(1, consumers)

                    if steps > 0:
                        T.barrier_wait(k_ready[0], 0)
                        T.wgmma_gemm(
                            q_shared, k_shared[0, :, :], scores, transpose_B=True, clear_accum=True, policy=full_row
                        )
                        T.wait_wgmma(0)
                    for t in T.serial(steps):
                        stage = t % stages
                        following = (t + 1) % stages
                        for i, j in T.Parallel(tile_rows, keys):
                            scores[i, j] = T.if_then_else(
                                (mask_shared[stage, j] & (1 << (i // group))) != 0, scores[i, j], -T.infinity("float32")
                            )
                        T.barrier_arrive(k_free[stage])
                        T.copy(row_max, row_max_old)
                        T.reduce_max(scores, row_max, dim=1, clear=False)
                        for i in T.Parallel(tile_rows):
                            alpha[i] = T.exp2((row_max_old[i] - row_max[i]) * scale)
                        for i, j in T.Parallel(tile_rows, keys):
                            scores[i, j] = T.exp2(scores[i, j] * scale - row_max[i] * scale)
                        T.reduce_sum(scores, part, dim=1)
                        for i in T.Parallel(tile_rows):
                            row_sum[i] = row_sum[i] * alpha[i] + part[i]
                        # This wait comes first because its loop keeps the assembler from moving the next one up, above
                        # the exponentials that run beside the product of step t-1.
                        if t + 1 < steps:
                            T.barrier_wait(k_ready[following], ((t + 1) // stages) & 1)
                        T.wait_wgmma(0)
                        if t > 0:
                            T.barrier_arrive(v_free[(t - 1) % stages])
                        T.copy(scores, probs)
                        for i, d in T.Parallel(tile_rows, dim):
                            acc[i, d] *= alpha[i]
                        # Past the last step the scores of a stale buffer are computed and dropped: a branch around an
                        # asynchronous product would make the assembler serialise them all.
                        T.wgmma_gemm(
                            q_shared,
                            k_shared[following, :, :],
                            scores,
                            transpose_B=True,
                            clear_accum=True,
                            policy=full_row,
                        )
                        T.barrier_wait(v_ready[stage], (t // stages) & 1)
                        T.wgmma_gemm(probs, v_shared[stage, :, :], acc, policy=full_row)
                        T.wait_wgmma(1)
                    T.wait_wgmma(0)

                    for i in T.Parallel(tile_rows):
                        alpha[i] = T.if_then_else(row_sum[i] > 0, 1.0 / row_sum[i], 0)
                    for i, d in T.Parallel(tile_rows, dim):
                        acc[i, d] *= alpha[i]
                    for i in T.Parallel(tile_rows):
                        if i < used and tile * rows + i // group < tq:
                            lse[tile * rows + i // group, g * group + i % group] = T.if_then_else(
                                row_sum[i] > 0,
                                (T.log2(row_sum[i]) + row_max[i] * scale) / LOG2E,
                                -T.infinity("float32"),
                            )
                    T.sync_threads(1, consumers)
                    T.copy(acc, q_shared)
                    T.sync_threads(1, consumers)
                    for p in T.unroll(q_passes):
                        i = p * q_rows_per_pass + tx // lanes
                        if i < used and tile * rows + i // group < tq:
                            for e in T.vectorized(8):
                                out[tile * rows + i // group, g * group + i % group, tx % lanes * 8 + e] = q_shared[
                                    i, tx % lanes * 8 + e
                                ]
                else:
                    if consumers > WARPGROUP:
                        T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    pt = tx - consumers
                    if pt < rows:
                        tails[pt] = 0
                        if tile * rows + pt < tq:
                            tails[pt] = (row_pos[tile * rows + pt] + 1) % block_size
                    seen = T.alloc_var("int32")
                    T.sync_threads(2, WARPGROUP)
                    mine = T.min(pt, keys - 1) // block_size
                    entry_first = T.alloc_var("int32")
                    entry_info = T.alloc_var("int32")
                    entry_first = first[tile, mine]
                    entry_info = info[tile, mine]
                    for t in T.serial(steps):
                        stage = t % stages
                        phase = (t // stages) & 1
                        T.barrier_wait(k_free[stage], phase ^ 1)
                        if pt < keys:
                            seen = entry_info & 65535
                            if (entry_info >> 16) != 0:
                                for r in T.serial(rows):
                                    if ((entry_info >> (16 + r)) & 1) != 0 and pt % block_size < tails[r]:
                                        seen = seen | (1 << r)
                            mask_shared[stage, pt] = seen
                            token_shared[t % 2, pt] = T.if_then_else(seen != 0, entry_first + pt % block_size, -1)
                        T.sync_threads(2, WARPGROUP)
                        # Entries of the next step, which arrive while keys are fetched.
                        entry_first = first[tile, T.min((t + 1) * entries + mine, capacity - 1)]
                        entry_info = info[tile, T.min((t + 1) * entries + mine, capacity - 1)]
                        for p in T.unroll(passes):
                            key = p * tokens_per_pass + pt // lanes
                            token = token_shared[t % 2, key]
                            T.ptx_cp_async(
                                T.access_ptr(k_shared[stage, key, pt % lanes * 8], "w", 8),
                                T.access_ptr(k[T.max(token, 0), g, pt % lanes * 8], "r", 8),
                                8,
                                token >= 0,
                            )
                        T.barrier_arrive(k_ready[stage])
                        T.cp_async_barrier_noinc(k_ready[stage])
                        T.barrier_wait(v_free[stage], phase ^ 1)
                        for p in T.unroll(passes):
                            key = p * tokens_per_pass + pt // lanes
                            token = token_shared[t % 2, key]
                            T.ptx_cp_async(
                                T.access_ptr(v_shared[stage, key, pt % lanes * 8], "w", 8),
                                T.access_ptr(v[T.max(token, 0), g, pt % lanes * 8], "r", 8),
                                8,
                                token >= 0,
                            )
                        T.cp_async_barrier_noinc(v_ready[stage])

    return sparse_gqa_union_forward
