# The language of kernels is not typed.
# mypy: ignore-errors
"""Row sums of the backward's softmax: delta = sum over channels of out * dout, in fp32."""

import tilelang.language as T

THREADS = 256
VECTOR = 8  # 16-byte pieces


def delta(*, dim: int, dtype: str):
    """Build the kernel ``(out, dout, delta)``: ``out`` and ``dout [vectors, dim]``, writes ``delta [vectors]`` fp32."""
    lanes = dim // VECTOR
    per_block = THREADS // lanes
    vectors = T.dynamic("vectors")

    @T.prim_func
    def sparse_gqa_delta(
        out: T.Tensor((vectors, dim), dtype),
        dout: T.Tensor((vectors, dim), dtype),
        total: T.Tensor((vectors,), "float32"),
    ):
        with T.Kernel(T.ceildiv(vectors, per_block), threads=THREADS) as block:
            tx = T.get_thread_binding()
            o = T.alloc_local((VECTOR,), dtype)
            d = T.alloc_local((VECTOR,), dtype)
            acc = T.alloc_var("float32", init=0.0)
            at = T.min(block * per_block + tx // lanes, vectors - 1)
            for e in T.vectorized(VECTOR):
                o[e] = out[at, tx % lanes * VECTOR + e]
            for e in T.vectorized(VECTOR):
                d[e] = dout[at, tx % lanes * VECTOR + e]
            for e in T.unroll(VECTOR):
                acc += T.cast(o[e], "float32") * T.cast(d[e], "float32")
            for s in T.unroll(lanes.bit_length() - 1):
                acc += T.shfl_xor(acc, 1 << s)
            if tx % lanes == 0 and block * per_block + tx // lanes < vectors:
                total[at] = acc

    return sparse_gqa_delta
