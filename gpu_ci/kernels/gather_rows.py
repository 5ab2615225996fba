"""Read the query and output-gradient rows of inverse lists into shared memory and do nothing with them.

The time is a floor for any backward that collects dK and dV by key block.
"""

import tilelang
import tilelang.language as T

THREADS = 256
IN_FLIGHT = 8


def kernel_source_bytes(heads: int, dim: int) -> int:
    """Bytes read for one list entry: one row of Q and of dO, all heads."""
    return 2 * heads * dim * 2


def gather_rows(heads: int, kv_heads: int, dim: int):
    group = heads // kv_heads
    lanes = dim // 8
    pieces = group * lanes
    tq, entries, lists, edges = T.dynamic("tq"), T.dynamic("entries"), T.dynamic("lists"), T.dynamic("edges")

    @T.prim_func
    def kernel(
        q: T.Tensor((tq, heads, dim), "bfloat16"),
        do: T.Tensor((tq, heads, dim), "bfloat16"),
        rows: T.Tensor((entries,), "int32"),
        bounds: T.Tensor((edges,), "int32"),
        sink: T.Tensor((lists, kv_heads), "float32"),
    ):
        with T.Kernel(kv_heads, lists, threads=THREADS) as (g, b):
            buffer = T.alloc_shared((IN_FLIGHT, 2 * group, dim), "bfloat16")
            tx = T.get_thread_binding()
            begin = bounds[b]
            end = bounds[b + 1]
            for e in T.serial(end - begin):
                row = rows[begin + e]
                slot = e % IN_FLIGHT
                for p in T.unroll(-(-pieces // THREADS)):
                    piece = p * THREADS + tx
                    if piece < pieces:
                        T.ptx_cp_async(
                            T.access_ptr(buffer[slot, piece // lanes, piece % lanes * 8], "w", 8),
                            T.access_ptr(q[row, g * group + piece // lanes, piece % lanes * 8], "r", 8),
                            8,
                        )
                        T.ptx_cp_async(
                            T.access_ptr(buffer[slot, group + piece // lanes, piece % lanes * 8], "w", 8),
                            T.access_ptr(do[row, g * group + piece // lanes, piece % lanes * 8], "r", 8),
                            8,
                        )
                T.ptx_commit_group()
                T.ptx_wait_group(IN_FLIGHT - 1)
            T.ptx_wait_group(0)
            T.sync_threads()
            if tx == 0:
                sink[b, g] = T.cast(buffer[0, 0, 0], "float32")

    return kernel


def build(heads: int, kv_heads: int, dim: int):
    return tilelang.compile(gather_rows(heads, kv_heads, dim), out_idx=None)
