# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""KL of rows over all blocks that they see, and its gradient with respect to the scores.

A block of threads takes a tile of ``TILE_ROWS`` rows, as their masses lie side by side; a warp reads four blocks of
each. Masses and scores are read twice: for Z, the largest score and the sum of exponentials, then for the result.
"""

import tilelang.language as T

from mcore_patches.ops.block_topk.design import INVISIBLE
from mcore_patches.ops.indexer_kl.design import STUDENT_THREADS, TILE_ROWS
from mcore_patches.ops.tilelang_warp import LOWEST, PASS_CONFIGS  # noqa: F401


def rows_kernel():
    """Build the kernel ``(mass, keys, begin, count, row_first, row_count, row_weight, kl, gradient, index_scale)``.

    ``mass [tiles, padded, TILE_ROWS]`` fp32 of the ``count[tile]`` blocks from number ``begin[tile]`` on; ``keys [Tq,
    width]`` int32, scores as `block_topk.tilelang_score` writes them; a row sees ``row_count`` blocks from
    ``row_first`` on. Writes ``kl [Tq]`` and, for visible blocks, ``gradient [Tq, width]`` bfloat16: of the row's KL,
    times ``row_weight``, with respect to the sum of the heads' products, of which a score is ``index_scale`` times.
    """
    threads = STUDENT_THREADS
    warps = threads // 32
    abreast = threads // TILE_ROWS  # blocks of a row that are looked at together
    tq, tiles, padded, width = (T.dynamic(n) for n in ("tq", "tiles", "padded", "width"))

    @T.macro
    def read(keys, row, block, index_scale, score):
        """The score behind a key."""
        key = keys[row, block]
        score[0] = T.reinterpret("float32", T.if_then_else(key < 0, INVISIBLE - key, key)) * index_scale

    @T.prim_func
    def indexer_kl_rows(
        mass: T.Tensor((tiles, padded, TILE_ROWS), "float32"),
        keys: T.Tensor((tq, width), "int32"),
        begin: T.Tensor((tiles,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        row_first: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        row_weight: T.Tensor((tq,), "float32"),
        kl: T.Tensor((tq,), "float32"),
        gradient: T.Tensor((tq, width), "bfloat16"),
        index_scale: T.float32,
    ):
        with T.Kernel(tiles, threads=threads) as from_last:
            z_of = T.alloc_shared((warps, TILE_ROWS), "float32")
            largest_of = T.alloc_shared((warps, TILE_ROWS), "float32")
            sum_of = T.alloc_shared((warps, TILE_ROWS), "float32")
            score = T.alloc_local((1,), "float32")
            first = T.alloc_var("int32", init=0)
            seen = T.alloc_var("int32", init=0)
            counts = T.alloc_var("float32", init=0)
            z = T.alloc_var("float32", init=0)
            largest = T.alloc_var("float32", init=LOWEST)
            total = T.alloc_var("float32", init=0)
            share = T.alloc_var("float32")
            divergence = T.alloc_var("float32", init=0)

            tile = tiles - 1 - from_last
            tx = T.get_thread_binding()
            r = tx % 32 // 4
            row = tile * TILE_ROWS + r
            if row < tq:
                first = row_first[row]
                seen = row_count[row]
                counts = row_weight[row]
            rounds = T.ceildiv(count[tile], abreast)
            base = begin[tile]

            for s in T.serial(rounds):
                place = s * abreast + tx // 32 * 4 + tx % 4
                if base + place >= first and base + place < first + seen:
                    read(keys, row, base + place, index_scale, score)
                    z += mass[tile, place, r]
                    if score[0] > largest:
                        total = total * T.exp(largest - score[0]) + 1
                        largest = score[0]
                    else:
                        total += T.exp(score[0] - largest)
            for e in T.unroll(2):
                z += T.shfl_xor(z, 1 << e)
                share = T.max(largest, T.shfl_xor(largest, 1 << e))
                total = total * T.exp(largest - share)
                total += T.shfl_xor(total, 1 << e)
                largest = share
            if tx % 4 == 0:
                z_of[tx // 32, r] = z
                largest_of[tx // 32, r] = largest
                sum_of[tx // 32, r] = total
            T.sync_threads()
            z = 0
            total = 0
            for w in T.unroll(warps):
                z += z_of[w, r]
                largest = T.max(largest, largest_of[w, r])
            for w in T.unroll(warps):
                total += sum_of[w, r] * T.exp(largest_of[w, r] - largest)
            T.sync_threads()

            for s in T.serial(rounds):
                place = s * abreast + tx // 32 * 4 + tx % 4
                if base + place >= first and base + place < first + seen:
                    read(keys, row, base + place, index_scale, score)
                    score[0] -= largest
                    # Without mass (Z = 0) a row adds nothing.
                    share = 0
                    if z != 0:
                        share = mass[tile, place, r] / z
                        if share != 0:
                            divergence += share * (T.log(share) - score[0] + T.log(total))
                        share = (T.exp(score[0]) / total - share) * counts * index_scale
                    gradient[row, base + place] = share
            for e in T.unroll(2):
                divergence += T.shfl_xor(divergence, 1 << e)
            if tx % 4 == 0:
                z_of[tx // 32, r] = divergence
            T.sync_threads()
            if tx < TILE_ROWS:
                if tile * TILE_ROWS + tx < tq:
                    divergence = 0
                    for w in T.unroll(warps):
                        divergence += z_of[w, tx]
                    kl[tile * TILE_ROWS + tx] = divergence

    return indexer_kl_rows
