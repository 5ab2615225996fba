# The language of kernels is not typed.
# mypy: ignore-errors
"""dK and dV of sparse GQA by windows of 64 tokens: the rows that attend one of them are gathered, nothing is scattered.

A block holds a window's keys and values and two warpgroups of sums: one turns scores into probabilities and collects
dV, the other score gradients and dK. A third gathers Q and dO of the listed rows. Keys are the 64-row operand, so that
probabilities come out of the first product in the registers that the second one reads.
"""

import tilelang.language as T

LOG2E = 1.4426950408889634
WARPGROUP = 128
WINDOW = 64
# Two collecting warpgroups and a gathering one share the 504 registers a lane that 384 threads are launched with.
CONSUMER_REGISTERS = 216
PRODUCER_REGISTERS = 72


def window_backward(*, heads: int, kv_heads: int, dim: int, rows: int, stages: int, dtype: str):
    """Build the kernel ``(q, k, v, dout, lse, delta, bits, listed, lists, dk, dv, row0, scale)``.

    ``q`` and ``dout [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``lse`` (natural log) and ``delta [Tq,
    heads]``, ``bits``, ``listed`` and ``lists`` of rows from ``row0`` on (:mod:`tilelang_windows`), ``rows`` listed
    rows a step. Adds to ``dk`` and ``dv [Tk, kv_heads, dim]`` fp32.
    """
    group = heads // kv_heads
    vectors = rows * group
    lanes = dim // 8
    vectors_per_pass = WARPGROUP // lanes
    passes = -(-vectors // vectors_per_pass)
    key_passes = WINDOW // (3 * WARPGROUP // lanes) + 1
    tq, tk, words, windows, chunk = (T.dynamic(n) for n in ("tq", "tk", "words", "windows", "chunk"))
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def sparse_gqa_window_backward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        dout: T.Tensor((tq, heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        delta: T.Tensor((tq, heads), "float32"),
        bits: T.Tensor((words, chunk), "int32"),
        listed: T.Tensor((windows,), "int32"),
        lists: T.Tensor((windows, chunk), "int32"),
        dk: T.Tensor((tk, kv_heads, dim), "float32"),
        dv: T.Tensor((tk, kv_heads, dim), "float32"),
        row0: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(windows * kv_heads, threads=3 * WARPGROUP) as program:
            w, g = program // kv_heads, program % kv_heads
            k_shared = T.alloc_shared((WINDOW, dim), dtype)
            v_shared = T.alloc_shared((WINDOW, dim), dtype)
            q_shared = T.alloc_shared((stages, vectors, dim), dtype)
            do_shared = T.alloc_shared((stages, vectors, dim), dtype)
            p_shared = T.alloc_shared((WINDOW, vectors), dtype)
            bits_shared = T.alloc_shared((stages, 2, rows), "int32")
            lse_shared = T.alloc_shared((stages, vectors), "float32")
            delta_shared = T.alloc_shared((stages, vectors), "float32")
            row_shared = T.alloc_shared((2, rows), "int32")
            ready = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * stages)
            free = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * stages)
            p_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            p_free = T.alloc_barrier(arrive_count=WARPGROUP)

            tx = T.get_thread_binding()
            n = listed[w]
            steps = T.ceildiv(n, rows)
            scale_log2e = scale * LOG2E

            if n > 0:
                for p in T.unroll(key_passes):
                    i = p * (3 * WARPGROUP // lanes) + tx // lanes
                    if i < WINDOW:
                        T.ptx_cp_async(
                            T.access_ptr(k_shared[i, tx % lanes * 8], "w", 8),
                            T.access_ptr(k[T.min(w * WINDOW + i, tk - 1), g, tx % lanes * 8], "r", 8),
                            8,
                            w * WINDOW + i < tk,
                        )
                        T.ptx_cp_async(
                            T.access_ptr(v_shared[i, tx % lanes * 8], "w", 8),
                            T.access_ptr(v[T.min(w * WINDOW + i, tk - 1), g, tx % lanes * 8], "r", 8),
                            8,
                            w * WINDOW + i < tk,
                        )
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                if tx < WARPGROUP:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    scores = T.alloc_fragment((WINDOW, vectors), "float32")
                    probs = T.alloc_fragment((WINDOW, vectors), dtype)
                    dv_acc = T.alloc_fragment((WINDOW, dim), "float32")
                    T.fill(dv_acc, 0)
                    for t in T.serial(steps):
                        stage = t % stages
                        T.barrier_wait(ready[stage], (t // stages) & 1)
                        T.wgmma_gemm(
                            k_shared, q_shared[stage, :, :], scores, transpose_B=True, clear_accum=True, policy=full_row
                        )
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(WINDOW, vectors):
                            scores[i, j] = T.if_then_else(
                                ((bits_shared[stage, i // 32, j // group] >> (i % 32)) & 1) != 0,
                                T.exp2(scores[i, j] * scale_log2e - lse_shared[stage, j]),
                                0,
                            )
                        T.copy(scores, probs)
                        T.barrier_wait(p_free, (t & 1) ^ 1)
                        T.copy(probs, p_shared)
                        T.barrier_arrive(p_ready)
                        T.wgmma_gemm(probs, do_shared[stage, :, :], dv_acc, policy=full_row)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[stage])
                    for i, d in T.Parallel(WINDOW, dim):
                        if w * WINDOW + i < tk:
                            dv[w * WINDOW + i, g, d] += dv_acc[i, d]
                elif tx < 2 * WARPGROUP:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    dp = T.alloc_fragment((WINDOW, vectors), "float32")
                    ds = T.alloc_fragment((WINDOW, vectors), dtype)
                    dk_acc = T.alloc_fragment((WINDOW, dim), "float32")
                    T.fill(dk_acc, 0)
                    for t in T.serial(steps):
                        stage = t % stages
                        T.barrier_wait(ready[stage], (t // stages) & 1)
                        T.wgmma_gemm(
                            v_shared, do_shared[stage, :, :], dp, transpose_B=True, clear_accum=True, policy=full_row
                        )
                        T.wait_wgmma(0)
                        T.barrier_wait(p_ready, t & 1)
                        for i, j in T.Parallel(WINDOW, vectors):
                            # A token that nobody attends may hold anything, NaN included.
                            dp[i, j] = T.if_then_else(
                                p_shared[i, j] != T.cast(0, dtype),
                                T.cast(p_shared[i, j], "float32") * (dp[i, j] - delta_shared[stage, j]),
                                0,
                            )
                        T.barrier_arrive(p_free)
                        T.copy(dp, ds)
                        T.wgmma_gemm(ds, q_shared[stage, :, :], dk_acc, policy=full_row)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[stage])
                    for i, d in T.Parallel(WINDOW, dim):
                        if w * WINDOW + i < tk:
                            dk[w * WINDOW + i, g, d] += dk_acc[i, d] * scale
                else:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    pt = tx - 2 * WARPGROUP
                    entry = T.alloc_var("int32")
                    for t in T.serial(steps):
                        stage = t % stages
                        if pt < rows:
                            entry = -1
                            if t * rows + pt < n:
                                entry = lists[w, t * rows + pt]
                            row_shared[t % 2, pt] = entry
                        T.sync_threads(2, WARPGROUP)
                        T.barrier_wait(free[stage], ((t // stages) & 1) ^ 1)
                        for p in T.unroll(passes):
                            j = p * vectors_per_pass + pt // lanes
                            if j < vectors:
                                listed_row = row_shared[t % 2, j // group]
                                row = row0 + T.max(listed_row, 0)
                                T.ptx_cp_async(
                                    T.access_ptr(q_shared[stage, j, pt % lanes * 8], "w", 8),
                                    T.access_ptr(q[row, g * group + j % group, pt % lanes * 8], "r", 8),
                                    8,
                                    listed_row >= 0,
                                )
                                T.ptx_cp_async(
                                    T.access_ptr(do_shared[stage, j, pt % lanes * 8], "w", 8),
                                    T.access_ptr(dout[row, g * group + j % group, pt % lanes * 8], "r", 8),
                                    8,
                                    listed_row >= 0,
                                )
                        if pt < vectors:
                            listed_row = row_shared[t % 2, pt // group]
                            lse_shared[stage, pt] = 0
                            delta_shared[stage, pt] = 0
                            if listed_row >= 0:
                                lse_shared[stage, pt] = lse[row0 + listed_row, g * group + pt % group] * LOG2E
                                delta_shared[stage, pt] = delta[row0 + listed_row, g * group + pt % group]
                        if pt < 2 * rows:
                            listed_row = row_shared[t % 2, pt % rows]
                            bits_shared[stage, pt // rows, pt % rows] = 0
                            if listed_row >= 0:
                                bits_shared[stage, pt // rows, pt % rows] = bits[2 * w + pt // rows, listed_row]
                        T.barrier_arrive(ready[stage])
                        T.cp_async_barrier_noinc(ready[stage])

    return sparse_gqa_window_backward
