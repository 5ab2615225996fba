# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""Forward of sparse GQA for any GPU with bf16 matrix units: one row and one KV head, keys gathered a step ahead."""

import tilelang.language as T

from mcore_patches.ops.sparse_gqa.design import PLAIN_HEADS as HEADS
from mcore_patches.ops.tilelang_warp import atomic

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# A row maximum below any score, yet finite: exp2(-inf - LOWEST) is 0 where exp2(-inf + inf) would be NaN.
LOWEST = -(2.0**30)
LANES = 8  # threads that gather one token, 16 bytes each at a time
STAGES = 2


def plain_forward(*, heads: int, kv_heads: int, dim: int, block_size: int, dtype: str, keys: int, threads: int):
    """Build the kernel ``(q, k, v, block_ids, row_pos, row_start, out, lse, scale)``.

    ``q [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``block_ids [Tq, K]``; ``out`` like ``q``, ``lse [Tq,
    heads]`` fp32 natural log.
    """
    group = heads // kv_heads
    entries = keys // block_size
    tokens_per_pass = threads // LANES
    tq, tk, topk = T.dynamic("tq"), T.dynamic("tk"), T.dynamic("topk")
    full_col = T.GemmWarpPolicy.FullCol

    @T.macro
    def gather(t, k, v, block_ids, row, first, full, tail, count, g, k_shared, v_shared, seen, tx):
        """Step t's tokens: those of blocks t * entries and on, then of the incomplete block."""
        token = T.alloc_var("int32")
        for p in T.unroll(keys // tokens_per_pass):
            at = p * tokens_per_pass + tx // LANES
            slot = t * entries + at // block_size
            token = -1
            if slot < count:
                if block_ids[row, slot] >= 0 and block_ids[row, slot] < full:
                    token = first + block_ids[row, slot] * block_size + at % block_size
            if slot == count and at % block_size < tail:
                token = first + full * block_size + at % block_size
            if tx % LANES == 0:
                seen[t % STAGES, at] = T.if_then_else(token >= 0, 1, 0)
            for u in T.unroll(dim // (8 * LANES)):
                c = 8 * (LANES * u + tx % LANES)
                T.ptx_cp_async(
                    T.access_ptr(k_shared[t % STAGES, at, c], "w", 8),
                    T.access_ptr(k[T.max(token, 0), g, c], "r", 8),
                    8,
                    token >= 0,
                )
                T.ptx_cp_async(
                    T.access_ptr(v_shared[t % STAGES, at, c], "w", 8),
                    T.access_ptr(v[T.max(token, 0), g, c], "r", 8),
                    8,
                    token >= 0,
                )
        T.ptx_commit_group()

    @T.prim_func
    def sparse_gqa_plain_forward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        block_ids: T.Tensor((tq, topk), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        out: T.Tensor((tq, heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(tq * kv_heads, threads=threads) as program:
            q_shared = T.alloc_shared((HEADS, dim), dtype)
            k_shared = T.alloc_shared((STAGES, keys, dim), dtype)
            v_shared = T.alloc_shared((STAGES, keys, dim), dtype)
            seen = T.alloc_shared((STAGES, keys), "int32")
            p_shared = T.alloc_shared((HEADS, keys), dtype)
            listed = T.alloc_shared((1,), "int32")
            score = T.alloc_fragment((HEADS, keys), "float32")
            acc = T.alloc_fragment((HEADS, dim), "float32")
            row_max = T.alloc_fragment((HEADS,), "float32")
            old_max = T.alloc_fragment((HEADS,), "float32")
            row_sum = T.alloc_fragment((HEADS,), "float32")
            part = T.alloc_fragment((HEADS,), "float32")
            alpha = T.alloc_fragment((HEADS,), "float32")

            tx = T.get_thread_binding()
            row = program // kv_heads
            g = program % kv_heads
            scale_log2e = scale * LOG2E
            first = row_start[row]
            full = T.alloc_var("int32", init=0)
            tail = T.alloc_var("int32", init=0)
            if row_pos[row] >= 0:
                full = (row_pos[row] + 1) // block_size
                tail = (row_pos[row] + 1) % block_size
            # Leading ids that may be valid.
            if tx == 0:
                listed[0] = 0
            T.sync_threads()
            for s in T.serial(T.ceildiv(topk - tx, threads)):
                if block_ids[row, s * threads + tx] >= 0 and block_ids[row, s * threads + tx] < full:
                    atomic("atomicMax", listed[0], s * threads + tx + 1)
            T.sync_threads()
            count = listed[0]
            steps = T.ceildiv(count + T.if_then_else(tail > 0, 1, 0), entries)

            for h, d in T.Parallel(HEADS, dim):
                q_shared[h, d] = T.if_then_else(h < group, q[row, g * group + T.min(h, group - 1), d], 0)
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, LOWEST)
            gather(0, k, v, block_ids, row, first, full, tail, count, g, k_shared, v_shared, seen, tx)
            for t in T.serial(steps):
                # Behind the last step zeros are written: one group of copies a step keeps the count.
                gather(t + 1, k, v, block_ids, row, first, full, tail, count, g, k_shared, v_shared, seen, tx)
                T.ptx_wait_group(1)
                T.sync_threads()
                for h, i in T.Parallel(HEADS, keys):
                    score[h, i] = T.if_then_else(seen[t % STAGES, i] != 0, 0.0, -T.infinity("float32"))
                T.gemm(q_shared, k_shared[t % STAGES, :, :], score, transpose_B=True, policy=full_col)
                T.copy(row_max, old_max)
                T.reduce_max(score, row_max, dim=1, clear=False)
                for h in T.Parallel(HEADS):
                    alpha[h] = T.exp2((old_max[h] - row_max[h]) * scale_log2e)
                for h, i in T.Parallel(HEADS, keys):
                    score[h, i] = T.exp2(score[h, i] * scale_log2e - row_max[h] * scale_log2e)
                T.reduce_sum(score, part, dim=1)
                for h in T.Parallel(HEADS):
                    row_sum[h] = row_sum[h] * alpha[h] + part[h]
                for h, d in T.Parallel(HEADS, dim):
                    acc[h, d] *= alpha[h]
                T.copy(score, p_shared)
                T.sync_threads()
                T.gemm(p_shared, v_shared[t % STAGES, :, :], acc, policy=full_col)
                T.sync_threads()
            T.ptx_wait_group(0)
            for h, d in T.Parallel(HEADS, dim):
                if h < group:
                    out[row, g * group + h, d] = T.if_then_else(row_sum[h] > 0, acc[h, d] / row_sum[h], 0)
            for h in T.Parallel(HEADS):
                if h < group:
                    lse[row, g * group + h] = T.if_then_else(
                        row_sum[h] > 0, T.log2(row_sum[h]) * LN2 + row_max[h] * scale, -T.infinity("float32")
                    )

    return sparse_gqa_plain_forward
