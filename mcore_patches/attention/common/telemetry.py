"""Which implementations the ops of the layers ran on, in the counters of the patch that installed them."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_patches.overlay import settings
from mcore_patches.overlay.counters import Counters

FALLBACK = "torch in bounded memory"


class OpCalls:
    """Counts the calls of a patch's layers; nothing before `count_in` was called."""

    def __init__(self) -> None:
        self._counters: Counters | None = None

    def count_in(self, counters: Counters) -> None:
        """Count calls here from now on."""
        self._counters = counters

    def count(self, op: str, x: Tensor, supported: bool, reason: str) -> str:
        """Count a call of an op: on the CPU as it must be, on CUDA as fused or declined, which warns once a reason.

        While torch.compile traces, MCORE_PATCHES_ON_DECLINE=raise alone is obeyed.

        Args:
            x: an argument, of whose device and shape. supported, reason: what the op's `supports` says.

        Returns:
            The backend to ask the op for: "tilelang" where a kernel that does not compile is to be an error, else
            "auto".

        Raises:
            DeclinedError: declined on CUDA, with MCORE_PATCHES_ON_DECLINE=raise.
        """
        strict = x.device.type == "cuda" and settings.on_decline() == "raise"
        if self._counters is not None and (strict or not torch.compiler.is_compiling()):
            if supported or x.device.type != "cuda":
                if not torch.compiler.is_compiling():
                    self._counters.hit(f"{op} {'tilelang' if supported else 'chunked'}")
            else:
                self._counters.decline(
                    f"{op}: {reason}", shape_class=tuple(x.shape[1:]), fallback=FALLBACK, fallback_bytes=None
                )
        return "tilelang" if strict and supported else "auto"
