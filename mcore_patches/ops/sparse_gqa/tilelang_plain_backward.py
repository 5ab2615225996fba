# The language of kernels is not typed.
# mypy: ignore-errors
"""Backward of sparse GQA for any GPU with bf16 matrix units: dQ row by row, then dK and dV by windows of keys.

The kernels do what :mod:`tilelang_row_backward` and :mod:`tilelang_window_backward` do on Hopper and take the same
lists: the first stores P and dS by rank, the second multiplies gathered Q and dO by them.
"""

import tilelang.language as T

from mcore_patches.ops.sparse_gqa.design import PLAIN_HEADS as HEADS
from mcore_patches.ops.sparse_gqa.design import WINDOW, even_group
from mcore_patches.ops.sparse_gqa.tilelang_plain_forward import LANES, LOG2E
from mcore_patches.ops.sparse_gqa.tilelang_windows import WORD
from mcore_patches.ops.tilelang_warp import below, popcount


def plain_row_backward(
    *, heads: int, kv_heads: int, dim: int, rows: int, block_size: int, dtype: str, keys: int, threads: int
):
    """Build the kernel of one chunk of rows, from ``row0`` on; arguments as in :mod:`tilelang_row_backward`."""
    group = heads // kv_heads
    wide = even_group(group)
    entries = keys // block_size
    tokens_per_pass = threads // LANES
    names = ("tq", "tk", "tiles", "topk", "chunk", "ranks")
    tq, tk, tiles, topk, chunk, ranks = (T.dynamic(n) for n in names)
    full_col = T.GemmWarpPolicy.FullCol

    @T.prim_func
    def sparse_gqa_plain_row_backward(
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
        with T.Kernel(chunk * kv_heads, threads=threads) as program:
            q_shared = T.alloc_shared((HEADS, dim), dtype)
            do_shared = T.alloc_shared((HEADS, dim), dtype)
            k_shared = T.alloc_shared((keys, dim), dtype)
            v_shared = T.alloc_shared((keys, dim), dtype)
            ds_shared = T.alloc_shared((HEADS, keys), dtype)
            seen = T.alloc_shared((keys,), "int32")
            score = T.alloc_fragment((HEADS, keys), "float32")
            dp = T.alloc_fragment((HEADS, keys), "float32")
            row_lse = T.alloc_fragment((HEADS,), "float32")
            row_delta = T.alloc_fragment((HEADS,), "float32")
            acc = T.alloc_fragment((HEADS, dim), "float32")

            tx = T.get_thread_binding()
            i = program // kv_heads
            g = program % kv_heads
            row = row0 + i
            scale_log2e = scale * LOG2E
            full = T.alloc_var("int32", init=0)
            tail = T.alloc_var("int32", init=0)
            token = T.alloc_var("int32")
            if row < tq and count[T.min(row // rows, tiles - 1)] < 0:
                first = row_start[row]
                if row_pos[row] >= 0:
                    full = (row_pos[row] + 1) // block_size
                    tail = (row_pos[row] + 1) % block_size
                listed = selected[i]
                steps = T.ceildiv(listed + T.if_then_else(tail > 0, 1, 0), entries)
                for h, d in T.Parallel(HEADS, dim):
                    q_shared[h, d] = T.if_then_else(h < group, q[row, g * group + T.min(h, group - 1), d], 0)
                for h, d in T.Parallel(HEADS, dim):
                    do_shared[h, d] = T.if_then_else(h < group, dout[row, g * group + T.min(h, group - 1), d], 0)
                for h in T.Parallel(HEADS):
                    row_lse[h] = lse[row, g * group + T.min(h, group - 1)] * LOG2E
                    row_delta[h] = delta[row, g * group + T.min(h, group - 1)]
                T.fill(acc, 0)
                for t in T.serial(steps):
                    T.sync_threads()
                    for p in T.unroll(keys // tokens_per_pass):
                        at = p * tokens_per_pass + tx // LANES
                        slot = t * entries + at // block_size
                        token = -1
                        if slot < listed:
                            token = first + ordered[i, slot] * block_size + at % block_size
                        if slot == listed and at % block_size < tail:
                            token = first + full * block_size + at % block_size
                        if tx % LANES == 0:
                            seen[at] = T.if_then_else(token >= 0, 1, 0)
                        for u in T.unroll(dim // (8 * LANES)):
                            c = 8 * (LANES * u + tx % LANES)
                            T.ptx_cp_async(
                                T.access_ptr(k_shared[at, c], "w", 8),
                                T.access_ptr(k[T.max(token, 0), g, c], "r", 8),
                                8,
                                token >= 0,
                            )
                            T.ptx_cp_async(
                                T.access_ptr(v_shared[at, c], "w", 8),
                                T.access_ptr(v[T.max(token, 0), g, c], "r", 8),
                                8,
                                token >= 0,
                            )
                    T.ptx_commit_group()
                    T.ptx_wait_group(0)
                    T.sync_threads()
                    T.gemm(q_shared, k_shared, score, transpose_B=True, policy=full_col, clear_accum=True)
                    T.gemm(do_shared, v_shared, dp, transpose_B=True, policy=full_col, clear_accum=True)
                    for h, n in T.Parallel(HEADS, keys):
                        score[h, n] = T.if_then_else(seen[n] != 0, T.exp2(score[h, n] * scale_log2e - row_lse[h]), 0)
                        dp[h, n] = score[h, n] * (dp[h, n] - row_delta[h])
                    T.copy(dp, ds_shared)
                    for h, n in T.Parallel(HEADS, keys):
                        if h < wide:
                            stored[0, i, g, t * keys + n, h] = score[h, n]
                            stored[1, i, g, t * keys + n, h] = dp[h, n]
                    T.sync_threads()
                    T.gemm(ds_shared, k_shared, acc, policy=full_col)
                for h, d in T.Parallel(HEADS, dim):
                    if h < group:
                        dq[row, g * group + h, d] = acc[h, d] * scale

    return sparse_gqa_plain_row_backward


def plain_window_backward(*, heads: int, kv_heads: int, dim: int, rows: int, stages: int, dtype: str, threads: int):
    """Build the kernel ``(q, dout, stored, listed, entries, dk, dv, row0)`` as in :mod:`tilelang_window_backward`."""
    group = heads // kv_heads
    wide = even_group(group)
    vectors = rows * wide
    lanes = dim // 8
    piece = next(p for p in (8, 4, 2) if wide % p == 0)
    tq, tk, chunk, ranks, windows, most = (T.dynamic(n) for n in ("tq", "tk", "chunk", "ranks", "windows", "most"))

    @T.macro
    def gather(t, w, g, q, dout, stored, entries, n, row0, q_shared, do_shared, probs, entry_shared, tx):
        T.sync_threads()
        if tx < rows:
            for e in T.unroll(4):
                entry_shared[tx, e] = 0
            if t * rows + tx < n:
                for e in T.unroll(4):
                    entry_shared[tx, e] = entries[w, t * rows + tx, e]
            else:
                entry_shared[tx, 0] = -1
        T.sync_threads()
        for p in T.unroll(-(-vectors * lanes // threads)):
            j = (p * threads + tx) // lanes
            c = (p * threads + tx) % lanes * 8
            if j < vectors:
                row = entry_shared[j // wide, 0]
                head = g * group + T.min(j % wide, group - 1)
                live = row >= 0 and j % wide < group
                T.ptx_cp_async(
                    T.access_ptr(q_shared[t % stages, j, c], "w", 8),
                    T.access_ptr(q[row0 + T.max(row, 0), head, c], "r", 8),
                    8,
                    live,
                )
                T.ptx_cp_async(
                    T.access_ptr(do_shared[t % stages, j, c], "w", 8),
                    T.access_ptr(dout[row0 + T.max(row, 0), head, c], "r", 8),
                    8,
                    live,
                )
        for p in T.unroll(-(-2 * WINDOW * rows // threads)):
            which = (p * threads + tx) // (WINDOW * rows)
            j = (p * threads + tx) // WINDOW % rows
            token = (p * threads + tx) % WINDOW
            if which < 2:
                word = entry_shared[j, 1 + token // WORD]
                attends = ((word >> (token % WORD)) & 1) != 0
                rank = T.alloc_var("int32", init=0)
                if attends:
                    rank = entry_shared[j, 3] + below(word, token % WORD)
                    if token >= WORD:
                        rank += popcount(entry_shared[j, 1])
                for c in T.unroll(wide // piece):
                    T.ptx_cp_async(
                        T.access_ptr(probs[t % stages, which, token, j * wide + c * piece], "w", piece),
                        T.access_ptr(stored[which, T.max(entry_shared[j, 0], 0), g, rank, c * piece], "r", piece),
                        piece,
                        attends,
                    )
        T.ptx_commit_group()

    @T.prim_func
    def sparse_gqa_plain_window_backward(
        q: T.Tensor((tq, heads, dim), dtype),
        dout: T.Tensor((tq, heads, dim), dtype),
        stored: T.Tensor((2, chunk, kv_heads, ranks, wide), dtype),
        listed: T.Tensor((windows,), "int32"),
        entries: T.Tensor((windows, most, 4), "int32"),
        dk: T.Tensor((tk, kv_heads, dim), "float32"),
        dv: T.Tensor((tk, kv_heads, dim), "float32"),
        row0: T.int32,
    ):
        with T.Kernel(windows, kv_heads, threads=threads) as (w, g):
            q_shared = T.alloc_shared((stages, vectors, dim), dtype)
            do_shared = T.alloc_shared((stages, vectors, dim), dtype)
            probs = T.alloc_shared((stages, 2, WINDOW, vectors), dtype)
            entry_shared = T.alloc_shared((rows, 4), "int32")
            dk_acc = T.alloc_fragment((WINDOW, dim), "float32")
            dv_acc = T.alloc_fragment((WINDOW, dim), "float32")
            tx = T.get_thread_binding()
            n = listed[w]
            steps = T.ceildiv(n, rows)
            if n > 0:
                T.fill(dk_acc, 0)
                T.fill(dv_acc, 0)
                if stages > 1:
                    gather(0, w, g, q, dout, stored, entries, n, row0, q_shared, do_shared, probs, entry_shared, tx)
                for t in T.serial(steps):
                    # With two stages the step ahead; behind the last one zeros are written.
                    ahead = t + stages - 1
                    gather(ahead, w, g, q, dout, stored, entries, n, row0, q_shared, do_shared, probs, entry_shared, tx)
                    T.ptx_wait_group(stages - 1)
                    T.sync_threads()
                    T.gemm(probs[t % stages, 0, :, :], do_shared[t % stages, :, :], dv_acc)
                    T.gemm(probs[t % stages, 1, :, :], q_shared[t % stages, :, :], dk_acc)
                T.ptx_wait_group(0)
                for i, d in T.Parallel(WINDOW, dim):
                    if w * WINDOW + i < tk:
                        dk[w * WINDOW + i, g, d] += dk_acc[i, d]
                for i, d in T.Parallel(WINDOW, dim):
                    if w * WINDOW + i < tk:
                        dv[w * WINDOW + i, g, d] += dv_acc[i, d]

    return sparse_gqa_plain_window_backward
