"""Correctness, then times, of the sparse-MLA kernels beside megatron-core 0.19.2's: under 100 s on one H200.

    python gpu_ci/kernels/sparse_mla_probe.py [--heads 64,128,16]

Each section runs in processes of its own with a time limit, so that a kernel that hangs or traps costs only that.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

PART = 2**27  # elements that are compared at once
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def random_causal(rows, topk, device="cuda", seed=0):
    import torch

    g = torch.Generator(device=device).manual_seed(seed)
    out = torch.empty(rows, topk, dtype=torch.int32, device=device)
    for start in range(0, rows, 1024):
        end = min(rows, start + 1024)
        score = torch.rand(end - start, rows, device=device, generator=g)
        position = torch.arange(start, end, device=device)[:, None]
        score = score.masked_fill(torch.arange(rows, device=device)[None] > position, -1.0)
        value, index = score.topk(topk, -1)
        out[start:end] = torch.where(value >= 0, index, -1).int()
    return out


def median_ms(function, repeats, warmup=1):
    import torch

    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def section_compile(width, reduction):
    """What a first call builds, in this process, into TileLang's cache on disk."""
    from mcore_patches.ops.jit import CACHE
    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    started = time.time()
    kernels.warmup(width=int(width), heads=128, deterministic=reduction == "store")
    if reduction == "store":
        kernels.warmup(width=int(width), heads=64, deterministic=True)
    parts = ", ".join(f"{key[3]} {seconds:.1f}" for key, seconds in CACHE.log.seconds.items())
    print(f"RESULT build D{width} {reduction}: {time.time() - started:.1f} s side by side ({parts})", flush=True)


def section_installed(heads):
    """Warm TileLang's disk cache with the installed kernels."""
    import torch

    fwd, bwd = installed()
    q, kv, indices, dout = inputs(1, 256, 256, int(heads), 2048, 576)
    out, lse = fwd.sparse_mla_fwd_interface(q, kv, indices.unsqueeze(2), sm_scale=0.04)
    bwd.sparse_mla_bwd(q, kv, out, dout, indices.unsqueeze(2), lse, sm_scale=0.04)
    torch.cuda.synchronize()


def installed():
    import importlib

    base = "megatron.core.transformer.experimental_attention_variant.ops."
    return (
        importlib.import_module(base + "tilelang_sparse_mla_fwd"),
        importlib.import_module(base + "tilelang_sparse_mla_bwd"),
    )


def inputs(batch, rows, keys, heads, topk, width, seed=0):
    import torch

    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g, dtype=torch.float32).bfloat16()

    q, kv, dout = normal(batch, rows, heads, width), normal(batch, keys, 1, width), normal(batch, rows, heads, 512)
    indices = torch.randint(0, keys, (batch, rows, topk), device="cuda", generator=g, dtype=torch.int32)
    return q, kv, indices, dout


def reference(q, kv, indices, scale, dout=None):
    import torch

    q64, kv64 = q.double().requires_grad_(), kv.double().squeeze(2).requires_grad_()
    ok = (indices >= 0) & (indices < kv.shape[1])
    safe = torch.where(ok, indices, 0).long()
    batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
    chosen = kv64[batch, safe]
    score = torch.einsum("bshd,bskd->bshk", q64, chosen) * scale
    score = score.masked_fill(~ok[:, :, None], float("-inf"))
    lse = score.logsumexp(-1)
    p = torch.exp(score - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bshk,bskd->bshd", p, chosen[..., :512])
    if dout is None:
        return out, lse, None, None
    dq, dkv = torch.autograd.grad((out * dout.double()).sum(), (q64, kv64))
    return out, lse, dq, dkv.unsqueeze(2)


def error(ref, got, floor=1e-30):
    """Norm of the difference over that of ref, in float64; infinite elements must agree, and do not count."""
    import torch

    # By parts: in float64 the largest tensors of the bench would not fit beside each other.
    axis = max(range(ref.ndim), key=ref.shape.__getitem__)
    length = max(1, PART * ref.shape[axis] // max(1, ref.numel()))
    difference = norm = torch.zeros((), dtype=torch.float64, device=ref.device)
    for a, b in zip(ref.split(length, axis), got.split(length, axis), strict=True):
        a, b = a.double(), b.double()
        if not torch.equal(a.isinf(), b.isinf()):
            return float("nan")
        a, b = (t.masked_fill(t.isinf(), 0.0) for t in (a, b))
        difference, norm = difference + (b - a).square().sum(), norm + a.square().sum()
    return (difference.sqrt() / norm.sqrt().clamp_min(floor)).item()


CASES = [
    # batch, rows, keys, heads, topk
    (1, 5, 70, 1, 1),
    (2, 9, 130, 7, 63),
    (1, 17, 300, 16, 64),
    (1, 9, 200, 24, 65),
    (2, 7, 500, 64, 127),
    (1, 6, 1000, 128, 2051),
    (1, 40, 3000, 100, 640),
]


def report(label, errors, limit=0.008):
    bad = [name for name, value in errors.items() if not value < limit]
    print(
        f"RESULT {'FAIL' if bad else 'ok  '} {label}  " + "  ".join(f"{k} {v:.1e}" for k, v in errors.items()),
        flush=True,
    )


def case_inputs(case, width, seed):
    """Ids with a fifth outside [0, keys), an empty row, repeats where K exceeds the keys, and a tail of -1 in row 2."""
    import torch

    batch, rows, keys, heads, topk = case
    q, kv, indices, dout = inputs(batch, rows, keys, heads, topk, width, seed=seed)
    drop = torch.rand(indices.shape, device="cuda") < 0.2
    indices = torch.where(drop, torch.randint(-3, 0, indices.shape, device="cuda"), indices.long()).int()
    indices[0, 1] = -1
    indices[0, 0, 0] = 2**31 - 1
    indices[-1, 2, topk // 2 :] = -1
    indices[-1, 2, -1:] = keys
    return q, kv, indices, dout


def gradients(kernels, q, kv, indices, dout, scale, ref, deterministic):
    out_r, lse_r, dq_r, dkv_r = ref
    dq, dkv = kernels.backward(q, kv, indices, out_r.bfloat16(), lse_r.float(), dout, scale, 512, deterministic)
    errors = {"dq": error(dq_r, dq, 0.02 * dq.numel() ** 0.5), "dkv": error(dkv_r, dkv)}
    return (dq, dkv), {**errors, "empty row": dq[0, 1].abs().max().item()}


def section_check(which, shared_kib="0"):
    """Errors against float64; with shared_kib, of the plain kernels under that much shared memory."""
    import torch

    from mcore_patches.ops.device import Device
    from mcore_patches.ops.sparse_mla import ordering
    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if shared_kib != "0":
        kernels._device = lambda _: Device("sm_90a", int(shared_kib) * 1024, 132)
        kernels.build_first = lambda *_: None
    ordering.PARTS_BYTES = 6 * 2**20  # several chunks
    for width in (512, 576) if shared_kib == "0" else (576,):
        for number, case in enumerate(CASES):
            label = which if shared_kib == "0" else f"{which} plain {shared_kib} KiB"
            label += " D{} B{}-S{}-Skv{}-H{}-K{}".format(width, *case)
            try:
                q, kv, indices, dout = case_inputs(case, width, 100 * width + number)
                scale = width**-0.5
                ref = reference(q, kv, indices, scale, dout)
                if which == "forward":
                    out, lse = kernels.forward(q, kv, indices, scale, 512)
                    errors = {"out": error(ref[0], out), "lse": error(ref[1], lse)}
                    again = kernels.forward(q, kv, indices, scale, 512)
                    errors["replay"] = float(not all(torch.equal(a, b) for a, b in zip((out, lse), again)))
                else:
                    deterministic = which == "deterministic"
                    first, errors = gradients(kernels, q, kv, indices, dout, scale, ref, deterministic)
                    if deterministic:
                        again, _ = gradients(kernels, q, kv, indices, dout, scale, ref, True)
                        errors["replay"] = float(not all(torch.equal(a, b) for a, b in zip(first, again)))
                torch.cuda.synchronize()
                report(label, errors)
            except Exception as e:
                traceback.print_exc()
                print(f"RESULT FAIL {label}: {type(e).__name__} {str(e)[-150:]}", flush=True)


def section_check_strided(width):
    """q and dout as [S, B, H, D] seen as [B, S, H, D], kv as a slice of wider rows."""
    import torch

    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    width = int(width)
    print(f"RESULT strides survive: {kernels._strides_survive()}")
    for case in ((2, 7, 500, 64, 127), (1, 9, 200, 24, 65), (1, 9, 200, 1, 65)):
        q, kv, indices, dout = case_inputs(case, width, 7)
        wide = torch.full((*kv.shape[:3], width + 64), float("nan"), device="cuda", dtype=kv.dtype)
        wide[..., :width] = kv
        q_wide = torch.full((case[1], case[0], case[3] + 3, width), float("nan"), device="cuda", dtype=kv.dtype)
        q_wide[:, :, : case[3]] = q.transpose(0, 1)
        q_strided, kv_strided = q_wide[:, :, : case[3]].transpose(0, 1), wide[..., :width]
        dout_strided = dout.transpose(0, 1).contiguous().transpose(0, 1)
        try:
            out, lse = kernels.forward(q, kv, indices, 0.04, 512)
            out_s, _ = kernels.forward(q_strided, kv_strided, indices, 0.04, 512)
            dq, dkv = kernels.backward(q, kv, indices, out, lse, dout, 0.04, 512, False)
            dq_s, dkv_s = kernels.backward(q_strided, kv_strided, indices, out, lse, dout_strided, 0.04, 512, False)
            report(
                f"strided D{width} {case}",
                {"out": error(out, out_s), "dq": error(dq, dq_s), "dkv": error(dkv, dkv_s)},
            )
        except Exception as e:
            traceback.print_exc()
            print(f"RESULT FAIL strided {case}: {type(e).__name__} {str(e)[-200:]}", flush=True)


def section_time(heads):
    import torch

    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels
    from mcore_patches.ops.sparse_mla.tilelang_builds import head_rows

    rows, topk, scale = 16384, 2048, 576**-0.5
    indices = random_causal(rows, topk).unsqueeze(0)
    pairs = (indices >= 0).sum().item()
    print(f"RESULT valid (row, key) pairs: {pairs / indices.numel():.4f} of T*K", flush=True)
    device = kernels._device(indices.device)
    extent = kernels._extent(indices, rows, device, 576)
    nowhere = torch.full_like(indices, -1)
    table = ["H    D    fwd ms  TF/s | bwd ms  TF/s | det ms  /bwd | products only, stores only, plan, sum"]
    for H in (int(h) for h in heads.split("+")):
        took = {}
        for width in (576, 512):
            q, kv, _, dout = inputs(1, rows, rows, H, 1, width)
            forward_flops = 2 * rows * H * topk * (width + 512) / 1e9
            backward_flops = 2 * rows * H * topk * (3 * width + 2 * 512) / 1e9
            try:
                run = lambda q=q, kv=kv: kernels.forward(q, kv, indices, scale, 512)  # noqa: E731
                out, lse = run()
                took["f", width] = f = median_ms(run, 5)
                if H == 128:
                    halves = [q[:, :, :64].contiguous(), q[:, :, 64:].contiguous()]
                    ms = median_ms(
                        lambda halves=halves, kv=kv: [kernels.forward(h, kv, indices, scale, 512) for h in halves], 5
                    )
                    print(f"RESULT forward D{width}: H128 at once {f:.2f} ms, halves one after the other {ms:.2f} ms")
                    del halves
                run = lambda det, a=(q, kv, indices, out, lse, dout): kernels.backward(*a, scale, 512, det)  # noqa: E731
                took["b", width] = b = median_ms(lambda run=run: run(False), 3)
                took["d", width] = d = median_ms(lambda run=run: run(True), 3)
                a, c = run(False), run(True)
                differ = f"dq {error(a[0], c[0]):.1e} dkv {error(a[1], c[1]):.1e}"
                print(f"RESULT H{H} D{width} deterministic against atomic: {differ}")
                del a, c
                line = f"{H:<4} {width}  {f:6.2f} {forward_flops / f:6.1f} | {b:6.2f} {backward_flops / b:6.1f}"
                line += f" | {d:6.2f} {d / b:5.2f}"
                blocks = -(-H // 64)
                parts = torch.empty(1, 512 * topk * blocks, width, dtype=torch.bfloat16, device="cuda")
                slots = torch.randperm(512 * topk, device="cuda", dtype=torch.int32).view(1, 512, topk)
                store = kernels.kernel("backward", device, width, reduction="store", **head_rows(H), strided=False)
                dq, delta = torch.empty_like(q), torch.zeros_like(lse)
                every = (q, kv.squeeze(2), dout, indices, nowhere, extent, lse, delta, scale, dq, parts)
                ms = median_ms(lambda every=every, store=store: store(*every), 2)
                cut = slice(rows - 528, rows - 16)
                some = (q[:, cut], kv.squeeze(2), dout[:, cut], indices[:, cut], slots, extent[:, cut], lse[:, cut])
                some += (delta[:, cut], scale, dq[:, cut], parts)
                part_ms = median_ms(lambda some=some, store=store: store(*some), 3) * rows / 512
                line += f" | {ms:6.2f} {part_ms:6.2f}"
                line += plan_times(kernels, device, indices, parts, width, blocks)
                table.append(line)
                print("RESULT " + line, flush=True)
            except Exception as e:
                traceback.print_exc()
                print(f"RESULT time H{H} D{width}: {type(e).__name__} {str(e)[-200:]}", flush=True)
            if width == 576:
                try:
                    fwd, bwd = installed()
                    ids = indices.unsqueeze(2)
                    o, l = fwd.sparse_mla_fwd_interface(q, kv, ids, sm_scale=scale)
                    f = median_ms(lambda a=(q, kv, ids), fwd=fwd: fwd.sparse_mla_fwd_interface(*a, sm_scale=scale), 3)
                    b = median_ms(
                        lambda a=(q, kv, o, dout, ids, l), bwd=bwd: bwd.sparse_mla_bwd(*a, sm_scale=scale), 1, 0
                    )
                    table.append(
                        f"{H:<4} installed: {f:.2f} ms, ours {f / took['f', 576]:.2f}x"
                        f" | {b:.1f} ms, ours {b / took['b', 576]:.2f}x"
                    )
                    print(f"RESULT      out against installed: {error(o, out):.2e}", flush=True)
                    del o, l
                except Exception as e:
                    traceback.print_exc()
                    print(f"RESULT installed H{H}: {type(e).__name__} {str(e)[-200:]}", flush=True)
        try:
            ratios = {n: took[n, 576] / took[n, 512] for n in "fbd"}
            table.append(
                f"{H:<4} width 512 faster: forward {ratios['f']:.3f} (FLOPs 1.062),"
                f" backward {ratios['b']:.3f} (1.075), deterministic {ratios['d']:.3f}"
            )
        except KeyError:
            pass
    print("\n".join("RESULT " + line for line in table), flush=True)


def plan_times(kernels, device, indices, parts, width, blocks):
    """Times of the deterministic backward's numbers and sum over 512 rows, scaled to all rows."""
    import torch

    rows, topk = 512, indices.shape[-1]
    keys = indices.shape[1]
    mine = indices[0, -528:-16]
    numbers = kernels.PartNumbers(device, width, rows, topk, keys, indices.device)
    dkv = torch.zeros(keys, width, device="cuda")
    plan_ms = median_ms(lambda: numbers.number(mine), 3)
    sum_ms = median_ms(lambda: numbers.add(parts[0], blocks, dkv), 3)
    scale = keys / rows
    return f" {plan_ms * scale:6.2f} {sum_ms * scale:6.2f}"


def spawn(limit, *jobs):
    """Run jobs (argument lists) at the same time; print the RESULT lines, and the tail of a job that failed."""
    running = []
    for job in jobs:
        process = subprocess.Popen(
            [sys.executable, __file__, "--job", *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append((job, process))
    end = time.time() + limit
    for job, process in running:
        try:
            output, _ = process.communicate(timeout=max(1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nRESULT {' '.join(job)}: stopped at its limit of {limit:.0f} s"
        log = os.environ.get("OUT")
        if log:
            Path(log, "-".join(job) + ".log").write_text(output)
        lines = output.splitlines()
        for line in lines:
            if line.startswith("RESULT"):
                print(line[7:], flush=True)
        if process.returncode:
            print(f"-- {' '.join(job)} ended with {process.returncode}")
            print("\n".join(lines[-12:]), flush=True)


def main():
    from gpu_ci.bench.options import whole_numbers

    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=whole_numbers(1), default="64,128,16")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on every time limit, for a slow host")
    parser.add_argument("--job", nargs="+")
    options = parser.parse_args()
    if options.job:
        name, *rest = options.job
        globals()[f"section_{name}"](*rest)
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this probe needs a CUDA device")
    started = time.time()
    heads = [str(n) for n in options.heads]
    spawn(
        40 * options.patience,
        ["compile", "576", "atomic"],
        ["compile", "576", "store"],
        ["compile", "512", "atomic"],
        ["compile", "512", "store"],
        *[["installed", h] for h in heads],
    )
    print(f"[{time.time() - started:.0f} s]", flush=True)
    spawn(
        32 * options.patience,
        ["check", "forward"],
        ["check", "atomic"],
        ["check", "deterministic"],
        ["check_strided", "576"],
        ["check", "forward", "226"],
        ["check", "forward", "163"],
        ["check", "atomic", "163"],
        ["check", "forward", "99"],
        ["check", "deterministic", "99"],
    )
    print(f"[{time.time() - started:.0f} s]", flush=True)
    spawn(max(20, 98 - (time.time() - started)) * options.patience, ["time", "+".join(heads)])
    print(f"[{time.time() - started:.0f} s in all]", flush=True)


if __name__ == "__main__":
    main()
