# The language of kernels is not typed.
# mypy: ignore-errors
"""Forward of sparse GQA one query row at a time, for tiles whose rows share too few blocks.

Gathering keys and values bounds this kernel, so the product is turned round to waste nothing on padding: scores are
``K Q^T`` (64 keys by ``group`` heads) and the output ``V^T P^T`` (``dim`` by ``group``), the keys and values being the
64-row operand and the few heads the narrow one. One block walks the rows of a tile, so that the gather of the next row
starts while the last one ends.

What a block does between two gathers has to be short. So probabilities are 2^(score - base) with a base that stays
until a score exceeds it by `TOLERATED`, in place of the maximum so far: a step then needs no reduction over its keys
and one barrier, at which a thread with such a score calls for a new base. Any base gives the same output, up to
rounding.
"""

import tilelang.language as T

LOG2E = 1.4426950408889634
LOWEST = -(2.0**30)
TOLERATED = 16.0  # in doublings; bf16 and fp32 keep their precision at 2^16, and sums of it are far from overflow
WARPGROUP = 128
COLS = 16  # heads of a KV head, the last one repeated: the least width of a matrix read along it
HEADS = COLS // 4  # of each key that a thread has


def row_forward(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    block_size: int,
    dtype: str,
    keys: int,
    k_stages: int,
    v_stages: int,
    blocks_per_sm: int,
):
    """Build the kernel ``(q, k, v, block_ids, row_pos, row_start, row_count, count, out, lse, scale_log2e)``.

    ``q [Tq, heads, dim]``, ``k`` and ``v [Tk, kv_heads, dim]``, ``block_ids [Tq, K]``, ``row_count [Tq]``: how many
    leading ids may be valid, ``count [tiles]``: tiles with a count >= 0 belong to the union kernel and are skipped
    here.
    """
    group = heads // kv_heads
    entries = keys // block_size
    lanes = dim // 8
    tokens_per_pass = WARPGROUP // lanes
    passes = keys // tokens_per_pass
    q_passes = -(-COLS * lanes // WARPGROUP)
    o_passes = -(-group * lanes // WARPGROUP)
    tq, tk, tiles, topk = T.dynamic("tq"), T.dynamic("tk"), T.dynamic("tiles"), T.dynamic("topk")

    def head_of(lane, n):
        """The n-th of the heads that a thread has, which is `lane` of four."""
        return n // 2 * 8 + lane * 2 + n % 2

    @T.macro
    def exponentials(score, base, p, scores, p_shared, slot):
        for n in T.unroll(2 * HEADS):
            p[n] = T.exp2(score[n] - base[n % HEADS])
        for i, c in T.Parallel(keys, 4):
            first = i // 8 % 2 * HEADS
            for t in T.unroll(2):
                for e in T.unroll(2):
                    scores[i, 8 * t + 2 * c + e] = p[first + 2 * t + e]
        T.copy(scores, p_shared[slot, :, :])

    @T.prim_func
    def sparse_gqa_row_forward(
        q: T.Tensor((tq, heads, dim), dtype),
        k: T.Tensor((tk, kv_heads, dim), dtype),
        v: T.Tensor((tk, kv_heads, dim), dtype),
        block_ids: T.Tensor((tq, topk), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        out: T.Tensor((tq, heads, dim), dtype),
        lse: T.Tensor((tq, heads), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(tiles * kv_heads, threads=2 * WARPGROUP) as program:
            # One KV head after the other: keys and values of both do not stay in the L2 cache.
            tile = T.alloc_var("int32", init=T.truncmod(program, tiles))
            g = T.alloc_var("int32", init=T.truncdiv(program, tiles))
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            q_shared = T.alloc_shared((COLS, dim), dtype)
            k_shared = T.alloc_shared((k_stages, keys, dim), dtype)
            v_shared = T.alloc_shared((v_stages, keys, dim), dtype)
            mask_shared = T.alloc_shared((k_stages, keys), "int32")
            # Two slots: a warp may write the tokens of the next step while another still reads those of this one.
            token_shared = T.alloc_shared((2, keys), "int32")
            p_shared = T.alloc_shared((2, keys, COLS), dtype)
            raised = T.alloc_shared((2,), "int32")
            warps_shared = T.alloc_shared((WARPGROUP // 32, COLS), "float32")
            k_ready = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * k_stages)
            v_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * v_stages)
            k_free = T.alloc_barrier(arrive_count=[WARPGROUP] * k_stages)
            v_free = T.alloc_barrier(arrive_count=[WARPGROUP] * v_stages)
            scores = T.alloc_fragment((keys, COLS), "float32")
            acc = T.alloc_fragment((dim, COLS), "float32")
            # A thread has two keys of a step and, of each, four heads: 8 * t + 2 * c + e, at 2 * t + e.
            score = T.alloc_local((2 * HEADS,), "float32")
            p = T.alloc_local((2 * HEADS,), "float32")
            base = T.alloc_local((HEADS,), "float32")
            total = T.alloc_local((HEADS,), "float32")
            high = T.alloc_local((HEADS,), "float32")
            factor = T.alloc_local((HEADS,), "float32")
            over = T.alloc_local((1,), "float32")
            tokens = T.alloc_local((passes,), "int32")

            tx = T.get_thread_binding()
            it = T.alloc_var("int32", init=0)

            if count[tile] < 0:
                if tx < WARPGROUP:
                    # No step has number 0; the first row's barrier comes before any look.
                    if tx < 2:
                        raised[tx] = 0
                    for r in T.serial(rows):
                        row = tile * rows + r
                        if row < tq:
                            tail = T.if_then_else(row_pos[row] < 0, 0, (row_pos[row] + 1) % block_size)
                            steps = T.ceildiv(row_count[row] + T.if_then_else(tail > 0, 1, 0), entries)
                            for n in T.unroll(q_passes):
                                if n * WARPGROUP + tx < COLS * lanes:
                                    T.ptx_cp_async(
                                        T.access_ptr(q_shared[(n * WARPGROUP + tx) // lanes, tx % lanes * 8], "w", 8),
                                        T.access_ptr(
                                            q[
                                                row,
                                                g * group + T.min((n * WARPGROUP + tx) // lanes, group - 1),
                                                tx % lanes * 8,
                                            ],
                                            "r",
                                            8,
                                        ),
                                        8,
                                    )
                            T.ptx_commit_group()
                            T.ptx_wait_group(0)
                            T.fence_proxy_async()
                            T.sync_threads(1, WARPGROUP)
                            T.fill(acc, 0)
                            for n in T.unroll(HEADS):
                                base[n] = LOWEST
                                total[n] = 0
                            for _t in T.serial(steps):
                                ks = it % k_stages
                                vs = it % v_stages
                                T.barrier_wait(k_ready[ks], (it // k_stages) & 1)
                                T.wgmma_gemm(
                                    k_shared[ks, :, :],
                                    q_shared,
                                    scores,
                                    transpose_B=True,
                                    clear_accum=True,
                                    policy=T.GemmWarpPolicy.FullRow,
                                )
                                T.wait_wgmma(0)
                                for i, c in T.Parallel(keys, 4):
                                    first = i // 8 % 2 * HEADS
                                    seen = mask_shared[ks, i] != 0
                                    for t in T.unroll(2):
                                        for e in T.unroll(2):
                                            score[first + 2 * t + e] = T.if_then_else(
                                                seen, scores[i, 8 * t + 2 * c + e] * scale, -T.infinity("float32")
                                            )
                                T.barrier_arrive(k_free[ks])
                                # Nobody knows yet whether another thread calls, so these may be in vain.
                                over[0] = LOWEST
                                for n in T.unroll(HEADS):
                                    over[0] = T.max(over[0], T.max(score[n], score[HEADS + n]) - base[n])
                                if over[0] > TOLERATED:
                                    raised[it % 2] = it + 1
                                exponentials(score, base, p, scores, p_shared, it % 2)
                                T.fence_proxy_async()
                                T.sync_threads(1, WARPGROUP)
                                raised_in = raised[it % 2]
                                if raised_in == it + 1:
                                    for n in T.unroll(HEADS):
                                        high[n] = T.max(score[n], score[HEADS + n])
                                        for b in T.unroll(3):
                                            high[n] = T.max(high[n], T.shfl_xor(high[n], 4 << b))
                                    if tx % 32 < 4:
                                        for n in T.unroll(HEADS):
                                            warps_shared[tx // 32, head_of(tx % 4, n)] = high[n]
                                    T.sync_threads(1, WARPGROUP)
                                    for n in T.unroll(HEADS):
                                        high[n] = base[n]
                                        for w in T.unroll(WARPGROUP // 32):
                                            high[n] = T.max(high[n], warps_shared[w, head_of(tx % 4, n)])
                                        factor[n] = T.exp2(base[n] - high[n])
                                        base[n] = high[n]
                                        total[n] *= factor[n]
                                    for d, c in T.Parallel(dim, 4):
                                        for t in T.unroll(2):
                                            for e in T.unroll(2):
                                                acc[d, 8 * t + 2 * c + e] *= factor[2 * t + e]
                                    exponentials(score, base, p, scores, p_shared, it % 2)
                                    T.fence_proxy_async()
                                    T.sync_threads(1, WARPGROUP)
                                T.barrier_wait(v_ready[vs], (it // v_stages) & 1)
                                T.wgmma_gemm(
                                    v_shared[vs, :, :],
                                    p_shared[it % 2, :, :],
                                    acc,
                                    transpose_A=True,
                                    policy=T.GemmWarpPolicy.FullRow,
                                )
                                for n in T.unroll(HEADS):
                                    total[n] += p[n] + p[HEADS + n]
                                T.wait_wgmma(0)
                                T.barrier_arrive(v_free[vs])
                                it = it + 1
                            for n in T.unroll(HEADS):
                                for b in T.unroll(3):
                                    total[n] += T.shfl_xor(total[n], 4 << b)
                            if tx % 32 < 4:
                                for n in T.unroll(HEADS):
                                    warps_shared[tx // 32, head_of(tx % 4, n)] = total[n]
                            T.sync_threads(1, WARPGROUP)
                            for n in T.unroll(HEADS):
                                total[n] = 0
                                for w in T.unroll(WARPGROUP // 32):
                                    total[n] += warps_shared[w, head_of(tx % 4, n)]
                                factor[n] = T.if_then_else(total[n] > 0, 1.0 / total[n], 0)
                                if tx < 4 and head_of(tx, n) < group:
                                    lse[row, g * group + head_of(tx, n)] = T.if_then_else(
                                        total[n] > 0, (T.log2(total[n]) + base[n]) / LOG2E, -T.infinity("float32")
                                    )
                            for d, c in T.Parallel(dim, 4):
                                for t in T.unroll(2):
                                    for e in T.unroll(2):
                                        q_shared[8 * t + 2 * c + e, d] = acc[d, 8 * t + 2 * c + e] * factor[2 * t + e]
                            T.sync_threads(1, WARPGROUP)
                            for n in T.unroll(o_passes):
                                if n * WARPGROUP + tx < group * lanes:
                                    for e in T.vectorized(8):
                                        out[row, g * group + (n * WARPGROUP + tx) // lanes, tx % lanes * 8 + e] = (
                                            q_shared[(n * WARPGROUP + tx) // lanes, tx % lanes * 8 + e]
                                        )
                            T.sync_threads(1, WARPGROUP)
                else:
                    pt = tx - WARPGROUP
                    token = T.alloc_var("int32")
                    block = T.alloc_var("int32")
                    for r in T.serial(rows):
                        row = tile * rows + r
                        if row < tq:
                            pos = row_pos[row]
                            start = row_start[row]
                            full = T.if_then_else(pos < 0, 0, (pos + 1) // block_size)
                            tail = T.if_then_else(pos < 0, 0, (pos + 1) % block_size)
                            listed = row_count[row]
                            steps = T.ceildiv(listed + T.if_then_else(tail > 0, 1, 0), entries)
                            block = block_ids[row, T.min(T.min(pt, keys - 1) // block_size, topk - 1)]
                            for t in T.serial(steps):
                                ks = it % k_stages
                                vs = it % v_stages
                                slot = t * entries + T.min(pt, keys - 1) // block_size
                                token = -1
                                if slot < listed and block >= 0 and block < full:
                                    token = start + block * block_size + pt % block_size
                                if slot == listed and pt % block_size < tail:
                                    token = start + full * block_size + pt % block_size
                                T.barrier_wait(k_free[ks], ((it // k_stages) & 1) ^ 1)
                                if pt < keys:
                                    mask_shared[ks, pt] = T.if_then_else(token >= 0, 1, 0)
                                    token_shared[it % 2, pt] = token
                                T.sync_threads(2, WARPGROUP)
                                for n in T.unroll(passes // 4):
                                    for e in T.vectorized(4):
                                        tokens[4 * n + e] = token_shared[it % 2, pt // lanes * passes + 4 * n + e]
                                # Ids of the next step, which arrive while keys are fetched.
                                block = block_ids[row, T.min(slot + entries, topk - 1)]
                                for n in T.unroll(passes):
                                    key = pt // lanes * passes + n
                                    T.ptx_cp_async(
                                        T.access_ptr(k_shared[ks, key, pt % lanes * 8], "w", 8),
                                        T.access_ptr(k[T.max(tokens[n], 0), g, pt % lanes * 8], "r", 8),
                                        8,
                                        tokens[n] >= 0,
                                    )
                                T.barrier_arrive(k_ready[ks])
                                T.cp_async_barrier_noinc(k_ready[ks])
                                T.barrier_wait(v_free[vs], ((it // v_stages) & 1) ^ 1)
                                for n in T.unroll(passes):
                                    key = pt // lanes * passes + n
                                    T.ptx_cp_async(
                                        T.access_ptr(v_shared[vs, key, pt % lanes * 8], "w", 8),
                                        T.access_ptr(v[T.max(tokens[n], 0), g, pt % lanes * 8], "r", 8),
                                        8,
                                        tokens[n] >= 0,
                                    )
                                T.cp_async_barrier_noinc(v_ready[vs])
                                it = it + 1

    return sparse_gqa_row_forward
