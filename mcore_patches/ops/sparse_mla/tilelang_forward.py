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
    half = value_width // 2
    dtype, accum = T.bfloat16, T.float32
    q_type: Any = T.Tensor([batch, rows, heads, width], dtype)
    if strided:
        q_strides = [T.dynamic(f"q_stride_{n}", "int64") for n in range(3)]
        q_type = T.StridedTensor([batch, rows, heads, width], [*q_strides, 1], dtype)

    @T.macro
    def multiply(i, blocks, kv_ready, valid, q_shared, kv_shared, score):
        stage = i % STAGES
        if i < blocks:
            T.barrier_wait(kv_ready[stage], (i // STAGES) & 1)
        for h, k in T.Parallel(HB, KB):
            score[h, k] = T.if_then_else(valid[stage, k] != 0, 0.0, -T.infinity(accum))
        T.wgmma_gemm(q_shared, kv_shared[stage, :, :], score, transpose_B=True)

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
            next_score = T.alloc_fragment([HB, KB], accum)
            row_max = T.alloc_fragment([HB], accum)
            new_max = T.alloc_fragment([HB], accum)
            row_sum = T.alloc_fragment([HB], accum)
            block_sum = T.alloc_fragment([HB], accum)
            alpha = T.alloc_fragment([HB], accum)
            out_left0 = T.alloc_fragment([HB, half // 2], accum)
            out_left1 = T.alloc_fragment([HB, half // 2], accum)
            out_right0 = T.alloc_fragment([HB, half // 2], accum)
            out_right1 = T.alloc_fragment([HB, half // 2], accum)

            q_ready = T.alloc_barrier(arrive_count=128)
            kv_ready = T.alloc_barrier(arrive_count=[256] * STAGES)
            kv_free = T.alloc_barrier(arrive_count=[256] * STAGES)
            p_ready = T.alloc_barrier(arrive_count=128)
            p_free = T.alloc_barrier(arrive_count=256)

            head_blocks = T.ceildiv(heads, HB)
            row = T.alloc_var(T.int32, init=T.truncdiv(x, head_blocks))
            h0 = T.alloc_var(T.int32, init=T.truncmod(x, head_blocks) * HB)
            blocks = T.ceildiv(Extent[b, row], KB)
            log2_scale = scale * LOG2E
            tx = T.get_thread_binding()

            if tx < 128:
                T.set_max_nreg(144, 1)
                T.tma_copy(Q[b, row, h0 : h0 + HB, :], q_shared, barrier=q_ready)
                T.barrier_arrive(q_ready)
                T.fill(row_sum, 0)
                T.fill(row_max, -(2.0**30))
                T.barrier_wait(q_ready, 0)
                multiply(0, blocks, kv_ready, valid, q_shared, kv_shared, next_score)
                T.wait_wgmma(0)
                for i in T.serial(blocks):
                    T.copy(next_score, score)
                    # The product of the next block runs while the softmax of this one does. Behind the last block it is
                    # taken on what lies in the stage, and dropped: a branch would make ptxas serialise the products.
                    multiply(i + 1, blocks, kv_ready, valid, q_shared, kv_shared, next_score)
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
                    T.wait_wgmma(0)
                T.barrier_wait(p_free, (blocks & 1) ^ 1)
                for h in T.Parallel(HB):
                    norm_shared[h] = T.if_then_else(row_sum[h] > 0, 1.0 / row_sum[h], 0.0)
                T.barrier_arrive(p_ready)
                for h in T.Parallel(HB):
                    row_sum[h] = T.if_then_else(
                        row_sum[h] > 0, T.log2(row_sum[h]) * LN2 + row_max[h] * scale, -T.infinity(accum)
                    )
                T.copy(row_sum, Lse[b, row, h0 : h0 + HB])
            elif tx >= 128 and tx < 256:
                T.set_max_nreg(160, 1)
                T.fill(out_left0, 0)
                T.fill(out_left1, 0)
                for i in T.serial(blocks):
                    stage = i % STAGES
                    T.barrier_wait(p_ready, i & 1)
                    if T.any_sync(alpha_shared[(tx - 128) // 32 * 16 + tx % 16] != 1.0) != 0:
                        for h, d in T.Parallel(HB, half // 2):
                            out_left0[h, d] *= alpha_shared[h]
                            out_left1[h, d] *= alpha_shared[h]
                    T.wgmma_gemm(p_shared, kv_shared[stage, :, 0 : half // 2], out_left0)
                    T.wgmma_gemm(p_shared, kv_shared[stage, :, half // 2 : half], out_left1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free[stage])
                    T.barrier_arrive(p_free)
                T.barrier_wait(p_ready, blocks & 1)
                for h, d in T.Parallel(HB, half // 2):
                    out_left0[h, d] *= norm_shared[h]
                    out_left1[h, d] *= norm_shared[h]
                T.copy(out_left0, q_shared[:, 0 : half // 2])
                T.copy(out_left1, q_shared[:, half // 2 : half])
                T.fence_proxy_async()
                T.sync_threads(1, 128)
                T.copy(q_shared[:, :half], Out[b, row, h0 : h0 + HB, :half])
            elif tx >= 256 and tx < 384:
                T.set_max_nreg(160, 1)
                T.fill(out_right0, 0)
                T.fill(out_right1, 0)
                for i in T.serial(blocks):
                    stage = i % STAGES
                    T.barrier_wait(p_ready, i & 1)
                    if T.any_sync(alpha_shared[(tx - 256) // 32 * 16 + tx % 16] != 1.0) != 0:
                        for h, d in T.Parallel(HB, half // 2):
                            out_right0[h, d] *= alpha_shared[h]
                            out_right1[h, d] *= alpha_shared[h]
                    T.wgmma_gemm(p_shared, kv_shared[stage, :, half : half + half // 2], out_right0)
                    T.wgmma_gemm(p_shared, kv_shared[stage, :, half + half // 2 : value_width], out_right1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free[stage])
                    T.barrier_arrive(p_free)
                T.barrier_wait(p_ready, blocks & 1)
                for h, d in T.Parallel(HB, half // 2):
                    out_right0[h, d] *= norm_shared[h]
                    out_right1[h, d] *= norm_shared[h]
                T.copy(out_right0, q_shared[:, half : half + half // 2])
                T.copy(out_right1, q_shared[:, half + half // 2 : value_width])
                T.fence_proxy_async()
                T.sync_threads(2, 128)
                T.copy(q_shared[:, half:value_width], Out[b, row, h0 : h0 + HB, half:value_width])
            else:
                T.set_max_nreg(48, 0)
                ids = T.alloc_local([4], T.int32)
                lane = tx - 384
                for r in T.unroll(4):
                    k = r * 16 + lane // 8
                    ids[r] = -1
                    if k < topk:
                        ids[r] = Indices[b, row, k]
                for i in T.serial(blocks):
                    stage = i % STAGES
                    T.barrier_wait(kv_free[stage], ((i // STAGES) & 1) ^ 1)
                    for r in T.unroll(4):
                        slot = r * 16 + lane // 8
                        inside = (ids[r] >= 0) and (ids[r] < keys)
                        if lane % 8 == 0:
                            valid[stage, slot] = T.cast(inside, T.int32)
                        key = T.if_then_else(inside, ids[r], 0)
                        for u in T.unroll(width // 64):
                            T.ptx_cp_async(
                                T.access_ptr(kv_shared[stage, slot, 64 * u + lane % 8 * 8], "w", 8),
                                T.access_ptr(KV[b, key, 64 * u + lane % 8 * 8], "r", 8),
                                8,
                                inside,
                            )
                    T.cp_async_barrier_noinc(kv_ready[stage])
                    T.barrier_arrive(kv_ready[stage])
                    for r in T.unroll(4):
                        k = (i + 1) * KB + r * 16 + lane // 8
                        ids[r] = -1
                        if k < topk:
                            ids[r] = Indices[b, row, k]

    return sparse_mla_forward
