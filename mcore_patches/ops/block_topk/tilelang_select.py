# The language of kernels is not typed.
# mypy: ignore-errors
"""The exact top-k of every row's scores, a block of threads a row.

Of groups of neighbouring blocks only those with the k best maxima (ties by position) can hold one of the k best blocks:
a block outside is beaten by one block in each of these. So the maxima are ranked first, at an eighth of the reads; then
the blocks of the k groups that are not below the k-th maximum.

A rank is found by histograms over the range that holds it, a factor of ``BINS`` narrower each time. Counts are integers
and equal keys are cut by position, so the result does not depend on the order in which threads arrive.
"""

import tilelang.language as T

from mcore_patches.ops.block_topk.design import GROUP, INVISIBLE
from mcore_patches.ops.tilelang_warp import (  # noqa: F401
    EVERY_LANE,
    PASS_CONFIGS,
    atomic,
    below,
    popcount,
    sum_before,
    votes,
)

BIN_BITS = 11
BINS = 2**BIN_BITS
ROUNDS = 3  # after which a range of 32 bits is one key
LARGEST = 2**31 - 1
# Places in `cut`: the range of keys that holds the k-th best, and how many of that range are wanted.
LOW, HIGH, WANTED = 0, 1, 2


def _unsigned(value):
    return T.cast(value, "uint32")


@T.macro
def _span(cut, least, most, wanted, tx):
    """cut = the range of all keys, from each thread's `least` and `most`, of which `wanted` are."""
    if tx == 0:
        cut[LOW] = LARGEST
        cut[HIGH] = INVISIBLE
        cut[WANTED] = wanted
    T.sync_threads()
    lowest = T.call_extern("int32", "__reduce_min_sync", T.uint32(EVERY_LANE), least)
    highest = T.call_extern("int32", "__reduce_max_sync", T.uint32(EVERY_LANE), most)
    if tx % 32 == 0:
        atomic("atomicMin", cut[LOW], lowest)
        atomic("atomicMax", cut[HIGH], highest)
    T.sync_threads()


@T.macro
def _narrow(source, base, count, cut, histogram, sums, tx, threads):
    """Narrow `cut` to one key: of source[base : base + count] those above it and WANTED of its equals are the best."""
    per_thread = BINS // threads
    total = T.alloc_local((1,), "int32")
    upto = T.alloc_local((1,), "int32")
    for _ in T.serial(ROUNDS):
        if cut[LOW] != cut[HIGH]:
            low = cut[LOW]
            high = cut[HIGH]
            wanted = cut[WANTED]
            span = _unsigned(high) - _unsigned(low)
            shift = T.max(32 - BIN_BITS - T.call_extern("int32", "__clz", T.cast(span, "int32")), 0)
            for b in T.unroll(per_thread):
                histogram[b * threads + tx] = 0
            T.sync_threads()
            for s in T.serial(T.ceildiv(count, threads)):
                if s * threads + tx < count:
                    distance = _unsigned(high) - _unsigned(source[base + s * threads + tx])
                    if distance <= span:
                        atomic("atomicAdd", histogram[distance >> shift], 1)
            T.sync_threads()
            total[0] = 0
            for b in T.unroll(per_thread):
                total[0] += histogram[tx * per_thread + b]
            sum_before(total, upto, sums, tx, threads)
            if upto[0] < wanted and wanted <= upto[0] + total[0]:
                for b in T.serial(per_thread):
                    here = histogram[tx * per_thread + b]
                    if upto[0] < wanted and wanted <= upto[0] + here:
                        begin = _unsigned(tx * per_thread + b) << _unsigned(shift)
                        end = T.min(span, begin + (T.uint32(1) << _unsigned(shift)) - T.uint32(1))
                        cut[LOW] = T.cast(_unsigned(high) - end, "int32")
                        if here == wanted - upto[0]:
                            cut[HIGH] = T.cast(_unsigned(high) - end, "int32")
                            cut[WANTED] = LARGEST
                        else:
                            cut[HIGH] = T.cast(_unsigned(high) - begin, "int32")
                            cut[WANTED] = wanted - upto[0]
                    upto[0] += here
            T.sync_threads()


@T.macro
def _keep(source, base, count, cut, target, above_of, equal_of, tx, threads):
    """Write to `target` the places of the best of source[base : base + count], ascending."""
    warp = tx // 32
    lane = tx % 32
    above = T.alloc_var("int32")
    equal = T.alloc_var("int32")
    key = T.alloc_var("int32")
    at = T.alloc_var("int32")
    low = cut[LOW]
    wanted = cut[WANTED]
    rounds = T.ceildiv(count, threads)
    above = 0
    equal = 0
    for s in T.serial(rounds):
        c = (warp * rounds + s) * 32 + lane
        key = INVISIBLE
        if c < count:
            key = source[base + c]
        above += popcount(votes(key > low))
        equal += popcount(votes(c < count and key == low))
    if lane == 0:
        above_of[warp] = above
        equal_of[warp] = equal
    T.sync_threads()
    above = 0
    equal = 0
    for w in T.unroll(threads // 32):
        if w < warp:
            above += above_of[w]
            equal += equal_of[w]
    for s in T.serial(rounds):
        c = (warp * rounds + s) * 32 + lane
        key = INVISIBLE
        if c < count:
            key = source[base + c]
        votes_above = votes(key > low)
        votes_equal = votes(c < count and key == low)
        equal_before = equal + below(votes_equal, lane)
        at = above + below(votes_above, lane) + T.min(equal_before, wanted)
        if key > low or (c < count and key == low and equal_before < wanted):
            target[at] = c
        above += popcount(votes_above)
        equal += popcount(votes_equal)


def select_kernel(*, capacity: int, threads: int, blocks_per_sm: int):
    """Build the kernel ``(keys, maxima, row_first, row_count, ids)``.

    ``keys [Tq, width]`` and ``maxima [Tq * width / GROUP]`` as `tilelang_score` writes them for rows that see more than
    `topk` blocks, ``row_first [Tq]`` and ``row_count [Tq]`` the blocks that a row sees. Writes ``ids [Tq, topk]``:
    numbers of blocks, counted from ``row_first``, ascending, -1 behind the last. `topk` is at most `capacity`.
    """
    warps = threads // 32
    per_lane = -(-GROUP * capacity // threads)
    tq, width, all_groups, topk = (T.dynamic(n) for n in ("tq", "width", "all_groups", "topk"))

    @T.prim_func
    def block_topk_select(
        keys: T.Tensor((tq, width), "int32"),
        maxima: T.Tensor((all_groups,), "int32"),
        row_first: T.Tensor((tq,), "int32"),
        row_count: T.Tensor((tq,), "int32"),
        ids: T.Tensor((tq, topk), "int32"),
    ):
        with T.Kernel(tq, threads=threads) as row:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            histogram = T.alloc_shared((max(BINS, capacity),), "int32")  # later the places of the best
            chosen = T.alloc_shared((capacity,), "int32")  # groups
            candidate = T.alloc_shared((GROUP * capacity,), "int32")  # keys of blocks
            place = T.alloc_shared((GROUP * capacity,), "uint16")  # of candidates among the chosen groups' blocks
            above_of = T.alloc_shared((warps,), "int32")
            equal_of = T.alloc_shared((warps,), "int32")
            cut = T.alloc_shared((3,), "int32")
            mine = T.alloc_local((per_lane,), "int32")
            least = T.alloc_var("int32")
            most = T.alloc_var("int32")
            before = T.alloc_var("int32")
            at = T.alloc_var("int32")
            candidates = T.alloc_var("int32")

            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            n = row_count[row]
            first = row_first[row]
            group0 = first // GROUP
            base = T.cast(row, "int64") * (width // GROUP) + group0

            if n <= topk:
                for s in T.serial(T.ceildiv(topk, threads)):
                    if s * threads + tx < topk:
                        ids[row, s * threads + tx] = T.if_then_else(s * threads + tx < n, s * threads + tx, -1)
            else:
                n_groups = (first + n - 1) // GROUP - group0 + 1
                if n_groups <= topk:
                    for s in T.serial(T.ceildiv(n_groups, threads)):
                        if s * threads + tx < n_groups:
                            chosen[s * threads + tx] = s * threads + tx
                    if tx == 0:
                        cut[LOW] = INVISIBLE + 1
                else:
                    least = LARGEST
                    most = INVISIBLE
                    for s in T.serial(T.ceildiv(n_groups, threads)):
                        if s * threads + tx < n_groups:
                            least = T.min(least, maxima[base + s * threads + tx])
                            most = T.max(most, maxima[base + s * threads + tx])
                    _span(cut, least, most, topk, tx)
                    _narrow(maxima, base, n_groups, cut, histogram, above_of, tx, threads)
                    _keep(maxima, base, n_groups, cut, chosen, above_of, equal_of, tx, threads)
                T.sync_threads()

                floor = cut[LOW]
                listed = T.min(n_groups, topk) * GROUP
                for j in T.unroll(per_lane):
                    c = (warp * per_lane + j) * 32 + lane
                    mine[j] = INVISIBLE
                    if c < listed:
                        mine[j] = keys[row, (group0 + chosen[c // GROUP]) * GROUP + c % GROUP]
                least = LARGEST
                most = INVISIBLE
                before = 0
                for j in T.unroll(per_lane):
                    before += popcount(votes(mine[j] >= floor))
                    if mine[j] >= floor:
                        least = T.min(least, mine[j])
                        most = T.max(most, mine[j])
                if lane == 0:
                    equal_of[warp] = before
                T.sync_threads()
                _span(cut, least, most, topk, tx)
                before = 0
                candidates = 0
                for w in T.unroll(warps):
                    if w < warp:
                        before += equal_of[w]
                    candidates += equal_of[w]
                for j in T.unroll(per_lane):
                    chosen_here = votes(mine[j] >= floor)
                    at = before + below(chosen_here, lane)
                    if mine[j] >= floor:
                        candidate[at] = mine[j]
                        place[at] = T.cast((warp * per_lane + j) * 32 + lane, "uint16")
                    before += popcount(chosen_here)
                T.sync_threads()
                _narrow(candidate, 0, candidates, cut, histogram, above_of, tx, threads)
                _keep(candidate, 0, candidates, cut, histogram, above_of, equal_of, tx, threads)
                T.sync_threads()
                for s in T.serial(T.ceildiv(topk, threads)):
                    if s * threads + tx < topk:
                        at = place[histogram[s * threads + tx]]
                        ids[row, s * threads + tx] = (group0 + chosen[at // GROUP]) * GROUP + at % GROUP - first

    return block_topk_select
