"""Trainings of the tiny models in one layout, compared with those on one rank."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_patches
from gpu_ci.multi_gpu import compare, routes, verdict, world
from gpu_ci.multi_gpu.adam import MasterWeightAdam
from gpu_ci.multi_gpu.plan import Case, Job
from mcore_patches.cpu.parallel import Layout
from mcore_patches.cpu.rebinding import RebindingLog

PATCHES = ("qsa", "sparse_mla_nope", "sparse_mla_fast", "dsa_cp_gradient")
OPS = ("sparse_gqa", "block_topk", "indexer_kl")
LEARNING_RATE = 1e-3


def cases(job: Job, device: torch.device, folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """A record of each case; those on one rank without recomputation are kept in `folder`."""
    report = mcore_patches.apply_patches(PATCHES, strict=True)
    for patch in PATCHES:
        mcore_patches.require_applied(patch)
    with _indexer_of_cpus(device):
        for sizes, group in itertools.groupby(job.cases, key=lambda case: case.sizes):
            with world.model_parallel(device, sizes.tp, sizes.cp, sizes.pp) as layout:
                for case in group:
                    yield {"name": case.name} | _case(case, layout, device, folder, steps, report.digest)


def _indexer_of_cpus(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Megatron's fused indexer has no path for CPU tensors."""
    from mcore_patches.cpu.models import fused_indexer_declined

    return fused_indexer_declined() if device.type == "cpu" else contextlib.nullcontext()


def _case(case: Case, layout: Layout, device: torch.device, folder: Path, steps: int, digest: str) -> dict[str, Any]:
    world.reset_peak(device)
    before = _mla_calls(device)
    kept = folder / f"{case.reference}.pt"
    is_reference = layout.world == 1 and case.recompute == "none"
    reference = None if is_reference else compare.Training(**torch.load(kept, weights_only=True))
    with _backends() as chosen:
        trained, attended, milliseconds = _train(case, layout, device, steps, reference)
    mine = {
        "place": (layout.cp_rank, layout.pp_rank),
        "first": attended.first,
        "again": attended.again,
        "norms": {name: gradient.double().norm().item() for name, gradient in trained.gradients.items()},
        "peak": world.peak_gib(device),
        "digest": digest,
        "declined": _off_the_kernels(case, device, chosen, before),
    }
    ranks = world.gathered(mine)
    if reference is None:
        torch.save(trained.as_dict(), kept)
    compared = compare.compare(reference or trained, trained)
    faults = [*compared.faults, *verdict.route_faults(ranks, case.recompute != "none")]
    faults += verdict.disagreement([entry["norms"] for entry in ranks])
    faults += [f"rank {rank}: {why}" for rank, entry in enumerate(ranks) for why in entry["declined"]]
    faults += verdict.digest_faults([entry["digest"] for entry in ranks])
    if not trained.losses[-1] < trained.losses[0] and steps > 1:
        faults.append(f"the loss did not fall: {trained.losses[0]:.4f} to {trained.losses[-1]:.4f}")
    return {
        **compared.as_dict(),
        "faults": faults,
        "losses": trained.losses,
        "peaks": [entry["peak"] for entry in ranks],
        "step_ms": milliseconds,
    }


def _train(
    case: Case, layout: Layout, device: torch.device, steps: int, reference: compare.Training | None
) -> tuple[compare.Training, routes.Attended, float]:
    """The training, the routes of its first step, and the median milliseconds of a step after the second."""
    from gpu_ci.multi_gpu import models
    from mcore_patches.attention.qsa import record_routes
    from mcore_patches.cpu.training import build_optimizer, schedule_step, wrap_with_ddp

    chunks = wrap_with_ddp(models.model(case, layout, device))
    optimizer: Any
    if device.type == "cuda":
        optimizer = build_optimizer(chunks, LEARNING_RATE, clip_grad=1.0)
    else:
        optimizer = MasterWeightAdam(chunks, LEARNING_RATE)
    trained = compare.Training([], {}, [])
    seconds: list[float] = []
    if reference is not None and reference.routes:
        trained.given = _step_with_routes(chunks, models.batches(case, 0, device), reference.routes)
    with routes.attended(chunks[0]) as attended, record_routes(chunks[0]) as recorded:
        first = schedule_step(chunks, models.batches(case, 0, device), optimizer)
    trained.routes = {layer: [ids.cpu() for ids in passes] for layer, passes in recorded.items()}
    trained.losses.append(first.loss)
    trained.gradients = {name: gradient.cpu() for name, gradient in first.gradients.items()}
    trained.indexer = _indexer_losses()
    for step in range(1, steps):
        batches = models.batches(case, step, device)
        started = time.perf_counter()
        trained.losses.append(schedule_step(chunks, batches, optimizer).loss)  # waits for the device
        seconds.append(time.perf_counter() - started)
    return trained, attended, 1e3 * statistics.median(seconds[1:] or seconds or [0.0])


def _step_with_routes(chunks: list[Any], batches: list[Any], given: dict[int, list[Tensor]]) -> dict[str, Tensor]:
    """Whole gradients of a step with given routes of the whole model."""
    from mcore_patches.attention.qsa import inject_routes
    from mcore_patches.attention.qsa.routes import qsa_layers
    from mcore_patches.cpu.training import schedule_step

    here = {layer.global_layer_number for layer in qsa_layers(chunks)}
    with inject_routes(chunks, {layer: passes for layer, passes in given.items() if layer in here}):
        result = schedule_step(chunks, batches)
    _indexer_losses()
    return {name: gradient.cpu() for name, gradient in result.gradients.items()}


def _indexer_losses() -> list[float]:
    """Of each layer, summed over microbatches, reduced over ranks as megatron's training loop does. A collective."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    tracker = DSAIndexerLossLoggingHelper.tracker
    DSAIndexerLossLoggingHelper.reduce_loss_in_tracker()
    values = tracker["values"].tolist() if "values" in tracker else []
    tracker.clear()
    return values


@contextlib.contextmanager
def _backends() -> Iterator[Counter[str]]:
    """Counts inside the calls of QSA's ops by "op: backend", and those that DSA's fused kernels declined by reason."""
    import importlib

    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    log, chosen = RebindingLog(), Counter[str]()
    for op in OPS:
        module = importlib.import_module(f"mcore_patches.ops.{op}")

        def resolve(*args: Any, op: str = op, ask: Any = module.resolve_backend, **settings: Any) -> str:
            backend = ask(*args, **settings)
            chosen[f"{op}: {backend}"] += 1
            return backend

        log.rebind(module, "resolve_backend", resolve, "tells which backend a call of the op took")

    def declined(config: Any, hook: str, reason: str) -> None:
        if reason != "hook is not implemented":
            chosen[f"{hook}: {reason}"] += 1

    log.rebind(dsa_kernels, "_log_declined_hook", declined, "hears of the declines that are logged for debugging only")
    try:
        yield chosen
    finally:
        log.undo()


def _mla_calls(device: torch.device) -> dict[str, int]:
    """Calls of megatron's fused sparse MLA by route and by reason of a decline, so far."""
    patch = "sparse_mla_fast" if device.type == "cuda" else "sparse_mla_nope"
    counters = mcore_patches.status()[patch].counters
    return {**counters["routes"], **counters["declines"]}


def _off_the_kernels(case: Case, device: torch.device, chosen: Counter[str], before: dict[str, int]) -> list[str]:
    """What did not run where it should have: on our kernels, on a CPU on the chunked paths."""
    if case.model == "qsa":
        backend = "tilelang" if device.type == "cuda" else "chunked"
        expected = {f"{op}: {backend}" for op in OPS}
        return [] if set(chosen) == expected else [f"ops ran as {dict(chosen)}, expected {sorted(expected)}"]
    rose = {name: n - before.get(name, 0) for name, n in _mla_calls(device).items() if n != before.get(name, 0)}
    expected = {"ours" if device.type == "cuda" else "chunked"}
    found = [] if set(rose) == expected else [f"sparse MLA counted {rose}, expected calls of {sorted(expected)}"]
    if device.type == "cuda" and chosen:
        found.append(f"megatron's fused kernels declined: {dict(chosen)}")
    return found
