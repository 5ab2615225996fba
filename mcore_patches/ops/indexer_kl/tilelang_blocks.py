# The language of kernels is not typed.
# mypy: ignore-errors
"""Gradient of the index keys: for each block the queries of the rows that selected it, in ascending order of rows."""

import tilelang.language as T

from mcore_patches.ops.tilelang_warp import PASS_CONFIGS  # noqa: F401

THREADS = 256
WARPS = THREADS // 32
IN_FLIGHT = 4  # pairs whose queries a warp loads before it uses the first


def blocks_kernel(*, heads: int, channels: int, dtype: str, weighted: bool):
    """Build the kernel ``(q, weights, counts, ends, pair_row, pair_coefficient, pair_heads, dk)``.

    ``q [Tq, heads, channels]``, ``weights [Tq, heads]`` fp32 (not read unless `weighted`). Pairs of rows and blocks are
    numbered by block, then by row: block b has ``counts[b]`` of them, the last is number ``ends[b] - 1``. Adds to ``dk
    [Nb, channels]`` fp32 the coefficient of each pair times the sum of its row's queries over the pair's heads (bits).
    """
    lanes = channels // 8  # 16-byte pieces of a vector
    abreast = 32 // lanes  # heads that a warp loads at once
    loads = -(-heads // abreast)
    tq, tw, nb, n_pairs = (T.dynamic(n) for n in ("tq", "tw", "nb", "n_pairs"))

    @T.prim_func
    def indexer_kl_blocks(
        q: T.Tensor((tq, heads, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        counts: T.Tensor((nb,), "int32"),
        ends: T.Tensor((nb,), "int32"),
        pair_row: T.Tensor((n_pairs,), "int32"),
        pair_coefficient: T.Tensor((n_pairs,), "float32"),
        pair_heads: T.Tensor((n_pairs,), "int32"),
        dk: T.Tensor((nb, channels), "float32"),
    ):
        with T.Kernel(nb, threads=THREADS) as block:
            parts = T.alloc_shared((WARPS, channels), "float32")
            piece = T.alloc_local((IN_FLIGHT, loads, 8), dtype)
            factor = T.alloc_local((IN_FLIGHT, loads), "float32")
            total = T.alloc_local((8,), "float32")
            at = T.alloc_var("int32")
            row = T.alloc_var("int32")
            bits = T.alloc_var("int32")
            coefficient = T.alloc_var("float32")
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            n = counts[block]
            first = ends[block] - n

            if n > 0:
                for e in T.unroll(8):
                    total[e] = 0
                for s in T.serial(T.ceildiv(n, WARPS * IN_FLIGHT)):
                    for u in T.unroll(IN_FLIGHT):
                        at = (s * IN_FLIGHT + u) * WARPS + warp
                        coefficient = 0
                        bits = 0
                        row = 0
                        if at < n:
                            row = pair_row[first + at]
                            coefficient = pair_coefficient[first + at]
                            bits = pair_heads[first + at]
                        for i in T.unroll(loads):
                            head = i * abreast + lane // lanes
                            factor[u, i] = 0
                            for e in T.vectorized(8):
                                piece[u, i, e] = 0
                            if ((bits >> head) & 1) != 0:
                                factor[u, i] = coefficient * weights[row, head] if weighted else coefficient
                                for e in T.vectorized(8):
                                    piece[u, i, e] = q[row, head, lane % lanes * 8 + e]
                    for u in T.unroll(IN_FLIGHT):
                        for i in T.unroll(loads):
                            for e in T.unroll(8):
                                total[e] += factor[u, i] * T.cast(piece[u, i, e], "float32")
                for e in T.unroll(8):
                    for b in T.unroll(abreast.bit_length() - 1):
                        total[e] += T.shfl_xor(total[e], lanes << b)
                    if lane < lanes:
                        parts[warp, lane * 8 + e] = total[e]
                T.sync_threads()
                if tx < channels:
                    coefficient = 0
                    for w in T.unroll(WARPS):
                        coefficient += parts[w, tx]
                    dk[block, tx] += coefficient

    return indexer_kl_blocks
