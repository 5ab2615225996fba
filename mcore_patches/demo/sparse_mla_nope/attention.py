"""What the absorbed sparse attention of megatron's DSA layers does during training: fused calls, declines, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels
from torch import Tensor

from mcore_patches.cpu.rebinding import RebindingLog
from mcore_patches.demo.memory import Meter, Reading

_OBSERVES = "the demo counts and measures, and hands every argument and result on"


@dataclass
class FusedCalls:
    """Calls of the fused attention that megatron made. Declined ones returned None, and megatron's dense path ran.

    dense_bytes: fp32 scores [b, heads, sq, skv] that one declined call makes the dense path hold, the largest.
    """

    taken: int = 0
    declined: int = 0
    dense_bytes: int = 0

    @property
    def total(self) -> int:
        return self.taken + self.declined


@contextmanager
def counted() -> Iterator[FusedCalls]:
    """Count in the module that megatron's attention calls, one level above whatever the overlay replaces."""
    calls, fused = FusedCalls(), dsa_kernels.run_fused_absorbed_sparse_attention

    def run_fused_absorbed_sparse_attention(config: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = fused(config, query, key, *args, **kwargs)
        if result is None:
            calls.declined += 1
            sq, b, heads, _ = query.shape
            calls.dense_bytes = max(calls.dense_bytes, dense_score_bytes(sq, key.shape[0], heads, b))
        else:
            calls.taken += 1
        return result

    with _rebound(dsa_kernels, "run_fused_absorbed_sparse_attention", run_fused_absorbed_sparse_attention):
        yield calls


def dense_score_bytes(sq: int, skv: int, heads: int, batch: int = 1) -> int:
    """Bytes of one dense fp32 score matrix [b, heads, sq, skv]."""
    return 4 * batch * heads * sq * skv


@contextmanager
def marked(meter: Meter) -> Iterator[None]:
    """Set marks where the sparse attention of a layer begins and ends, forward and backward, for `peak_bytes`.

    A call is everything from query, latent key and top-k to the output of the value up-projection.
    """
    attend, calls = dsa._run_sparse_attention, itertools.count()

    def _run_sparse_attention(*, query: Tensor, key: Tensor, up_v_weight: Tensor, **rest: Any) -> Tensor:
        call = next(calls)
        query, key, up_v_weight = _BackwardMark.apply(meter, f"{call}:backward ends", query, key, up_v_weight)
        meter.mark(f"{call}:forward begins")
        output = attend(query=query, key=key, up_v_weight=up_v_weight, **rest)
        meter.mark(f"{call}:forward ends")
        (output,) = _BackwardMark.apply(meter, f"{call}:backward begins", output)
        return output

    with _rebound(dsa, "_run_sparse_attention", _run_sparse_attention):
        yield


def peak_bytes(readings: list[Reading]) -> list[int]:
    """For each call, in order, the most bytes that its attention held at a time.

    In forward that is what it allocated; in backward what forward kept, and what backward allocated.
    """
    places = {reading.label: place for place, reading in enumerate(readings)}
    calls = [label.partition(":")[0] for label in places if label.endswith(":forward begins")]
    peaks = []
    for call in calls:
        forward = _held(readings, places[f"{call}:forward begins"], places[f"{call}:forward ends"])
        backward = _held(readings, places[f"{call}:backward begins"], places[f"{call}:backward ends"])
        peaks.append(max(forward.peak, forward.live + backward.peak))
    return peaks


def _held(readings: list[Reading], begin: int, end: int) -> Reading:
    """What was allocated between two marks: bytes left at the end and at the most."""
    before = readings[begin].live
    peak = max(reading.peak for reading in readings[begin + 1 : end + 1])
    return Reading(readings[end].label, readings[end].live - before, peak - before)


class _BackwardMark(torch.autograd.Function):
    """Hands tensors on; sets a mark when their gradients, all of them, pass by in backward."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, label: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.meter, ctx.label = meter, label
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.meter.mark(ctx.label)
        return (None, None, *grads)


@contextmanager
def _rebound(module: Any, name: str, replacement: Any) -> Iterator[None]:
    log = RebindingLog()
    log.rebind(module, name, replacement, _OBSERVES)
    try:
        yield
    finally:
        log.undo()
