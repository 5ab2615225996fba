# The language of kernels is not typed.
# mypy: ignore-errors
"""Which blocks a tile of neighbouring rows selects between them, so that each is multiplied once for all its rows.

Blocks of all documents are numbered as in ``k_blocks``. A bitmap of those numbers in shared memory takes the place of
sorting: a block's place in the list is the number of bits below its own.
"""

import tilelang.language as T

from mcore_patches.ops.indexer_kl.design import TILE_ROWS, UNION_THREADS, UNION_WORDS
from mcore_patches.ops.tilelang_warp import PASS_CONFIGS, atomic, below, popcount, sum_before  # noqa: F401

LARGEST = 2**31 - 1


def union_kernel(*, ratio: int):
    """Build the kernel ``(block_ids, row_first, row_count, row_start, count, tokens, places, blocks)``.

    ``block_ids [Tq, K]``; of each row ``row_first`` (number of its document's first block), ``row_count`` (blocks that
    it sees, 0 for a row to leave out) and ``row_start`` (its document's first token), all ``[Tq]``. Writes ``count
    [tiles]``, how many blocks a tile of ``TILE_ROWS`` rows selects; ``tokens [tiles, TILE_ROWS * K]``, the first token
    of each, in ascending order of blocks; ``places [Tq, K]``, where an id's block is in that list; and ``blocks [Tq,
    K]``, its number in ``k_blocks``. Both are -1 for an id to ignore.
    """
    tq, topk, tiles, capacity = (T.dynamic(n) for n in ("tq", "topk", "tiles", "capacity"))
    threads, warps = UNION_THREADS, UNION_THREADS // 32

    @T.prim_func
    def indexer_kl_union(
        block_ids: T.Tensor((tq, topk), "int32"),
        row_first: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        tokens: T.Tensor((tiles, capacity), "int32"),
        places: T.Tensor((tq, topk), "int32"),
        blocks: T.Tensor((tq, topk), "int32"),
    ):
        with T.Kernel(tiles, threads=threads) as tile:
            bitmap = T.alloc_shared((UNION_WORDS,), "int32")
            before = T.alloc_shared((UNION_WORDS,), "int32")
            sums = T.alloc_shared((warps,), "int32")
            first = T.alloc_shared((TILE_ROWS,), "int32")
            seen = T.alloc_shared((TILE_ROWS,), "int32")
            limits = T.alloc_shared((2,), "int32")
            tx = T.get_thread_binding()
            total = T.alloc_local((1,), "int32")
            upto = T.alloc_local((1,), "int32")
            bit = T.alloc_var("int32")
            place = T.alloc_var("int32")
            block = T.alloc_var("int32")

            if tx == 0:
                limits[0] = LARGEST
                limits[1] = 0
            T.sync_threads()
            if tx < TILE_ROWS:
                seen[tx] = 0
                first[tx] = 0
                if tile * TILE_ROWS + tx < tq:
                    first[tx] = row_first[tile * TILE_ROWS + tx]
                    seen[tx] = row_count[tile * TILE_ROWS + tx]
                    if seen[tx] > 0:
                        atomic("atomicMin", limits[0], first[tx])
                        atomic("atomicMax", limits[1], first[tx] + seen[tx])
            T.sync_threads()
            base = limits[0]
            words = T.ceildiv(T.max(limits[1] - base, 0), 32)
            for s in T.serial(T.ceildiv(words, threads)):
                if s * threads + tx < words:
                    bitmap[s * threads + tx] = 0
            T.sync_threads()
            for r in T.serial(TILE_ROWS):
                if tile * TILE_ROWS + r < tq:
                    for s in T.serial(T.ceildiv(topk, threads)):
                        if s * threads + tx < topk:
                            block = block_ids[tile * TILE_ROWS + r, s * threads + tx]
                            if block >= 0 and block < seen[r]:
                                block = block + first[r] - base
                                atomic("atomicOr", bitmap[block // 32], 1 << (block % 32))
            T.sync_threads()

            per_thread = T.ceildiv(words, threads)
            total[0] = 0
            for w in T.serial(per_thread):
                if tx * per_thread + w < words:
                    total[0] += popcount(bitmap[tx * per_thread + w])
            sum_before(total, upto, sums, tx, threads)
            if tx == threads - 1:
                count[tile] = upto[0] + total[0]
            for w in T.serial(per_thread):
                if tx * per_thread + w < words:
                    before[tx * per_thread + w] = upto[0]
                    upto[0] += popcount(bitmap[tx * per_thread + w])
            T.sync_threads()

            for r in T.serial(TILE_ROWS):
                if tile * TILE_ROWS + r < tq:
                    for s in T.serial(T.ceildiv(topk, threads)):
                        if s * threads + tx < topk:
                            block = block_ids[tile * TILE_ROWS + r, s * threads + tx]
                            place = -1
                            if block >= 0 and block < seen[r]:
                                bit = block + first[r] - base
                                place = before[bit // 32] + below(bitmap[bit // 32], bit % 32)
                                tokens[tile, place] = row_start[tile * TILE_ROWS + r] + block * ratio
                            places[tile * TILE_ROWS + r, s * threads + tx] = place
                            blocks[tile * TILE_ROWS + r, s * threads + tx] = T.if_then_else(
                                place >= 0, block + first[r], -1
                            )

    return indexer_kl_union
