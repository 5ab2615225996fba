# The language of kernels is not typed.
# mypy: ignore-errors
# A condition that guards an access must not be joined with it: kernels evaluate both.
# ruff: noqa: SIM102
"""Inverse of a selection, without sorting: for every window of tokens, the rows that attend one of them, ascending.

A bit for every (token, row) says who attends what: documents off the grid, tails and causality end up in the bits. Bits
are combined by OR, and rows are listed in ascending order, so nothing depends on the order in which threads arrive.
"""

import tilelang.language as T

WORD = 32
THREADS = 256
WARPS = THREADS // 32


def mark_windows(*, rows: int, block_size: int):
    """Build the kernel ``(block_ids, row_pos, row_start, row_count, count, bits, row0)``.

    Sets, in the zeroed ``bits [words, chunk]``, bit t of ``bits[w, i]`` where row ``row0 + i`` attends token ``32 w +
    t``. ``row_count [Tq]`` and ``count [tiles]`` come from the plan: rows of tiles with a count >= 0 set nothing.
    """
    tq, topk, tiles, words, chunk = (T.dynamic(n) for n in ("tq", "topk", "tiles", "words", "chunk"))

    @T.prim_func
    def sparse_gqa_mark_windows(
        block_ids: T.Tensor((tq, topk), "int32"),
        row_pos: T.Tensor((tq,), "int32"),
        row_start: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        count: T.Tensor((tiles,), "int32"),
        bits: T.Tensor((words, chunk), "int32"),
        row0: T.int32,
    ):
        with T.Kernel(chunk, threads=THREADS) as i:
            tx = T.get_thread_binding()
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            row = row0 + i
            if row < tq:
                if count[row // rows] < 0 and row_pos[row] >= 0:
                    full = (row_pos[row] + 1) // block_size
                    tail = (row_pos[row] + 1) % block_size
                    for s in T.serial(T.ceildiv(row_count[row] + 1, THREADS)):
                        slot = s * THREADS + tx
                        length = 0
                        first = 0
                        if slot < row_count[row]:
                            block = block_ids[row, slot]
                            if block >= 0 and block < full:
                                first = row_start[row] + block * block_size
                                length = block_size
                        if slot == row_count[row]:
                            first = row_start[row] + full * block_size
                            length = tail
                        if length > 0:
                            run = (1 << length) - 1
                            T.atomic_or(bits[first // WORD, i], run << (first % WORD))
                            if first % WORD + length > WORD:
                                T.atomic_or(bits[first // WORD + 1, i], run >> (WORD - first % WORD))

    return sparse_gqa_mark_windows


def list_windows():
    """Build the kernel ``(bits, listed, lists)``: the rows with a bit in a window, two words, in ascending order.

    ``bits [2 * windows, chunk]``; writes ``listed [windows]``, how many rows, and ``lists [windows, chunk]``, their
    numbers within the chunk.
    """
    words, windows, chunk = T.dynamic("words"), T.dynamic("windows"), T.dynamic("chunk")

    @T.prim_func
    def sparse_gqa_list_windows(
        bits: T.Tensor((words, chunk), "int32"),
        listed: T.Tensor((windows,), "int32"),
        lists: T.Tensor((windows, chunk), "int32"),
    ):
        with T.Kernel(windows, threads=THREADS) as w:
            sums = T.alloc_shared((2, WARPS), "int32")
            tx = T.get_thread_binding()
            warp = tx // 32
            at = T.alloc_var("int32", init=0)
            word = T.alloc_var("int32")
            before = T.alloc_var("int32")
            for s in T.serial(T.ceildiv(chunk, THREADS)):
                i = s * THREADS + tx
                word = 0
                if i < chunk:
                    word = bits[2 * w, i] | bits[2 * w + 1, i]
                votes = T.call_extern("int32", "__ballot_sync", T.uint32(0xFFFFFFFF), word != 0)
                if tx % 32 == 0:
                    sums[s % 2, warp] = T.call_extern("int32", "__popc", votes)
                T.sync_threads()
                before = at
                for n in T.unroll(WARPS):
                    if n < warp:
                        before += sums[s % 2, n]
                    at += sums[s % 2, n]
                if word != 0:
                    below = T.call_extern("int32", "__popc", votes & ((1 << (tx % 32)) - 1))
                    lists[w, before + below] = i
            if tx == 0:
                listed[w] = at

    return sparse_gqa_list_windows
