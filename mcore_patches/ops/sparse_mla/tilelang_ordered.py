"""Sums of the rows' parts of dKV in a fixed order: ascending rows for each key, whatever the GPU's timing.

Within a chunk of rows, each pair of a row and a key that it selects is an entry. Entries are numbered by key, then by
row: mark notes the pairs in a bit matrix, rank counts each key's bits, locate numbers the entries. The backward kernel
stores its part of an entry at the entry's number, and sum adds each key's parts, which are then neighbours. An id that
occurs n times in a row is one entry, whose equal parts all land in one place, and counts n times.
"""

# Annotations of a prim_func are calls, evaluated by TileLang.
# mypy: disable-error-code="valid-type"

import tilelang
import tilelang.language as T

from mcore_patches.ops.sparse_mla.ordering import ROWS_PER_WORD

PASS_CONFIGS = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}  # every access is guarded by hand
KEYS_PER_BLOCK = 128
THREADS = 256
PARTS_IN_FLIGHT = 4  # loads that a thread issues before it uses the first
CHANNELS_PER_THREAD = 8  # 16 bytes of a part


def mark_kernel():
    """Builds the prim_func that sets bit row % 32 of Bits[row // 32, key], zero before, for each key of each row.

    Slots[row, k] is 0 for the first place that names a key in its row, whichever comes first, and not 0 for others;
    it is not written for ids to ignore.
    """
    rows, topk, words, keys = (T.dynamic(n) for n in ("rows", "topk", "words", "keys"))

    @T.prim_func
    def sparse_mla_mark(
        Indices: T.Tensor([rows, topk], T.int32),
        Bits: T.Tensor([words, keys], T.int32),
        Slots: T.Tensor([rows, topk], T.int32),
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            tx = T.get_thread_binding()
            for i in T.serial(T.ceildiv(topk, THREADS)):
                k = i * THREADS + tx
                if k < topk:
                    key = Indices[row, k]
                    if key >= 0 and key < keys:
                        bit = T.shift_left(1, row % ROWS_PER_WORD)
                        # T.atomic_or does not tell what was there.
                        before = T.call_extern("int32", "atomicOr", T.address_of(Bits[row // ROWS_PER_WORD, key]), bit)
                        Slots[row, k] = T.bitwise_and(before, bit)

    return sparse_mla_mark


def rank_kernel():
    """Builds the prim_func of Before[w, key] = the key's bits in words 0 to w - 1, and Count[key] = its bits in all."""
    words, keys = T.dynamic("words"), T.dynamic("keys")

    @T.prim_func
    def sparse_mla_rank(
        Bits: T.Tensor([words, keys], T.int32),
        Before: T.Tensor([words, keys], T.int32),
        Count: T.Tensor([keys], T.int32),
    ):
        with T.Kernel(T.ceildiv(keys, KEYS_PER_BLOCK), threads=KEYS_PER_BLOCK) as block:
            key = block * KEYS_PER_BLOCK + T.get_thread_binding()
            count = T.alloc_local([1], T.int32)
            count[0] = 0
            if key < keys:
                for w in T.serial(words):
                    Before[w, key] = count[0]
                    count[0] += T.cast(T.popcount(T.cast(Bits[w, key], T.uint32)), T.int32)
                Count[key] = count[0]

    return sparse_mla_rank


def locate_kernel():
    """Builds the prim_func of Slots[row, k] = the entry's number, -1 for an id to ignore, and of its multiplicity.

    Slots is what mark left there. Ends[key] is the number of entries of the keys up to and including `key`. Times must
    be 1 before, so that what stands once in its row, nearly everything, need not be counted.
    """
    rows, topk, words, keys, entries = (T.dynamic(n) for n in ("rows", "topk", "words", "keys", "entries"))

    @T.prim_func
    def sparse_mla_locate(
        Indices: T.Tensor([rows, topk], T.int32),
        Bits: T.Tensor([words, keys], T.int32),
        Before: T.Tensor([words, keys], T.int32),
        Count: T.Tensor([keys], T.int32),
        Ends: T.Tensor([keys], T.int32),
        Slots: T.Tensor([rows, topk], T.int32),
        Times: T.Tensor([entries], T.int32),
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            tx = T.get_thread_binding()
            word = row // ROWS_PER_WORD
            below = T.shift_left(1, row % ROWS_PER_WORD) - 1
            slot = T.alloc_local([1], T.int32)
            for i in T.serial(T.ceildiv(topk, THREADS)):
                k = i * THREADS + tx
                if k < topk:
                    key = Indices[row, k]
                    slot[0] = -1
                    if key >= 0 and key < keys:
                        again = Slots[row, k]
                        slot[0] = (
                            Ends[key]
                            - Count[key]
                            + Before[word, key]
                            + T.cast(T.popcount(T.cast(T.bitwise_and(Bits[word, key], below), T.uint32)), T.int32)
                        )
                        if again != 0:
                            T.atomic_add(Times[slot[0]], 1)
                    Slots[row, k] = slot[0]

    return sparse_mla_locate


def sum_kernel(width: int, parts_of_entry: int):
    """Builds the prim_func that adds to DKV[key] the parts of its entries in order, `parts_of_entry` of each."""
    keys, entries, parts = T.dynamic("keys"), T.dynamic("entries"), T.dynamic("parts")
    lanes = width // CHANNELS_PER_THREAD
    flight, channels = PARTS_IN_FLIGHT, CHANNELS_PER_THREAD

    @T.prim_func
    def sparse_mla_sum(
        Parts: T.Tensor([parts, width], T.bfloat16),
        Count: T.Tensor([keys], T.int32),
        Ends: T.Tensor([keys], T.int32),
        Times: T.Tensor([entries], T.int32),
        DKV: T.Tensor([keys, width], T.float32),
    ):
        with T.Kernel(keys, threads=lanes) as key:
            tx = T.get_thread_binding()
            total = T.alloc_local([channels], T.float32)
            part = T.alloc_local([flight, channels], T.bfloat16)
            times = T.alloc_local([flight], T.float32)
            first = Ends[key] - Count[key]
            count = Count[key] * parts_of_entry
            if count > 0:
                for v in T.vectorized(channels):
                    total[v] = DKV[key, tx * channels + v]
                for i in T.serial(T.ceildiv(count, flight)):
                    for u in T.unroll(flight):
                        # Behind the last part the last one is read again and counted 0 times.
                        n = T.min(i * flight + u, count - 1)
                        times[u] = T.if_then_else(
                            i * flight + u < count, T.cast(Times[first + n // parts_of_entry], T.float32), 0.0
                        )
                        for v in T.vectorized(channels):
                            part[u, v] = Parts[T.cast(first, T.int64) * parts_of_entry + n, tx * channels + v]
                    for u in T.unroll(flight):
                        for v in T.unroll(channels):
                            total[v] += times[u] * T.cast(part[u, v], T.float32)
                for v in T.vectorized(channels):
                    DKV[key, tx * channels + v] = total[v]

    return sparse_mla_sum
