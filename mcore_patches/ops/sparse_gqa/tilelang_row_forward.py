# The language of kernels is not typed.
# mypy: ignore-errors
"""Forward of sparse GQA one query row at a time, for tiles whose rows share too few blocks.

Gathering keys and values bounds this kernel, so the product is turned round to waste nothing on padding: scores are
``K Q^T`` (64 keys by ``group`` heads) and the output ``V^T P^T`` (``dim`` by ``group``), the keys and values being the
64-row operand and the few heads the narrow one. One block walks the rows of a tile, so that the gather of the next row
starts while the last one ends.
"""

import tilelang.language as T

LOG2E = 1.4426950408889634
LOWEST = -(2.0**30)
WARPGROUP = 128


def row_forward(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    block_size: int,
    dtype: str,
    keys: int,
    k_stages: int,
    v_stages: int,
    blocks_per_sm: int,
):
    """Build the kernel ``(q, k, v, block_ids, row_pos, row_start, row_count, count, out, lse, scale_log2e)``.

    ``q [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``block_ids [Tq, K]``, ``row_count [Tq]``: how many
    leading ids may be valid, ``count [tiles]``: tiles with a count >= 0 belong to the union kernel and are skipped
    here.
    """
    group = heads // kv_heads
    cols = -(-group // 8) * 8
    entries = keys // block_size
    lanes = dim // 8
    tokens_per_pass = WARPGROUP // lanes
    passes = keys // tokens_per_pass
    q_passes = -(-cols * lanes // WARPGROUP)
    o_passes = -(-group * lanes // WARPGROUP)
    tq, tk, tiles, topk = T.dynamic("tq"), T.dynamic("tk"), T.dynamic("tiles"), T.dynamic("topk")

    @T.prim_func
    def sparse_gqa_row_forward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        block_ids: T.Tensor((tq, topk), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        out: T.Tensor((tq, heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(tiles * kv_heads, threads=2 * WARPGROUP) as program:
            tile, g = program // kv_heads, program % kv_heads
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            q_shared = T.alloc_shared((cols, dim), dtype)
            k_shared = T.alloc_shared((k_stages, keys, dim), dtype)
            v_shared = T.alloc_shared((v_stages, keys, dim), dtype)
            mask_shared = T.alloc_shared((k_stages, keys), "int32")
            # Two slots: a warp may write the tokens of the next step while another still reads those of this one.
            token_shared = T.alloc_shared((2, keys), "int32")
            s_shared = T.alloc_shared((cols, keys + 4), "float32")
            p_shared = T.alloc_shared((cols, keys), dtype)
            alpha_shared = T.alloc_shared((cols,), "float32")
            k_ready = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * k_stages)
            v_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * v_stages)
            k_free = T.alloc_barrier(arrive_count=[WARPGROUP] * k_stages)
            v_free = T.alloc_barrier(arrive_count=[WARPGROUP] * v_stages)
            scores = T.alloc_fragment((keys, cols), "float32")
            acc = T.alloc_fragment((dim, cols), "float32")
            s_row = T.alloc_fragment((cols, keys), "float32")
            row_max = T.alloc_fragment((cols,), "float32")
            row_max_old = T.alloc_fragment((cols,), "float32")
            alpha = T.alloc_fragment((cols,), "float32")
            row_sum = T.alloc_fragment((cols,), "float32")
            part = T.alloc_fragment((cols,), "float32")

            tx = T.get_thread_binding()
            it = T.alloc_var("int32", init=0)

            if count[tile] < 0:
                if tx < WARPGROUP:
                    for r in T.serial(rows):
                        row = tile * rows + r
                        if row < tq:
                            tail = T.if_then_else(row_pos[row] < 0, 0, (row_pos[row] + 1) % block_size)
                            steps = T.ceildiv(row_count[row] + T.if_then_else(tail > 0, 1, 0), entries)
                            for p in T.unroll(q_passes):
                                if p * WARPGROUP + tx < cols * lanes:
                                    T.ptx_cp_async(
                                        T.access_ptr(q_shared[(p * WARPGROUP + tx) // lanes, tx % lanes * 8], "w", 8),
                                        T.access_ptr(
                                            q[
                                                row,
                                                g * group + T.min((p * WARPGROUP + tx) // lanes, group - 1),
                                                tx % lanes * 8,
                                            ],
                                            "r",
                                            8,
                                        ),
                                        8,
                                    )
                            T.ptx_commit_group()
                            T.ptx_wait_group(0)
                            T.fence_proxy_async()
                            T.sync_threads(1, WARPGROUP)
                            T.fill(acc, 0)
                            T.fill(row_sum, 0)
                            T.fill(row_max, LOWEST)
                            for _t in T.serial(steps):
                                ks = it % k_stages
                                vs = it % v_stages
                                T.barrier_wait(k_ready[ks], (it // k_stages) & 1)
                                T.wgmma_gemm(
                                    k_shared[ks, :, :],
                                    q_shared,
                                    scores,
                                    transpose_B=True,
                                    clear_accum=True,
                                    policy=T.GemmWarpPolicy.FullRow,
                                )
                                T.wait_wgmma(0)
                                for i, j in T.Parallel(keys, cols):
                                    s_shared[j, i] = T.if_then_else(
                                        mask_shared[ks, i] != 0, scores[i, j], -T.infinity("float32")
                                    )
                                T.barrier_arrive(k_free[ks])
                                T.copy(row_max, row_max_old)
                                T.sync_threads(1, WARPGROUP)
                                T.copy(s_shared[:, 0:keys], s_row)
                                T.reduce_max(s_row, row_max, dim=1, clear=False)
                                for j in T.Parallel(cols):
                                    alpha[j] = T.exp2((row_max_old[j] - row_max[j]) * scale)
                                for j, i in T.Parallel(cols, keys):
                                    s_row[j, i] = T.exp2(s_row[j, i] * scale - row_max[j] * scale)
                                T.reduce_sum(s_row, part, dim=1)
                                for j in T.Parallel(cols):
                                    row_sum[j] = row_sum[j] * alpha[j] + part[j]
                                T.copy(alpha, alpha_shared)
                                T.copy(s_row, p_shared)
                                T.fence_proxy_async()
                                T.sync_threads(1, WARPGROUP)
                                for d, j in T.Parallel(dim, cols):
                                    acc[d, j] *= alpha_shared[j]
                                T.barrier_wait(v_ready[vs], (it // v_stages) & 1)
                                T.wgmma_gemm(
                                    v_shared[vs, :, :],
                                    p_shared,
                                    acc,
                                    transpose_A=True,
                                    transpose_B=True,
                                    policy=T.GemmWarpPolicy.FullRow,
                                )
                                T.wait_wgmma(0)
                                T.barrier_arrive(v_free[vs])
                                it = it + 1
                            for j in T.Parallel(cols):
                                alpha[j] = T.if_then_else(row_sum[j] > 0, 1.0 / row_sum[j], 0)
                            T.sync_threads(1, WARPGROUP)
                            T.copy(alpha, alpha_shared)
                            for j in T.Parallel(cols):
                                if j < group:
                                    lse[row, g * group + j] = T.if_then_else(
                                        row_sum[j] > 0,
                                        (T.log2(row_sum[j]) + row_max[j] * scale) / LOG2E,
                                        -T.infinity("float32"),
                                    )
                            T.sync_threads(1, WARPGROUP)
                            for d, j in T.Parallel(dim, cols):
                                q_shared[j, d] = acc[d, j] * alpha_shared[j]
                            T.sync_threads(1, WARPGROUP)
                            for p in T.unroll(o_passes):
                                if p * WARPGROUP + tx < group * lanes:
                                    for e in T.vectorized(8):
                                        out[row, g * group + (p * WARPGROUP + tx) // lanes, tx % lanes * 8 + e] = (
                                            q_shared[(p * WARPGROUP + tx) // lanes, tx % lanes * 8 + e]
                                        )
                            T.sync_threads(1, WARPGROUP)
                else:
                    pt = tx - WARPGROUP
                    token = T.alloc_var("int32")
                    block = T.alloc_var("int32")
                    for r in T.serial(rows):
                        row = tile * rows + r
                        if row < tq:
                            pos = row_pos[row]
                            start = row_start[row]
                            full = T.if_then_else(pos < 0, 0, (pos + 1) // block_size)
                            tail = T.if_then_else(pos < 0, 0, (pos + 1) % block_size)
                            listed = row_count[row]
                            steps = T.ceildiv(listed + T.if_then_else(tail > 0, 1, 0), entries)
                            block = block_ids[row, T.min(T.min(pt, keys - 1) // block_size, topk - 1)]
                            for t in T.serial(steps):
                                ks = it % k_stages
                                vs = it % v_stages
                                slot = t * entries + T.min(pt, keys - 1) // block_size
                                token = -1
                                if slot < listed and block >= 0 and block < full:
                                    token = start + block * block_size + pt % block_size
                                if slot == listed and pt % block_size < tail:
                                    token = start + full * block_size + pt % block_size
                                T.barrier_wait(k_free[ks], ((it // k_stages) & 1) ^ 1)
                                if pt < keys:
                                    mask_shared[ks, pt] = T.if_then_else(token >= 0, 1, 0)
                                    token_shared[it % 2, pt] = token
                                T.sync_threads(2, WARPGROUP)
                                # Ids of the next step, which arrive while keys are fetched.
                                block = block_ids[row, T.min(slot + entries, topk - 1)]
                                for p in T.unroll(passes):
                                    key = p * tokens_per_pass + pt // lanes
                                    source = token_shared[it % 2, key]
                                    T.ptx_cp_async(
                                        T.access_ptr(k_shared[ks, key, pt % lanes * 8], "w", 8),
                                        T.access_ptr(k[T.max(source, 0), g, pt % lanes * 8], "r", 8),
                                        8,
                                        source >= 0,
                                    )
                                T.barrier_arrive(k_ready[ks])
                                T.cp_async_barrier_noinc(k_ready[ks])
                                T.barrier_wait(v_free[vs], ((it // v_stages) & 1) ^ 1)
                                for p in T.unroll(passes):
                                    key = p * tokens_per_pass + pt // lanes
                                    source = token_shared[it % 2, key]
                                    T.ptx_cp_async(
                                        T.access_ptr(v_shared[vs, key, pt % lanes * 8], "w", 8),
                                        T.access_ptr(v[T.max(source, 0), g, pt % lanes * 8], "r", 8),
                                        8,
                                        source >= 0,
                                    )
                                T.cp_async_barrier_noinc(v_ready[vs])
                                it = it + 1

    return sparse_gqa_row_forward
