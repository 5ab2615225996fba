"""Hopper backward of sparse MLA: one query row and 64 heads a block."""

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

HEADS_PER_BLOCK = 64  # the M of one wgmma

# What a row reads and writes for itself leaves the L2 cache first, so that keys and dKV, which all rows share, stay.
OF_ONE_ROW: Any = {"eviction_policy": "evict_first"}

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    # Every access below is guarded by hand; TileLang's own check of a slot would split 16-byte stores into four.
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}


def backward_kernel(width: int, value_width: int, reduction: str, strided: bool = False, head_rows: int = 64):
    """Builds the prim_func of dQ (bf16) and of the rows' parts of dKV, channels reordered by `tilelang_scatter.group`.

    With reduction "atomic" the parts are added to `DKV` [batch, keys, width], fp32, and `Slots` is `Indices`. With
    "store" the part of (row, k) and of head block j is stored, rounded to bf16, to `DKV` [1, slots, width] at
    Slots[row, k] * (number of head blocks) + j; a negative slot marks an id to ignore.
    Extent[b, row] is the number of leading ids of a row that are read; KV may have any strides that are multiples of 8,
    Q and DOut too if `strided`.
    The products that sum over heads take `head_rows` (32 or 64) of a block's heads; beyond them there must be none.
    """
    batch, rows, heads, keys, topk = (T.dynamic(n) for n in ("batch", "rows", "heads", "keys", "topk"))
    slots = T.dynamic("slots")
    kv_strides = [T.dynamic(f"kv_stride_{n}", "int64") for n in range(2)]
    HB, KB, HT = HEADS_PER_BLOCK, KEYS_PER_BLOCK, head_rows
    tail = width - value_width
    late = tail == 0 and reduction == "atomic"  # else registers do not suffice, or it does not pay
    dtype, accum = T.bfloat16, T.float32

    q_type: Any = T.Tensor([batch, rows, heads, width], dtype)
    dout_type: Any = T.Tensor([batch, rows, heads, value_width], dtype)
    if strided:
        q_strides, dout_strides = ([T.dynamic(f"{t}_stride_{n}", "int64") for n in range(3)] for t in ("q", "dout"))
        q_type = T.StridedTensor([batch, rows, heads, width], [*q_strides, 1], dtype)
        dout_type = T.StridedTensor([batch, rows, heads, value_width], [*dout_strides, 1], dtype)
    run = group(reduction) // 4
    dkv_dtype = element_type(reduction)
    scatter, copy_targets = scattering(reduction)

    @T.macro
    def multiply(piece, column, p_shared, ds_shared, do_shared, q_shared):
        # Zeros, not clear_accum: so the compiler sees that what the registers held is dead.
        T.fill(piece, 0)
        if column < value_width:
            T.wgmma_gemm(p_shared[0:HT, :], do_shared[0:HT, column : column + PIECE], piece, transpose_A=True)
        T.wgmma_gemm(ds_shared[0:HT, :], q_shared[0:HT, column : column + PIECE], piece, transpose_A=True)

    def destination(Slots, b, row, k, key, head_block, head_blocks):
        return key if reduction == "atomic" else Slots[b, row, k] * head_blocks + head_block

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
        with T.Kernel(rows * T.ceildiv(heads, HB), batch, threads=384, prelude=STORE_ONCE) as (x, b):
            q_shared = T.alloc_shared([HB, width], dtype)
            do_shared = T.alloc_shared([HB, value_width], dtype)
            kv_shared = T.alloc_shared([KB, width], dtype)
            p_shared = T.alloc_shared([HB, KB], dtype)
            ds_shared = T.alloc_shared([HB, KB], dtype)
            targets = T.alloc_shared([2, KB], T.int32)

            score = T.alloc_fragment([HB, KB], accum)
            dp = T.alloc_fragment([HB, KB], accum)
            lse = T.alloc_fragment([HB], accum)
            delta = T.alloc_fragment([HB], accum)
            dq_0 = T.alloc_fragment([HB, 128], accum)
            dq_1 = T.alloc_fragment([HB, 128], accum)
            dq_2 = T.alloc_fragment([HB, 128], accum)
            dq_3 = T.alloc_fragment([HB, 128], accum)
            even_left = T.alloc_local([2], place_type(reduction))
            odd_left = T.alloc_local([2], place_type(reduction))
            mine_left = T.alloc_local([2 * run], accum)
            first_left = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            second_left = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            even_right = T.alloc_local([2], place_type(reduction))
            odd_right = T.alloc_local([2], place_type(reduction))
            mine_right = T.alloc_local([2 * run], accum)
            first_right = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            second_right = T.alloc_local([ELEMENTS // 2], dkv_dtype)
            left_0 = T.alloc_fragment([KB, PIECE], accum)
            right_0 = T.alloc_fragment([KB, PIECE], accum)

            q_ready = T.alloc_barrier(arrive_count=128)
            kv_ready = T.alloc_barrier(arrive_count=256)
            kv_free = T.alloc_barrier(arrive_count=256)
            p_ready = T.alloc_barrier(arrive_count=128)
            ds_ready = T.alloc_barrier(arrive_count=128)
            pds_free = T.alloc_barrier(arrive_count=256)

            head_blocks = T.ceildiv(heads, HB)
            # The last row first: where rows see what is before them, short ones fill the last wave.
            row = T.alloc_var(T.int32, init=rows - 1 - T.truncdiv(x, head_blocks))
            head_block = T.truncmod(x, head_blocks)
            h0 = T.alloc_var(T.int32, init=head_block * HB)
            blocks = T.ceildiv(Extent[b, row], KB)
            log2_scale = scale * LOG2E
            tx = T.get_thread_binding()

            if tx < 128:
                T.set_max_nreg(232, 1)
                T.tma_copy(Q[b, row, h0 : h0 + HB, :], q_shared, barrier=q_ready, **OF_ONE_ROW)
                T.tma_copy(DOut[b, row, h0 : h0 + HB, :], do_shared, barrier=q_ready, **OF_ONE_ROW)
                T.barrier_arrive(q_ready)
                for h in T.Parallel(HB):
                    lse[h] = T.infinity(accum)
                    if h0 + h < heads:
                        lse[h] = T.if_then_else(
                            Lse[b, row, h0 + h] == -T.infinity(accum), 0.0, Lse[b, row, h0 + h] * LOG2E
                        )
                T.fill(dq_0, 0)
                T.fill(dq_1, 0)
                if late:
                    T.fill(left_0, 0)
                    for pair in T.unroll(2):
                        even_left[pair] = -1
                        odd_left[pair] = -1
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(kv_ready, i & 1)
                    for h, k in T.Parallel(HB, KB):
                        score[h, k] = T.if_then_else(targets[i & 1, k] >= 0, 0.0, -T.infinity(accum))
                    T.wgmma_gemm(q_shared, kv_shared, score, transpose_B=True)
                    if late:
                        # The last piece of the keys before, of which the first time there are none.
                        scatter(DKV, b, even_left, odd_left, left_0, mine_left, first_left, second_left, 192)
                    T.wait_wgmma(0)
                    for h, k in T.Parallel(HB, KB):
                        score[h, k] = T.exp2(score[h, k] * log2_scale - lse[h])
                    T.barrier_wait(pds_free, (i & 1) ^ 1)
                    T.copy(score, p_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    T.barrier_wait(p_ready, i & 1)
                    T.fill(left_0, 0)
                    T.wgmma_gemm(p_shared[0:HT, :], do_shared[0:HT, 0:PIECE], left_0, transpose_A=True)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(ds_shared[0:HT, :], q_shared[0:HT, 0:PIECE], left_0, transpose_A=True)
                    # dQ after the first piece: it is multiplied while that is added.
                    T.wgmma_gemm(ds_shared, kv_shared[:, 0:128], dq_0)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 128:256], dq_1)
                    copy_targets(DKV, b, targets, i & 1, even_left, odd_left)
                    T.wait_wgmma(2)
                    scatter(DKV, b, even_left, odd_left, left_0, mine_left, first_left, second_left, 0)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free)
                    multiply(left_0, 64, p_shared, ds_shared, do_shared, q_shared)
                    T.wait_wgmma(0)
                    scatter(DKV, b, even_left, odd_left, left_0, mine_left, first_left, second_left, 64)
                    multiply(left_0, 128, p_shared, ds_shared, do_shared, q_shared)
                    T.wait_wgmma(0)
                    scatter(DKV, b, even_left, odd_left, left_0, mine_left, first_left, second_left, 128)
                    multiply(left_0, 192, p_shared, ds_shared, do_shared, q_shared)
                    T.wait_wgmma(0)
                    T.barrier_arrive(pds_free)
                    if not late:
                        scatter(DKV, b, even_left, odd_left, left_0, mine_left, first_left, second_left, 192)
                if late:
                    scatter(DKV, b, even_left, odd_left, left_0, mine_left, first_left, second_left, 192)
                T.barrier_wait(pds_free, (blocks & 1) ^ 1)
                T.copy(dq_0, q_shared[:, 0:128])
                T.copy(dq_1, q_shared[:, 128:256])
                T.fence_proxy_async()
                T.sync_threads(1, 128)
                T.copy(q_shared[:, 0:256], DQ[b, row, h0 : h0 + HB, 0:256], **OF_ONE_ROW)
            elif tx >= 128 and tx < 256:
                T.set_max_nreg(240, 1)
                dq_tail = T.alloc_fragment([HB, tail], accum)
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
                    for h, k in T.Parallel(HB, KB):
                        dp[h, k] = -delta[h]
                    T.wgmma_gemm(do_shared, kv_shared[:, 0:value_width], dp, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(p_ready, i & 1)
                    for h, k in T.Parallel(HB, KB):
                        dp[h, k] = T.cast(p_shared[h, k], accum) * dp[h, k] * scale
                    T.copy(dp, ds_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    multiply(right_0, 256, p_shared, ds_shared, do_shared, q_shared)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 256:384], dq_2)
                    T.wgmma_gemm(ds_shared, kv_shared[:, 384:512], dq_3)
                    copy_targets(DKV, b, targets, i & 1, even_right, odd_right)
                    if tail > 0:
                        T.wgmma_gemm(ds_shared, kv_shared[:, 512:576], dq_tail)
                        T.wait_wgmma(3)
                    else:
                        T.wait_wgmma(2)
                    scatter(DKV, b, even_right, odd_right, right_0, mine_right, first_right, second_right, 256)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free)
                    # The longer turn is this group's, so the other begins with the next scores while this one adds.
                    if tail > 0:
                        multiply(right_0, 512, p_shared, ds_shared, do_shared, q_shared)
                        T.wait_wgmma(0)
                        scatter(DKV, b, even_right, odd_right, right_0, mine_right, first_right, second_right, 512)
                    multiply(right_0, 320, p_shared, ds_shared, do_shared, q_shared)
                    T.wait_wgmma(0)
                    scatter(DKV, b, even_right, odd_right, right_0, mine_right, first_right, second_right, 320)
                    multiply(right_0, 384, p_shared, ds_shared, do_shared, q_shared)
                    T.wait_wgmma(0)
                    scatter(DKV, b, even_right, odd_right, right_0, mine_right, first_right, second_right, 384)
                    multiply(right_0, 448, p_shared, ds_shared, do_shared, q_shared)
                    T.wait_wgmma(0)
                    T.barrier_arrive(pds_free)
                    scatter(DKV, b, even_right, odd_right, right_0, mine_right, first_right, second_right, 448)
                T.barrier_wait(pds_free, (blocks & 1) ^ 1)
                T.copy(dq_2, q_shared[:, 256:384])
                T.copy(dq_3, q_shared[:, 384:512])
                if tail > 0:
                    T.copy(dq_tail, q_shared[:, 512:576])
                T.fence_proxy_async()
                T.sync_threads(2, 128)
                T.copy(q_shared[:, 256:width], DQ[b, row, h0 : h0 + HB, 256:width], **OF_ONE_ROW)
            else:
                T.set_max_nreg(32, 0)
                keep = T.alloc_local([4], T.int32)
                target = T.alloc_local([4], T.int32)
                lane = tx - 256
                for r in T.unroll(4):
                    k = r * 16 + lane // 8
                    keep[r] = -1
                    if k < topk:
                        keep[r] = Indices[b, row, k]
                        target[r] = destination(Slots, b, row, k, keep[r], head_block, head_blocks)
                for i in T.serial(blocks):
                    T.barrier_wait(kv_free, (i & 1) ^ 1)
                    for r in T.unroll(4):
                        slot = r * 16 + lane // 8
                        inside = (keep[r] >= 0) and (keep[r] < keys)
                        if lane % 8 == 0:
                            targets[i & 1, slot] = T.if_then_else(inside, target[r], -1)
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
                            target[r] = destination(Slots, b, row, k, keep[r], head_block, head_blocks)

    return sparse_mla_backward
