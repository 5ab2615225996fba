# The language of kernels is not typed.
# mypy: ignore-errors
"""Adds up the partial sums of dK and dV that the union backward left for every token, in the order of tiles."""

import tilelang.language as T

from mcore_patches.ops.tilelang_warp import below, popcount, votes

TOKENS = 8  # tokens of a block of threads: eight pieces of 16 bytes side by side
BATCH = 4  # loads in flight


def reduce_partials(*, kv_heads: int, dim: int, keys: int, slots: int, dtype: str):
    """Build the kernel ``(partial, place, tiles_of, dk, dv, chunk)``.

    ``partial [steps, kv_heads, 2, dim / 8, keys, 8]`` and ``place [Tk, slots]`` as :mod:`tilelang_union_backward`
    writes them; ``place`` is left zeroed. ``tiles_of [chunks]``: how many tiles a chunk has; one without any costs next
    to nothing. Adds the first kind of sums to ``dk`` (without the scale) and the second to ``dv``, ``[Tk, kv_heads,
    dim]`` fp32.
    """
    pieces = dim // 8
    threads = TOKENS * pieces * 2
    warps = threads // 32
    tk, steps_kept, chunks = T.dynamic("tk"), T.dynamic("steps_kept"), T.dynamic("chunks")

    @T.prim_func
    def sparse_gqa_reduce_partials(
        partial: T.Tensor((steps_kept, kv_heads, 2, pieces, keys, 8), dtype),
        place: T.Tensor((tk, slots), "int32"),
        tiles_of: T.Tensor((chunks,), "int32"),
        dk: T.Tensor((tk, kv_heads, dim), "float32"),
        dv: T.Tensor((tk, kv_heads, dim), "float32"),
        chunk: T.int32,
    ):
        with T.Kernel(T.ceildiv(tk, TOKENS), threads=threads) as block:
            listed = T.alloc_shared((TOKENS, slots), "int32")
            length = T.alloc_shared((TOKENS,), "int32")
            tx = T.get_thread_binding()
            at = T.alloc_var("int32")
            found = T.alloc_var("int32")
            acc = T.alloc_local((8,), "float32")
            piece = T.alloc_local((BATCH, 8), dtype)

            if tiles_of[chunk] > 0:
                for w in T.serial(-(-TOKENS // warps)):
                    mine = w * warps + tx // 32
                    if mine < TOKENS:
                        at = 0
                        if block * TOKENS + mine < tk:
                            for s in T.serial(slots // 32):
                                found = place[block * TOKENS + mine, s * 32 + tx % 32]
                                filled = votes(found != 0)
                                if found != 0:
                                    place[block * TOKENS + mine, s * 32 + tx % 32] = 0
                                    listed[mine, at + below(filled, tx % 32)] = found
                                at += popcount(filled)
                        if tx % 32 == 0:
                            length[mine] = at
                T.sync_threads()

                mine = tx % TOKENS
                token = block * TOKENS + mine
                c = tx // TOKENS % pieces
                which = tx // (TOKENS * pieces)
                if length[mine] > 0:
                    for g in T.serial(kv_heads):
                        for e in T.unroll(8):
                            acc[e] = 0
                        for n in T.serial(T.ceildiv(length[mine], BATCH)):
                            for b in T.unroll(BATCH):
                                row = listed[mine, T.min(n * BATCH + b, length[mine] - 1)] - 1
                                for e in T.vectorized(8):
                                    piece[b, e] = partial[row // keys, g, which, c, row % keys, e]
                            for b in T.unroll(BATCH):
                                if n * BATCH + b < length[mine]:
                                    for e in T.unroll(8):
                                        acc[e] += T.cast(piece[b, e], "float32")
                        if which == 0:
                            for e in T.vectorized(8):
                                dk[token, g, c * 8 + e] += acc[e]
                        else:
                            for e in T.vectorized(8):
                                dv[token, g, c * 8 + e] += acc[e]

    return sparse_gqa_reduce_partials
