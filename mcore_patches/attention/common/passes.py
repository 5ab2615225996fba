"""What a checkpointed forward pass selected, kept for its recomputation.

A recomputed layer must attend what it attended the first time; a second selection may differ wherever scores tie or
kernels round differently. The first pass saves its ids and the scale of its loss, the recomputation takes them.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.random import _unset_checkpointing, is_checkpointing
from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout
from mcore_patches.attention.common.loss import LossScale

_SKETCH = 8
_TOLERANCE = 0.1
# More forward passes than a pipeline has under way. What is older was left behind by passes without a backward pass.
_MOST_SAVED = 64


class RouteError(RuntimeError):
    """Saved or given routes that do not belong to the forward pass that asks for them."""


@dataclass(frozen=True)
class SavedPass:
    """A checkpointed forward pass of a layer that waits for its recomputation.

    ids: int32 [T, K], None for dense attention. scale: of its loss. shape, cu_seqlens, sketch: what tells it from
    other passes, the sketch being that of its (index) queries.
    """

    ids: Tensor | None
    scale: LossScale
    shape: torch.Size
    cu_seqlens: Tensor
    sketch: Tensor

    def distance(self, shape: torch.Size, cu_seqlens: Tensor, sketch: Tensor) -> float:
        """How far these queries are from those of this pass, relative; infinite if they are others.

        Waits for the device.
        """
        if self.shape != shape or self.cu_seqlens.shape != cu_seqlens.shape:
            return math.inf
        apart = torch.linalg.vector_norm(self.sketch - sketch)
        length = torch.linalg.vector_norm(self.sketch)
        ours = (apart <= _TOLERANCE * length) & (self.cu_seqlens == cu_seqlens).all()
        return float(torch.where(ours, apart / length.clamp_min(torch.finfo(length.dtype).tiny), math.inf))

    def attends_as(self, other: SavedPass) -> bool:
        """Waits for the device."""
        if self.ids is None or other.ids is None:
            return self.ids is other.ids
        return torch.equal(self.ids, other.ids)


def is_recomputation() -> bool:
    """Whether this forward pass runs inside a backward pass, to make the activations of an earlier one again.

    Megatron's own flag tells only its checkpoints, and is switched off by one inside another.
    """
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def is_first_pass() -> bool:
    """Whether this is the forward pass of a checkpoint of megatron's, which a recomputation may follow."""
    return is_checkpointing() and not torch.is_grad_enabled()


def sketch(queries: Tensor) -> Tensor:
    """A checksum of queries that bears rounding: 8 sums with signs drawn from the places of the summands, fp32.

    The distance of two sketches relative to their length estimates that of the tensors. Kernels that are not
    deterministic change the last bits of a recomputed activation, so equality would be too much to ask; other tokens
    give another tensor altogether.
    """
    flat = queries.detach().flatten(1)
    by_channel = flat @ _signs(flat.shape[1], 1, flat.device).to(flat.dtype)
    return (by_channel.float() * _signs(flat.shape[0], 2, flat.device)).sum(dim=0)


def _signs(count: int, seed: int, device: torch.device) -> Tensor:
    """+1 and -1 [count, 8], the same on every call: bits of an integer hash of the place."""
    x = torch.arange(count * _SKETCH, device=device) + (seed << 40)
    for _ in range(2):
        x = (x ^ (x >> 31)) * 0x7FB5D329728EA185
    return ((x >> 32) & 1).view(count, _SKETCH).float() * 2 - 1


class PassQueue:
    """Saved passes of one layer (of one virtual pipeline stage, which has layers of its own).

    kind: what errors call the layer, "QSA".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._saved: deque[SavedPass] = deque()
        self._unsettled = 0

    def __len__(self) -> int:
        """Saved passes that wait for their recomputation."""
        return len(self._saved)

    def save(self, ids: Tensor | None, scale: LossScale, queries: Tensor, layout: TokenLayout, layer: int) -> None:
        """Keep what the recomputation of this pass will need; queries: [T, heads, channels], what it is known by."""
        self._saved.append(SavedPass(ids, scale, queries.shape, layout.cu_seqlens, sketch(queries)))
        self._unsettled += 1
        if len(self._saved) > _MOST_SAVED:
            self._saved.popleft()
            self._unsettled = min(self._unsettled, len(self._saved))
            warnings.warn(
                f"{self.kind} layer {layer}: {_MOST_SAVED} forward passes wait for their recomputation, the oldest is "
                f"forgotten. Passes in training mode without gradients leave theirs behind: put the model in "
                f"evaluation mode for those",
                RuntimeWarning,
                stacklevel=2,
            )

    def replay(self, queries: Tensor, layout: TokenLayout, layer: int) -> SavedPass:
        """Take the pass with these queries [T, heads, channels] out of the queue.

        Schedules recompute in the order of their forward passes, a sum of losses in reverse, so the order tells
        nothing: it is the pass whose queries are nearest, the latest of several. A pass that left its route behind
        before the weights changed is farther away than the pass that is recomputed.

        Raises:
            RouteError: there is none, or several are equally near and attended different blocks.
        """
        asked = (queries.shape, layout.cu_seqlens, sketch(queries))
        distances = [saved.distance(*asked) for saved in self._saved]
        nearest = min(distances, default=math.inf)
        if nearest < math.inf:
            places = [place for place, distance in enumerate(distances) if distance == nearest]
            latest = self._saved[places[-1]]
            if not all(latest.attends_as(self._saved[place]) for place in places):
                raise RouteError(
                    f"{self.kind} layer {layer}: {len(places)} forward passes with the same queries "
                    f"{tuple(queries.shape)} attended different blocks, and the recomputation cannot tell which of "
                    f"them it repeats. Run the backward pass of one before the forward pass of the next"
                )
            del self._saved[places[-1]]
            self._unsettled = min(self._unsettled, len(self._saved))
            return latest
        waiting = ", ".join(str(tuple(saved.shape)) for saved in self._saved) or "none"
        raise RouteError(
            f"{self.kind} layer {layer}: the recomputation of queries {tuple(queries.shape)} in "
            f"{len(layout.cu_seqlens) - 1} documents finds no forward pass that it repeats (saved: {waiting}). The "
            f"layer's input differs from the first pass by more than rounding; or forward passes in training mode with "
            f"no gradients left theirs behind: put the model in evaluation mode for those, or call "
            f"discard_saved_routes(model); or the checkpoint is none of megatron's: recompute by "
            f"recompute_granularity, not by torch.utils.checkpoint"
        )

    def settle(self, keep: bool) -> None:
        """End of a forward pass: what it saved stays only if a backward pass can follow."""
        for _ in range(0 if keep else self._unsettled):
            self._saved.pop()
        self._unsettled = 0

    def discard(self) -> None:
        self._saved.clear()
        self._unsettled = 0


def discard_saved_routes(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Forget routes saved for recomputations that will not come: after a failed step, or forward passes without one.

    A recomputation that raises leaves megatron's flag for "inside a checkpoint" set; this resets it.
    """
    _unset_checkpointing()
    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        for module in chunk.modules():
            if isinstance(routes := getattr(module, "routes", None), PassQueue):
                routes.discard()
