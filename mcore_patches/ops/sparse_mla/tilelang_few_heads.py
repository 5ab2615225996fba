"""Hopper backward of sparse MLA for up to 16 heads: keys are the 64-row operand, so that no matrix rows are empty.

Scores are made the other way round, [keys, heads]: P and dS stay in registers, left operands of P^T dO + dS^T Q. Two
groups take turns with blocks of 64 keys, each with a stage of its own, so that one adds to dKV while the other
multiplies; each holds a part of dQ^T [width, heads], and the parts are added at the end.
"""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

from typing import Any

import tilelang
import tilelang.language as T

from mcore_patches.ops.sparse_mla.tilelang_scatter import (
    ELEMENTS,
    KEYS_PER_BLOCK,
    PIECE,
    STORE_ONCE,
    element_type,
    group,
    place_type,
    scattering,
)

LOG2E = 1.4426950408889634
GROUPS = 2
HEAD_ROWS = 16  # more would not leave room for two stages of keys

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # every access is guarded by hand
}


def backward_kernel(width: int, value_width: int, reduction: str, strided: bool = False):
    """Builds the prim_func, for 16 heads at most, with arguments and results as `tilelang_backward.backward_kernel`."""
    batch, rows, heads, keys, topk = (T.dynamic(n) for n in ("batch", "rows", "heads", "keys", "topk"))
    slots = T.dynamic("slots")
    kv_strides = [T.dynamic(f"kv_stride_{n}", "int64") for n in range(2)]
    HR, KB = HEAD_ROWS, KEYS_PER_BLOCK
    dtype, accum = T.bfloat16, T.float32

    q_type: Any = T.Tensor([batch, rows, heads, width], dtype)
    dout_type: Any = T.Tensor([batch, rows, heads, value_width], dtype)
    if strided:
        q_strides, dout_strides = ([T.dynamic(f"{t}_stride_{n}", "int64") for n in range(3)] for t in ("q", "dout"))
        q_type = T.StridedTensor([batch, rows, heads, width], [*q_strides, 1], dtype)
        dout_type = T.StridedTensor([batch, rows, heads, value_width], [*dout_strides, 1], dtype)
    dkv_dtype = element_type(reduction)
    run = group(reduction) // 4
    scatter, copy_targets = scattering(reduction)

    def destination(Slots, b, row, k, key):
        return key if reduction == "atomic" else Slots[b, row, k]

    @T.macro
    def multiply(piece, column, p, ds, do_shared, q_shared):
        # Zeros, not clear_accum: so the compiler sees that what the registers held is dead.
        T.fill(piece, 0)
        if column < value_width:
            T.wgmma_gemm(p, do_shared[:, column : column + PIECE], piece)
        T.wgmma_gemm(ds, q_shared[:, column : column + PIECE], piece)

    @T.macro
    def consume(
        g,
        b,
        blocks,
        DKV,
        scale,
        targets,
        kv_ready,
        kv_free,
        q_shared,
        do_shared,
        kv_shared,
        ds_shared,
        lse_shared,
        delta_shared,
        score,
        dp,
        p,
        ds,
        dq,
        piece_0,
        piece_1,
        even,
        odd,
        mine,
        first,
        second,
    ):
        T.fill(dq, 0)
        for j in T.serial(T.ceildiv(blocks - g, GROUPS)):
            T.barrier_wait(kv_ready[g], j & 1)
            for k, h in T.Parallel(KB, HR):
                score[k, h] = T.if_then_else(targets[g, k] >= 0, 0.0, -T.infinity(accum))
            for k, h in T.Parallel(KB, HR):
                dp[k, h] = -delta_shared[h]
            T.wgmma_gemm(kv_shared[g, :, :], q_shared, score, transpose_B=True)
            T.wgmma_gemm(kv_shared[g, :, 0:value_width], do_shared, dp, transpose_B=True)
            T.wait_wgmma(0)
            for k, h in T.Parallel(KB, HR):
                score[k, h] = T.exp2(score[k, h] * (scale * LOG2E) - lse_shared[h])
            T.copy(score, p)
            for k, h in T.Parallel(KB, HR):
                dp[k, h] = T.cast(p[k, h], accum) * dp[k, h] * scale
            T.copy(dp, ds)
            T.copy(ds, ds_shared[g, :, :])
            T.fence_proxy_async()
            T.sync_threads(1 + g, 128)
            T.wgmma_gemm(kv_shared[g, :, :], ds_shared[g, :, :], dq, transpose_A=True)
            multiply(piece_0, 0, p, ds, do_shared, q_shared)
            copy_targets(DKV, b, targets, g, even, odd)
            T.wait_wgmma(0)
            T.barrier_arrive(kv_free[g])
            for n in T.unroll(width // PIECE // 2):
                multiply(piece_1, (2 * n + 1) * PIECE, p, ds, do_shared, q_shared)
                scatter(DKV, b, even, odd, piece_0, mine, first, second, 2 * n * PIECE)
                T.wait_wgmma(0)
                if (2 * n + 2) * PIECE < width:
                    multiply(piece_0, (2 * n + 2) * PIECE, p, ds, do_shared, q_shared)
                scatter(DKV, b, even, odd, piece_1, mine, first, second, (2 * n + 1) * PIECE)
                T.wait_wgmma(0)
            if width // PIECE % 2:
                scatter(DKV, b, even, odd, piece_0, mine, first, second, width - PIECE)

    @T.prim_func
    def sparse_mla_backward(
        Q: q_type,
        KV: T.StridedTensor([batch, keys, width], [*kv_strides, 1], dtype),
        DOut: dout_type,
        Indices: T.Tensor([batch, rows, topk], T.int32),
        Slots: T.Tensor([batch, rows, topk], T.int32),
        Extent: T.Tensor([batch, rows], T.int32),
        Lse: T.Tensor([batch, rows, heads], accum),
        Delta: T.Tensor([batch, rows, heads], accum),
        scale: T.float32,
        DQ: T.Tensor([batch, rows, heads, width], dtype),
        DKV: T.Tensor([batch, slots, width], dkv_dtype),
    ):
        with T.Kernel(rows, batch, threads=384, prelude=STORE_ONCE) as (row, b):
            q_shared = T.alloc_shared([HR, width], dtype)
            do_shared = T.alloc_shared([HR, value_width], dtype)
            kv_shared = T.alloc_shared([GROUPS, KB, width], dtype)
            ds_shared = T.alloc_shared([GROUPS, KB, HR], dtype)
            dq_part = T.alloc_shared([HR, width], accum)
            targets = T.alloc_shared([GROUPS, KB], T.int32)
            lse_shared = T.alloc_shared([HR], accum)
            delta_shared = T.alloc_shared([HR], accum)

            score_0 = T.alloc_fragment([KB, HR], accum)
            score_1 = T.alloc_fragment([KB, HR], accum)
            dp_0 = T.alloc_fragment([KB, HR], accum)
            dp_1 = T.alloc_fragment([KB, HR], accum)
            p_0 = T.alloc_fragment([KB, HR], dtype)
            p_1 = T.alloc_fragment([KB, HR], dtype)
            ds_0 = T.alloc_fragment([KB, HR], dtype)
            ds_1 = T.alloc_fragment([KB, HR], dtype)
            dq_0 = T.alloc_fragment([width, HR], accum)
            dq_1 = T.alloc_fragment([width, HR], accum)
            piece_00 = T.alloc_fragment([KB, PIECE], accum)
            piece_01 = T.alloc_fragment([KB, PIECE], accum)
            piece_10 = T.alloc_fragment([KB, PIECE], accum)
            piece_11 = T.alloc_fragment([KB, PIECE], accum)
            even_0 = T.alloc_local([2], place_type(reduction))
            odd_0 = T.alloc_local([2], place_type(reduction))
            even_1 = T.alloc_local([2], place_type(reduction))
            odd_1 = T.alloc_local([2], place_type(reduction))
            mine_0 = T.alloc_local([2 * run], accum)
            first_0 = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            second_0 = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            mine_1 = T.alloc_local([2 * run], accum)
            first_1 = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            second_1 = T.alloc_local([ELEMENTS // 2], dkv_dtype)

            q_ready = T.alloc_barrier(arrive_count=128)
            kv_ready = T.alloc_barrier(arrive_count=[256] * GROUPS)
            kv_free = T.alloc_barrier(arrive_count=[128] * GROUPS)
            part_ready = T.alloc_barrier(arrive_count=128)

            blocks = T.ceildiv(Extent[b, row], KB)
            tx = T.get_thread_binding()

            if tx < HR:
                lse_shared[tx] = T.infinity(accum)
                delta_shared[tx] = 0.0
                if tx < heads:
                    lse_shared[tx] = T.if_then_else(Lse[b, row, tx] == -T.infinity(accum), 0.0, Lse[b, row, tx] * LOG2E)
                    delta_shared[tx] = Delta[b, row, tx]
            T.sync_threads()

            if tx < 128:
                T.set_max_nreg(224, 1)
                T.tma_copy(Q[b, row, 0:HR, :], q_shared, barrier=q_ready)
                T.tma_copy(DOut[b, row, 0:HR, :], do_shared, barrier=q_ready)
                T.barrier_arrive(q_ready)
                T.barrier_wait(q_ready, 0)
                consume(
                    0, b, blocks, DKV, scale, targets, kv_ready, kv_free, q_shared, do_shared, kv_shared, ds_shared,
                    lse_shared, delta_shared, score_0, dp_0, p_0, ds_0, dq_0, piece_00, piece_01, even_0, odd_0, mine_0,
                    first_0, second_0,
                )  # fmt: skip
                T.barrier_wait(part_ready, 0)
                for d, h in T.Parallel(width, HR):
                    dq_0[d, h] += dq_part[h, d]
                # The other group does not read Q any more, nor do, behind this, the warps of this one.
                T.sync_threads(1, 128)
                for d, h in T.Parallel(width, HR):
                    q_shared[h, d] = T.cast(dq_0[d, h], dtype)
                T.fence_proxy_async()
                T.sync_threads(1, 128)
                T.copy(q_shared, DQ[b, row, 0:HR, :])
            elif tx < 256:
                T.set_max_nreg(224, 1)
                T.barrier_wait(q_ready, 0)
                consume(
                    1, b, blocks, DKV, scale, targets, kv_ready, kv_free, q_shared, do_shared, kv_shared, ds_shared,
                    lse_shared, delta_shared, score_1, dp_1, p_1, ds_1, dq_1, piece_10, piece_11, even_1, odd_1, mine_1,
                    first_1, second_1,
                )  # fmt: skip
                for d, h in T.Parallel(width, HR):
                    dq_part[h, d] = dq_1[d, h]
                T.barrier_arrive(part_ready)
            else:
                T.set_max_nreg(56, 0)
                keep = T.alloc_local([4], T.int32)
                target = T.alloc_local([4], T.int32)
                lane = tx - 256
                for r in T.unroll(4):
                    k = r * 16 + lane // 8
                    keep[r] = -1
                    if k < topk:
                        keep[r] = Indices[b, row, k]
                        target[r] = destination(Slots, b, row, k, keep[r])
                for i in T.serial(blocks):
                    T.barrier_wait(kv_free[i % GROUPS], ((i // GROUPS) & 1) ^ 1)
                    for r in T.unroll(4):
                        slot = r * 16 + lane // 8
                        inside = (keep[r] >= 0) and (keep[r] < keys)
                        if lane % 8 == 0:
                            targets[i % GROUPS, slot] = T.if_then_else(inside, target[r], -1)
                        key = T.if_then_else(inside, keep[r], 0)
                        for u in T.unroll(width // 64):
                            T.ptx_cp_async(
                                T.access_ptr(kv_shared[i % GROUPS, slot, 64 * u + lane % 8 * 8], "w", 8),
                                T.access_ptr(KV[b, key, 64 * u + lane % 8 * 8], "r", 8),
                                8,
                                inside,
                            )
                    T.cp_async_barrier_noinc(kv_ready[i % GROUPS])
                    T.barrier_arrive(kv_ready[i % GROUPS])
                    for r in T.unroll(4):
                        k = (i + 1) * KB + r * 16 + lane // 8
                        keep[r] = -1
                        if k < topk:
                            keep[r] = Indices[b, row, k]
                            target[r] = destination(Slots, b, row, k, keep[r])

    return sparse_mla_backward
