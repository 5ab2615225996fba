# The language of kernels is not typed.
# mypy: ignore-errors
"""dK and dV of sparse GQA by windows of 64 tokens: the rows that attend one of them are gathered, nothing is scattered.

A step takes a few listed rows: dV += P^T dO and dK += dS^T Q, of 64 tokens by the rows' heads. P and dS come from the
row kernel, which stored them by rank; a token that a row does not attend gets zeros. One warpgroup collects dV, another
dK, a third gathers. The gather of Q and dO bounds the kernel, so it is left to the copy engine: asynchronous copies by
threads would share their path with everything else.
"""

import tilelang.language as T

from mcore_patches.ops.sparse_gqa.design import WINDOW, even_group
from mcore_patches.ops.sparse_gqa.tilelang_windows import WORD
from mcore_patches.ops.tilelang_warp import below, popcount

WARPGROUP = 128
WARPS = WARPGROUP // 32
COLUMNS = 64  # channels of one copy: 128 bytes
# Steps by which P and dS are loaded ahead, to registers: they come from device memory.
AHEAD = 3
# Slots of listed rows: those of this step and of the steps ahead, and one that a fast warp may write.
SLOTS = AHEAD + 2


def window_backward(*, heads: int, kv_heads: int, dim: int, rows: int, stages: int, dtype: str, bulk: bool = True):
    """Build the kernel ``(q, dout, stored, listed, entries, dk, dv, row0)`` of one chunk of rows.

    ``q`` and ``dout [Tq, heads, dim]``; ``stored [2, chunk, kv_heads, ranks, even group]``, P and dS as
    :mod:`tilelang_row_backward` writes them; ``listed`` and ``entries`` (:mod:`tilelang_windows`) of rows from ``row0``
    on, ``rows`` of them a step. Adds to ``dk`` (without the scale) and ``dv [Tk, kv_heads, dim]`` fp32.
    """
    group = heads // kv_heads
    wide = even_group(group)
    vectors = rows * wide
    lanes = dim // 8
    vectors_per_pass = WARPGROUP // lanes
    passes = vectors // vectors_per_pass
    piece = next(p for p in (8, 4, 2) if wide % p == 0)  # elements of one load of P or dS
    tq, tk, chunk, ranks, windows, most = (T.dynamic(n) for n in ("tq", "tk", "chunk", "ranks", "windows", "most"))
    full_row = T.GemmWarpPolicy.FullRow

    @T.macro
    def collect(which, probs, vectors_shared, total, ready, free, steps, w, g):
        """One consumer: total[tokens of window w] += sum over steps of probs[which, stage] @ vectors_shared[stage]."""
        acc = T.alloc_fragment((WINDOW, dim), "float32")
        for i, d in T.Parallel(WINDOW, dim):
            acc[i, d] = T.if_then_else(w * WINDOW + i < tk, total[T.min(w * WINDOW + i, tk - 1), g, d], 0)
        for t in T.serial(steps):
            T.barrier_wait(ready[t % stages], (t // stages) & 1)
            T.wgmma_gemm(probs[which, t % stages, :, :], vectors_shared[t % stages, :, :], acc, policy=full_row)
            T.wait_wgmma(1)
            if t > 0:
                T.barrier_arrive(free[(t - 1) % stages])
        T.wait_wgmma(0)
        for i, d in T.Parallel(WINDOW, dim):
            if w * WINDOW + i < tk:
                total[w * WINDOW + i, g, d] = acc[i, d]

    @T.macro
    def fetch_entry(entry, entries, w, t, pt, n):
        """Of the threads below `rows`, each loads a listed row of step t."""
        if pt < rows:
            for e in T.vectorized(4):
                entry[e] = entries[w, T.min(t * rows + pt, n - 1), e]

    @T.macro
    def publish_entry(entry, entry_shared, t, pt, n):
        """What `fetch_entry` loaded, or past the last one a row without bits: there it would wait for the load."""
        if pt < rows:
            if t * rows + pt >= n:
                entry[0] = -1
                entry[1] = 0
                entry[2] = 0
            for e in T.vectorized(4):
                entry_shared[t % SLOTS, pt, e] = entry[e]

    @T.macro
    def load_probs(held, h, slot, entry_shared, stored, which, token, g):
        """held[h, vectors] = what the rows of a slot stored for a token, zeros where they do not attend it."""
        word = T.alloc_var("int32")
        rank = T.alloc_var("int32")
        for j in T.unroll(rows):
            word = entry_shared[slot, j, 1 + token // WORD]
            rank = entry_shared[slot, j, 3] + below(word, token % WORD)
            if token >= WORD:
                rank += popcount(entry_shared[slot, j, 1])
            if ((word >> (token % WORD)) & 1) != 0:
                for c in T.unroll(wide // piece):
                    for e in T.vectorized(piece):
                        held[h, j * wide + c * piece + e] = stored[
                            which, entry_shared[slot, j, 0], g, rank, c * piece + e
                        ]
            else:
                for c in T.unroll(wide // piece):
                    for e in T.vectorized(piece):
                        held[h, j * wide + c * piece + e] = 0

    @T.macro
    def copy_bulk(q, dout, q_shared, do_shared, ready, entry_shared, slot, stage, pt, g, row0):
        """Each warp has the copy engine fetch some of the rows; one past the end of q gives zeros."""
        row = T.alloc_var("int32")
        for j in T.unroll(rows):
            if pt // 32 == j % WARPS:
                row = entry_shared[slot, j, 0]
                row = T.if_then_else(row < 0, tq, row0 + row)
                for c in T.unroll(dim // COLUMNS):
                    here = slice(c * COLUMNS, (c + 1) * COLUMNS)
                    T.tma_copy(
                        dout[row, g * group : (g + 1) * group, here],
                        do_shared[stage, j * wide : j * wide + group, here],
                        barrier=ready[stage],
                        leader_scope_threads=32,
                    )
                    T.tma_copy(
                        q[row, g * group : (g + 1) * group, here],
                        q_shared[stage, j * wide : j * wide + group, here],
                        barrier=ready[stage],
                        leader_scope_threads=32,
                    )

    @T.macro
    def copy_by_threads(q, dout, q_shared, do_shared, ready, entry_shared, slot, stage, pt, g, row0):
        for p in T.unroll(passes):
            j = p * vectors_per_pass + pt // lanes
            row = entry_shared[slot, j // wide, 0]
            head = g * group + T.min(j % wide, group - 1)
            live = row >= 0 and j % wide < group
            T.ptx_cp_async(
                T.access_ptr(do_shared[stage, j, pt % lanes * 8], "w", 8),
                T.access_ptr(dout[row0 + T.max(row, 0), head, pt % lanes * 8], "r", 8),
                8,
                live,
            )
            T.ptx_cp_async(
                T.access_ptr(q_shared[stage, j, pt % lanes * 8], "w", 8),
                T.access_ptr(q[row0 + T.max(row, 0), head, pt % lanes * 8], "r", 8),
                8,
                live,
            )
        T.cp_async_barrier_noinc(ready[stage])

    @T.prim_func
    def sparse_gqa_window_backward(
        q: T.Tensor((tq, heads, dim), dtype),
        dout: T.Tensor((tq, heads, dim), dtype),
        stored: T.Tensor((2, chunk, kv_heads, ranks, wide), dtype),
        listed: T.Tensor((windows,), "int32"),
        entries: T.Tensor((windows, most, 4), "int32"),
        dk: T.Tensor((tk, kv_heads, dim), "float32"),
        dv: T.Tensor((tk, kv_heads, dim), "float32"),
        row0: T.int32,
    ):
        # One KV head after the other: half as much of Q and dO is in use at a time, and stays in the L2 cache.
        with T.Kernel(windows, kv_heads, threads=3 * WARPGROUP) as (w, g):
            q_shared = T.alloc_shared((stages, vectors, dim), dtype)
            do_shared = T.alloc_shared((stages, vectors, dim), dtype)
            probs = T.alloc_shared((2, stages, WINDOW, vectors), dtype)
            entry_shared = T.alloc_shared((SLOTS, rows, 4), "int32")
            ready = T.alloc_barrier(arrive_count=[WARPGROUP if bulk else 2 * WARPGROUP] * stages)
            free = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * stages)

            tx = T.get_thread_binding()
            n = listed[w]
            steps = T.ceildiv(n, rows)

            if n > 0:
                if tx < WARPGROUP:
                    collect(0, probs, do_shared, dv, ready, free, steps, w, g)
                elif tx < 2 * WARPGROUP:
                    collect(1, probs, q_shared, dk, ready, free, steps, w, g)
                else:
                    pt = tx - 2 * WARPGROUP
                    token = pt % WINDOW
                    which = pt // WINDOW
                    entry = T.alloc_local((4,), "int32")
                    held = T.alloc_local((AHEAD, vectors), dtype)
                    if bulk and wide > group:
                        # The copy engine leaves out the vector that makes the group even.
                        for s in T.unroll(stages * vectors * lanes // WARPGROUP):
                            j = (s * WARPGROUP + pt) // lanes
                            for e in T.vectorized(8):
                                q_shared[j // vectors, j % vectors, pt % lanes * 8 + e] = 0
                            for e in T.vectorized(8):
                                do_shared[j // vectors, j % vectors, pt % lanes * 8 + e] = 0
                        T.fence_proxy_async()
                    for h in T.unroll(AHEAD):
                        fetch_entry(entry, entries, w, h, pt, n)
                        publish_entry(entry, entry_shared, h, pt, n)
                    fetch_entry(entry, entries, w, AHEAD, pt, n)
                    T.sync_threads(2, WARPGROUP)
                    for h in T.unroll(AHEAD):
                        load_probs(held, h, h, entry_shared, stored, which, token, g)
                    for s in T.serial(T.ceildiv(steps, AHEAD)):
                        for h in T.unroll(AHEAD):
                            t = s * AHEAD + h
                            if t < steps:
                                slot = t % SLOTS
                                stage = t % stages
                                publish_entry(entry, entry_shared, t + AHEAD, pt, n)
                                T.sync_threads(2, WARPGROUP)
                                fetch_entry(entry, entries, w, t + AHEAD + 1, pt, n)
                                T.barrier_wait(free[stage], ((t // stages) & 1) ^ 1)
                                if bulk:
                                    copy_bulk(
                                        q, dout, q_shared, do_shared, ready, entry_shared, slot, stage, pt, g, row0
                                    )
                                else:
                                    copy_by_threads(
                                        q, dout, q_shared, do_shared, ready, entry_shared, slot, stage, pt, g, row0
                                    )
                                for c in T.unroll(vectors // 8):
                                    for e in T.vectorized(8):
                                        probs[which, stage, token, c * 8 + e] = held[h, c * 8 + e]
                                T.fence_proxy_async()
                                T.barrier_arrive(ready[stage])
                                load_probs(held, h, (t + AHEAD) % SLOTS, entry_shared, stored, which, token, g)

    return sparse_gqa_window_backward
