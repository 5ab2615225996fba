"""Hopper forward of sparse MLA: four warp groups, one query row and 64 heads a block."""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

from typing import Any

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

HEADS_PER_BLOCK = 64  # the M of one wgmma
KEYS_PER_BLOCK = 64
STAGES = 2
RESCALE_THRESHOLD = 8.0  # the running maximum follows only when it grows by a factor of 2**8

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # every access is guarded by hand
}


def forward_kernel(width: int, value_width: int, strided: bool = False):
    """Builds the prim_func of the forward for one head width (multiple of 64) and a value width of 512.

    Extent[b, row] is the number of leading ids of a row that are read; KV may have any strides that are multiples of 8,
    Q too if `strided`.
    """
    batch, rows, heads, keys, topk = (T.dynamic(n) for n in ("batch", "rows", "heads", "keys", "topk"))
    kv_strides = [T.dynamic(f"kv_stride_{n}", "int64") for n in range(2)]
    HB, KB = HEADS_PER_BLOCK, KEYS_PER_BLOCK
    half, quarter, tail = value_width // 2, value_width // 4, width - value_width
    dtype, accum = T.bfloat16, T.float32
    q_type: Any = T.Tensor([batch, rows, heads, width], dtype)
    if strided:
        q_strides = [T.dynamic(f"q_stride_{n}", "int64") for n in range(3)]
        q_type = T.StridedTensor([batch, rows, heads, width], [*q_strides, 1], dtype)

    @T.macro
    def accumulate(i, first, tx, p_ready, p_free, kv_free, alpha_shared, p_shared, kv_shared, out_0, out_1):
        stage = i % STAGES
        T.barrier_wait(p_ready, i & 1)
        if T.any_sync(alpha_shared[tx % 128 // 32 * 16 + tx % 16] != 1.0) != 0:
            for h, d in T.Parallel(HB, quarter):
                out_0[h, d] *= alpha_shared[h]
                out_1[h, d] *= alpha_shared[h]
        T.wgmma_gemm(p_shared, kv_shared[stage, :, first : first + quarter], out_0)
        T.wgmma_gemm(p_shared, kv_shared[stage, :, first + quarter : first + half], out_1)
        T.wait_wgmma(0)
        T.barrier_arrive(kv_free[stage])
        T.barrier_arrive(p_free)

    @T.macro
    def finish(blocks, b, row, h0, first, group_barrier, p_ready, norm_shared, q_shared, out_0, out_1, Out):
        T.barrier_wait(p_ready, blocks & 1)
        for h, d in T.Parallel(HB, quarter):
            out_0[h, d] *= norm_shared[h]
            out_1[h, d] *= norm_shared[h]
        T.copy(out_0, q_shared[:, first : first + quarter])
        T.copy(out_1, q_shared[:, first + quarter : first + half])
        T.fence_proxy_async()
        T.sync_threads(group_barrier, 128)
        T.copy(q_shared[:, first : first + half], Out[b, row, h0 : h0 + HB, first : first + half])

    @T.macro
    def load(KV, b, stage, ids, keys, lane, first, columns, kv_shared):
        for r in T.unroll(4):
            slot = r * 16 + lane // 8
            inside = (ids[r] >= 0) and (ids[r] < keys)
            key = T.if_then_else(inside, ids[r], 0)
            for u in T.unroll(columns // 64):
                T.ptx_cp_async(
                    T.access_ptr(kv_shared[stage, slot, first + 64 * u + lane % 8 * 8], "w", 8),
                    T.access_ptr(KV[b, key, first + 64 * u + lane % 8 * 8], "r", 8),
                    8,
                    inside,
                )

    @T.prim_func
    def sparse_mla_forward(
        Q: q_type,
        KV: T.StridedTensor([batch, keys, width], [*kv_strides, 1], dtype),
        Indices: T.Tensor([batch, rows, topk], T.int32),
        Extent: T.Tensor([batch, rows], T.int32),
        scale: T.float32,
        Out: T.Tensor([batch, rows, heads, value_width], dtype),
        Lse: T.Tensor([batch, rows, heads], accum),
    ):
        with T.Kernel(rows * T.ceildiv(heads, HB), batch, threads=512) as (x, b):
            q_shared = T.alloc_shared([HB, width], dtype)
            kv_shared = T.alloc_shared([STAGES, KB, width], dtype)
            p_shared = T.alloc_shared([HB, KB], dtype)
            valid = T.alloc_shared([STAGES, KB], T.int32)
            alpha_shared = T.alloc_shared([HB], accum)
            norm_shared = T.alloc_shared([HB], accum)

            score = T.alloc_fragment([HB, KB], accum)
            row_max = T.alloc_fragment([HB], accum)
            new_max = T.alloc_fragment([HB], accum)
            row_sum = T.alloc_fragment([HB], accum)
            block_sum = T.alloc_fragment([HB], accum)
            alpha = T.alloc_fragment([HB], accum)
            # With 512 threads ptxas plans with 128 registers, too few for one product of 256 columns.
            left_0 = T.alloc_fragment([HB, quarter], accum)
            left_1 = T.alloc_fragment([HB, quarter], accum)
            right_0 = T.alloc_fragment([HB, quarter], accum)
            right_1 = T.alloc_fragment([HB, quarter], accum)

            q_ready = T.alloc_barrier(arrive_count=128)
            # The score product begins when the tail and the first half of the channels are there.
            first_ready = T.alloc_barrier(arrive_count=[256] * STAGES)
            second_ready = T.alloc_barrier(arrive_count=[256] * STAGES)
            kv_free = T.alloc_barrier(arrive_count=[256] * STAGES)
            tail_free = T.alloc_barrier(arrive_count=[128] * STAGES)
            p_ready = T.alloc_barrier(arrive_count=128)
            p_free = T.alloc_barrier(arrive_count=256)

            head_blocks = T.ceildiv(heads, HB)
            row = T.alloc_var(T.int32, init=T.truncdiv(x, head_blocks))
            h0 = T.alloc_var(T.int32, init=T.truncmod(x, head_blocks) * HB)
            blocks = T.ceildiv(Extent[b, row], KB)
            log2_scale = scale * LOG2E
            tx = T.get_thread_binding()

            if tx < 128:
                T.set_max_nreg(104, 0)
                T.tma_copy(Q[b, row, h0 : h0 + HB, :], q_shared, barrier=q_ready)
                T.barrier_arrive(q_ready)
                T.fill(row_sum, 0)
                T.fill(row_max, -(2.0**30))
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    stage = i % STAGES
                    T.barrier_wait(first_ready[stage], (i // STAGES) & 1)
                    for h, k in T.Parallel(HB, KB):
                        score[h, k] = T.if_then_else(valid[stage, k] != 0, 0.0, -T.infinity(accum))
                    if tail > 0:
                        T.wgmma_gemm(
                            q_shared[:, value_width:width],
                            kv_shared[stage, :, value_width:width],
                            score,
                            transpose_B=True,
                        )
                    T.wgmma_gemm(q_shared[:, 0:half], kv_shared[stage, :, 0:half], score, transpose_B=True)
                    T.barrier_wait(second_ready[stage], (i // STAGES) & 1)
                    T.wgmma_gemm(
                        q_shared[:, half:value_width], kv_shared[stage, :, half:value_width], score, transpose_B=True
                    )
                    T.wait_wgmma(0)
                    T.barrier_arrive(tail_free[stage])
                    T.reduce_max(score, new_max, dim=1, clear=True)
                    for h in T.Parallel(HB):
                        new_max[h] = T.if_then_else(
                            (new_max[h] - row_max[h]) * log2_scale > RESCALE_THRESHOLD, new_max[h], row_max[h]
                        )
                        alpha[h] = T.exp2((row_max[h] - new_max[h]) * log2_scale)
                        row_max[h] = new_max[h]
                    for h, k in T.Parallel(HB, KB):
                        score[h, k] = T.exp2(score[h, k] * log2_scale - row_max[h] * log2_scale)
                    T.reduce_sum(score, block_sum, dim=1)
                    for h in T.Parallel(HB):
                        row_sum[h] = row_sum[h] * alpha[h] + block_sum[h]
                    T.barrier_wait(p_free, (i & 1) ^ 1)
                    T.copy(alpha, alpha_shared)
                    T.copy(score, p_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                T.barrier_wait(p_free, (blocks & 1) ^ 1)
                for h in T.Parallel(HB):
                    # Equal to 0, not above it: a sum that is NaN makes out and lse NaN.
                    norm_shared[h] = T.if_then_else(row_sum[h] == 0, 0.0, 1.0 / row_sum[h])
                T.barrier_arrive(p_ready)
                for h in T.Parallel(HB):
                    row_sum[h] = T.if_then_else(
                        row_sum[h] == 0, -T.infinity(accum), T.log2(row_sum[h]) * LN2 + row_max[h] * scale
                    )
                T.copy(row_sum, Lse[b, row, h0 : h0 + HB])
            elif tx >= 128 and tx < 256:
                T.set_max_nreg(168, 1)
                T.fill(left_0, 0)
                T.fill(left_1, 0)
                for i in T.serial(blocks):
                    accumulate(i, 0, tx, p_ready, p_free, kv_free, alpha_shared, p_shared, kv_shared, left_0, left_1)
                finish(blocks, b, row, h0, 0, 1, p_ready, norm_shared, q_shared, left_0, left_1, Out)
            elif tx >= 256 and tx < 384:
                T.set_max_nreg(168, 1)
                T.fill(right_0, 0)
                T.fill(right_1, 0)
                for i in T.serial(blocks):
                    accumulate(
                        i, half, tx, p_ready, p_free, kv_free, alpha_shared, p_shared, kv_shared, right_0, right_1
                    )
                finish(blocks, b, row, h0, half, 2, p_ready, norm_shared, q_shared, right_0, right_1, Out)
            else:
                T.set_max_nreg(72, 0)
                ids = T.alloc_local([4], T.int32)
                lane = tx - 384
                for r in T.unroll(4):
                    k = r * 16 + lane // 8
                    ids[r] = -1
                    if k < topk:
                        ids[r] = Indices[b, row, k]
                for i in T.serial(blocks):
                    stage = i % STAGES
                    T.barrier_wait(tail_free[stage], ((i // STAGES) & 1) ^ 1)
                    for r in T.unroll(4):
                        if lane % 8 == 0:
                            valid[stage, r * 16 + lane // 8] = T.cast((ids[r] >= 0) and (ids[r] < keys), T.int32)
                    if tail > 0:
                        load(KV, b, stage, ids, keys, lane, value_width, tail, kv_shared)
                    T.barrier_wait(kv_free[stage], ((i // STAGES) & 1) ^ 1)
                    load(KV, b, stage, ids, keys, lane, 0, half, kv_shared)
                    T.cp_async_barrier_noinc(first_ready[stage])
                    T.barrier_arrive(first_ready[stage])
                    load(KV, b, stage, ids, keys, lane, half, half, kv_shared)
                    T.cp_async_barrier_noinc(second_ready[stage])
                    T.barrier_arrive(second_ready[stage])
                    for r in T.unroll(4):
                        k = (i + 1) * KB + r * 16 + lane // 8
                        ids[r] = -1
                        if k < topk:
                            ids[r] = Indices[b, row, k]

    return sparse_mla_forward
