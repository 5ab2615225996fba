# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""Inverse of a selection, without sorting: for every window of 64 tokens, the rows that attend one of them, ascending.

A bit for every (token, row) says who attends what: documents off the grid, tails and causality end up in the bits. Bits
are combined by OR, and rows are listed in ascending order, so nothing depends on the order in which threads arrive.

A row's tokens are numbered in ascending order, its rank. The row kernel stores what it computes for a token by rank, so
that what a window needs of a row lies side by side.
"""

import tilelang.language as T

from mcore_patches.ops.sparse_gqa.design import WINDOW
from mcore_patches.ops.tilelang_warp import atomic, below, popcount, votes

WORD = 32
THREADS = 256
WARPS = THREADS // 32


def order_rows(*, rows: int, block_size: int, words: int):
    """Build the kernel ``(block_ids, row_pos, row_start, count, ordered, selected, bits, ranks, row0)``.

    Of the rows ``row0 + i`` that are not in a tile with a count >= 0: ``ordered [chunk, K]`` the complete blocks,
    ascending, ``selected [chunk]`` how many (0 for all other rows); in the zeroed ``bits [2 * windows, chunk]`` bit t
    of ``bits[w, i]`` where the row attends token ``32 w + t``; ``ranks [windows, chunk]`` the rank of the first token
    that the row attends in the window, unwritten where it attends none. ``words`` of 32 blocks are looked at in a pass.
    """
    names = ("tq", "topk", "tiles", "chunk", "bit_words", "windows")
    tq, topk, tiles, chunk, bit_words, windows = (T.dynamic(n) for n in names)

    @T.prim_func
    def sparse_gqa_order_rows(
        block_ids: T.Tensor((tq, topk), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        ordered: T.Tensor((chunk, topk), "int32"),
        selected: T.Tensor((chunk,), "int32"),
        bits: T.Tensor((bit_words, chunk), "int32"),
        ranks: T.Tensor((windows, chunk), "int32"),
        row0: T.int32,
    ):
        with T.Kernel(chunk, threads=THREADS) as i:
            bitmap = T.alloc_shared((words,), "int32")
            partial = T.alloc_shared((THREADS,), "int32")
            tx = T.get_thread_binding()
            n = T.alloc_var("int32", init=0)
            full = T.alloc_var("int32", init=0)
            tail = T.alloc_var("int32", init=0)
            at = T.alloc_var("int32")
            word = T.alloc_var("int32")
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            before = T.alloc_var("int32")
            row = row0 + i
            if row < tq:
                if count[row // rows] < 0 and row_pos[row] >= 0:
                    full = (row_pos[row] + 1) // block_size
                    tail = (row_pos[row] + 1) % block_size
            for part in T.serial(T.ceildiv(full, 32 * words)):
                base = part * 32 * words
                n_words = T.min(words, (full - base + 31) // 32)
                each = T.ceildiv(n_words, THREADS)
                for s in T.serial(T.ceildiv(n_words - tx, THREADS)):
                    bitmap[s * THREADS + tx] = 0
                T.sync_threads()
                for s in T.serial(T.ceildiv(topk - tx, THREADS)):
                    block = block_ids[row, s * THREADS + tx] - base
                    if block >= 0 and block < T.min(full - base, 32 * words):
                        atomic("atomicOr", bitmap[block // 32], 1 << (block % 32))
                T.sync_threads()
                at = 0
                for s in T.serial(each):
                    if tx * each + s < n_words:
                        at += popcount(bitmap[tx * each + s])
                partial[tx] = at
                T.sync_threads()
                T.cumsum(partial, dim=0)
                T.sync_threads()
                at = n + partial[tx] - at
                for s in T.serial(each):
                    if tx * each + s < n_words:
                        word = bitmap[tx * each + s]
                        while word != 0:
                            ordered[i, at] = base + (tx * each + s) * 32 + popcount((word & (-word)) - 1)
                            word = word & (word - 1)
                            at += 1
                n += partial[THREADS - 1]
                T.sync_threads()
            if tx == 0:
                selected[i] = n
            # Slot n is the incomplete block.
            for s in T.serial(T.ceildiv(n + 1 - tx, THREADS)):
                slot = s * THREADS + tx
                length = block_size
                first = row_start[T.min(row, tq - 1)] + full * block_size
                if slot < n:
                    first = row_start[row] + ordered[i, slot] * block_size
                else:
                    length = tail
                before = -1
                if slot > 0:
                    before = row_start[row] + ordered[i, slot - 1] * block_size + block_size - 1
                if length > 0:
                    run = (1 << length) - 1
                    T.atomic_or(bits[first // WORD, i], run << (first % WORD))
                    if first % WORD + length > WORD:
                        T.atomic_or(bits[first // WORD + 1, i], run >> (WORD - first % WORD))
                    if before < first // WINDOW * WINDOW:
                        ranks[first // WINDOW, i] = slot * block_size
                    if first % WINDOW + length > WINDOW:
                        ranks[first // WINDOW + 1, i] = slot * block_size + WINDOW - first % WINDOW

    return sparse_gqa_order_rows


def list_windows():
    """Build the kernel ``(bits, ranks, singles, listed, entries, chunk)``: the rows with a bit in a window, ascending.

    ``bits`` and ``ranks`` as `order_rows` writes them, the former left zeroed; ``singles [chunks]``: how many tiles of
    a chunk are not shared. Writes ``listed [windows]``, how many rows, and ``entries [windows, rows, 4]``: a row's
    number within the chunk, its two words of bits, and its rank.
    """
    words, windows, rows, chunks = T.dynamic("words"), T.dynamic("windows"), T.dynamic("rows"), T.dynamic("chunks")

    @T.prim_func
    def sparse_gqa_list_windows(
        bits: T.Tensor((words, rows), "int32"),
        ranks: T.Tensor((windows, rows), "int32"),
        singles: T.Tensor((chunks,), "int32"),
        listed: T.Tensor((windows,), "int32"),
        entries: T.Tensor((windows, rows, 4), "int32"),
        chunk: T.int32,
    ):
        with T.Kernel(windows, threads=THREADS) as w:
            sums = T.alloc_shared((2, WARPS), "int32")
            entry = T.alloc_local((4,), "int32")
            tx = T.get_thread_binding()
            warp = tx // 32
            at = T.alloc_var("int32", init=0)
            before = T.alloc_var("int32")
            if singles[chunk] > 0:
                for s in T.serial(T.ceildiv(rows, THREADS)):
                    i = s * THREADS + tx
                    entry[1] = 0
                    entry[2] = 0
                    if i < rows:
                        entry[1] = bits[2 * w, i]
                        entry[2] = bits[2 * w + 1, i]
                    attends = (entry[1] | entry[2]) != 0
                    attending = votes(attends)
                    if tx % 32 == 0:
                        sums[s % 2, warp] = popcount(attending)
                    T.sync_threads()
                    before = at
                    for n in T.unroll(WARPS):
                        if n < warp:
                            before += sums[s % 2, n]
                        at += sums[s % 2, n]
                    if attends:
                        bits[2 * w, i] = 0
                        bits[2 * w + 1, i] = 0
                        entry[0] = i
                        entry[3] = ranks[w, i]
                        for e in T.vectorized(4):
                            entries[w, before + below(attending, tx % 32), e] = entry[e]
            if tx == 0:
                listed[w] = at

    return sparse_gqa_list_windows
