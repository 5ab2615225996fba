"""Correctness, then times, of the sparse GQA kernels beside dense cuDNN attention, in about two minutes on one H200.

    python gpu_ci/kernels/sparse_gqa_probe.py [--sections build,check,time,tune] [--tokens 65536,131072,16384]

Every kernel and every check runs in a process of its own with a time limit, so that a kernel that hangs or faults costs
only its own line. A check that fails runs once more under compute-sanitizer where there is one. RESULT lines come last
again, together.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

HEADS, KV_HEADS, DIM, TOPK, RATIO = 24, 2, 256, 512, 4
SCALE = DIM**-0.5
BOUND = 0.01  # relative error in the Frobenius norm; bf16 inputs and outputs give 2e-3 to 4e-3
FORWARD_VARIANTS = {
    "k2v1x2": {},
    "k1v1x3": {"k_stages": 1, "v_stages": 1, "blocks_per_sm": 3},
    "k3v3x1": {"k_stages": 3, "v_stages": 3, "blocks_per_sm": 1},
}
CHECKS = ["plan", "row_forward", "union_forward", "row_backward", "union_backward", "mixed"]


def result(line: str) -> None:
    print(f"RESULT {line}", flush=True)


# ---------------------------------------------------------------------------------------------- kernels


def kernels(variant: str = "k2v1x2", **backward: int):
    """The kernels of the probe's shape, with a variant of the forward and changes to the backward's tiles."""
    import torch

    from mcore_patches.ops.sparse_gqa.design import sparse_gqa_design
    from mcore_patches.ops.sparse_gqa.tilelang_kernels import Kernels, Shape

    group = HEADS // KV_HEADS
    design = sparse_gqa_design("sm_90a", 227 * 1024, torch.bfloat16, DIM, group, RATIO, TOPK)
    design = replace(
        design,
        forward=replace(design.forward, **FORWARD_VARIANTS[variant]),
        backward=replace(design.backward, **backward),
    )
    return Kernels(Shape("sm_90a", HEADS, KV_HEADS, DIM, RATIO, TOPK), design)


def kernel_builders() -> dict[str, Callable[[], object]]:
    builders = dict(kernels().named_builds())
    for variant in FORWARD_VARIANTS:
        builders[f"row_forward {variant}"] = kernels(variant).named_builds()["row_forward"]
    return builders


def section_build(name: str) -> None:
    started = time.time()
    kernel_builders()[name]()
    result(f"build {name}: {time.time() - started:.1f} s")


# ---------------------------------------------------------------------------------------------- checks


def packed_case(lengths: list[int], seed: int):
    """Packed documents with padding rows inside and behind, empty rows, wild ids, ids out of order, a sink."""
    import torch

    g = torch.Generator(device="cuda").manual_seed(seed)
    pos, start, at = [], [], 0
    for i, n in enumerate(lengths):
        pos += list(range(n)) + [-1] * (3 * (i % 2))
        start += [at] * n + [0] * (3 * (i % 2))
        at += n
    row_pos = torch.tensor(pos, dtype=torch.int32, device="cuda")
    row_start = torch.tensor(start, dtype=torch.int32, device="cuda")
    rows, row = len(pos), torch.arange(len(pos), device="cuda")[:, None]
    blocks = max(lengths) // RATIO + 1
    complete = torch.div(row_pos + 1, RATIO, rounding_mode="floor")[:, None]
    # Neighbouring rows draw from scores that differ a little, so that they share most of what they pick.
    score = torch.rand(1 + rows // 32, blocks, device="cuda", generator=g)[torch.arange(rows, device="cuda") // 32]
    score = score + 0.05 * torch.rand(rows, blocks, device="cuda", generator=g)
    block = torch.arange(blocks, device="cuda")
    score = torch.where((block == 0) & (row % 3 != 0), 2.0, score).masked_fill(block >= complete, -1.0)
    best, ids = score.topk(min(TOPK, blocks), dim=1)
    ids = torch.where(best >= 0, ids, -1).int()
    ids = torch.nn.functional.pad(ids, (0, TOPK - ids.shape[1]), value=-1)
    take = (ids >= 0).sum(dim=1)
    wild = (torch.arange(rows, device="cuda") % 11 == 3) & (take < TOPK)
    ids[wild, take[wild]] = complete[wild, 0].int() + 5
    ids[torch.arange(rows, device="cuda") % 17 == 5] = -1

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=g).bfloat16()

    q, dout = normal(rows, HEADS, DIM), normal(rows, HEADS, DIM)
    k, v = normal(at + 3, KV_HEADS, DIM), normal(at + 3, KV_HEADS, DIM)
    k[-3:] = v[-3:] = float("nan")
    q[row_pos < 0] = dout[row_pos < 0] = float("nan")
    return q, k, v, dout, ids, row_pos, row_start


def error(got, want) -> float:
    """Relative error, infinite where one is finite and the other not."""
    import torch

    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    got, want = got[finite].double(), want[finite].double()
    return float((got - want).norm() / want.norm())


def reference_plan(ids, pos, start, rows: int, limit: int) -> list[dict[int, int] | None]:
    """Of every tile: {first token: row mask | tail mask << 16}, or None where the union is larger than the limit."""
    ids, pos, start = (x.tolist() for x in (ids, pos, start))
    plan: list[dict[int, int] | None] = []
    for base in range(0, len(pos), rows):
        union: dict[int, int] = {}
        for r in range(min(rows, len(pos) - base)):
            p, s = pos[base + r], start[base + r]
            if p < 0:
                continue
            complete = (p + 1) // RATIO
            for block in ids[base + r]:
                if 0 <= block < complete:
                    union[s + block * RATIO] = union.get(s + block * RATIO, 0) | 1 << r
            if (p + 1) % RATIO:
                union[s + complete * RATIO] = union.get(s + complete * RATIO, 0) | 1 << (16 + r)
        plan.append(union if len(union) <= limit else None)
    return plan


def check_plan() -> dict[str, float]:
    from mcore_patches.ops.sparse_gqa.tilelang_forward import Rows, make_plan

    _, _, _, _, ids, pos, start = packed_case([1, 3, 4, 41, 7, 130, 2, 3000, 61, 33], 1)
    wrong, both = {}, kernels()
    for name, tiles in (("plan", both.design.forward), ("backward_plan", both.design.backward.union)):
        for limit in (tiles.limit(TOPK), 560, 0):
            plan = make_plan(both, name, Rows(ids, pos, start), tiles, limit)
            count, first, info = plan.count.tolist(), plan.first.tolist(), plan.info.tolist()
            want = reference_plan(ids, pos, start, tiles.rows, limit)
            bad = 0
            for tile, union in enumerate(want):
                if union is None or count[tile] < 0:
                    bad += (union is None) != (count[tile] < 0)
                    continue
                n = count[tile]
                got = {f: i & 0xFFFFFFFF for f, i in zip(first[tile][:n], info[tile][:n])}
                bad += n != len(union) or got != union
            unshared = sum(u is None for u in want)
            wrong[f"rows {tiles.rows} limit {limit} ({unshared} of {len(want)} unshared)"] = float(bad)
    return wrong


def check_attention(name: str) -> dict[str, float]:
    """Forward and backward against float64, with a limit that sends all tiles, none or some to the union kernels."""
    import torch

    from mcore_patches.ops.sparse_gqa.naive import sparse_gqa_naive
    from mcore_patches.ops.sparse_gqa.tilelang_backward import backward
    from mcore_patches.ops.sparse_gqa.tilelang_forward import Rows, forward, make_plan

    q, k, v, dout, ids, pos, start = packed_case([1, 3, 4, 41, 7, 130, 2, 2500, 61, 33], 2)
    rows = Rows(ids, pos, start)
    # A small scratch: several chunks.
    few = kernels(steps=1000, stored_bytes=2**27)
    most = few.design.forward.limit(TOPK)
    limit = {"row": 0, "union": most, "mixed": 560}[name.partition("_")[0]]
    q64, k64, v64 = (x.double().requires_grad_() for x in (q, k, v))
    want, want_lse = sparse_gqa_naive(q64, k64, v64, ids, pos, start, scale=SCALE, block_size=RATIO)
    plan = make_plan(few, "plan", rows, few.design.forward, limit)
    errors = {"shared": float((plan.count >= 0).float().mean())}
    if name.endswith("forward") or name == "mixed":
        for variant in FORWARD_VARIANTS if name == "row_forward" else ["k2v1x2"]:
            arguments = (kernels(variant), q, k, v, rows, SCALE)
            out, lse = forward(*arguments, limit=limit)
            torch.cuda.synchronize()
            errors |= {f"{variant} out": error(out, want), f"{variant} lse": error(lse, want_lse)}
            again, _ = forward(*arguments, limit=limit)
            errors[f"{variant} replay"] = float(not torch.equal(out, again))
    if name.endswith("backward") or name == "mixed":
        grads = torch.autograd.grad(want, (q64, k64, v64), dout.double().nan_to_num(0.0))
        arguments = (few, q, k, v, rows, want.detach().bfloat16(), want_lse.float(), dout, SCALE)
        got = backward(*arguments, limit=limit)
        torch.cuda.synchronize()
        errors |= {n: error(g, w) for n, g, w in zip(("dq", "dk", "dv"), got, grads)}
        again = backward(*arguments, limit=limit)
        errors["replay"] = float(not all(torch.equal(a, b) for a, b in zip(got, again)))
    return errors


def section_check(name: str) -> None:
    errors = check_plan() if name == "plan" else check_attention(name)
    bad = [n for n, e in errors.items() if n != "shared" and not e < BOUND]
    text = "  ".join(f"{n} {e:.2e}" for n, e in errors.items())
    result(f"{'FAIL' if bad else 'ok  '} check {name}: {text}")
    if bad:
        sys.exit(1)


# ---------------------------------------------------------------------------------------------- times


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    import torch

    run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernel_times(run: Callable[[], object]) -> str:
    """Device time by kernel of one call, the largest first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total.setdefault(event.name.removesuffix("_kernel")[:40], []).append(event.time_range.elapsed_us() / 1e3)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:9]
    return ", ".join(f"{n} {sum(t):.2f} ({len(t)})" for n, t in ranked)


def dense_times(tokens: int) -> tuple[float, float]:
    """Milliseconds of dense causal cuDNN attention: forward, and forward + backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)
    dout = torch.randn_like(q)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):

        def forward() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        try:
            forward()
        except RuntimeError:
            k, v = normal(HEADS), normal(HEADS)
        with torch.no_grad():
            forward_ms = milliseconds(forward)
        both_ms = milliseconds(lambda: torch.autograd.grad(forward(), (q, k, v), dout), 2)
    return forward_ms, both_ms


def section_time(tokens_text: str) -> None:
    import torch

    from gpu_ci.bench.selections import KINDS, block_selection, overlap
    from mcore_patches.ops.sparse_gqa.tilelang_backward import backward as run_backward
    from mcore_patches.ops.sparse_gqa.tilelang_forward import Rows
    from mcore_patches.ops.sparse_gqa.tilelang_forward import forward as run_forward

    tokens = int(tokens_text)
    dense_forward, dense_both = dense_times(tokens)
    result(f"time T {tokens}: dense cuDNN forward {dense_forward:.2f} ms, forward + backward {dense_both:.2f} ms")
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    q, dout = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for kind in KINDS:
        ids = block_selection(tokens, kind, topk=TOPK, block_size=RATIO)
        unions = {n: round(u, 2) for n, u in overlap(ids, 32)[1].items()}
        rows = Rows(ids, pos, torch.zeros_like(pos))
        variants = ["k2v1x2"] if tokens != 65536 or kind != "random" else list(FORWARD_VARIANTS)
        try:
            out, lse = run_forward(kernels(), q, k, v, rows, SCALE)
            forward_ms = float("inf")
            for variant in variants:
                forward = functools.partial(run_forward, kernels(variant), q, k, v, rows, SCALE)
                ms = milliseconds(forward)
                result(f"time T {tokens} {kind} forward {variant}: {ms:.2f} ms, {ms / dense_forward:.3f} of dense")
                forward_ms = min(forward_ms, ms)
            backward = functools.partial(run_backward, kernels(), q, k, v, rows, out, lse, dout, SCALE)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ms = milliseconds(backward, 2)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            result(
                f"time T {tokens} {kind} backward: {ms:.2f} ms; forward + backward {ms + forward_ms:.2f} ms, "
                f"{(ms + forward_ms) / dense_both:.3f} of dense; peak {peak:.2f} GiB; unions {unions}"
            )
            if tokens != 16384:
                result(f"  forward by kernel: {kernel_times(forward)}")
                result(f"  backward by kernel: {kernel_times(backward)}")
        except Exception as e:
            traceback.print_exc()
            result(f"FAIL time T {tokens} {kind}: {type(e).__name__} {str(e)[-200:]}")
            raise


def section_tune(tokens_text: str) -> None:
    """Both directions of a random selection with kernels built otherwise, and the backward by chunk size."""
    import torch

    from gpu_ci.bench.selections import block_selection
    from mcore_patches.ops.sparse_gqa.tilelang_backward import backward
    from mcore_patches.ops.sparse_gqa.tilelang_forward import Rows, forward

    tokens = int(tokens_text)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    q, dout = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows = Rows(block_selection(tokens, "random", topk=TOPK, block_size=RATIO), pos, torch.zeros_like(pos))
    out, lse = forward(kernels(), q, k, v, rows, SCALE)
    gradients = q, k, v, rows, out, lse, dout, SCALE
    for name, chosen in {
        "as built": kernels(),
        "unguarded": varied(kernels(), {}),
        "windows by threads": varied(kernels(), {"backward_window": {"bulk": False}}),
    }.items():
        run = functools.partial(forward, chosen, q, k, v, rows, SCALE)
        result(f"tune T {tokens} random forward, {name}: {milliseconds(run):.2f} ms; {kernel_times(run)}")
        run = functools.partial(backward, chosen, *gradients)
        result(f"tune T {tokens} random backward, {name}: {milliseconds(run, 2):.2f} ms; {kernel_times(run)}")
    for mebibytes in (6, 12, 24, 48, 96, 4096):
        chosen = kernels(gathered_bytes=mebibytes * 2**20, stored_bytes=8 * 2**30)
        run = functools.partial(backward, chosen, *gradients)
        result(f"tune T {tokens} chunks of {mebibytes} MiB: {milliseconds(run, 2):.2f} ms; {kernel_times(run)}")


def varied(chosen: object, changes: dict[str, dict[str, object]]) -> object:
    """Kernels without TileLang's bounds checks, some of them with other arguments."""
    from mcore_patches.ops.sparse_gqa import tilelang_kernels
    from mcore_patches.ops.sparse_gqa.tilelang_kernels import CACHE, GUARDED, Kernels, specifications

    class Varied(Kernels):
        def __getitem__(self, name: str) -> object:
            plain = specifications(self.shape, self.design)[name]
            arguments = dict(plain.arguments) | changes.get(name, {})
            wanted = replace(plain, arguments=arguments, pass_configs=GUARDED)
            key = (*self.shape.key, "varied", name, *arguments.values())
            return CACHE.get(key, lambda: tilelang_kernels._build(key, wanted, self.shape.arch))

    return Varied(chosen.shape, chosen.design)


# ---------------------------------------------------------------------------------------------- processes

SECTIONS = {"build": section_build, "check": section_check, "time": section_time, "tune": section_tune}
LINES: list[str] = []


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]


def spawn(limit: float, children: list[list[str]], at_once: int = 16) -> list[list[str]]:
    """Run children, each with a time limit, `at_once` at a time; print what they say; return those that fail."""
    failed, waiting, running = [], list(children), []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < at_once:
            child = waiting.pop(0)
            process = subprocess.Popen(
                command(*child), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
            running.append((child, process, time.time()))
        child, process, started = running.pop(0)
        try:
            text, _ = process.communicate(timeout=max(1.0, limit - (time.time() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            text += f"\nRESULT FAIL {' '.join(child)}: over its limit of {limit:.0f} s"
        LINES.extend(line for line in text.splitlines() if line.startswith("RESULT"))
        if process.returncode:
            failed.append(child)
            if not any(line.startswith("RESULT FAIL") for line in text.splitlines()):
                LINES.append(f"RESULT FAIL {' '.join(child)}: exit status {process.returncode}")
            print(text[-3000:], flush=True)
        else:
            print("\n".join(line for line in text.splitlines() if line.startswith("RESULT")), flush=True)
    return failed


def sanitize(child: list[str]) -> None:
    """Run a child that failed once more under memcheck and print the first lines."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on PATH", flush=True)
        return
    try:
        run = subprocess.run(
            [tool, "--tool", "memcheck", "--print-limit", "3", *command(*child)],
            capture_output=True,
            text=True,
            timeout=40,
        )
        lines = (run.stdout + run.stderr).splitlines()
    except subprocess.TimeoutExpired as stopped:
        lines = (stopped.stdout or b"").decode().splitlines()
    print("\n".join(["memcheck " + " ".join(child), *lines[:30]]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="build,check,time")
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--tokens", default="65536,16384,131072")
    parser.add_argument("--seconds", type=float, default=135.0, help="no timing starts or runs on beyond this")
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        SECTIONS[arguments.child[0]](arguments.child[1])
        return
    started = time.time()
    sections = arguments.sections.split(",")
    if "build" in sections:
        spawn(70, [["build", name] for name in kernel_builders()])
        print(f"[{time.time() - started:.0f} s]", flush=True)
    if "check" in sections:
        failed = spawn(40, [["check", name] for name in arguments.checks.split(",")])
        print(f"[{time.time() - started:.0f} s]", flush=True)
        if failed:
            sanitize(failed[0])
    if "tune" in sections:
        spawn(120, [["tune", "65536"]])
    if "time" in sections:
        for tokens in arguments.tokens.split(","):
            left = arguments.seconds - (time.time() - started)
            if left < 15:
                LINES.append(f"RESULT time T {tokens}: not started, {left:.0f} s left")
                continue
            spawn(min(60, left), [["time", tokens]])
            print(f"[{time.time() - started:.0f} s]", flush=True)
    print("\n=== " + "\n".join(["results", *LINES]))
    sys.exit(any("FAIL" in line for line in LINES))


if __name__ == "__main__":
    main()
