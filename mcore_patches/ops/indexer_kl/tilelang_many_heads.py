# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""What `tilelang_student` does, for more heads than a thread can hold the queries of: by the matrix units.

A block of threads takes a row. Its keys come by in tiles, twice: for the scores K Q^T, and, with their gradient G, for
dQ = G^T K and for G Q, what each of the row's pairs adds to its block's gradient. Here that is noted whole, in
bfloat16, as the products of so many heads are too many to be made again block by block. G is rounded to bfloat16, too.
"""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import MANY_HEADS as HEADS
from mcore_patches.ops.indexer_kl.design import MANY_HEADS_KEYS as KEYS
from mcore_patches.ops.indexer_kl.design import MANY_HEADS_THREADS as THREADS
from mcore_patches.ops.indexer_kl.tilelang_student import _over_threads
from mcore_patches.ops.tilelang_warp import LOWEST, PASS_CONFIGS  # noqa: F401


def many_heads_kernel(*, heads: int, channels: int, capacity: int, weighted: bool, relu: bool, wgmma: bool = True):
    """Build the kernel ``(q, k, weights, row_weight, blocks, mass, pairs, kl, dq, dweights, parts, index_scale)``.

    Arguments up to ``dweights`` are those of `student_kernel`, ``q``, ``k`` and ``dq`` bfloat16. At a pair's number
    ``parts [n_pairs, channels]`` bfloat16 gets what the pair adds to the gradient of its block. `wgmma`: multiply as
    only Hopper does.
    """
    dtype = "bfloat16"
    pieces = channels // 8  # of 16 bytes, of a vector
    vectors = THREADS // pieces  # that are loaded together
    warps = THREADS // 32
    tq, nb, tw, n_pairs, topk = (T.dynamic(n) for n in ("tq", "nb", "tw", "n_pairs", "topk"))
    full_row = T.GemmWarpPolicy.FullRow

    @T.macro
    def load(k, selected, s, tx, k_shared):
        """The keys of a tile of slots, zeros for none; then all threads may read them, by the matrix units too."""
        T.sync_threads()  # the last tile has been read
        for p in T.serial(KEYS // vectors):
            i = p * vectors + tx // pieces
            number = selected[s * KEYS + i]
            for e in T.vectorized(8):
                k_shared[i, tx % pieces * 8 + e] = T.if_then_else(
                    number >= 0, k[T.cast(T.max(number, 0), "int64"), tx % pieces * 8 + e], T.cast(0, dtype)
                )
        if wgmma:
            T.fence_proxy_async()
        T.sync_threads()

    @T.macro
    def score_keys(k_shared, q_shared, scores):
        if wgmma:
            T.wgmma_gemm(k_shared, q_shared, scores, transpose_B=True, clear_accum=True, policy=full_row)
            T.wait_wgmma(0)
        else:
            T.gemm(k_shared, q_shared, scores, transpose_B=True, clear_accum=True, policy=full_row)

    @T.prim_func
    def indexer_kl_many_heads(
        q: T.Tensor((tq, heads, channels), dtype),
        k: T.Tensor((nb, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        row_weight: T.Tensor((tq,), "float32"),
        blocks: T.Tensor((tq, topk), "int32"),
        mass: T.Tensor((tq, topk), "float32"),
        pairs: T.Tensor((tq, topk), "int32"),
        kl: T.Tensor((tq,), "float32"),
        dq: T.Tensor((tq, heads, channels), dtype),
        dweights: T.Tensor((tw, heads), "float32"),
        parts: T.Tensor((n_pairs, channels), dtype),
        index_scale: T.float32,
    ):
        with T.Kernel(tq, threads=THREADS) as row:
            q_shared = T.alloc_shared((HEADS, channels), dtype)
            k_shared = T.alloc_shared((KEYS, channels), dtype)
            g_shared = T.alloc_shared((HEADS, KEYS), dtype)
            selected = T.alloc_shared((capacity,), "int32")
            numbers = T.alloc_shared((capacity,), "int32")
            logit = T.alloc_shared((capacity,), "float32")  # later the gradient with respect to it
            weight = T.alloc_shared((HEADS,), "float32")
            scratch = T.alloc_shared((warps,), "float32")
            scores = T.alloc_fragment((KEYS, HEADS), "float32")
            flow = T.alloc_fragment((KEYS, HEADS), dtype)
            of_keys = T.alloc_fragment((KEYS,), "float32")
            part = T.alloc_fragment((KEYS, channels), "float32")
            dq_sum = T.alloc_fragment((HEADS, channels), "float32")
            dw_sum = T.alloc_fragment((KEYS, HEADS), "float32")
            dw = T.alloc_fragment((HEADS,), "float32")
            z = T.alloc_local((1,), "float32")
            e_max = T.alloc_local((1,), "float32")
            e_sum = T.alloc_local((1,), "float32")
            divergence = T.alloc_local((1,), "float32")
            score = T.alloc_var("float32")
            share = T.alloc_var("float32")

            tx = T.get_thread_binding()
            counts = row_weight[row]
            # Rows that do not count may hold anything.
            rounds = T.if_then_else(counts != 0, T.ceildiv(topk, KEYS), 0)
            T.fill(dq_sum, 0)
            if weighted:
                T.fill(dw_sum, 0)
            divergence[0] = 0

            for s in T.serial(capacity // THREADS):
                selected[s * THREADS + tx] = -1
                numbers[s * THREADS + tx] = -1
                if s * THREADS + tx < topk:
                    selected[s * THREADS + tx] = blocks[row, s * THREADS + tx]
                    numbers[s * THREADS + tx] = pairs[row, s * THREADS + tx]
            if tx < HEADS:
                weight[tx] = 0
                if tx < heads:
                    weight[tx] = weights[row, tx] if weighted else T.float32(1)
            for p in T.serial(HEADS // vectors):
                h = p * vectors + tx // pieces
                for e in T.vectorized(8):
                    q_shared[h, tx % pieces * 8 + e] = T.if_then_else(
                        h < heads, q[row, T.min(h, heads - 1), tx % pieces * 8 + e], T.cast(0, dtype)
                    )

            for s in T.serial(rounds):
                load(k, selected, s, tx, k_shared)
                score_keys(k_shared, q_shared, scores)
                for i, h in T.Parallel(KEYS, HEADS):
                    if relu:
                        # A maximum would drop NaN.
                        scores[i, h] = T.if_then_else(scores[i, h] < 0, 0.0, scores[i, h])
                    scores[i, h] = scores[i, h] * weight[h]
                T.reduce_sum(scores, of_keys, dim=1)
                for i in T.Parallel(KEYS):
                    logit[s * KEYS + i] = of_keys[i] * index_scale
            T.sync_threads()

            e_max[0] = LOWEST
            z[0] = 0
            for s in T.serial(T.if_then_else(counts != 0, T.ceildiv(topk, THREADS), 0)):
                if selected[s * THREADS + tx] >= 0:
                    z[0] += mass[row, s * THREADS + tx]
                    e_max[0] = T.max(e_max[0], logit[s * THREADS + tx])
            _over_threads("add", z, scratch, tx, THREADS)
            _over_threads("max", e_max, scratch, tx, THREADS)
            e_sum[0] = 0
            for s in T.serial(T.if_then_else(counts != 0, T.ceildiv(topk, THREADS), 0)):
                if selected[s * THREADS + tx] >= 0:
                    e_sum[0] += T.exp(logit[s * THREADS + tx] - e_max[0])
            _over_threads("add", e_sum, scratch, tx, THREADS)
            for s in T.serial(T.if_then_else(counts != 0, T.ceildiv(topk, THREADS), 0)):
                slot = s * THREADS + tx
                score = 0
                if selected[slot] >= 0:
                    # Without mass (Z = 0) a row adds nothing.
                    if z[0] != 0:
                        share = mass[row, slot] / z[0]
                        score = logit[slot] - e_max[0]
                        if share != 0:
                            divergence[0] += share * (T.log(share) - score + T.log(e_sum[0]))
                        score = (T.exp(score) / e_sum[0] - share) * counts * index_scale
                logit[slot] = score
            _over_threads("add", divergence, scratch, tx, THREADS)
            if tx == 0:
                kl[row] = divergence[0]

            for s in T.serial(rounds):
                load(k, selected, s, tx, k_shared)
                score_keys(k_shared, q_shared, scores)
                for i, h in T.Parallel(KEYS, HEADS):
                    if weighted:
                        dw_sum[i, h] += logit[s * KEYS + i] * (
                            T.if_then_else(scores[i, h] < 0, 0.0, scores[i, h]) if relu else scores[i, h]
                        )
                    flow[i, h] = logit[s * KEYS + i] * weight[h]
                    if relu:
                        flow[i, h] = T.if_then_else(scores[i, h] > 0, flow[i, h], T.cast(0, dtype))
                for i, h in T.Parallel(KEYS, HEADS):
                    g_shared[h, i] = flow[i, h]
                if wgmma:
                    T.fence_proxy_async()
                T.sync_threads()
                if wgmma:
                    T.wgmma_gemm(g_shared, k_shared, dq_sum, policy=full_row)
                    T.wgmma_gemm(flow, q_shared, part, clear_accum=True, policy=full_row)
                    T.wait_wgmma(0)
                else:
                    T.gemm(g_shared, k_shared, dq_sum, policy=full_row)
                    T.gemm(flow, q_shared, part, clear_accum=True, policy=full_row)
                T.sync_threads()  # the keys have been read
                for i, c in T.Parallel(KEYS, channels):
                    k_shared[i, c] = part[i, c]
                T.sync_threads()
                for p in T.serial(KEYS // vectors):
                    i = p * vectors + tx // pieces
                    if numbers[s * KEYS + i] >= 0:
                        for e in T.vectorized(8):
                            parts[T.cast(numbers[s * KEYS + i], "int64"), tx % pieces * 8 + e] = k_shared[
                                i, tx % pieces * 8 + e
                            ]
            for h, c in T.Parallel(HEADS, channels):
                if h < heads:
                    dq[row, h, c] = dq_sum[h, c]
            if weighted:
                T.reduce_sum(dw_sum, dw, dim=0)
                for h in T.Parallel(HEADS):
                    if h < heads:
                        dweights[row, h] = dw[h]

    return indexer_kl_many_heads
