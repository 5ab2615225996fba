# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""Plan of a sparse GQA call, built on the device: which blocks a tile of neighbouring rows reads, and who reads what.

For every tile of ``rows`` rows the plan lists the union of the rows' blocks, document by document and ascending in
each, with two bits for every row: it selected the block, or the block is its incomplete last one, of which it sees the
tokens up to itself. A union larger than ``limit`` entries is not worth sharing: the tile is marked -1 and its rows are
attended one by one.

A presence bitmap of the document's blocks in shared memory does it without sorting: set bits, count them in a prefix
sum, and an id's place in the list is the number of bits below it. Bits are combined by OR, so the order in which
threads arrive changes nothing.
"""

import tilelang.language as T

from mcore_patches.ops.tilelang_warp import atomic, below, popcount

THREADS = 256


def plan(*, rows: int, block_size: int, keys: int, entries: int, words: int):
    """Build the kernel ``(block_ids, row_pos, row_start, row_count, count, first, info, limit)``.

    ``block_ids [Tq, K]``, ``row_pos [Tq]``, ``row_start [Tq]``; writes ``row_count [Tq]`` (leading ids that may be
    valid), ``count [tiles]`` (entries, or -1), ``first [tiles, capacity]`` (an entry's first token) and
    ``info [tiles, capacity]`` (bit r: row r selected the block, bit 16 + r: it is row r's incomplete one); the last
    ``keys``-token step is filled with entries no row reads. A tile with a document of more than ``32 * words`` blocks
    is not shared. ``limit`` must not pass ``entries``, nor, rounded up to whole steps, ``capacity``.
    """
    step = keys // block_size
    tq, tiles, topk, capacity = T.dynamic("tq"), T.dynamic("tiles"), T.dynamic("topk"), T.dynamic("capacity")

    @T.prim_func
    def sparse_gqa_plan(
        block_ids: T.Tensor((tq, topk), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        first: T.Tensor((tiles, capacity), "int32"),
        info: T.Tensor((tiles, capacity), "int32"),
        limit: T.int32,
    ):
        with T.Kernel(tiles, threads=THREADS) as tile:
            bitmap = T.alloc_shared((words,), "int32")
            places = T.alloc_shared((words,), "int32")
            partial = T.alloc_shared((THREADS,), "int32")
            mask = T.alloc_shared((entries,), "int32")
            start = T.alloc_shared((rows,), "int32")
            full = T.alloc_shared((rows,), "int32")
            tail = T.alloc_shared((rows,), "int32")
            leads = T.alloc_shared((rows,), "int32")
            used = T.alloc_shared((rows,), "int32")
            tx = T.get_thread_binding()
            base = T.alloc_var("int32", init=0)
            blocks = T.alloc_var("int32")
            running = T.alloc_var("int32")
            bits = T.alloc_var("int32")

            if tx < rows:
                start[tx] = -1
                full[tx] = 0
                tail[tx] = 0
                used[tx] = 0
                if tile * rows + tx < tq:
                    if row_pos[tile * rows + tx] >= 0:
                        start[tx] = row_start[tile * rows + tx]
                        full[tx] = (row_pos[tile * rows + tx] + 1) // block_size
                        tail[tx] = (row_pos[tile * rows + tx] + 1) % block_size
            T.sync_threads()
            if tx < rows:
                leads[tx] = T.if_then_else(start[tx] >= 0, 1, 0)
                for r in T.serial(rows):
                    if r < tx and start[r] == start[tx]:
                        leads[tx] = 0
            T.sync_threads()

            for lead in T.serial(rows):
                if leads[lead] == 1:
                    blocks = 0
                    for r in T.serial(rows):
                        if start[r] == start[lead]:
                            blocks = T.max(blocks, full[r] + T.if_then_else(tail[r] > 0, 1, 0))
                    if blocks > 32 * words:
                        base = -1
                        blocks = 0
                    n_words = (blocks + 31) // 32
                    chunk = T.ceildiv(n_words, THREADS)
                    for w in T.serial(T.ceildiv(n_words - tx, THREADS)):
                        bitmap[w * THREADS + tx] = 0
                    T.sync_threads()
                    for r in T.serial(rows):
                        if start[r] == start[lead]:
                            for s in T.serial(T.ceildiv(topk - tx, THREADS)):
                                c = s * THREADS + tx
                                block = block_ids[tile * rows + r, c]
                                if block >= 0 and block < full[r]:
                                    if block < blocks:
                                        atomic("atomicOr", bitmap[block // 32], 1 << (block % 32))
                                    after = block_ids[tile * rows + r, T.min(c + 1, topk - 1)]
                                    if c == topk - 1 or after < 0 or after >= full[r]:
                                        atomic("atomicMax", used[r], c + 1)
                    if tx < rows:
                        if start[tx] == start[lead] and tail[tx] > 0 and full[tx] < blocks:
                            atomic("atomicOr", bitmap[full[tx] // 32], 1 << (full[tx] % 32))
                    T.sync_threads()
                    running = 0
                    for w in T.serial(chunk):
                        if tx * chunk + w < n_words:
                            running += popcount(bitmap[tx * chunk + w])
                    partial[tx] = running
                    T.sync_threads()
                    T.cumsum(partial, dim=0)
                    T.sync_threads()
                    total = partial[THREADS - 1]
                    if base >= 0:
                        if base + total > limit:
                            base = -1
                        else:
                            running = base + partial[tx] - running
                            for w in T.serial(chunk):
                                if tx * chunk + w < n_words:
                                    places[tx * chunk + w] = running
                                    bits = bitmap[tx * chunk + w]
                                    while bits != 0:
                                        first[tile, running] = (
                                            start[lead]
                                            + ((tx * chunk + w) * 32 + popcount((bits & (-bits)) - 1)) * block_size
                                        )
                                        mask[running] = 0
                                        bits = bits & (bits - 1)
                                        running += 1
                            T.sync_threads()
                            for r in T.serial(rows):
                                if start[r] == start[lead]:
                                    for s in T.serial(T.ceildiv(topk - tx, THREADS)):
                                        block = block_ids[tile * rows + r, s * THREADS + tx]
                                        if block >= 0 and block < full[r]:
                                            atomic(
                                                "atomicOr",
                                                mask[places[block // 32] + below(bitmap[block // 32], block % 32)],
                                                1 << r,
                                            )
                            if tx < rows:
                                if start[tx] == start[lead] and tail[tx] > 0:
                                    atomic(
                                        "atomicOr",
                                        mask[places[full[tx] // 32] + below(bitmap[full[tx] // 32], full[tx] % 32)],
                                        1 << (16 + tx),
                                    )
                            base += total
                    T.sync_threads()

            if base >= 0:
                for e in T.serial(T.ceildiv(base - tx, THREADS)):
                    info[tile, e * THREADS + tx] = mask[e * THREADS + tx]
                if tx < step and base + tx < T.ceildiv(base, step) * step:
                    first[tile, base + tx] = 0
                    info[tile, base + tx] = 0
            if tx == 0:
                count[tile] = base
            if tx < rows and tile * rows + tx < tq:
                row_count[tile * rows + tx] = used[tx]

    return sparse_gqa_plan
