"""Hopper backward of sparse MLA: one query row and 64 heads a block, dKV by fp32 atomics."""

from __future__ import annotations

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634

HEADS_PER_BLOCK = 64  # the M of one wgmma
KEYS_PER_BLOCK = 64

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


def delta_kernel(value_width: int):
    """Builds the prim_func of Delta = sum(out * dout) over the value channels, fp32."""
    total = T.dynamic("total")

    @T.prim_func
    def sparse_mla_delta(
        Out: T.Tensor([total, value_width], T.bfloat16),
        DOut: T.Tensor([total, value_width], T.bfloat16),
        Delta: T.Tensor([total], T.float32),
    ):
        with T.Kernel(T.ceildiv(total, 4), threads=128) as block:
            tx = T.get_thread_binding()
            row = block * 4 + tx // 32
            lane = tx % 32
            acc = T.alloc_local([1], T.float32)
            o = T.alloc_local([8], T.bfloat16)
            do = T.alloc_local([8], T.bfloat16)
            acc[0] = 0.0
            if row < total:
                for c in T.unroll(value_width // 256):
                    for v in T.vectorized(8):
                        o[v] = Out[row, c * 256 + lane * 8 + v]
                    for v in T.vectorized(8):
                        do[v] = DOut[row, c * 256 + lane * 8 + v]
                    for v in T.unroll(8):
                        acc[0] += T.cast(o[v], T.float32) * T.cast(do[v], T.float32)
            for s in T.unroll(5):
                acc[0] += T.shfl_xor(acc[0], 16 >> s)
            if row < total and lane == 0:
                Delta[row] = acc[0]

    return sparse_mla_delta


def backward_kernel(width: int, value_width: int):
    """Builds the prim_func of dQ (bf16) and dKV (fp32, accumulated into a zeroed buffer)."""
    batch, rows, heads, keys, topk = (T.dynamic(n) for n in ("batch", "rows", "heads", "keys", "topk"))
    HB, KB = HEADS_PER_BLOCK, KEYS_PER_BLOCK
    tail = width - value_width
    dtype, accum = T.bfloat16, T.float32

    @T.macro
    def scatter(DKV, b, target, frag, column, columns):
        for k, d in T.Parallel(KB, columns // 2):
            if target[k] >= 0:
                T.atomic_addx2(DKV[b, target[k], column + d * 2], frag[k, d * 2])

    @T.prim_func
    def sparse_mla_backward(
        Q: T.Tensor([batch, rows, heads, width], dtype),
        KV: T.Tensor([batch, keys, width], dtype),
        DOut: T.Tensor([batch, rows, heads, value_width], dtype),
        Indices: T.Tensor([batch, rows, topk], T.int32),
        Lse: T.Tensor([batch, rows, heads], accum),
        Delta: T.Tensor([batch, rows, heads], accum),
        scale: T.float32,
        DQ: T.Tensor([batch, rows, heads, width], dtype),
        DKV: T.Tensor([batch, keys, width], accum),
    ):
        with T.Kernel(rows * T.ceildiv(heads, HB), batch, threads=384) as (x, b):
            q_shared = T.alloc_shared([HB, width], dtype)
            do_shared = T.alloc_shared([HB, value_width], dtype)
            kv_shared = T.alloc_shared([KB, width], dtype)
            p_shared = T.alloc_shared([HB, KB], dtype)
            ds_shared = T.alloc_shared([HB, KB], dtype)
            ids = T.alloc_shared([2, KB], T.int32)

            score = T.alloc_fragment([HB, KB], accum)
            dp = T.alloc_fragment([HB, KB], accum)
            lse = T.alloc_fragment([HB], accum)
            delta = T.alloc_fragment([HB], accum)
            dq_0 = T.alloc_fragment([HB, 128], accum)
            dq_1 = T.alloc_fragment([HB, 128], accum)
            dq_2 = T.alloc_fragment([HB, 128], accum)
            dq_3 = T.alloc_fragment([HB, 128], accum)
            target_left = T.alloc_fragment([KB], T.int32)
            target_right = T.alloc_fragment([KB], T.int32)
            dkv_left = T.alloc_fragment([KB, 128], accum)
            dkv_right = T.alloc_fragment([KB, 64], accum)

            q_ready = T.alloc_barrier(arrive_count=128)
            kv_ready = T.alloc_barrier(arrive_count=256)
            kv_free = T.alloc_barrier(arrive_count=256)
            p_ready = T.alloc_barrier(arrive_count=128)
            ds_ready = T.alloc_barrier(arrive_count=128)
            pds_free = T.alloc_barrier(arrive_count=256)

            blocks = T.ceildiv(topk, KB)
            head_blocks = T.ceildiv(heads, HB)
            row = T.alloc_var(T.int32, init=T.truncdiv(x, head_blocks))
            h0 = T.alloc_var(T.int32, init=T.truncmod(x, head_blocks) * HB)
            log2_scale = scale * LOG2E
            tx = T.get_thread_binding()

            if tx < 128:
                T.set_max_nreg(240, 1)
                T.tma_copy(Q[b, row, h0 : h0 + HB, :], q_shared, barrier=q_ready)
                T.tma_copy(DOut[b, row, h0 : h0 + HB, :], do_shared, barrier=q_ready)
                T.barrier_arrive(q_ready)
                for h in T.Parallel(HB):
                    lse[h] = T.infinity(accum)
                    if h0 + h < heads:
                        lse[h] = T.if_then_else(
                            Lse[b, row, h0 + h] == -T.infinity(accum), 0.0, Lse[b, row, h0 + h] * LOG2E
                        )
                T.fill(dq_0, 0)
                T.fill(dq_1, 0)
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(kv_ready, i & 1)
                    for h, k in T.Parallel(HB, KB):
                        score[h, k] = T.if_then_else(ids[i & 1, k] >= 0, 0.0, -T.infinity(accum))
                    T.wgmma_gemm(q_shared, kv_shared, score, transpose_B=True)
                    T.wait_wgmma(0)
                    for h, k in T.Parallel(HB, KB):
                        score[h, k] = T.exp2(score[h, k] * log2_scale - lse[h])
                    T.barrier_wait(pds_free, (i & 1) ^ 1)
                    T.copy(score, p_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    T.barrier_wait(p_ready, i & 1)
                    T.wgmma_gemm(p_shared, do_shared[:, 0:128], dkv_left, transpose_A=True, clear_accum=True)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 0:128], dq_0)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 128:256], dq_1)
                    T.wgmma_gemm(ds_shared, q_shared[:, 0:128], dkv_left, transpose_A=True)
                    T.wait_wgmma(1)
                    T.copy(ids[i & 1, :], target_left)
                    T.barrier_arrive(kv_free)
                    T.wait_wgmma(0)
                    scatter(DKV, b, target_left, dkv_left, 0, 128)
                    T.wgmma_gemm(p_shared, do_shared[:, 128:256], dkv_left, transpose_A=True, clear_accum=True)
                    T.wgmma_gemm(ds_shared, q_shared[:, 128:256], dkv_left, transpose_A=True)
                    T.wait_wgmma(0)
                    T.barrier_arrive(pds_free)
                    scatter(DKV, b, target_left, dkv_left, 128, 128)
                T.barrier_wait(pds_free, (blocks & 1) ^ 1)
                T.copy(dq_0, q_shared[:, 0:128])
                T.copy(dq_1, q_shared[:, 128:256])
                T.fence_proxy_async()
                T.sync_threads(1, 128)
                T.copy(q_shared[:, 0:256], DQ[b, row, h0 : h0 + HB, 0:256])
            elif tx >= 128 and tx < 256:
                T.set_max_nreg(240, 1)
                dq_tail = T.alloc_fragment([HB, 64], accum)
                for h in T.Parallel(HB):
                    delta[h] = 0.0
                    if h0 + h < heads:
                        delta[h] = Delta[b, row, h0 + h]
                T.fill(dq_2, 0)
                T.fill(dq_3, 0)
                if tail > 0:
                    T.fill(dq_tail, 0)
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(kv_ready, i & 1)
                    T.wgmma_gemm(do_shared, kv_shared[:, 0:value_width], dp, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(p_ready, i & 1)
                    for h, k in T.Parallel(HB, KB):
                        dp[h, k] = T.cast(p_shared[h, k], accum) * (dp[h, k] - delta[h]) * scale
                    T.copy(dp, ds_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 256:384], dq_2)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 384:512], dq_3)
                    if tail > 0:
                        T.wgmma_gemm(ds_shared, kv_shared[:, 512:576], dq_tail)
                    T.wgmma_gemm(p_shared, do_shared[:, 256:320], dkv_right, transpose_A=True, clear_accum=True)
                    T.wgmma_gemm(ds_shared, q_shared[:, 256:320], dkv_right, transpose_A=True)
                    T.wait_wgmma(2)
                    T.copy(ids[i & 1, :], target_right)
                    T.barrier_arrive(kv_free)
                    T.wait_wgmma(0)
                    scatter(DKV, b, target_right, dkv_right, 256, 64)
                    for c in T.unroll(3):
                        T.wgmma_gemm(
                            p_shared,
                            do_shared[:, 320 + c * 64 : 384 + c * 64],
                            dkv_right,
                            transpose_A=True,
                            clear_accum=True,
                        )
                        T.wgmma_gemm(ds_shared, q_shared[:, 320 + c * 64 : 384 + c * 64], dkv_right, transpose_A=True)
                        T.wait_wgmma(0)
                        if tail == 0 and c == 2:
                            T.barrier_arrive(pds_free)
                        scatter(DKV, b, target_right, dkv_right, 320 + c * 64, 64)
                    if tail > 0:
                        T.wgmma_gemm(ds_shared, q_shared[:, 512:576], dkv_right, transpose_A=True, clear_accum=True)
                        T.wait_wgmma(0)
                        T.barrier_arrive(pds_free)
                        scatter(DKV, b, target_right, dkv_right, 512, 64)
                T.barrier_wait(pds_free, (blocks & 1) ^ 1)
                T.copy(dq_2, q_shared[:, 256:384])
                T.copy(dq_3, q_shared[:, 384:512])
                if tail > 0:
                    T.copy(dq_tail, q_shared[:, 512:576])
                T.fence_proxy_async()
                T.sync_threads(2, 128)
                T.copy(q_shared[:, 256:width], DQ[b, row, h0 : h0 + HB, 256:width])
            else:
                T.set_max_nreg(24, 0)
                keep = T.alloc_local([4], T.int32)
                lane = tx - 256
                for r in T.unroll(4):
                    k = r * 16 + lane // 8
                    keep[r] = -1
                    if k < topk:
                        keep[r] = Indices[b, row, k]
                for i in T.serial(blocks):
                    T.barrier_wait(kv_free, (i & 1) ^ 1)
                    for r in T.unroll(4):
                        slot = r * 16 + lane // 8
                        inside = (keep[r] >= 0) and (keep[r] < keys)
                        if lane % 8 == 0:
                            ids[i & 1, slot] = T.if_then_else(inside, keep[r], -1)
                        key = T.if_then_else(inside, keep[r], 0)
                        for u in T.unroll(width // 64):
                            T.ptx_cp_async(
                                T.access_ptr(kv_shared[slot, 64 * u + lane % 8 * 8], "w", 8),
                                T.access_ptr(KV[b, key, 64 * u + lane % 8 * 8], "r", 8),
                                8,
                                inside,
                            )
                    T.cp_async_barrier_noinc(kv_ready)
                    T.barrier_arrive(kv_ready)
                    for r in T.unroll(4):
                        k = (i + 1) * KB + r * 16 + lane // 8
                        keep[r] = -1
                        if k < topk:
                            keep[r] = Indices[b, row, k]

    return sparse_mla_backward
