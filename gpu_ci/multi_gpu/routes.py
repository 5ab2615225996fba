"""What the layers of a model attend: the ids of first passes and those of their recomputations, as digests."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_patches.attention.common.passes import is_recomputation
from mcore_patches.attention.qsa.routes import qsa_layers
from mcore_patches.cpu.rebinding import RebindingLog


@dataclass
class Attended:
    """By layer (its number in the whole model), in order of the passes: a digest of each pass's set of ids a row."""

    first: dict[int, list[str]] = field(default_factory=dict)
    again: dict[int, list[str]] = field(default_factory=dict)

    def note(self, layer: int, ids: Tensor) -> None:
        passes = self.again if is_recomputation() else self.first
        passes.setdefault(layer, []).append(digest(ids))


def digest(ids: Tensor) -> str:
    """Of the rows' sets of ids, [..., K] integers; places in a row and other numbers below 0 for none do not matter."""
    ordered = ids.detach().to(torch.int32).clamp(min=-1).sort(dim=-1).values.cpu().contiguous()
    return hashlib.sha256(repr(tuple(ordered.shape)).encode() + ordered.numpy().tobytes()).hexdigest()[:16]


@contextlib.contextmanager
def attended(model: torch.nn.Module) -> Iterator[Attended]:
    """Record the passes of QSA and of DSA layers of a model inside."""
    seen = Attended()
    hooks: list[Any] = []
    for layer in qsa_layers(model):
        number = layer.global_layer_number

        def note(_: Any, args: tuple[Any, ...], number: int = number) -> None:
            seen.note(number, args[3])

        hooks.append(layer.core_attention.register_forward_pre_hook(note))
    log = RebindingLog()
    _follow_dsa(model, seen, hooks, log)
    try:
        yield seen
    finally:
        log.undo()
        for hook in hooks:
            hook.remove()


def _follow_dsa(model: torch.nn.Module, seen: Attended, hooks: list[Any], log: RebindingLog) -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa

    running: list[int] = []
    attend = dsa._run_sparse_attention

    def noted(**arguments: Any) -> Tensor:
        seen.note(running[-1], arguments["topk_indices"])
        return attend(**arguments)

    for layer in model.modules():
        if isinstance(layer, dsa.DSAttention):

            def begin(module: Any, _: Any) -> None:
                running.append(module.layer_number)

            hooks.append(layer.register_forward_pre_hook(begin))
    log.rebind(dsa, "_run_sparse_attention", noted, "is the one place that sees the ids of every pass")
