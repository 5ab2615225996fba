"""Delta of the sparse MLA backward: what softmax takes off every score gradient."""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

import tilelang
import tilelang.language as T

PASS_CONFIGS = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}  # every access is guarded by hand
HEADS_PER_BLOCK = 4  # one warp each
CHANNELS_PER_LANE = 8  # 16 bytes


def delta_kernel(value_width: int):
    """Builds the prim_func of Delta = sum(out * dout) over the value channels (a multiple of 256), fp32.

    DOut may have any strides that are multiples of 8.
    """
    batch, rows, heads = (T.dynamic(n) for n in ("batch", "rows", "heads"))
    strides = [T.dynamic(f"dout_stride_{n}", "int64") for n in range(3)]
    lane_channels = CHANNELS_PER_LANE

    @T.prim_func
    def sparse_mla_delta(
        Out: T.Tensor([batch, rows, heads, value_width], T.bfloat16),
        DOut: T.StridedTensor([batch, rows, heads, value_width], [*strides, 1], T.bfloat16),
        Delta: T.Tensor([batch, rows, heads], T.float32),
    ):
        with T.Kernel(rows, T.ceildiv(heads, HEADS_PER_BLOCK), batch, threads=32 * HEADS_PER_BLOCK) as (row, block, b):
            tx = T.get_thread_binding()
            head = block * HEADS_PER_BLOCK + tx // 32
            lane = tx % 32
            total = T.alloc_local([1], T.float32)
            o = T.alloc_local([lane_channels], T.bfloat16)
            do = T.alloc_local([lane_channels], T.bfloat16)
            total[0] = 0.0
            if head < heads:
                for c in T.unroll(value_width // (32 * lane_channels)):
                    first = (c * 32 + lane) * lane_channels
                    o[T.Ramp(0, 1, lane_channels)] = Out[b, row, head, T.Ramp(first, 1, lane_channels)]
                    do[T.Ramp(0, 1, lane_channels)] = DOut[b, row, head, T.Ramp(first, 1, lane_channels)]
                    for v in T.unroll(lane_channels):
                        total[0] += T.cast(o[v], T.float32) * T.cast(do[v], T.float32)
            for s in T.unroll(5):
                total[0] += T.shfl_xor(total[0], 16 >> s)
            if head < heads and lane == 0:
                Delta[b, row, head] = total[0]

    return sparse_mla_delta
