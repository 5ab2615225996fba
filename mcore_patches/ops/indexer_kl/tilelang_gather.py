# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
"""Each row's own masses out of those that the teacher computed for its tile."""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import TILE_ROWS
from mcore_patches.ops.tilelang_warp import PASS_CONFIGS  # noqa: F401

THREADS = 256


def gather_kernel(*, width: int):
    """Build the kernel ``(mass, places, out)``.

    ``mass [tiles, padded, TILE_ROWS]`` fp32 by `tilelang_teacher`, `width` of them for every place in a tile's list;
    ``places [Tq, K]``, -1 for none. Writes ``out [Tq, K * width]``, 0 where there is none.
    """
    tq, tiles, padded, topk, columns = (T.dynamic(n) for n in ("tq", "tiles", "padded", "topk", "columns"))

    @T.prim_func
    def indexer_kl_gather(
        mass: T.Tensor((tiles, padded, TILE_ROWS), "float32"),
        places: T.Tensor((tq, topk), "int32"),
        out: T.Tensor((tq, columns), "float32"),
    ):
        with T.Kernel(tq, threads=THREADS) as row:
            tx = T.get_thread_binding()
            value = T.alloc_var("float32")
            for s in T.serial(T.ceildiv(columns, THREADS)):
                c = s * THREADS + tx
                if c < columns:
                    value = 0
                    if places[row, c // width] >= 0:
                        value = mass[row // TILE_ROWS, places[row, c // width] * width + c % width, row % TILE_ROWS]
                    out[row, c] = value

    return indexer_kl_gather
