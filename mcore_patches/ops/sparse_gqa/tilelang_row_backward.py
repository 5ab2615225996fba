# The language of kernels is not typed.
# mypy: ignore-errors
"""dQ of sparse GQA one query row at a time, for tiles whose rows share too few blocks; P and dS for the windows.

As in the forward, the gather of keys and values bounds the kernel, so keys are the 64-row operand: ``S = K Q^T``,
``dP = V dO^T`` and ``dQ^T = K^T dS`` (``dim`` by ``group``). A key's probabilities need no other key, so nothing
crosses threads. One stage each of K and V: two blocks share an SM and one gathers while the other multiplies.

P and dS are stored by rank for :mod:`tilelang_window_backward`, which would have to read all keys again otherwise.
"""

import tilelang.language as T

from mcore_patches.ops.sparse_gqa.design import even_group

LOG2E = 1.4426950408889634
WARPGROUP = 128


def row_backward(*, heads: int, kv_heads: int, dim: int, rows: int, block_size: int, dtype: str, keys: int):
    """Build the kernel of one chunk of rows, from ``row0`` on, a multiple of ``rows``.

    ``(q, k, v, dout, ordered, selected, row_pos, row_start, count, lse, delta, dq, stored, row0, scale)``: ``q``,
    ``dout`` and ``dq [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``ordered [chunk, K]`` and ``selected
    [chunk]`` (:mod:`tilelang_windows`), ``count [tiles]`` from the plan (tiles with a count >= 0 are skipped), ``lse``
    (natural log) and ``delta [Tq, heads]`` fp32, ``scale`` on q . k. Writes ``dq`` and ``stored [2, chunk, kv_heads,
    ranks, even group]``: P and dS (without the scale) of every token by rank, ``ranks`` a multiple of ``keys``.
    """
    group = heads // kv_heads
    wide = even_group(group)
    cols = -(-group // 16) * 16  # dS is read along the heads, 16 at least
    entries = keys // block_size
    lanes = dim // 8
    tokens_per_pass = WARPGROUP // lanes
    passes = keys // tokens_per_pass
    q_passes = -(-cols * lanes // WARPGROUP)
    names = ("tq", "tk", "tiles", "topk", "chunk", "ranks")
    tq, tk, tiles, topk, chunk, ranks = (T.dynamic(n) for n in names)
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def sparse_gqa_row_backward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        dout: T.Tensor((tq, heads, dim), dtype),
        ordered: T.Tensor((chunk, topk), "int32"),
        selected: T.Tensor((chunk,), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        lse: T.Tensor((tq, heads), "float32"),
        delta: T.Tensor((tq, heads), "float32"),
        dq: T.Tensor((tq, heads, dim), dtype),
        stored: T.Tensor((2, chunk, kv_heads, ranks, wide), dtype),
        row0: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(chunk // rows * kv_heads, threads=2 * WARPGROUP) as program:
            i0 = program // kv_heads * rows
            g = program % kv_heads
            tile = row0 // rows + program // kv_heads
            T.annotate_min_blocks_per_sm(2)
            q_shared = T.alloc_shared((cols, dim), dtype)
            do_shared = T.alloc_shared((cols, dim), dtype)
            k_shared = T.alloc_shared((keys, dim), dtype)
            v_shared = T.alloc_shared((keys, dim), dtype)
            # Two slots: the product of the last step may still read the other.
            ds_shared = T.alloc_shared((2, keys, cols), dtype)
            mask_shared = T.alloc_shared((keys,), "int32")
            token_shared = T.alloc_shared((2, keys), "int32")
            lse_shared = T.alloc_shared((cols,), "float32")
            delta_shared = T.alloc_shared((cols,), "float32")
            k_ready = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            v_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            k_free = T.alloc_barrier(arrive_count=WARPGROUP)
            v_free = T.alloc_barrier(arrive_count=WARPGROUP)
            scores = T.alloc_fragment((keys, cols), "float32")
            dp = T.alloc_fragment((keys, cols), "float32")
            acc = T.alloc_fragment((dim, cols), "float32")
            tokens = T.alloc_local((passes,), "int32")

            tx = T.get_thread_binding()
            it = T.alloc_var("int32", init=0)
            scale_log2e = scale * LOG2E

            if tile < tiles and count[T.min(tile, tiles - 1)] < 0:
                if tx < WARPGROUP:
                    for r in T.serial(rows):
                        row = tile * rows + r
                        if row < tq:
                            tail = T.if_then_else(row_pos[row] < 0, 0, (row_pos[row] + 1) % block_size)
                            steps = T.ceildiv(selected[i0 + r] + T.if_then_else(tail > 0, 1, 0), entries)
                            for p in T.unroll(q_passes):
                                if p * WARPGROUP + tx < cols * lanes:
                                    j = (p * WARPGROUP + tx) // lanes
                                    head = g * group + T.min(j, group - 1)
                                    T.ptx_cp_async(
                                        T.access_ptr(q_shared[j, tx % lanes * 8], "w", 8),
                                        T.access_ptr(q[row, head, tx % lanes * 8], "r", 8),
                                        8,
                                    )
                                    T.ptx_cp_async(
                                        T.access_ptr(do_shared[j, tx % lanes * 8], "w", 8),
                                        T.access_ptr(dout[row, head, tx % lanes * 8], "r", 8),
                                        8,
                                    )
                            T.ptx_commit_group()
                            if tx < cols:
                                head = g * group + T.min(tx, group - 1)
                                lse_shared[tx] = lse[row, head] * LOG2E
                                delta_shared[tx] = delta[row, head]
                            T.fill(acc, 0)
                            T.ptx_wait_group(0)
                            T.fence_proxy_async()
                            T.sync_threads(1, WARPGROUP)
                            for t in T.serial(steps):
                                T.barrier_wait(k_ready, it & 1)
                                T.wgmma_gemm(
                                    k_shared, q_shared, scores, transpose_B=True, clear_accum=True, policy=full_row
                                )
                                T.barrier_wait(v_ready, it & 1)
                                T.wgmma_gemm(
                                    v_shared, do_shared, dp, transpose_B=True, clear_accum=True, policy=full_row
                                )
                                T.wait_wgmma(1)
                                for i, j in T.Parallel(keys, cols):
                                    scores[i, j] = T.if_then_else(
                                        mask_shared[i] != 0, T.exp2(scores[i, j] * scale_log2e - lse_shared[j]), 0
                                    )
                                for i, j in T.Parallel(keys, cols):
                                    if j < wide:
                                        stored[0, i0 + r, g, t * keys + i, j] = scores[i, j]
                                T.wait_wgmma(0)
                                T.barrier_arrive(v_free)
                                for i, j in T.Parallel(keys, cols):
                                    scores[i, j] = scores[i, j] * (dp[i, j] - delta_shared[j])
                                T.copy(scores, ds_shared[it % 2, :, :])
                                T.fence_proxy_async()
                                T.sync_threads(1, WARPGROUP)
                                T.wgmma_gemm(k_shared, ds_shared[it % 2, :, :], acc, transpose_A=True, policy=full_row)
                                for i, j in T.Parallel(keys, cols):
                                    if j < wide:
                                        stored[1, i0 + r, g, t * keys + i, j] = scores[i, j]
                                T.wait_wgmma(0)
                                T.barrier_arrive(k_free)
                                it = it + 1
                            for d, j in T.Parallel(dim, cols):
                                q_shared[j, d] = acc[d, j] * scale
                            T.sync_threads(1, WARPGROUP)
                            for p in T.unroll(q_passes):
                                if p * WARPGROUP + tx < group * lanes:
                                    for e in T.vectorized(8):
                                        dq[row, g * group + (p * WARPGROUP + tx) // lanes, tx % lanes * 8 + e] = (
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
                            listed = selected[i0 + r]
                            steps = T.ceildiv(listed + T.if_then_else(tail > 0, 1, 0), entries)
                            block = ordered[i0 + r, T.min(T.min(pt, keys - 1) // block_size, topk - 1)]
                            for t in T.serial(steps):
                                slot = t * entries + T.min(pt, keys - 1) // block_size
                                token = -1
                                if slot < listed:
                                    token = start + block * block_size + pt % block_size
                                if slot == listed and pt % block_size < tail:
                                    token = start + full * block_size + pt % block_size
                                if pt < keys:
                                    token_shared[it % 2, pt] = token
                                T.sync_threads(2, WARPGROUP)
                                for n in T.unroll(passes // 4):
                                    for e in T.vectorized(4):
                                        tokens[4 * n + e] = token_shared[it % 2, pt // lanes * passes + 4 * n + e]
                                # Ids of the next step, which arrive while keys are fetched.
                                block = ordered[i0 + r, T.min(slot + entries, topk - 1)]
                                T.barrier_wait(v_free, (it & 1) ^ 1)
                                for n in T.unroll(passes):
                                    key = pt // lanes * passes + n
                                    T.ptx_cp_async(
                                        T.access_ptr(v_shared[key, pt % lanes * 8], "w", 8),
                                        T.access_ptr(v[T.max(tokens[n], 0), g, pt % lanes * 8], "r", 8),
                                        8,
                                        tokens[n] >= 0,
                                    )
                                T.cp_async_barrier_noinc(v_ready)
                                T.barrier_wait(k_free, (it & 1) ^ 1)
                                if pt < keys:
                                    mask_shared[pt] = T.if_then_else(token >= 0, 1, 0)
                                for n in T.unroll(passes):
                                    key = pt // lanes * passes + n
                                    T.ptx_cp_async(
                                        T.access_ptr(k_shared[key, pt % lanes * 8], "w", 8),
                                        T.access_ptr(k[T.max(tokens[n], 0), g, pt % lanes * 8], "r", 8),
                                        8,
                                        tokens[n] >= 0,
                                    )
                                T.barrier_arrive(k_ready)
                                T.cp_async_barrier_noinc(k_ready)
                                it = it + 1

    return sparse_gqa_row_backward
