# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""Backward of sparse GQA over the union of the blocks that a tile of neighbouring rows selected.

All five products of a step in one pass. Keys are the 64-row operand (``S = K Q^T``), so that the rows of a tile need
not fill up 64 or 128 matrix rows. dQ stays in registers; what a step adds to dK and dV goes to a scratch buffer in
bf16 as partial sums, which :mod:`tilelang_reduce` adds up in the order of tiles: no atomics, and a fixed order of
every sum.
"""

import tilelang.language as T

LOG2E = 1.4426950408889634
WARPGROUP = 128
CONSUMERS = 2 * WARPGROUP
# Two consumer warpgroups and a producer share the 504 registers a lane that 384 threads are launched with.
CONSUMER_REGISTERS = 232
PRODUCER_REGISTERS = 40


def union_backward(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    block_size: int,
    dtype: str,
    keys: int,
    slots: int,
):
    """Build the kernel of one chunk of tiles.

    ``(q, k, v, dout, lse, delta, count, first, info, row_pos, tile_of, offset, dq, partial, place, chunk, scale)``:
    ``q``, ``dout`` and ``dq [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``lse`` (natural log) and
    ``delta [Tq, heads]`` fp32, ``count``, ``first`` and ``info`` as the plan writes them, ``tile_of [chunks, slots]``
    the tile of every slot of a chunk (-1: none), ``offset [tiles]`` a tile's first step in ``partial``. Writes ``dq``,
    ``partial [steps, kv_heads, 2, dim / 8, keys, 8]`` (dK / scale, then dV) and ``place [Tk, slots]``: one more than
    the row of ``partial``, ``step * keys + key``, that holds a token's sums from a slot's tile.
    """
    group = heads // kv_heads
    used = rows * group
    vectors = -(-used // 32) * 32  # two warpgroups, 16 or more each: P and dS are read along the vectors
    entries = keys // block_size
    lanes = dim // 8
    tokens_per_pass = WARPGROUP // lanes
    passes = keys // tokens_per_pass
    vectors_per_pass = CONSUMERS // lanes
    q_passes = -(-vectors // vectors_per_pass)
    half, half_vectors = dim // 2, vectors // 2
    # The two warpgroups share dQ by channels where each gets a whole matrix tile of 64 of them, else by vectors.
    by_channels = half % 64 == 0
    dq_channels, dq_vectors = (half, vectors) if by_channels else (dim, half_vectors)
    k_stages = 2
    names = ("tq", "tk", "tiles", "capacity", "chunks", "steps_kept")
    tq, tk, tiles, capacity, chunks, steps_kept = (T.dynamic(n) for n in names)

    @T.macro
    def add_halves(probs, halves, sums, c0):
        """sums = probs @ channels from c0 on of all vectors, which lie in two halves."""
        T.wgmma_gemm(probs[:, 0:half_vectors], halves[0, :, c0 : c0 + half], sums, clear_accum=True)
        T.wgmma_gemm(probs[:, half_vectors:vectors], halves[1, :, c0 : c0 + half], sums)

    @T.macro
    def consume(
        wg,
        q_shared,
        do_shared,
        k_shared,
        v_shared,
        p_shared,
        ds_shared,
        mask_shared,
        lse_shared,
        delta_shared,
        k_ready,
        v_ready,
        k_free,
        v_free,
        partial,
        steps,
        step0,
        g,
        scale,
    ):
        """The loop of one consumer warpgroup: half of the vectors' scores, half of the channels' sums."""
        scores = T.alloc_fragment((keys, half_vectors), "float32")
        dp = T.alloc_fragment((keys, half_vectors), "float32")
        sums = T.alloc_fragment((keys, half), "float32")
        dq_acc = T.alloc_fragment((dq_channels, dq_vectors), "float32")
        v0 = wg * half_vectors
        c0 = wg * half
        dq_c0 = c0 if by_channels else 0
        dq_v0 = 0 if by_channels else v0
        scale_log2e = scale * LOG2E
        T.fill(dq_acc, 0)
        for t in T.serial(steps):
            stage = t % k_stages
            T.barrier_wait(k_ready[stage], (t // k_stages) & 1)
            T.wgmma_gemm(k_shared[stage, :, :], q_shared[wg, :, :], scores, transpose_B=True, clear_accum=True)
            T.barrier_wait(v_ready, t & 1)
            T.wgmma_gemm(v_shared, do_shared[wg, :, :], dp, transpose_B=True, clear_accum=True)
            T.wait_wgmma(1)
            for i, j in T.Parallel(keys, half_vectors):
                scores[i, j] = T.if_then_else(
                    (mask_shared[stage, i] & (1 << ((v0 + j) // group))) != 0,
                    T.exp2(scores[i, j] * scale_log2e - lse_shared[v0 + j]),
                    0,
                )
            T.copy(scores, p_shared[:, v0 : v0 + half_vectors])
            T.wait_wgmma(0)
            T.barrier_arrive(v_free)
            for i, j in T.Parallel(keys, half_vectors):
                dp[i, j] = scores[i, j] * (dp[i, j] - delta_shared[v0 + j])
            T.copy(dp, ds_shared[:, v0 : v0 + half_vectors])
            T.fence_proxy_async()
            T.sync_threads(1, CONSUMERS)
            add_halves(p_shared, do_shared, sums, c0)
            T.wgmma_gemm(
                k_shared[stage, :, dq_c0 : dq_c0 + dq_channels],
                ds_shared[:, dq_v0 : dq_v0 + dq_vectors],
                dq_acc,
                transpose_A=True,
            )
            T.wait_wgmma(1)
            for i, d in T.Parallel(keys, half):
                partial[step0 + t, g, 1, (c0 + d) // 8, i, d % 8] = sums[i, d]
            add_halves(ds_shared, q_shared, sums, c0)
            T.wait_wgmma(2)
            T.barrier_arrive(k_free[stage])
            T.wait_wgmma(0)
            for i, d in T.Parallel(keys, half):
                partial[step0 + t, g, 0, (c0 + d) // 8, i, d % 8] = sums[i, d]
            # Both warpgroups are done with p_shared and ds_shared, which the next step writes.
            T.sync_threads(1, CONSUMERS)
        # dQ leaves through q_shared, once the other warpgroup has read its rows of Q for the last time.
        T.sync_threads(1, CONSUMERS)
        for d, j in T.Parallel(dq_channels, dq_vectors):
            q_shared[(dq_v0 + j) // half_vectors, (dq_v0 + j) % half_vectors, dq_c0 + d] = dq_acc[d, j] * scale

    @T.prim_func
    def sparse_gqa_union_backward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        dout: T.Tensor((tq, heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        delta: T.Tensor((tq, heads), "float32"),
        count: T.Tensor((tiles,), "int32"),
        first: T.Tensor((tiles, capacity), "int32"),
        info: T.Tensor((tiles, capacity), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        tile_of: T.Tensor((chunks, slots), "int32"),
        offset: T.Tensor((tiles,), "int32"),
        dq: T.Tensor((tq, heads, dim), dtype),
        partial: T.Tensor((steps_kept, kv_heads, 2, lanes, keys, 8), dtype),
        place: T.Tensor((tk, slots), "int32"),
        chunk: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(kv_heads, slots, threads=CONSUMERS + WARPGROUP) as (g, slot):
            q_shared = T.alloc_shared((2, half_vectors, dim), dtype)
            do_shared = T.alloc_shared((2, half_vectors, dim), dtype)
            k_shared = T.alloc_shared((k_stages, keys, dim), dtype)
            v_shared = T.alloc_shared((keys, dim), dtype)
            p_shared = T.alloc_shared((keys, vectors), dtype)
            ds_shared = T.alloc_shared((keys, vectors), dtype)
            mask_shared = T.alloc_shared((k_stages, keys), "int32")
            token_shared = T.alloc_shared((2, keys), "int32")
            tails = T.alloc_shared((rows,), "int32")
            lse_shared = T.alloc_shared((vectors,), "float32")
            delta_shared = T.alloc_shared((vectors,), "float32")
            k_ready = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * k_stages)
            v_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            k_free = T.alloc_barrier(arrive_count=[CONSUMERS] * k_stages)
            v_free = T.alloc_barrier(arrive_count=CONSUMERS)

            tx = T.get_thread_binding()
            tile = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            step0 = T.alloc_var("int32")
            tile = tile_of[chunk, slot]

            if tile >= 0:
                steps = T.ceildiv(count[tile], entries)
                step0 = offset[tile]
                if tx < CONSUMERS:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    for p in T.unroll(q_passes):
                        j = p * vectors_per_pass + tx // lanes
                        if j < vectors:
                            row = tile * rows + T.min(j // group, rows - 1)
                            head = g * group + j % group
                            live = T.alloc_var("bool")
                            live = False
                            if j < used and row < tq:
                                live = row_pos[row] >= 0
                            T.ptx_cp_async(
                                T.access_ptr(q_shared[j // half_vectors, j % half_vectors, tx % lanes * 8], "w", 8),
                                T.access_ptr(q[T.min(row, tq - 1), head, tx % lanes * 8], "r", 8),
                                8,
                                live,
                            )
                            T.ptx_cp_async(
                                T.access_ptr(do_shared[j // half_vectors, j % half_vectors, tx % lanes * 8], "w", 8),
                                T.access_ptr(dout[T.min(row, tq - 1), head, tx % lanes * 8], "r", 8),
                                8,
                                live,
                            )
                    T.ptx_commit_group()
                    if tx < vectors:
                        lse_shared[tx] = 0
                        delta_shared[tx] = 0
                        if tx < used and tile * rows + tx // group < tq:
                            if row_pos[tile * rows + tx // group] >= 0:
                                lse_shared[tx] = lse[tile * rows + tx // group, g * group + tx % group] * LOG2E
                                delta_shared[tx] = delta[tile * rows + tx // group, g * group + tx % group]
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads(1, CONSUMERS)
                    if tx < WARPGROUP:
                        consume(
                            0,
                            q_shared,
                            do_shared,
                            k_shared,
                            v_shared,
                            p_shared,
                            ds_shared,
                            mask_shared,
                            lse_shared,
                            delta_shared,
                            k_ready,
                            v_ready,
                            k_free,
                            v_free,
                            partial,
                            steps,
                            step0,
                            g,
                            scale,
                        )
                    else:
                        consume(
                            1,
                            q_shared,
                            do_shared,
                            k_shared,
                            v_shared,
                            p_shared,
                            ds_shared,
                            mask_shared,
                            lse_shared,
                            delta_shared,
                            k_ready,
                            v_ready,
                            k_free,
                            v_free,
                            partial,
                            steps,
                            step0,
                            g,
                            scale,
                        )
                    T.sync_threads(1, CONSUMERS)
                    for p in T.unroll(q_passes):
                        j = p * vectors_per_pass + tx // lanes
                        if j < used and tile * rows + j // group < tq:
                            for e in T.vectorized(8):
                                dq[tile * rows + j // group, g * group + j % group, tx % lanes * 8 + e] = q_shared[
                                    j // half_vectors, j % half_vectors, tx % lanes * 8 + e
                                ]
                else:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    pt = tx - CONSUMERS
                    seen = T.alloc_var("int32")
                    if pt < rows:
                        tails[pt] = 0
                        if tile * rows + pt < tq:
                            tails[pt] = (row_pos[tile * rows + pt] + 1) % block_size
                    T.sync_threads(2, WARPGROUP)
                    mine = T.min(pt, keys - 1) // block_size
                    entry_first = T.alloc_var("int32")
                    entry_info = T.alloc_var("int32")
                    entry_first = first[tile, mine]
                    entry_info = info[tile, mine]
                    for t in T.serial(steps):
                        stage = t % k_stages
                        T.barrier_wait(k_free[stage], ((t // k_stages) & 1) ^ 1)
                        if pt < keys:
                            seen = entry_info & 65535
                            if (entry_info >> 16) != 0:
                                for r in T.serial(rows):
                                    if ((entry_info >> (16 + r)) & 1) != 0 and pt % block_size < tails[r]:
                                        seen = seen | (1 << r)
                            mask_shared[stage, pt] = seen
                            token_shared[t % 2, pt] = -1
                            if seen != 0:
                                token_shared[t % 2, pt] = entry_first + pt % block_size
                                if g == 0:
                                    place[entry_first + pt % block_size, slot] = (step0 + t) * keys + pt + 1
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
                        T.barrier_wait(v_free, (t & 1) ^ 1)
                        for p in T.unroll(passes):
                            key = p * tokens_per_pass + pt // lanes
                            token = token_shared[t % 2, key]
                            T.ptx_cp_async(
                                T.access_ptr(v_shared[key, pt % lanes * 8], "w", 8),
                                T.access_ptr(v[T.max(token, 0), g, pt % lanes * 8], "r", 8),
                                8,
                                token >= 0,
                            )
                        T.cp_async_barrier_noinc(v_ready)

    return sparse_gqa_union_backward
