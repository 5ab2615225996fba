"""Sparse MLA: our kernels beside the installed ones and cuDNN frontend's, against the machine's limits, in one run.

    python -m gpu_ci.bench.sparse_mla [--save] [--heads 8,16,32,64,128] [--tokens 4096,16384,65536] [--widths 576,512]
                                      [--topk 2048] [--seconds 280] [--no-build] [--no-hook]

One document, random causal selections; each kernel is timed at the clock that the GPU settles at under it. Kernels are
called as their autograd functions call them; megatron's SparseMLA runs its forward once more in the backward, so the
"hook" lines time `fused_sparse_mla_absorbed` as a whole with sparse_mla_nope alone and with sparse_mla_fast. Nominal
work is 2 T H K (D + 512) FLOPs forward and 2 T H K (3 D + 1024) backward, ids of -1 included, as the installed kernels
count theirs; results.csv has the share of ids that are keys. The floor of the atomic backward is the time in which fp32
atomics, eight lanes to a line of 128 bytes, add as many rows to the same keys without computing them. What would take
longer than is left of `--seconds` is not started and named.

cuDNN frontend is timed where it can be imported:

    E="nvidia-cudnn-frontend==1.32.0 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1"
    E="$E nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 protobuf"
    EXTRA="$E" gpu_ci/pack.sh

and PYTHONPATH=/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages:$PWD where that is unpacked to /tmp/site.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import mcore_patches
from gpu_ci.bench import results
from gpu_ci.bench.options import positive, whole_numbers
from gpu_ci.bench.qsa import Clock, matrix_ceiling, milliseconds
from gpu_ci.kernels.sparse_mla_probe import error, installed, random_causal
from mcore_patches.ops.sparse_mla import tilelang_kernels

BENCH, DETAILS = "sparse_mla", "sparse_mla_details"  # README shows the rows of the former
HEADLINES = {f"T16384-H{heads}-D576-K2048" for heads in (16, 64, 128)}  # the shapes that the goals are set for
DV = 512
SCALE = 576**-0.5  # for every width: the installed kernels hold it as a constant and would be compiled anew
HEAT = 0.4  # seconds that the GPU is kept busy with what is timed next
TOLERANCE = 0.02  # relative norm of the difference between two kernels in bf16
COLUMNS = "case", "", "ms", "TFLOP/s", "of ceiling", "installed / ours"

ADD_LINES = """
extern "C" __global__ void add_lines(float* sums, const int* ids, int topk, int width) {
    const int* row = ids + (long long)blockIdx.x * topk;
    int lines = width / 32, lane = threadIdx.x % 8;
    for (int n = threadIdx.x / 8; n < topk * lines; n += blockDim.x / 8) {
        int id = row[n / lines];
        float4* line = (float4*)(sums + (long long)id * width + (n % lines) * 32);
        if (id >= 0)
            asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(line + lane), "f"(1.0f) : "memory");
    }
}
"""


class Case:
    """Inputs of one shape, and what its passes cost."""

    def __init__(self, tokens: int, heads: int, width: int, ids: Tensor) -> None:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.heads, self.width, self.ids = heads, width, ids
        self.q, self.kv = normal(1, tokens, heads, width), normal(1, tokens, 1, width)
        self.dout = normal(1, tokens, heads, DV)
        self.scale = SCALE
        self.name = f"T{tokens}-H{heads}-D{width}-K{ids.shape[-1]}"
        products = 2 * tokens * heads * ids.shape[-1] / 1e9
        self.gflops = {"forward": products * (width + DV), "backward": products * (3 * width + 2 * DV)}

    def forward(self) -> tuple[Tensor, Tensor]:
        return tilelang_kernels.forward(self.q, self.kv, self.ids, self.scale, DV)

    @functools.cached_property
    def result(self) -> tuple[Tensor, Tensor]:
        """out and lse, as a backward gets them."""
        return self.forward()

    def backward(self, ordered: bool | None = None) -> tuple[Tensor, Tensor]:
        """ordered: how dKV is summed, None for what a call takes that does not ask for an order."""
        out, lse = self.result
        arguments = self.q, self.kv, self.ids, out, lse, self.dout, self.scale, DV
        return tilelang_kernels.backward(*arguments, False, ordered=ordered)

    @property
    def takes_order(self) -> bool:
        """Whether `backward` sums dKV in order without being asked to."""
        return tilelang_kernels.takes_order(self.q, self.kv, self.ids, False)


def steady_milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call after `HEAT` seconds of such calls.

    These kernels draw more power than the card may take, so its clock falls within a tenth of a second: a kernel timed
    after a pause, or after another that draws less, seems up to a tenth faster than it is in a row of its own.
    """
    end = time.monotonic() + HEAT
    while time.monotonic() < end:
        run()
        torch.cuda.synchronize()
    return milliseconds(run, warm=False)


def build_seconds(width: int, heads: int, deterministic: bool = False, cache: str | None = None) -> float:
    """What a first call waits for forward and backward, in a process of its own. cache: TileLang's folder."""
    call = f"warmup(width={width}, heads={heads}, deterministic={deterministic})"
    code = f"from mcore_patches.ops.sparse_mla import tilelang_kernels as k; print(k.{call})"
    return float(output_of(code, cache).split()[-1])


def output_of(code: str, cache: str | None = None) -> str:
    """Standard output of code in a process of its own."""
    environment = os.environ | ({"TILELANG_CACHE_DIR": cache} if cache else {})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(f"{code}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def cold_build_seconds(width: int, heads: int) -> float:
    with tempfile.TemporaryDirectory() as empty:
        return build_seconds(width, heads, cache=empty)


def fill_caches(heads: list[int], widths: list[int], topk: int) -> list[Future[Any]]:
    """Compile side by side, into TileLang's cache on disk, what the cases will run."""
    # One is enough of the head counts that share our kernels: up to 16, 32 or more, in as many blocks of 64.
    few = {(min(-(-n // 16), 3), -(-n // 64)): n for n in heads}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs: list[Future[Any]] = [
            pool.submit(build_seconds, width, count, deterministic)
            for count in few.values()
            for width in widths
            for deterministic in (False, True)
        ]
        for count in {kernel_heads(n) for n in heads}:
            code = f"from gpu_ci.bench import sparse_mla as b; b.run_installed_once({count}, {topk})"
            jobs.append(pool.submit(output_of, code))
    return jobs


def kernel_heads(heads: int) -> int:
    """Heads that the installed kernels take: a power of two, at least 16."""
    return max(16, 1 << (heads - 1).bit_length())


def run_installed_once(heads: int, topk: int) -> None:
    case = Case(256, heads, 576, torch.zeros(1, 256, topk, dtype=torch.int32, device="cuda"))
    fwd, bwd = installed()
    ids = case.ids.unsqueeze(2)
    out, lse = fwd.sparse_mla_fwd_interface(case.q, case.kv, ids, sm_scale=case.scale)
    bwd.sparse_mla_bwd(case.q, case.kv, out, case.dout, ids, lse, sm_scale=case.scale)


@functools.cache
def add_lines() -> Any:
    return torch.cuda._compile_kernel(ADD_LINES, "add_lines")


def atomic_floor_ms(case: Case) -> float:
    """Time of adding a row of fp32 to each selected key, once for every block of heads of our backward."""
    add = add_lines()
    sums = torch.zeros(case.kv.shape[1], case.width, device="cuda")
    rows, topk = case.ids.shape[1:]
    blocks = -(-case.heads // 64)
    arguments = [sums, case.ids, topk, case.width]
    return blocks * steady_milliseconds(lambda: add(grid=(rows, 1, 1), block=(256, 1, 1), args=arguments))


def check(what: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Times of kernels that disagree are worth nothing."""
    for name, (ours, theirs) in pairs.items():
        difference = error(ours, theirs)
        if not difference < TOLERANCE:
            raise ArithmeticError(f"{what}: {name} differs from ours by {difference:.1e} of its norm")


def cudnn_backward(case: Case) -> Callable[[], Any]:
    """cuDNN frontend's backward on our out and lse, checked once. It takes -1 only behind `topk_length` ids."""
    wrapper = importlib.import_module("cudnn").DSA.sparse_attention_backward_wrapper
    out, lse = case.result
    ids, length = case.ids[0].clamp(min=0), (case.ids[0] >= 0).sum(-1, dtype=torch.int32)
    no_sink = torch.full((case.heads,), -torch.inf, device="cuda")
    q, kv, dout = case.q[0], case.kv[0, :, 0], case.dout[0]

    def run() -> Any:
        options = {"softmax_scale": case.scale, "topk_length": length}
        return wrapper(q, kv, out[0], dout, lse[0], no_sink, ids, **options)

    theirs, (dq, dkv) = run(), case.backward()
    check("cuDNN", {"dq": (dq[0], theirs["dq"]), "dkv": (dkv[0, :, 0], theirs["dkv"])})
    return run


def installed_passes(case: Case) -> dict[str, Callable[[], Any]]:
    """The installed kernels, checked once. What they do not take (width 512, other head counts) is padded, which is not
    timed.
    """
    fwd, bwd = installed()
    wider, more_heads = 576 - case.width, kernel_heads(case.heads) - case.heads
    q, kv = pad(case.q, (0, wider, 0, more_heads)), pad(case.kv, (0, wider))
    dout = pad(case.dout, (0, 0, 0, more_heads))
    ids = case.ids.unsqueeze(2)

    def forward() -> tuple[Tensor, Tensor]:
        return fwd.sparse_mla_fwd_interface(q, kv, ids, sm_scale=case.scale)

    out, lse = forward()

    def backward() -> tuple[Tensor, Tensor]:
        return bwd.sparse_mla_bwd(q, kv, out, dout, ids, lse, sm_scale=case.scale)

    (dq, dkv), (our_dq, our_dkv) = backward(), case.backward()
    real = slice(case.heads), slice(case.width)
    pairs = {"out": (case.result[0], out[:, :, : case.heads])}
    pairs |= {"dq": (our_dq, dq[:, :, *real]), "dkv": (our_dkv, dkv[..., : case.width])}
    check("the installed kernels", pairs)
    return {"forward": forward, "backward": backward}


def hook(case: Case, *patches: str) -> tuple[float, float]:
    """Milliseconds of forward + backward through megatron's function; peak memory above inputs and gradients, GiB."""
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    query, key, dout = (t.transpose(0, 1) for t in (case.q, case.kv, case.dout))
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = tilelang_dsa.fused_sparse_mla_absorbed(query, key, case.ids, case.scale, DV)
        return torch.autograd.grad(out, (query, key), dout)

    with mcore_patches.applied(patches, strict=True):
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = step()
        peak = torch.cuda.max_memory_allocated() - before - sum(2 * g.numel() for g in gradients)
        del gradients
        return steady_milliseconds(step), peak / 2**30


class Bench:
    """Prints a line a measurement, and collects rows of results and the reasons for what is missing."""

    def __init__(self, seconds: float) -> None:
        self.clock = Clock(seconds)
        self.rows: list[dict[str, str]] = []
        self.case = ""
        self.reasons: dict[str, None] = {}
        self.last: dict[str, float] = {}
        self.installed: dict[tuple[int, int, str], float | None] = {}  # by rows, heads after padding, kind of pass
        self.ceiling = matrix_ceiling(steady_milliseconds)
        self.row("8192x8192x8192", "matrix ceiling, bf16", self.ceiling, "TFLOP/s")

    def line(self, *cells: str) -> None:
        cells += ("",) * (len(COLUMNS) - len(cells))
        print("{:<26}{:<44}{:>9}{:>9}{:>12}{:>18}".format(*cells), flush=True)

    def row(self, case: str, metric: str, value: float, unit: str) -> None:
        self.rows.append(results.row(DETAILS, case, metric, value, unit))

    def headline(self, case: str, metric: str, value: float) -> None:
        self.rows.append(results.row(BENCH if case in HEADLINES else DETAILS, case, metric, value, ""))

    def attempt(self, name: str, work: float, run: Callable[[], Any]) -> Any:
        """run(), or None: no time left, going by the seconds that as much work took before, or it raised."""
        if not self.clock.allows(f"{self.case} {name}", 1.0 + self.last.get(name, 0.0) * work):
            return None
        begin = time.monotonic()
        try:
            return run()
        except Exception as fault:  # other people's kernels raise what they like; the reason is printed
            text = (str(fault).strip() or type(fault).__name__).splitlines()[-1]
            self.reasons[f"{name}: {text[:200]}"] = None
            return None
        finally:
            # The first call of a name compiles as well; the least is what the work takes.
            self.last[name] = min(self.last.get(name, float("inf")), (time.monotonic() - begin) / work)
            gc.collect()
            torch.cuda.empty_cache()

    def timed(self, case: Case, who: str, kind: str, run: Callable[[], Any], base: float | None = None) -> float | None:
        """Milliseconds of one pass. base: the installed kernel's, for the ratio."""
        ms = self.attempt(f"{who}, {kind}", case.gflops[kind], lambda: steady_milliseconds(run))
        self.report(case, who, kind, ms, base)
        return ms

    def timed_installed(self, case: Case, kind: str, run: Callable[[], Any]) -> float | None:
        """As `timed`, but once for all cases that are padded to the same launch."""
        launch = case.ids.shape[1], kernel_heads(case.heads), kind
        if self.installed.get(launch) is None:
            self.installed[launch] = self.timed(case, "installed", kind, run)
        else:
            self.report(case, "installed", kind, self.installed[launch], None)
        return self.installed[launch]

    def report(self, case: Case, who: str, kind: str, ms: float | None, base: float | None) -> None:
        if ms is None:
            return
        speed = case.gflops[kind] / ms
        for metric, value, unit in (
            ("", ms, "ms"),
            (", nominal work", speed, "TFLOP/s"),
            (", of the matrix ceiling", speed / self.ceiling, ""),
        ):
            self.row(case.name, f"{who}: {kind}{metric}", value, unit)
        ratio = ""
        if base is not None:
            self.headline(case.name, f"{kind}, installed / {who}", base / ms)
            ratio = f"{base / ms:.2f}"
        self.line(case.name, f"{who}, {kind}", f"{ms:.2f}", f"{speed:.0f}", f"{speed / self.ceiling:.3f}", ratio)

    def run(self, case: Case, with_hook: bool) -> None:
        self.case, work = case.name, case.gflops["backward"]
        # Of this run: results.csv keeps cases of several.
        self.row(case.name, "matrix ceiling, bf16", self.ceiling, "TFLOP/s")
        theirs = self.attempt("installed", work, lambda: installed_passes(case)) or {}
        base = {kind: self.timed_installed(case, kind, run) for kind, run in theirs.items()}
        del theirs
        self.timed(case, "ours", "forward", case.forward, base.get("forward"))
        times = {
            ordered: self.timed(case, who, "backward", functools.partial(case.backward, ordered), base.get("backward"))
            for ordered, who in (
                (case.takes_order, "ours"),
                (not case.takes_order, "ours, atomic" if case.takes_order else "ours, deterministic"),
            )
        }
        ours, atomic, ordered = times[case.takes_order], times[False], times[True]
        if atomic and ordered:
            self.headline(case.name, "backward, deterministic / atomic", ordered / atomic)
        run = self.attempt("cuDNN frontend", work, lambda: cudnn_backward(case))
        if run is not None:
            who = f"cuDNN frontend {results.installed('nvidia-cudnn-frontend')}"
            cudnn = self.timed(case, who, "backward", run)
            if cudnn and ours:
                self.headline(case.name, f"backward, {who} / ours", cudnn / ours)
        self.floor(case, atomic)
        if with_hook:
            self.hooks(case)

    def floor(self, case: Case, atomic: float | None) -> None:
        ms = self.attempt("floor of the atomics", case.gflops["backward"], lambda: atomic_floor_ms(case))
        if ms is None:
            return
        added = (case.ids >= 0).sum().item() * case.width * 4 * -(-case.heads // 64)
        self.row(case.name, "fp32 added to dKV by atomics", added / 1e9, "GB")
        self.row(case.name, "floor of the atomics", ms, "ms")
        share = f"{ms / atomic:.3f} of ours" if atomic else ""
        self.line(case.name, f"atomics of {added / 1e9:.0f} GB alone", f"{ms:.2f}", "", "", share)

    def hooks(self, case: Case) -> None:
        timings = {}
        for who, patches in (("sparse_mla_nope", ()), ("sparse_mla_fast", ("sparse_mla_fast",))):
            run = functools.partial(hook, case, "sparse_mla_nope", *patches)
            timing = self.attempt(f"hook, {who}", case.gflops["backward"], run)
            if timing is None:
                continue
            timings[who], peak = timing
            self.row(case.name, f"{who}: hook, forward + backward", timings[who], "ms")
            self.row(case.name, f"{who}: hook, peak memory above inputs and gradients", peak, "GiB")
            self.line(case.name, f"hook with {who}, {peak:.2f} GiB", f"{timings[who]:.2f}")
        if len(timings) == 2:
            ratio = timings["sparse_mla_nope"] / timings["sparse_mla_fast"]
            self.headline(case.name, "hook, forward + backward, sparse_mla_nope / sparse_mla_fast", ratio)
            self.line(case.name, "hook, sparse_mla_nope / sparse_mla_fast", "", "", "", f"{ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures to results.csv")
    parser.add_argument("--heads", type=whole_numbers(1), default="8,16,32,64,128")
    parser.add_argument("--tokens", type=whole_numbers(1), default="4096,16384,65536")
    parser.add_argument("--widths", type=whole_numbers(512), default="576,512")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--seconds", type=positive, default=280.0, help="start nothing that would end later than this")
    parser.add_argument("--build", action=argparse.BooleanOptionalAction, default=True, help="time the first build")
    parser.add_argument("--hook", action=argparse.BooleanOptionalAction, default=True, help="time megatron's function")
    options = parser.parse_args()
    if not 1 <= options.topk <= min(options.tokens):
        parser.error(f"--topk must be from 1 to the least of --tokens, {min(options.tokens)}, got {options.topk}")
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    heads, tokens, widths = options.heads, options.tokens, options.widths
    bench = Bench(options.seconds)
    bench.line(*COLUMNS)
    for width in widths if options.build else ():
        seconds = bench.attempt("first build", 1.0, functools.partial(cold_build_seconds, width, max(heads)))
        if seconds is not None:
            bench.rows.append(results.row(BENCH, f"D{width}", "first build of forward and backward", seconds, "s"))
            bench.line(f"D{width}", f"first build: {seconds:.1f} s")
    for job in fill_caches(heads, widths, options.topk):
        bench.attempt("building ahead", 1.0, job.result)
    for rows in tokens:
        ids = random_causal(rows, options.topk).unsqueeze(0)
        bench.row(f"T{rows}-K{options.topk}", "selected ids that are no padding", (ids >= 0).float().mean().item(), "")
        for count in heads:
            for width in widths:
                bench.run(Case(rows, count, width, ids), options.hook)
                if options.save:
                    results.save(bench.rows)
    for reason in (*bench.reasons, *(f"no time left for {what}" for what in dict.fromkeys(bench.clock.skipped))):
        print(reason)


if __name__ == "__main__":
    main()
