"""Correctness, then times, of the sparse-MLA kernels beside megatron-core 0.19.2's, in under two minutes on one H200.

    python gpu_ci/kernels/sparse_mla_probe.py [--sections compile,atomics,check,time] [--heads 16,64,128]

Each section runs in processes of its own with a time limit, so that a kernel that hangs or traps costs only its section.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ATOMICS = r"""
// One block takes one row: `topk` ids, each a row of `width` fp32 values in `dst`. MODE picks the instruction.
extern "C" __global__ void __launch_bounds__(256) scatter(float* dst, const int* ids, int topk, int width, int mode) {
  extern __shared__ __align__(128) float stage[];
  const int* mine = ids + (long)blockIdx.x * topk;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float one = 1e-3f;
  if (mode <= 2) {
    for (int block = 0; block < topk; block += 64) {
      int g = (warp % 4) * 16 + lane / 4, q = lane % 4;
      int half = (warp / 4) * (width / 2);
      for (int r = 0; r < 2; ++r) {
        float* row = dst + (long)mine[block + g + 8 * r] * width + half;
        if (mode == 0)
          for (int c = 0; c < width / 2; c += 8)
            asm volatile("red.global.add.v2.f32 [%0], {%1,%1};" ::"l"(row + c + 2 * q), "f"(one) : "memory");
        else if (mode == 1)
          for (int c = 0; c < width / 2; c += 16)
            asm volatile("red.global.add.v4.f32 [%0], {%1,%1,%1,%1};" ::"l"(row + c + 4 * q), "f"(one) : "memory");
        else
          for (int c = 0; c < width / 2; c += 8) {
            asm volatile("red.global.add.s32 [%0], %1;" ::"l"(row + c + 2 * q), "r"(1) : "memory");
            asm volatile("red.global.add.s32 [%0], %1;" ::"l"(row + c + 2 * q + 1), "r"(1) : "memory");
          }
      }
    }
  } else if (mode == 3) {
    for (int k = warp; k < topk; k += 8) {
      float* row = dst + (long)mine[k] * width;
      for (int c = lane * 4; c < width; c += 128)
        asm volatile("red.global.add.v4.f32 [%0], {%1,%1,%1,%1};" ::"l"(row + c), "f"(one) : "memory");
    }
  } else if (mode == 7) {
    for (int k = warp; k < topk; k += 8) {
      float* row = dst + (long)mine[k] * width;
      for (int c = lane; c < width; c += 32)
        asm volatile("red.global.add.s32 [%0], %1;" ::"l"(row + c), "r"(1) : "memory");
    }
  } else {
    unsigned smem = (unsigned)__cvta_generic_to_shared(stage);
    for (int i = threadIdx.x; i < 8 * width; i += 256) stage[i] = mode == 5 ? __int_as_float(1) : one;
    asm volatile("fence.proxy.async.shared::cta;");
    __syncthreads();
    unsigned bytes = width * 4;
    for (int k = warp * 32 + lane; k < topk; k += 256) {
      float* row = dst + (long)mine[k] * width;
      if (mode == 4)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(row), "r"(smem + warp * bytes), "r"(bytes) : "memory");
      else if (mode == 5)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(row), "r"(smem + warp * bytes), "r"(bytes) : "memory");
      else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(row), "r"(smem + warp * bytes), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.commit_group;");
      asm volatile("cp.async.bulk.wait_group.read 2;");
    }
    asm volatile("cp.async.bulk.wait_group 0;");
  }
}
"""
MODES = {
    0: "red.v2.f32, wgmma order",
    1: "red.v4.f32, wgmma order after exchange",
    2: "red.s32, wgmma order",
    3: "red.v4.f32, one row a warp",
    4: "bulk reduce f32",
    5: "bulk reduce s32",
    6: "bulk store (no reduction)",
    7: "red.s32, one row a warp",
}


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


def section_compile(name, width):
    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    started = time.time()
    kernels.kernel(name, int(width), "sm_90a")
    print(f"RESULT compile {name} {width}: {time.time() - started:.1f} s in this process", flush=True)


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
    import torch

    ref, got = ref.double(), got.double()
    if not torch.equal(ref.isinf(), got.isinf()):
        return float("nan")
    ref, got = (t.masked_fill(t.isinf(), 0.0) for t in (ref, got))
    return ((got - ref).norm() / ref.norm().clamp_min(floor)).item()


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


def section_check(which):
    import torch

    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for width in (512, 576):
        for number, (batch, rows, keys, heads, topk) in enumerate(CASES):
            label = f"{which} D{width} B{batch}-S{rows}-Skv{keys}-H{heads}-K{topk}"
            try:
                q, kv, indices, dout = inputs(batch, rows, keys, heads, topk, width, seed=100 * width + number)
                drop = torch.rand(indices.shape, device="cuda") < 0.2
                indices = torch.where(drop, torch.randint(-3, 0, indices.shape, device="cuda"), indices.long()).int()
                indices[0, 1] = -1
                indices[0, 0, 0] = 2**31 - 1
                indices[-1, 2, -1] = keys
                scale = width**-0.5
                out_r, lse_r, dq_r, dkv_r = reference(q, kv, indices, scale, dout)
                if which == "forward":
                    out, lse = kernels.forward(q, kv, indices, scale, 512)
                    torch.cuda.synchronize()
                    errors = {"out": error(out_r, out), "lse": error(lse_r, lse)}
                    again = kernels.forward(q, kv, indices, scale, 512)
                    errors["replay"] = float(not all(torch.equal(a, b) for a, b in zip((out, lse), again)))
                else:
                    dq, dkv = kernels.backward(q, kv, indices, out_r.bfloat16(), lse_r.float(), dout, scale, 512, False)
                    torch.cuda.synchronize()
                    errors = {"dq": error(dq_r, dq, 0.02 * dq.numel() ** 0.5), "dkv": error(dkv_r, dkv)}
                    errors["empty row"] = dq[0, 1].abs().max().item()
                bad = [k for k, v in errors.items() if not v < 0.008]
                print(
                    f"RESULT {'FAIL' if bad else 'ok  '} {label}  "
                    + "  ".join(f"{k} {v:.2e}" for k, v in errors.items()),
                    flush=True,
                )
            except Exception as e:
                traceback.print_exc()
                print(f"RESULT FAIL {label}: {type(e).__name__} {str(e).splitlines()[-1][:150] if str(e) else ''}")


def section_atomics():
    import cupy
    import torch

    rows, topk = 16384, 2048
    ids = random_causal(rows, topk).clamp_min(0)
    module = cupy.RawModule(code=ATOMICS, backend="nvrtc", options=("-std=c++17", "-arch=sm_90a"))
    kernel = module.get_function("scatter")
    kernel.max_dynamic_shared_size_bytes = 8 * 576 * 4
    for width in (576,):
        dst = torch.zeros(rows, width, device="cuda")
        for mode, name in MODES.items():
            try:

                def launch(mode=mode):
                    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                        kernel(
                            (rows,),
                            (256,),
                            (dst.data_ptr(), ids.data_ptr(), cupy.int32(topk), cupy.int32(width), cupy.int32(mode)),
                            shared_mem=8 * 576 * 4,
                        )

                ms = median_ms(launch, 3)
                tb = rows * topk * width * 4 / ms / 1e9
                print(f"RESULT atomics {name:40s} width {width}: {ms:7.2f} ms {tb:5.2f} TB/s", flush=True)
            except Exception as e:
                print(f"RESULT atomics {name}: {type(e).__name__} {e}", flush=True)


def section_time(heads):
    import torch

    from mcore_patches.ops.sparse_mla import tilelang_kernels as kernels

    rows, topk, scale = 16384, 2048, 576**-0.5
    indices = random_causal(rows, topk).unsqueeze(0)
    for H in (int(h) for h in heads.split("+")):
        result = {}
        for width in (576, 512):
            q, kv, _, dout = inputs(1, rows, rows, H, 1, width)
            forward_flops = 2 * rows * H * topk * (width + 512) / 1e9
            backward_flops = 2 * rows * H * topk * (3 * width + 2 * 512) / 1e9
            try:
                out, lse = kernels.forward(q, kv, indices, scale, 512)
                ms = median_ms(lambda: kernels.forward(q, kv, indices, scale, 512), 5)
                result["forward", width] = ms
                print(
                    f"RESULT time ours forward  H{H} D{width}: {ms:7.2f} ms {forward_flops / ms:6.1f} TF/s", flush=True
                )
                ms = median_ms(lambda: kernels.backward(q, kv, indices, out, lse, dout, scale, 512, False), 3)
                result["backward", width] = ms
                print(
                    f"RESULT time ours backward H{H} D{width}: {ms:7.2f} ms {backward_flops / ms:6.1f} TF/s", flush=True
                )
                delta, dkv = torch.empty_like(lse), torch.zeros(1, rows, width, device="cuda")
                dq = torch.empty_like(q)
                ms = median_ms(
                    lambda: kernels.kernel("backward", width, "sm_90a")(
                        q, kv.squeeze(2), dout, indices, lse, delta, scale, dq, dkv
                    ),
                    3,
                )
                print(
                    f"RESULT time   main kernel alone H{H} D{width}: {ms:7.2f} ms {backward_flops / ms:6.1f} TF/s",
                    flush=True,
                )
            except Exception as e:
                traceback.print_exc()
                print(f"RESULT time ours H{H} D{width}: {type(e).__name__} {str(e)[-200:]}", flush=True)
            if width == 576:
                try:
                    fwd, bwd = installed()
                    ids = indices.unsqueeze(2)
                    o, l = fwd.sparse_mla_fwd_interface(q, kv, ids, sm_scale=scale)
                    ms = median_ms(lambda: fwd.sparse_mla_fwd_interface(q, kv, ids, sm_scale=scale), 3)
                    r = ms / result.get(("forward", 576), float("nan"))
                    print(
                        f"RESULT time installed forward  H{H}: {ms:7.2f} ms {forward_flops / ms:6.1f} TF/s, ours {r:.2f}x",
                        flush=True,
                    )
                    print(f"RESULT      out against installed: {error(o, out):.2e}", flush=True)
                    ms = median_ms(lambda: bwd.sparse_mla_bwd(q, kv, o, dout, ids, l, sm_scale=scale), 2)
                    r = ms / result.get(("backward", 576), float("nan"))
                    print(
                        f"RESULT time installed backward H{H}: {ms:7.2f} ms {backward_flops / ms:6.1f} TF/s, ours {r:.2f}x",
                        flush=True,
                    )
                    a = bwd.sparse_mla_bwd(q, kv, o, dout, ids, l, sm_scale=scale)
                    b = kernels.backward(q, kv, indices, out, lse, dout, scale, 512, False)
                    print(
                        f"RESULT      dq, dkv against installed: {error(a[0], b[0]):.2e} {error(a[1], b[1]):.2e}",
                        flush=True,
                    )
                    del o, l, a, b
                except Exception as e:
                    traceback.print_exc()
                    print(f"RESULT time installed H{H}: {type(e).__name__} {str(e)[-200:]}", flush=True)
        print(
            f"RESULT width 512 over 576 at H{H}: forward {result.get(('forward', 576), 0) / result.get(('forward', 512), 1):.3f} (FLOPs {1088 / 1024:.3f}), "
            f"backward {result.get(('backward', 576), 0) / result.get(('backward', 512), 1):.3f} (FLOPs {2752 / 2560:.3f})",
            flush=True,
        )


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
            output += f"\nRESULT {' '.join(job)}: stopped at its limit of {limit} s"
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", default="compile,atomics,check,time")
    parser.add_argument("--heads", default="16,64,128")
    parser.add_argument("--job", nargs="+")
    options = parser.parse_args()
    if options.job:
        name, *rest = options.job
        globals()[f"section_{name}"](*rest)
        return
    started = time.time()
    sections = options.sections.split(",")
    heads = options.heads.split(",")
    if "compile" in sections:
        jobs = [["compile", n, w] for n in ("forward", "backward") for w in ("512", "576")] + [
            ["compile", "delta", "512"]
        ]
        spawn(70, *jobs, *[["installed", h] for h in heads])
        print(f"[{time.time() - started:.0f} s]", flush=True)
    if "atomics" in sections:
        spawn(25, ["atomics"])
    if "check" in sections:
        spawn(45, ["check", "forward"], ["check", "backward"])
        print(f"[{time.time() - started:.0f} s]", flush=True)
    if "time" in sections:
        spawn(90, ["time", "+".join(heads)])
    print(f"[{time.time() - started:.0f} s in all]", flush=True)


if __name__ == "__main__":
    main()
