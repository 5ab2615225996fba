"""Plan of a sparse GQA call, built on the device: which blocks a tile of neighbouring rows reads, and who reads what.

For every tile of ``rows`` rows the plan lists the union of the selected blocks, document by document and ascending in
each, with a bit for every row that selected the block, then the rows' own incomplete blocks (the tails). A union larger
than ``limit`` entries is not worth sharing: the tile is marked -1 and its rows are attended one by one.

A presence bitmap of the document's blocks in shared memory does it without sorting: set bits, count them in a prefix
sum, and an id's place in the list is the number of bits below it. Bits are combined by OR, so the order in which threads
arrive changes nothing.
"""

import tilelang.language as T

THREADS = 256


def _popc(word):
    """Number of set bits; TileLang has no lowering of TVM's popcount to CUDA."""
    return T.call_extern("int32", "__popc", word)


def plan(*, rows: int, block_size: int, topk: int, keys: int, capacity: int, words: int):
    """Build the kernel ``(block_ids, row_pos, row_start, row_count, count, first, info, limit)``.

    ``block_ids [Tq, topk]``, ``row_pos [Tq]``, ``row_start [Tq]``; writes ``row_count [Tq]`` (leading ids that may be
    valid), ``count [tiles]`` (entries, or -1), ``first [tiles, capacity]`` (an entry's first token) and
    ``info [tiles, capacity]`` (row mask, plus the entry's number of tokens << 16); the last ``keys``-token step is filled
    with entries no row reads. Documents may hold up to ``32 * words`` blocks.
    """
    step = keys // block_size
    tq, tiles = T.dynamic("tq"), T.dynamic("tiles")

    @T.prim_func
    def kernel(
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
            below = T.alloc_shared((words,), "int32")
            partial = T.alloc_shared((THREADS,), "int32")
            mask = T.alloc_shared((capacity,), "int32")
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
                            blocks = T.max(blocks, full[r])
                    n_words = (blocks + 31) // 32
                    chunk = T.ceildiv(n_words, THREADS)
                    for w in T.serial(T.ceildiv(n_words - tx, THREADS)):
                        bitmap[w * THREADS + tx] = 0
                    T.sync_threads()
                    for s in T.serial(T.ceildiv(rows * topk, THREADS)):
                        r = (s * THREADS + tx) // topk
                        c = (s * THREADS + tx) % topk
                        if s * THREADS + tx < rows * topk and start[T.min(r, rows - 1)] == start[lead]:
                            block = block_ids[tile * rows + r, c]
                            if block >= 0 and block < full[r]:
                                T.atomic_or(bitmap[block // 32], 1 << (block % 32))
                                after = block_ids[tile * rows + r, T.min(c + 1, topk - 1)]
                                if c == topk - 1 or after < 0 or after >= full[r]:
                                    T.atomic_max(used[r], c + 1)
                    T.sync_threads()
                    running = 0
                    for w in T.serial(chunk):
                        if tx * chunk + w < n_words:
                            running += _popc(bitmap[tx * chunk + w])
                    partial[tx] = running
                    T.sync_threads()
                    T.cumsum(partial, dim=0)
                    T.sync_threads()
                    total = partial[THREADS - 1]
                    if base >= 0:
                        if base + total + rows > limit:
                            base = -1
                        else:
                            running = base + partial[tx] - running
                            for w in T.serial(chunk):
                                if tx * chunk + w < n_words:
                                    below[tx * chunk + w] = running
                                    bits = bitmap[tx * chunk + w]
                                    while bits != 0:
                                        first[tile, running] = (
                                            start[lead]
                                            + ((tx * chunk + w) * 32 + _popc((bits & (-bits)) - 1)) * block_size
                                        )
                                        mask[running] = 0
                                        bits = bits & (bits - 1)
                                        running += 1
                            T.sync_threads()
                            for s in T.serial(T.ceildiv(rows * topk, THREADS)):
                                r = (s * THREADS + tx) // topk
                                c = (s * THREADS + tx) % topk
                                if s * THREADS + tx < rows * topk and start[T.min(r, rows - 1)] == start[lead]:
                                    block = block_ids[tile * rows + r, c]
                                    if block >= 0 and block < full[r]:
                                        T.atomic_or(
                                            mask[
                                                below[block // 32]
                                                + _popc(bitmap[block // 32] & ((1 << (block % 32)) - 1))
                                            ],
                                            1 << r,
                                        )
                            base += total
                    T.sync_threads()

            if base >= 0:
                for e in T.serial(T.ceildiv(base - tx, THREADS)):
                    info[tile, e * THREADS + tx] = mask[e * THREADS + tx] | (block_size << 16)
                if tx == 0:
                    running = base
                    bits = 0
                    for r in T.serial(rows):
                        if start[r] >= 0:
                            bits = start[r]
                        if tail[r] > 0:
                            first[tile, running] = start[r] + full[r] * block_size
                            info[tile, running] = (1 << r) | (tail[r] << 16)
                            running += 1
                    count[tile] = running
                    while running % step != 0:
                        first[tile, running] = bits
                        info[tile, running] = 1 << 16
                        running += 1
            else:
                if tx == 0:
                    count[tile] = -1
            if tx < rows and tile * rows + tx < tq:
                row_count[tile * rows + tx] = used[tx]

    return kernel
