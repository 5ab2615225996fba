"""Sparse MLA forward for any GPU with bf16 matrix units: one query row and a block of heads, software pipelined."""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

import tilelang
import tilelang.language as T

from mcore_patches.ops.device import Tiles

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

LANES = 8  # threads that gather one key, 16 bytes each at a time

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
}


def forward_kernel(width: int, value_width: int, tiles: Tiles):
    """Builds the prim_func of the forward. Arguments as of the Hopper kernel's, Q contiguous."""
    batch, rows, heads, keys, topk = (T.dynamic(n) for n in ("batch", "rows", "heads", "keys", "topk"))
    kv_strides = [T.dynamic(f"kv_stride_{n}", "int64") for n in range(2)]
    HB, KB = tiles.heads, tiles.keys
    dtype, accum = T.bfloat16, T.float32

    rows_at_once = tiles.threads // LANES

    @T.macro
    def gather(i, KV, Indices, b, row, kv_shared, valid, tx):
        for r in T.unroll(KB // rows_at_once):
            slot = r * rows_at_once + tx // LANES
            key = T.if_then_else(i * KB + slot < topk, Indices[b, row, T.min(i * KB + slot, topk - 1)], -1)
            inside = key >= 0 and key < keys
            source = T.if_then_else(inside, key, 0)
            if tx % LANES == 0:
                valid[i % 2, slot] = T.cast(inside, T.int32)
            for u in T.unroll(width // (8 * LANES)):
                channel = 8 * (LANES * u + tx % LANES)
                T.ptx_cp_async(
                    T.access_ptr(kv_shared[i % 2, slot, channel], "w", 8),
                    T.access_ptr(KV[b, source, channel], "r", 8),
                    8,
                    inside,
                )
        T.ptx_commit_group()

    @T.prim_func
    def sparse_mla_forward_plain(
        Q: T.Tensor([batch, rows, heads, width], dtype),
        KV: T.StridedTensor([batch, keys, width], [*kv_strides, 1], dtype),
        Indices: T.Tensor([batch, rows, topk], T.int32),
        Extent: T.Tensor([batch, rows], T.int32),
        scale: T.float32,
        Out: T.Tensor([batch, rows, heads, value_width], dtype),
        Lse: T.Tensor([batch, rows, heads], accum),
    ):
        with T.Kernel(rows * T.ceildiv(heads, HB), batch, threads=tiles.threads) as (x, b):
            q_shared = T.alloc_shared([HB, width], dtype)
            kv_shared = T.alloc_shared([2, KB, width], dtype)
            valid = T.alloc_shared([2, KB], T.int32)
            p_shared = T.alloc_shared([HB, KB], dtype)
            score = T.alloc_fragment([HB, KB], accum)
            out = T.alloc_fragment([HB, value_width], accum)
            row_max = T.alloc_fragment([HB], accum)
            old_max = T.alloc_fragment([HB], accum)
            row_sum = T.alloc_fragment([HB], accum)
            block_sum = T.alloc_fragment([HB], accum)
            alpha = T.alloc_fragment([HB], accum)

            head_blocks = T.ceildiv(heads, HB)
            row = T.truncdiv(x, head_blocks)
            h0 = T.truncmod(x, head_blocks) * HB
            log2_scale = scale * LOG2E
            tx = T.get_thread_binding()

            T.copy(Q[b, row, h0 : h0 + HB, :], q_shared)
            T.fill(out, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, -(2.0**30))
            blocks = T.ceildiv(Extent[b, row], KB)
            gather(0, KV, Indices, b, row, kv_shared, valid, tx)
            for i in T.serial(blocks):
                # Behind the last block nothing is in reach, and zeros are written: one group a step keeps the count.
                gather(i + 1, KV, Indices, b, row, kv_shared, valid, tx)
                T.ptx_wait_group(1)
                T.sync_threads()
                for h, k in T.Parallel(HB, KB):
                    score[h, k] = T.if_then_else(valid[i % 2, k] != 0, 0.0, -T.infinity(accum))
                T.gemm(q_shared, kv_shared[i % 2, :, :], score, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(row_max, old_max)
                T.reduce_max(score, row_max, dim=1, clear=False)
                for h in T.Parallel(HB):
                    alpha[h] = T.exp2((old_max[h] - row_max[h]) * log2_scale)
                for h, k in T.Parallel(HB, KB):
                    score[h, k] = T.exp2(score[h, k] * log2_scale - row_max[h] * log2_scale)
                T.reduce_sum(score, block_sum, dim=1)
                for h in T.Parallel(HB):
                    row_sum[h] = row_sum[h] * alpha[h] + block_sum[h]
                for h, d in T.Parallel(HB, value_width):
                    out[h, d] *= alpha[h]
                T.copy(score, p_shared)
                T.gemm(p_shared, kv_shared[i % 2, :, 0:value_width], out, policy=T.GemmWarpPolicy.FullCol)
                T.sync_threads()
            T.ptx_wait_group(0)
            # Equal to 0, not above it: a sum that is NaN makes out and lse NaN.
            for h, d in T.Parallel(HB, value_width):
                out[h, d] = T.if_then_else(row_sum[h] == 0, 0.0, out[h, d] / row_sum[h])
            for h in T.Parallel(HB):
                row_sum[h] = T.if_then_else(
                    row_sum[h] == 0, -T.infinity(accum), T.log2(row_sum[h]) * LN2 + row_max[h] * scale
                )
            T.copy(out, Out[b, row, h0 : h0 + HB, :])
            T.copy(row_sum, Lse[b, row, h0 : h0 + HB])

    return sparse_mla_forward_plain
