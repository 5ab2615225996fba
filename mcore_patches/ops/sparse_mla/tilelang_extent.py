"""How far each row of ids reaches, so that the other kernels skip what lies behind."""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

import tilelang
import tilelang.language as T

PASS_CONFIGS = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}  # every access is guarded by hand
ROWS_PER_BLOCK = 4  # one warp each


def extent_kernel():
    """Builds the prim_func of Extent[row] = 1 + position of the row's last id inside [0, keys), 0 if there is none."""
    rows, topk = T.dynamic("rows"), T.dynamic("topk")

    @T.prim_func
    def sparse_mla_extent(
        Indices: T.Tensor([rows, topk], T.int32),
        keys: T.int32,
        Extent: T.Tensor([rows], T.int32),
    ):
        with T.Kernel(T.ceildiv(rows, ROWS_PER_BLOCK), threads=32 * ROWS_PER_BLOCK) as block:
            tx = T.get_thread_binding()
            row = block * ROWS_PER_BLOCK + tx // 32
            lane = tx % 32
            last = T.alloc_local([1], T.int32)
            last[0] = 0
            if row < rows:
                for i in T.serial(T.ceildiv(topk, 32)):
                    k = i * 32 + lane
                    key = T.if_then_else(k < topk, Indices[row, T.min(k, topk - 1)], -1)
                    if key >= 0 and key < keys:
                        last[0] = k + 1
            for s in T.unroll(5):
                last[0] = T.max(last[0], T.shfl_xor(last[0], 16 >> s))
            if row < rows and lane == 0:
                Extent[row] = last[0]

    return sparse_mla_extent
