# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""KL of each row over the blocks that it selected, and what flows back to its query: a block of threads a row.

Scores are sums in fp32 by plain arithmetic: the indexer's few heads fill no matrix unit, and its keys come from the L2
cache. With u_h = sum_b dI_b [q_h . k_b > 0] k_b the gradients are dq_h = w_h u_h and dw_h = q_h . u_h. What each pair
of a row and a block contributes to the block's gradient is noted at the pair's number, for `tilelang_blocks`.
"""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import STUDENT_THREADS
from mcore_patches.ops.tilelang_warp import LOWEST, PASS_CONFIGS  # noqa: F401

IN_FLIGHT = 4  # keys that a thread loads before it uses the first


@T.macro
def _over_threads(op, value, scratch, tx, threads):
    """value[0] = its sum ("add") or maximum over all threads, in one order; `scratch [threads / 32]` is shared."""
    other = T.alloc_var("float32")
    for e in T.unroll(5):
        other = T.shfl_xor(value[0], 1 << e)
        value[0] = T.max(value[0], other) if op == "max" else value[0] + other
    T.sync_threads()
    if tx % 32 == 0:
        scratch[tx // 32] = value[0]
    T.sync_threads()
    value[0] = scratch[0]
    for w in T.unroll(1, threads // 32):
        value[0] = T.max(value[0], scratch[w]) if op == "max" else value[0] + scratch[w]


def student_kernel(
    *, heads: int, channels: int, capacity: int, dtype: str, weighted: bool, relu: bool, blocks_per_sm: int
):
    """Build the kernel ``(q, k, weights, row_weight, blocks, mass, pairs, kl, dq, dweights, pair_row,
    pair_coefficient, pair_heads, index_scale)``.

    ``q [Tq, heads, channels]``, ``k [Nb, channels]``, ``weights [Tq, heads]`` fp32 (not read unless `weighted`);
    ``row_weight [Tq]`` fp32, what the row counts in gradients (0: it is not looked at); ``blocks [Tq, topk]``, numbers
    of blocks, -1 for none; ``mass [Tq, topk]`` fp32, the attention's on them; ``pairs [Tq, topk]``, numbers of the
    pairs of rows and blocks. Writes ``kl [Tq]`` fp32, ``dq`` like ``q`` (fp32 for float16),
    ``dweights`` like ``weights``, and at a pair's number its row, the gradient with respect to the sum of its heads'
    products, and the heads (bits) through which that flows. `topk` is at most `capacity`.
    """
    dq_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    threads = STUDENT_THREADS
    warps = threads // 32
    lanes = channels // 8  # 16-byte pieces of a vector
    vectors = threads // lanes  # that are looked at together
    tq, nb, tw, n_pairs, topk = (T.dynamic(n) for n in ("tq", "nb", "tw", "n_pairs", "topk"))

    @T.macro
    def load(k, selected, slot, topk, tx, piece, u):
        """piece[u] = the thread's eighth of the key in a slot, zeros for none."""
        for e in T.vectorized(8):
            piece[u, e] = 0
        if slot < topk:
            if selected[slot] >= 0:
                for e in T.vectorized(8):
                    piece[u, e] = k[T.cast(selected[slot], "int64"), tx % lanes * 8 + e]

    @T.prim_func
    def indexer_kl_student(
        q: T.Tensor((tq, heads, channels), dtype),
        k: T.Tensor((nb, channels), dtype),
        weights: T.Tensor((tw, heads), "float32"),
        row_weight: T.Tensor((tq,), "float32"),
        blocks: T.Tensor((tq, topk), "int32"),
        mass: T.Tensor((tq, topk), "float32"),
        pairs: T.Tensor((tq, topk), "int32"),
        kl: T.Tensor((tq,), "float32"),
        dq: T.Tensor((tq, heads, channels), dq_dtype),
        dweights: T.Tensor((tw, heads), "float32"),
        pair_row: T.Tensor((n_pairs,), "int32"),
        pair_coefficient: T.Tensor((n_pairs,), "float32"),
        pair_heads: T.Tensor((n_pairs,), "int32"),
        index_scale: T.float32,
    ):
        with T.Kernel(tq, threads=threads) as row:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            selected = T.alloc_shared((capacity,), "int32")
            logit = T.alloc_shared((capacity,), "float32")  # later the gradient with respect to it
            teacher = T.alloc_shared((capacity,), "float32")
            through = T.alloc_shared((capacity,), "int32")
            scratch = T.alloc_shared((warps,), "float32")
            flow = T.alloc_shared((warps, heads, channels), "float32")
            query = T.alloc_local((heads, 8), "float32")
            half = T.alloc_local((8,), dtype)
            piece = T.alloc_local((IN_FLIGHT, 8), dtype)
            product = T.alloc_local((heads,), "float32")
            gradient = T.alloc_local((heads, 8), "float32")
            weight = T.alloc_local((heads,), "float32")
            z = T.alloc_local((1,), "float32")
            e_max = T.alloc_local((1,), "float32")
            e_sum = T.alloc_local((1,), "float32")
            divergence = T.alloc_local((1,), "float32")
            score = T.alloc_var("float32")
            share = T.alloc_var("float32")
            bits = T.alloc_var("int32")

            tx = T.get_thread_binding()
            warp = tx // 32
            counts = row_weight[row]
            rounds = T.ceildiv(topk, vectors * IN_FLIGHT)
            for h in T.unroll(heads):
                for e in T.unroll(8):
                    gradient[h, e] = 0
            divergence[0] = 0

            if counts != 0:
                for s in T.serial(T.ceildiv(topk, threads)):
                    if s * threads + tx < topk:
                        selected[s * threads + tx] = blocks[row, s * threads + tx]
                T.sync_threads()
                for h in T.unroll(heads):
                    weight[h] = weights[row, h] if weighted else T.float32(1)
                    for e in T.vectorized(8):
                        half[e] = q[row, h, tx % lanes * 8 + e]
                    for e in T.unroll(8):
                        query[h, e] = T.cast(half[e], "float32")
                e_max[0] = LOWEST
                z[0] = 0
                for s in T.serial(rounds):
                    for u in T.unroll(IN_FLIGHT):
                        load(k, selected, (s * IN_FLIGHT + u) * vectors + tx // lanes, topk, tx, piece, u)
                    for u in T.unroll(IN_FLIGHT):
                        slot = (s * IN_FLIGHT + u) * vectors + tx // lanes
                        for h in T.unroll(heads):
                            product[h] = 0
                            for e in T.unroll(8):
                                product[h] += query[h, e] * T.cast(piece[u, e], "float32")
                            for e in T.unroll(lanes.bit_length() - 1):
                                product[h] += T.shfl_xor(product[h], 1 << e)
                        score = 0
                        bits = 0
                        for h in T.unroll(heads):
                            if relu:
                                if product[h] > 0:
                                    bits = bits | (1 << h)
                                # A maximum would drop NaN.
                                product[h] = T.if_then_else(product[h] < 0, 0.0, product[h])
                            else:
                                bits = bits | (1 << h)
                            score += product[h] * weight[h]
                        if tx % lanes == 0 and slot < topk:
                            logit[slot] = score * index_scale
                            through[slot] = bits
                T.sync_threads()
                for s in T.serial(T.ceildiv(topk, threads)):
                    slot = s * threads + tx
                    if slot < topk:
                        share = 0
                        if selected[slot] >= 0:
                            share = mass[row, slot]
                            e_max[0] = T.max(e_max[0], logit[slot])
                        teacher[slot] = share
                        z[0] += share
                _over_threads("add", z, scratch, tx, threads)
                _over_threads("max", e_max, scratch, tx, threads)
                e_sum[0] = 0
                for s in T.serial(T.ceildiv(topk, threads)):
                    slot = s * threads + tx
                    if slot < topk:
                        if selected[slot] >= 0:
                            e_sum[0] += T.exp(logit[slot] - e_max[0])
                _over_threads("add", e_sum, scratch, tx, threads)
                for s in T.serial(T.ceildiv(topk, threads)):
                    slot = s * threads + tx
                    if slot < topk:
                        score = 0
                        if selected[slot] >= 0:
                            # Without mass (Z = 0) a row adds nothing.
                            if z[0] != 0:
                                share = teacher[slot] / z[0]
                                score = logit[slot] - e_max[0]
                                if share != 0:
                                    divergence[0] += share * (T.log(share) - score + T.log(e_sum[0]))
                                score = (T.exp(score) / e_sum[0] - share) * counts * index_scale
                            pair_row[pairs[row, slot]] = row
                            pair_coefficient[pairs[row, slot]] = score
                            pair_heads[pairs[row, slot]] = through[slot]
                        logit[slot] = score
                _over_threads("add", divergence, scratch, tx, threads)
                for s in T.serial(rounds):
                    for u in T.unroll(IN_FLIGHT):
                        load(k, selected, (s * IN_FLIGHT + u) * vectors + tx // lanes, topk, tx, piece, u)
                    for u in T.unroll(IN_FLIGHT):
                        slot = (s * IN_FLIGHT + u) * vectors + tx // lanes
                        if slot < topk:
                            for h in T.unroll(heads):
                                score = T.if_then_else(((through[slot] >> h) & 1) != 0, logit[slot], 0.0)
                                for e in T.unroll(8):
                                    gradient[h, e] += score * T.cast(piece[u, e], "float32")
            if tx == 0:
                kl[row] = divergence[0]
            T.sync_threads()  # what follows may lie in the same memory as what came before
            # Vectors side by side in a warp, then warps, in this order.
            for h in T.unroll(heads):
                for e in T.unroll(8):
                    for b in T.unroll((32 // lanes).bit_length() - 1):
                        gradient[h, e] += T.shfl_xor(gradient[h, e], lanes << b)
                    if tx % 32 < lanes:
                        flow[warp, h, tx % lanes * 8 + e] = gradient[h, e]
            T.sync_threads()
            for s in T.serial(-(-heads * channels // threads)):
                c = s * threads + tx
                if c < heads * channels:
                    score = 0
                    for w in T.unroll(warps):
                        score += flow[w, c // channels, c % channels]
                    if weighted:
                        flow[0, c // channels, c % channels] = score
                        score = score * weights[row, c // channels]
                        # Rows that do not count may hold anything.
                        score = T.if_then_else(counts != 0, score, 0.0)
                    dq[row, c // channels, c % channels] = score
            if weighted:
                T.sync_threads()
                for h in T.serial(heads):
                    share = 0
                    if warp == 0 and counts != 0:
                        for s in T.unroll(-(-channels // 32)):
                            share += flow[0, h, s * 32 + tx % 32] * T.cast(q[row, h, s * 32 + tx % 32], "float32")
                        for b in T.unroll(5):
                            share += T.shfl_xor(share, 1 << b)
                    if tx == 0:
                        dweights[row, h] = share

    return indexer_kl_student
