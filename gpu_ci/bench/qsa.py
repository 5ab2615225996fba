"""QSA attention beside its peers: times, ratios, peak memory and how far from the matrix ceiling, in one run.

    python -m gpu_ci.bench.qsa [--save] [--tokens 8192,16384,32768,49152,65536,131072,262144]
                               [--kinds random,correlated] [--peers flash,bridge] [--seconds 300]

One document, 24 query and 2 KV heads of 256 channels, 512 blocks of 4 tokens. Always measured: ours and dense causal
cuDNN SDPA. Peers: dense FlashAttention SDPA, and mcore-bridge's Triton kernels where that package is installed; its
kernel file is loaded alone, and it gets the bitmap of the selection ready made. What would take longer than is left of
`--seconds` is not started and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_ci.bench import results
from gpu_ci.bench.options import any_of, positive, whole_numbers
from gpu_ci.bench.selections import KINDS, block_selection
from mcore_patches.ops import block_topk, indexer_kl, sparse_gqa

HEADS, KV_HEADS, DIM, TOPK, RATIO = 24, 2, 256, 512, 4
INDEX_HEADS, INDEX_DIM = 4, 128
SCALE = DIM**-0.5
SLOW = 2000.0  # ms of a forward and a backward that are run once, not a few times
SLOWEST = 6000.0  # ms beside which what a first pass does besides, as planning, is small
PEERS = ("flash", "bridge")
BRIDGE_FILE = "model/modules/kernels/qsa_block_sparse_attn.py"
SHAPE = f"Hq{HEADS}-Hkv{KV_HEADS}-D{DIM}-K{TOPK}-r{RATIO}"


@dataclasses.dataclass
class Timing:
    """Milliseconds, and GiB at the peak above inputs and gradients."""

    forward: float
    backward: float
    peak: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Clock:
    """What is left of the seconds that the run may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.skipped: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `what`, which takes about `seconds`, may start; if not it is remembered."""
        if time.monotonic() + seconds <= self.end:
            return True
        self.skipped.append(what)
        return False


def milliseconds(run: Callable[[], Any], *, warm: bool = True) -> float:
    """Median time of a few calls: fewer of slow ones, one of those that take seconds."""
    times: list[float] = []
    if warm:
        run()
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        if sum(times) > 1500:
            break
    return statistics.median(times)


def measure(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> Timing:
    """Forward and backward of an attention, each by itself: of what takes seconds, one pass after the first, and of
    what takes longer than `SLOWEST` the first.
    """
    timing = one_pass(forward, inputs, dout)
    if timing.both > SLOWEST:
        return timing
    gc.collect()
    timing = one_pass(forward, inputs, dout)
    if timing.both > SLOW:
        return timing
    with torch.no_grad():
        forward_ms = milliseconds(forward, warm=False)
    out = forward()
    backward_ms = milliseconds(functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True), warm=False)
    return Timing(forward_ms, backward_ms, timing.peak)


def one_pass(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> Timing:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    out = forward()
    between.record()
    gradients = torch.autograd.grad(out, inputs, dout)
    end.record()
    end.synchronize()
    del out
    peak = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in gradients)
    return Timing(begin.elapsed_time(between), between.elapsed_time(end), peak / 2**30)


def normal(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()


def ours(tokens: int, ids: Tensor) -> Timing:
    q, k, v = normal(tokens, HEADS, DIM), normal(tokens, KV_HEADS, DIM), normal(tokens, KV_HEADS, DIM)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    rows = ids, pos, torch.zeros_like(pos)

    def forward() -> Tensor:
        return sparse_gqa.sparse_gqa(q, k, v, *rows, scale=SCALE, block_size=RATIO, backend="tilelang")[0]

    return measure(forward, (q, k, v), torch.randn_like(q))


def dense(tokens: int, backend: SDPBackend) -> Timing:
    q, k, v = normal(1, HEADS, tokens, DIM), normal(1, KV_HEADS, tokens, DIM), normal(1, KV_HEADS, tokens, DIM)
    attend = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    with sdpa_kernel([backend]):
        try:
            with torch.no_grad():
                attend(q, k, v)
        except RuntimeError:  # this backend takes no groups: every query head gets keys of its own
            k, v = normal(1, HEADS, tokens, DIM), normal(1, HEADS, tokens, DIM)
        return measure(lambda: attend(q, k, v), (q, k, v), torch.randn_like(q))


@functools.cache
def bridge_kernels() -> ModuleType | None:
    """mcore-bridge's kernel file, loaded without the package around it, or None where it is not installed."""
    package = importlib.util.find_spec("mcore_bridge")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / BRIDGE_FILE
    spec = importlib.util.spec_from_file_location("mcore_bridge_qsa", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bridge(tokens: int, ids: Tensor) -> Timing:
    """Selected and incomplete blocks are flagged; positions cut them."""
    kernels = bridge_kernels()
    assert kernels is not None
    q, k, v = normal(tokens, HEADS, DIM), normal(tokens, KV_HEADS, DIM), normal(tokens, KV_HEADS, DIM)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    start = torch.zeros_like(pos)
    blocks = -(-tokens // RATIO)
    # A spare column takes what is not there.
    flags = torch.zeros(tokens, blocks + 1, dtype=torch.uint8, device="cuda")
    for rows in pos.long().split(8192):
        incomplete = torch.where((rows + 1) % RATIO > 0, (rows + 1) // RATIO, blocks)
        chosen = torch.where(ids[rows] >= 0, ids[rows].long(), blocks)
        flags[rows] = flags[rows].scatter_(1, torch.cat((chosen, incomplete[:, None]), dim=1), 1)
    flags = flags[:, :blocks].contiguous()

    def forward() -> Tensor:
        return kernels.qsa_block_sparse_attention_triton(q, k, v, flags, start, pos, start, start, SCALE, RATIO)

    timing = measure(forward, (q, k, v), torch.randn_like(q))
    return dataclasses.replace(timing, peak=timing.peak + flags.numel() / 2**30)


def select_ms(tokens: int) -> float | str:
    """Milliseconds of the selection of blocks, or why no kernel runs it."""
    q_idx = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    k_blocks = torch.randn(tokens // RATIO, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    arguments = q_idx, k_blocks, pos, torch.zeros_like(pos)
    supported, reason = block_topk.supports(*arguments, ratio=RATIO, topk=TOPK)
    if not supported:
        return reason
    return milliseconds(lambda: block_topk.select_blocks(*arguments, ratio=RATIO, topk=TOPK))


def kl_ms(tokens: int, ids: Tensor) -> float | str:
    """Milliseconds of the Stage-2 KL, forward and backward, or why no kernel runs it."""
    q_idx, k_blocks = normal(tokens, INDEX_HEADS, INDEX_DIM), normal(tokens // RATIO, INDEX_DIM)
    q, k = normal(tokens, HEADS, DIM).detach(), normal(tokens, KV_HEADS, DIM).detach()
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    start = torch.zeros_like(pos)
    _, lse = sparse_gqa.sparse_gqa(q, k, k, ids, pos, start, scale=SCALE, block_size=RATIO)
    arguments = q_idx, k_blocks, q, k, lse, ids, pos, start, start
    settings: dict[str, Any] = {"scale": SCALE, "ratio": RATIO}
    supported, reason = indexer_kl.supports(*arguments, **settings)
    if not supported:
        return reason
    return milliseconds(lambda: torch.autograd.grad(indexer_kl.indexer_kl(*arguments, **settings), (q_idx, k_blocks)))


def layer_of_ops(tokens: int, kind: str) -> float:
    """GiB at the peak above inputs and gradients of a layer's three ops: selection, attention, Stage-2 KL, backward.

    The selection runs for its memory; attention and KL take one of the bench's, of the kind asked for.
    """
    q, k, v = normal(tokens, HEADS, DIM), normal(tokens, KV_HEADS, DIM), normal(tokens, KV_HEADS, DIM)
    q_idx, k_blocks = normal(tokens, INDEX_HEADS, INDEX_DIM), normal(tokens // RATIO, INDEX_DIM)
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")
    start, dout = torch.zeros_like(pos), torch.randn_like(q)
    ids = block_selection(tokens, kind, topk=TOPK, block_size=RATIO, rows_at_once=256)
    inputs = q, k, v, q_idx, k_blocks
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selected = block_topk.select_blocks(q_idx, k_blocks, pos, start, ratio=RATIO, topk=TOPK, backend="tilelang")
    del selected
    settings: dict[str, Any] = {"scale": SCALE, "backend": "tilelang"}
    out, lse = sparse_gqa.sparse_gqa(q, k, v, ids, pos, start, block_size=RATIO, **settings)
    kl = indexer_kl.indexer_kl(
        q_idx, k_blocks, q.detach(), k.detach(), lse.detach(), ids, pos, start, start, ratio=RATIO, **settings
    )
    gradients = torch.autograd.grad((out, kl), inputs, (dout, torch.ones_like(kl)))
    peak = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in gradients)
    assert all(bool(x.isfinite().all()) for x in gradients)
    return peak / 2**30


def attended_tokens(tokens: int, ids: Tensor | None) -> int:
    """Keys of all rows together; None: dense causal."""
    pos = torch.arange(tokens, device="cuda")
    if ids is None:
        return int((pos + 1).sum())
    return int(((ids >= 0).sum(1) * RATIO + (pos + 1) % RATIO).sum())


def scoring(tokens: int) -> float:
    """TFLOP of the products of all index heads with the blocks that rows see."""
    return 2 * INDEX_HEADS * INDEX_DIM * sum(complete // RATIO for complete in range(1, tokens + 1)) / 1e12


def matching(pairs: int) -> float:
    """TFLOP of the KL over pairs of rows and selected blocks: the teacher's scores, the student's and its gradients."""
    return pairs * (2 * RATIO * HEADS * DIM + 3 * 2 * INDEX_HEADS * INDEX_DIM) / 1e12


def matrix_ceiling(clocked: Callable[[Callable[[], Any]], float] = milliseconds) -> float:
    """TFLOP/s of a large bf16 product, as `clocked` measures milliseconds."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / clocked(lambda: a @ b) / 1e9


class Bench:
    """Collects rows of results and what the next length will probably take."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.clock = Clock(options.seconds)
        self.peers, self.kinds = options.peers, options.kinds
        self.ceiling = matrix_ceiling()
        self.rows = [results.row("qsa", "8192x8192x8192", "matrix ceiling, bf16", self.ceiling, "TFLOP/s")]
        self.rates: dict[str, float] = {}  # seconds a unit of work
        self.reasons: list[str] = []
        self.lines: list[tuple[str, str, Timing, float, float]] = []

    def warm_up(self) -> None:
        """Compile the kernels of the peers, whose first pass is timed where it takes long."""
        tokens = 2048
        dense(tokens, SDPBackend.CUDNN_ATTENTION)
        if "flash" in self.peers:
            dense(tokens, SDPBackend.FLASH_ATTENTION)
        if "bridge" in self.peers and bridge_kernels() is not None:
            bridge(tokens, block_selection(tokens, "random", topk=TOPK, block_size=RATIO))

    def timed(self, name: str, tokens: int, power: int, run: Callable[[], Any]) -> Any:
        """run(), unless it would take longer than is left: 3 s, or going by shorter lengths.

        The first call of a name compiles as well, so the least is what the work takes.
        """
        work = float(tokens) ** power
        rate = self.rates.get(name)
        if not self.clock.allows(f"{name} at {tokens}", 1.0 + (3.0 if rate is None else rate * work)):
            return None
        begin = time.monotonic()
        result = run()
        gc.collect()
        torch.cuda.empty_cache()
        seconds = time.monotonic() - begin
        print(f"{name} at {tokens}: {seconds:.1f} s", flush=True)
        self.rates[name] = seconds / work if rate is None else min(rate, seconds / work)
        return result

    def add(self, case: str, who: str, timing: Timing, keys: int) -> None:
        flops = 4 * keys * HEADS * DIM
        both = 3.5 * flops / timing.both / 1e9
        tokens = int(case.split("-")[0].removeprefix("T"))
        once = 4 * tokens * (HEADS + KV_HEADS) * DIM  # bytes of Q, K, V and the output
        self.lines.append((case.removesuffix(f"-{SHAPE}"), who, timing, both, both / self.ceiling))
        for metric, value, unit in (
            ("forward", timing.forward, "ms"),
            ("backward", timing.backward, "ms"),
            ("forward + backward", timing.both, "ms"),
            ("peak memory above inputs and gradients", timing.peak, "GiB"),
            ("useful work of the forward", flops / 1e12, "TFLOP"),
            ("useful work of forward + backward", 3.5 * flops / 1e12, "TFLOP"),
            ("Q, K, V and output once", once / 1e9, "GB"),
            ("and in the backward with their gradients once", 2 * once / 1e9, "GB"),
            ("forward, of the matrix ceiling", flops / timing.forward / 1e9 / self.ceiling, ""),
            ("forward + backward, useful work", both, "TFLOP/s"),
            ("forward + backward, of the matrix ceiling", both / self.ceiling, ""),
        ):
            self.rows.append(results.row("qsa", case, f"{who}: {metric}", value, unit))
        if "dense" not in who:
            gathered = keys * KV_HEADS * DIM * 4
            metric = f"{who}: K and V of all rows, read row by row"
            self.rows.append(results.row("qsa", case, metric, gathered / 1e9, "GB"))

    def work(self, case: str, what: str, ms: float | str | None, tflop: float, gigabytes: float, read: str) -> None:
        """Roofline of an op that is not an attention: its products, what it has to read, how near the ceiling it is."""
        if not isinstance(ms, float):
            return
        for metric, value, unit in (
            ("products", tflop, "TFLOP"),
            (read, gigabytes, "GB"),
            ("of the matrix ceiling", tflop / ms * 1e3 / self.ceiling, ""),
        ):
            self.rows.append(results.row("qsa", case, f"{what}: {metric}", value, unit))

    def ratios(self, case: str, timing: Timing, who: str, other: Timing) -> None:
        for metric in ("forward", "both"):
            value = getattr(timing, metric) / getattr(other, metric)
            name = "forward + backward" if metric == "both" else metric
            self.rows.append(results.row("qsa", case, f"{name}, ours / {who}", value, ""))

    def length(self, tokens: int) -> None:
        case = f"T{tokens}-{SHAPE}"
        dense_timing = self.timed("dense", tokens, 2, lambda: dense(tokens, SDPBackend.CUDNN_ATTENTION))
        if dense_timing is not None:
            self.add(case, "dense cuDNN", dense_timing, attended_tokens(tokens, None))
        if "flash" in self.peers:
            flash = self.timed("flash", tokens, 2, lambda: dense(tokens, SDPBackend.FLASH_ATTENTION))
            if flash is not None:
                self.add(case, "dense FlashAttention", flash, attended_tokens(tokens, None))
        select = self.timed("select", tokens, 2, lambda: select_ms(tokens))
        self.extra(case, "select_blocks", select)
        self.share(
            case, "select_blocks / its products at the matrix ceiling", select, scoring(tokens) / self.ceiling * 1e3
        )
        read = 2 * INDEX_DIM * (tokens * INDEX_HEADS + tokens // RATIO) / 1e9
        self.work(case, "select_blocks", select, scoring(tokens), read, "index queries and keys once")
        for kind in self.kinds:
            self.kind(tokens, kind, dense_timing, select)

    def kind(self, tokens: int, kind: str, dense_timing: Timing | None, select: float | str | None) -> None:
        case = f"T{tokens}-{kind}-{SHAPE}"
        make = functools.partial(block_selection, tokens, kind, topk=TOPK, block_size=RATIO)
        ids = self.timed(f"{kind} selection", tokens, 2, make)
        if ids is None:
            return
        timing = self.timed(f"ours {kind}", tokens, 1, lambda: ours(tokens, ids))
        if timing is not None:
            self.add(case, "ours", timing, attended_tokens(tokens, ids))
            if dense_timing is not None:
                self.ratios(case, timing, "dense cuDNN", dense_timing)
        kl = self.timed(f"kl {kind}", tokens, 1, lambda: kl_ms(tokens, ids))
        self.extra(case, "Stage-2 KL", kl)
        pairs = int((ids >= 0).sum())
        read = 2 * pairs * RATIO * KV_HEADS * DIM / 1e9
        self.work(case, "Stage-2 KL", kl, matching(pairs), read, "keys of all rows, read row by row")
        if timing is not None:
            self.share(case, "select_blocks / forward of ours", select, timing.forward)
            self.share(case, "Stage-2 KL / forward + backward of ours", kl, timing.both)
        peak = self.timed(f"peak {kind}", tokens, 1, lambda: layer_of_ops(tokens, kind))
        if peak is not None:
            what = "selection, attention and KL, forward + backward: peak memory above inputs and gradients"
            self.rows.append(results.row("qsa", case, what, peak, "GiB"))
        if "bridge" in self.peers and bridge_kernels() is not None:
            other = self.timed(f"bridge {kind}", tokens, 2, lambda: bridge(tokens, ids))
            if other is not None:
                who = f"mcore-bridge {results.installed('mcore-bridge')}"
                self.add(case, who, other, attended_tokens(tokens, ids))
                if timing is not None:
                    self.ratios(case, timing, who, other)

    def table(self) -> str:
        """One line a measurement, with what it is of dense cuDNN at that length."""
        dense = {case: timing for case, who, timing, *_ in self.lines if who == "dense cuDNN"}
        head = (
            "case",
            "",
            "forward ms",
            "backward ms",
            "of dense",
            "both, of dense",
            "peak GiB",
            "TFLOP/s",
            "of ceiling",
        )
        text = ["{:<20}{:<22}{:>11}{:>13}{:>10}{:>16}{:>10}{:>9}{:>12}".format(*head)]
        for case, who, timing, speed, share in self.lines:
            base = dense.get(case.split("-")[0], Timing(math.nan, math.nan, math.nan))
            ratios = f"{timing.forward / base.forward:>10.3f}{timing.both / base.both:>16.3f}"
            times = f"{timing.forward:>11.2f}{timing.backward:>13.2f}"
            text.append(f"{case:<20}{who:<22}{times}{ratios}{timing.peak:>10.2f}{speed:>9.1f}{share:>12.3f}")
        return "\n".join(text)

    def share(self, case: str, what: str, value: float | str | None, base: float) -> None:
        if isinstance(value, float):
            self.rows.append(results.row("qsa", case, what, value / base, ""))

    def extra(self, case: str, what: str, value: float | str | None) -> None:
        if isinstance(value, str):
            self.reasons.append(f"{case}: {what} has no kernel here: {value}")
        elif value is not None:
            self.rows.append(results.row("qsa", case, what, value, "ms"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures to results.csv")
    parser.add_argument("--tokens", type=whole_numbers(RATIO), default="8192,16384,32768,49152,65536,131072,262144")
    parser.add_argument("--kinds", type=any_of(KINDS), default=",".join(KINDS))
    parser.add_argument(
        "--peers", type=any_of(PEERS), default=",".join(PEERS), help="any of flash, bridge; '' for none"
    )
    parser.add_argument("--seconds", type=positive, default=300.0, help="start nothing that would end later than this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")
    bench = Bench(options)
    if "bridge" in bench.peers and bridge_kernels() is None:
        bench.reasons.append("mcore-bridge is not installed: not measured")
    bench.warm_up()
    for tokens in options.tokens:
        bench.length(tokens)
        if options.save:  # a run that is cut off keeps what it has
            results.save(bench.rows)
    print(bench.table())
    print(results.table([row for row in bench.rows if row["metric"].startswith(("select_blocks", "Stage-2 KL"))]))
    for line in (*bench.reasons, *(f"no time left for {what}" for what in bench.clock.skipped)):
        print(line)


if __name__ == "__main__":
    main()
