"""Sparse MLA backward for any GPU with bf16 matrix units: one query row and a block of heads."""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

import tilelang
import tilelang.language as T

from mcore_patches.ops.device import Tiles

LOG2E = 1.4426950408889634

COLUMNS = 64  # of dKV at a time
LANES = 8  # threads that gather one key, 16 bytes each at a time

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    # Merging the buffers by lifetime has put live ones on top of each other in kernels of this kind.
    tilelang.PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: False,
}


def backward_kernel(width: int, value_width: int, reduction: str, tiles: Tiles):
    """Builds the prim_func of dQ and dKV. Arguments as of the Hopper kernel's, channels in their own order."""
    batch, rows, heads, keys, topk = (T.dynamic(n) for n in ("batch", "rows", "heads", "keys", "topk"))
    slots = T.dynamic("slots")
    kv_strides = [T.dynamic(f"kv_stride_{n}", "int64") for n in range(2)]
    HB, KB = tiles.heads, tiles.keys
    dtype, accum = T.bfloat16, T.float32
    dkv_dtype = accum if reduction == "atomic" else dtype

    rows_at_once = tiles.threads // LANES

    def destination(Slots, b, row, k, key, head_block, head_blocks):
        return key if reduction == "atomic" else Slots[b, row, k] * head_blocks + head_block

    @T.macro
    def scatter(DKV, b, target, dkv, column):
        if reduction == "atomic":
            for k, d in T.Parallel(KB, COLUMNS // 2):
                if target[k] >= 0:
                    T.atomic_addx2(DKV[b, target[k], column + d * 2], dkv[k, d * 2])
        else:
            for k, d in T.Parallel(KB, COLUMNS):
                if target[k] >= 0:
                    DKV[b, target[k], column + d] = dkv[k, d]

    @T.prim_func
    def sparse_mla_backward_plain(
        Q: T.Tensor([batch, rows, heads, width], dtype),
        KV: T.StridedTensor([batch, keys, width], [*kv_strides, 1], dtype),
        DOut: T.Tensor([batch, rows, heads, value_width], dtype),
        Indices: T.Tensor([batch, rows, topk], T.int32),
        Slots: T.Tensor([batch, rows, topk], T.int32),
        Extent: T.Tensor([batch, rows], T.int32),
        Lse: T.Tensor([batch, rows, heads], accum),
        Delta: T.Tensor([batch, rows, heads], accum),
        scale: T.float32,
        DQ: T.Tensor([batch, rows, heads, width], dtype),
        DKV: T.Tensor([batch, slots, width], dkv_dtype),
    ):
        with T.Kernel(rows * T.ceildiv(heads, HB), batch, threads=tiles.threads) as (x, b):
            q_shared = T.alloc_shared([HB, width], dtype)
            do_shared = T.alloc_shared([HB, value_width], dtype)
            kv_shared = T.alloc_shared([KB, width], dtype)
            p_shared = T.alloc_shared([HB, KB], dtype)
            ds_shared = T.alloc_shared([HB, KB], dtype)
            target = T.alloc_shared([KB], T.int32)
            score = T.alloc_fragment([HB, KB], accum)
            dp = T.alloc_fragment([HB, KB], accum)
            lse = T.alloc_fragment([HB], accum)
            delta = T.alloc_fragment([HB], accum)
            dq = T.alloc_fragment([HB, width], accum)
            dkv = T.alloc_fragment([KB, COLUMNS], accum)

            head_blocks = T.ceildiv(heads, HB)
            row = T.truncdiv(x, head_blocks)
            head_block = T.truncmod(x, head_blocks)
            h0 = head_block * HB
            log2_scale = scale * LOG2E
            tx = T.get_thread_binding()

            T.copy(Q[b, row, h0 : h0 + HB, :], q_shared)
            T.copy(DOut[b, row, h0 : h0 + HB, :], do_shared)
            for h in T.Parallel(HB):
                # A row without keys has an lse of -inf and no valid key below; heads behind the last get p = 0.
                lse[h] = T.infinity(accum)
                delta[h] = 0.0
                if h0 + h < heads:
                    lse[h] = T.if_then_else(Lse[b, row, h0 + h] == -T.infinity(accum), 0.0, Lse[b, row, h0 + h] * LOG2E)
                    delta[h] = Delta[b, row, h0 + h]
            T.fill(dq, 0)
            for i in T.serial(T.ceildiv(Extent[b, row], KB)):
                T.sync_threads()
                for r in T.unroll(KB // rows_at_once):
                    slot = r * rows_at_once + tx // LANES
                    k = T.min(i * KB + slot, topk - 1)
                    key = T.if_then_else(i * KB + slot < topk, Indices[b, row, k], -1)
                    inside = key >= 0 and key < keys
                    source = T.if_then_else(inside, key, 0)
                    if tx % LANES == 0:
                        target[slot] = T.if_then_else(
                            inside, destination(Slots, b, row, k, key, head_block, head_blocks), -1
                        )
                    for u in T.unroll(width // (8 * LANES)):
                        channel = 8 * (LANES * u + tx % LANES)
                        T.ptx_cp_async(
                            T.access_ptr(kv_shared[slot, channel], "w", 8),
                            T.access_ptr(KV[b, source, channel], "r", 8),
                            8,
                            inside,
                        )
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.sync_threads()
                for h, k in T.Parallel(HB, KB):
                    score[h, k] = T.if_then_else(target[k] >= 0, 0.0, -T.infinity(accum))
                T.gemm(q_shared, kv_shared, score, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(
                    do_shared,
                    kv_shared[:, 0:value_width],
                    dp,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullCol,
                    clear_accum=True,
                )
                for h, k in T.Parallel(HB, KB):
                    score[h, k] = T.exp2(score[h, k] * log2_scale - lse[h])
                    dp[h, k] = score[h, k] * (dp[h, k] - delta[h]) * scale
                T.copy(score, p_shared)
                T.copy(dp, ds_shared)
                T.gemm(ds_shared, kv_shared, dq, policy=T.GemmWarpPolicy.FullCol)
                for c in T.unroll(width // COLUMNS):
                    T.gemm(
                        ds_shared,
                        q_shared[:, c * COLUMNS : (c + 1) * COLUMNS],
                        dkv,
                        transpose_A=True,
                        policy=T.GemmWarpPolicy.FullCol,
                        clear_accum=True,
                    )
                    if c < value_width // COLUMNS:
                        T.gemm(
                            p_shared,
                            do_shared[:, c * COLUMNS : (c + 1) * COLUMNS],
                            dkv,
                            transpose_A=True,
                            policy=T.GemmWarpPolicy.FullCol,
                        )
                    scatter(DKV, b, target, dkv, c * COLUMNS)
            T.copy(dq, DQ[b, row, h0 : h0 + HB, :])

    return sparse_mla_backward_plain
