"""Where the ordered backward of sparse MLA spends its time, and what storing and summing side by side would gain.

    python gpu_ci/kernels/order_probe.py [--heads 64,32,128,16] [--widths 576,512] [--rows 16384] [--unswapped]

As it is, a chunk of rows is planned, stored and summed before the next begins. So the processors wait at each end, and
device memory is idle while products are made. Here chunks alternate between two buffers of half the size: the next one
is stored while the last one is summed. The sums stay in the order of chunks, so dKV must be the same to the bit.

With --unswapped four lanes store the half line of a key that they have, where the kernel lets eight lanes swap halves
and store a whole line: twice the lines at a time, but no shuffle. What is stored is the same, so is the checksum.

Prints milliseconds of the atomic backward, of the ordered one, of its kernels, and of the overlapped one by the rows of
a chunk. Under two minutes on one H200 with kernels built.
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_ci.kernels.sparse_mla_probe import inputs, median_ms, random_causal

SCALE = 0.04


def overlapped(run, device, q, kv, dout, ids, extent, lse, delta, dq, dkv, chunk):
    """`_backward_in_order` of a single batch entry, with two chunks of rows under way."""
    import torch

    from mcore_patches.ops.sparse_mla.tilelang_builds import head_blocks_of
    from mcore_patches.ops.sparse_mla.tilelang_kernels import PartNumbers

    heads, width = q.shape[2:]
    rows, topk = ids.shape[1:]
    blocks = head_blocks_of(heads, device, width)
    numbers = [PartNumbers(device, width, chunk, topk, kv.shape[1], q.device) for _ in range(2)]
    parts = q.new_empty(2, 1, chunk * topk * blocks, width)
    main = torch.cuda.current_stream()
    # Sums and numbers go first wherever a processor falls free: what is stored waits for them, and they are short.
    numbering, summing = (torch.cuda.Stream(priority=-1) for _ in range(2))
    storing = [torch.cuda.Stream() for _ in range(2)]
    for stream in (numbering, summing, *storing):
        stream.wait_stream(main)
    summed = [torch.cuda.Event() for _ in range(2)]
    for n, start in enumerate(range(0, rows, chunk)):
        here, turn = (slice(0, 1), slice(start, min(start + chunk, rows))), n % 2
        numbered, stored = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(numbering):
            if n >= 2:
                numbering.wait_event(summed[turn])
            slots = numbers[turn].number(ids[here][0])
            numbered.record()
        with torch.cuda.stream(storing[turn]):
            storing[turn].wait_event(numbered)
            of_rows = [t[here] for t in (q, dout, ids, extent, lse, delta, dq)]
            run(of_rows[0], kv, *of_rows[1:3], slots.unsqueeze(0), *of_rows[3:6], SCALE, of_rows[6], parts[turn])
            stored.record()
        with torch.cuda.stream(summing):
            summing.wait_event(stored)
            numbers[turn].add(parts[turn, 0], blocks, dkv[0])
            summed[turn].record()
    for stream in (numbering, summing, *storing):
        main.wait_stream(stream)


def unswapped(reduction):
    """`tilelang_scatter.scattering` where each lane stores what it has: 16 bytes of its own key at a time."""
    import tilelang.language as T

    from mcore_patches.ops.sparse_mla import tilelang_scatter as scatter_module

    swapping, copy_targets = scatter_module.scattering(reduction)
    if reduction == "atomic":
        return swapping, copy_targets
    columns = scatter_module.group(reduction)
    run, tiles = columns // 4, columns // scatter_module.WGMMA_COLUMNS

    @T.macro
    def scatter(DKV, b, even, odd, piece, mine, first, second, column):
        for k, g, c in T.Parallel(scatter_module.KEYS_PER_BLOCK, 1, 4):
            for t in T.unroll(2 * tiles):
                for e in T.unroll(2):
                    mine[2 * t + e] = piece[k, 2 * g * columns + t * scatter_module.WGMMA_COLUMNS + 2 * c + e]
            pair = k // 8 % 2
            place = T.if_then_else(k % 2 == 0, even[pair], odd[pair])
            for j in T.unroll(2 * run):
                first[j] = T.cast(mine[j], T.bfloat16)
            lane = T.get_thread_binding() % scatter_module.LANES_OF_KEY
            if place >= 0:
                for half in T.unroll(2):
                    DKV[b, place, T.Ramp(column + half * columns + lane * run, 1, run)] = first[
                        T.Ramp(half * run, 1, run)
                    ]

    return scatter, copy_targets


def by_kernel(function):
    """Milliseconds of each kernel of one call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    took = {e.key: e.device_time_total / 1e3 for e in record.key_averages() if e.device_time_total > 50}
    return {name[:40]: ms for name, ms in sorted(took.items(), key=lambda item: -item[1])}


def measure(heads, width, rows):
    import torch

    from mcore_patches.ops.device import device_of
    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels
    from mcore_patches.ops.sparse_mla.ordering import rows_in_order
    from mcore_patches.ops.sparse_mla.tilelang_builds import head_blocks_of, head_rows, kernel

    topk = 2048
    device = device_of(torch.device("cuda"))
    blocks = head_blocks_of(heads, device, width)
    q, kv, _, dout = inputs(1, rows, rows, heads, topk, width)
    ids = random_causal(rows, topk)[None]
    out, lse = kernels.forward(q, kv, ids, SCALE, 512, deterministic=True)
    backward = functools.partial(kernels.backward, q, kv, ids, out, lse, dout, SCALE, 512, False)
    atomic = median_ms(lambda: backward(ordered=False), 5)
    ordered = median_ms(lambda: backward(ordered=True), 5)
    parts = by_kernel(lambda: backward(ordered=True))
    print(f"H{heads} D{width}: atomic {atomic:.2f}, ordered {ordered:.2f} ({ordered / atomic:.3f})", flush=True)
    print("    " + ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items()), flush=True)

    wanted = backward(ordered=True)
    run = kernel("backward", device, width, reduction="store", **head_rows(heads), strided=False)
    extent = kernels._extent(ids, rows, device, width)
    delta = torch.empty_like(lse)
    kernel("delta", device, width)(out, dout, delta)
    dq = torch.empty_like(q)
    wave = device.multiprocessors // blocks
    whole = rows_in_order(rows, topk, rows, width, blocks, device.multiprocessors)
    print(f"    checksum {float(wanted[1].double().sum()):.9e} {float(wanted[1].double().square().sum()):.9e}")
    for waves in (1, 2, 3, max(1, whole // wave // 2), max(1, whole // wave)):
        chunk = waves * wave

        def call(chunk=chunk):
            dkv = torch.zeros(1, rows, width, device="cuda")
            overlapped(run, device, q, kv.squeeze(2), dout, ids, extent, lse, delta, dq, dkv, chunk)
            return dkv

        dkv = kernels._channels_in_order(call(), device, "store").unsqueeze(2)
        same = torch.equal(dkv, wanted[1]), torch.equal(dq, wanted[0])
        ms = median_ms(call, 5)
        gib = 2 * chunk * topk * blocks * width * 2 / 2**30
        print(f"    {waves} waves: {ms:.2f} ({ms / atomic:.3f}), parts {gib:.2f} GiB, dkv, dq equal {same}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", default="64,32,128,16")
    parser.add_argument("--widths", default="576,512")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--unswapped", action="store_true")
    options = parser.parse_args()
    if options.unswapped:
        from mcore_patches.ops.sparse_mla import tilelang_backward, tilelang_few_heads

        tilelang_backward.scattering = tilelang_few_heads.scattering = unswapped
    for width in options.widths.split(","):
        for heads in options.heads.split(","):
            measure(int(heads), int(width), options.rows)


if __name__ == "__main__":
    main()
