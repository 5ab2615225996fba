"""Which implementations the ops of the layers ran on, in the counters of the patch that installed them."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_patches.overlay.counters import Counters

_counters: Counters | None = None

FALLBACK = "torch in bounded memory"


def count_in(counters: Counters) -> None:
    """Count calls here from now on."""
    global _counters
    _counters = counters


def count(op: str, x: Tensor, supported: bool, reason: str) -> None:
    """Count a call of an op: on the CPU as it must be, on CUDA as fused or declined, which warns once a reason.

    Args:
        x: an argument, of whose device and shape. supported, reason: what the op's `supports` says.

    Raises:
        DeclinedError: declined on CUDA, with MCORE_PATCHES_ON_DECLINE=raise.
    """
    if _counters is None or torch.compiler.is_compiling():
        return
    if supported or x.device.type != "cuda":
        _counters.hit(f"{op} {'tilelang' if supported else 'chunked'}")
        return
    _counters.decline(f"{op}: {reason}", shape_class=tuple(x.shape[1:]), fallback=FALLBACK, fallback_bytes=None)
