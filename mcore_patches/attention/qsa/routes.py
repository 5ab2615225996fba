"""The blocks that queries selected: kept for recomputation, given from outside, read back.

A recomputed layer must attend what it attended the first time; a second selection may differ wherever scores tie or
kernels round differently. The first pass saves its ids, the recomputation takes them.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.random import _unset_checkpointing
from torch import Tensor

from mcore_patches.attention.qsa.layout import TokenLayout
from mcore_patches.ops.arguments import verify_distinct
from mcore_patches.ops.packing import complete_blocks

if TYPE_CHECKING:
    from mcore_patches.attention.qsa.attention import QSASelfAttention

_SKETCH = 8
_TOLERANCE = 0.1


class RouteError(RuntimeError):
    """Saved or given routes that do not belong to the forward pass that asks for them."""


@dataclass(frozen=True)
class SavedRoute:
    """The ids of one forward pass, int32 [T, K], and what tells it from others: shape, boundaries, sketch of q_idx."""

    ids: Tensor
    shape: torch.Size
    cu_seqlens: Tensor
    sketch: Tensor

    def distance(self, shape: torch.Size, cu_seqlens: Tensor, sketch: Tensor) -> float:
        """How far these index queries are from those it was saved for, relative; infinite if they are others.

        Waits for the device.
        """
        if self.shape != shape or self.cu_seqlens.shape != cu_seqlens.shape:
            return math.inf
        apart = torch.linalg.vector_norm(self.sketch - sketch)
        length = torch.linalg.vector_norm(self.sketch)
        ours = (apart <= _TOLERANCE * length) & (self.cu_seqlens == cu_seqlens).all()
        return float(torch.where(ours, apart / length.clamp_min(torch.finfo(length.dtype).tiny), math.inf))


def sketch(q_idx: Tensor) -> Tensor:
    """A checksum of index queries that bears rounding: 8 sums with signs drawn from the places of the summands, fp32.

    The distance of two sketches relative to their length estimates that of the tensors. Kernels that are not
    deterministic change the last bits of a recomputed activation, so equality would be too much to ask; other tokens
    give another tensor altogether.
    """
    flat = q_idx.detach().flatten(1)
    by_channel = flat @ _signs(flat.shape[1], 1, flat.device).to(flat.dtype)
    return (by_channel.float() * _signs(flat.shape[0], 2, flat.device)).sum(dim=0)


def _signs(count: int, seed: int, device: torch.device) -> Tensor:
    """+1 and -1 [count, 8], the same on every call: bits of an integer hash of the place."""
    x = torch.arange(count * _SKETCH, device=device) + (seed << 40)
    for _ in range(2):
        x = (x ^ (x >> 31)) * 0x7FB5D329728EA185
    return ((x >> 32) & 1).view(count, _SKETCH).float() * 2 - 1


class LayerRoutes:
    """The routes of one layer (of one virtual pipeline stage, which has layers of its own)."""

    def __init__(self) -> None:
        self._saved: deque[SavedRoute] = deque()
        self._unsettled = 0
        self.given: deque[Tensor] | None = None
        self.record: list[Tensor] | None = None

    def __len__(self) -> int:
        """Saved routes that wait for their recomputation."""
        return len(self._saved)

    def save(self, ids: Tensor, q_idx: Tensor, layout: TokenLayout) -> None:
        self._saved.append(SavedRoute(ids, q_idx.shape, layout.cu_seqlens, sketch(q_idx)))
        self._unsettled += 1

    def replay(self, q_idx: Tensor, layout: TokenLayout, layer: int) -> Tensor:
        """Take the route that was saved for these index queries out of the queue.

        Schedules recompute in the order of their forward passes, a sum of losses in reverse, so the order tells
        nothing: it is the route whose index queries are nearest. A pass that left its route behind before the weights
        changed is farther away than the pass that is recomputed.

        Raises:
            RouteError: there is none, or several are equally near and differ.
        """
        asked = (q_idx.shape, layout.cu_seqlens, sketch(q_idx))
        distances = [route.distance(*asked) for route in self._saved]
        nearest = min(distances, default=math.inf)
        if nearest < math.inf:
            places = [place for place, distance in enumerate(distances) if distance == nearest]
            route = self._saved[places[0]]
            if any(not torch.equal(self._saved[place].ids, route.ids) for place in places[1:]):
                raise RouteError(
                    f"QSA layer {layer}: {len(places)} forward passes with the same index queries {tuple(q_idx.shape)} "
                    f"attended different blocks, and the recomputation cannot tell which of them it repeats. Run the "
                    f"backward pass of one before the forward pass of the next"
                )
            del self._saved[places[0]]
            self._unsettled = min(self._unsettled, len(self._saved))
            return route.ids
        waiting = ", ".join(str(tuple(route.shape)) for route in self._saved) or "none"
        raise RouteError(
            f"QSA layer {layer}: the recomputation of index queries {tuple(q_idx.shape)} in "
            f"{len(layout.cu_seqlens) - 1} documents finds no route saved for them (saved: {waiting}). Either the "
            f"layer's input differs from the first pass by more than rounding, or forward passes in training mode with "
            f"no gradients left theirs behind: put the model in evaluation mode for those, or call "
            f"discard_saved_routes(model)"
        )

    def settle(self, keep: bool) -> None:
        """End of a forward pass: what it saved stays only if a backward pass can follow."""
        for _ in range(0 if keep else self._unsettled):
            self._saved.pop()
        self._unsettled = 0

    def discard(self) -> None:
        self._saved.clear()
        self._unsettled = 0

    def take_given(self, layout: TokenLayout, ratio: int, layer: int) -> Tensor | None:
        """This rank's rows of the routes given for the next forward pass, or None where none are given.

        Raises:
            RouteError: they are used up. ValueError, TypeError: they do not fit the batch. Waits for the device.
        """
        if self.given is None:
            return None
        if not self.given:
            raise RouteError(f"QSA layer {layer}: more forward passes than routes given to inject_routes")
        ids = self.given.popleft()
        name = f"inject_routes: routes of layer {layer}"
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {str(ids.dtype).removeprefix('torch.')}")
        if ids.dim() != 2 or ids.shape[0] != layout.num_tokens or ids.shape[1] < 1:
            raise ValueError(
                f"{name} must be [{layout.num_tokens}, blocks], a row for each token of the whole batch, "
                f"got {tuple(ids.shape)}"
            )
        mine = ids.to(layout.tokens.device).index_select(0, layout.tokens).to(torch.int32)
        mine = mine.masked_fill(layout.rows.pos[:, None] < 0, -1)
        unseen = (mine >= complete_blocks(layout.rows.pos, ratio)[:, None]).any(dim=1)
        if unseen.any():
            row = int(unseen.int().argmax())
            raise ValueError(
                f"{name} must name blocks that are complete at their token; {int(unseen.sum())} rows do not, the first "
                f"is token {int(layout.tokens[row])} at position {int(layout.rows.pos[row])} with block "
                f"{int(mine[row].max())}"
            )
        verify_distinct(name, mine, layout.rows.pos, ratio)
        return mine

    def note(self, ids: Tensor, layout: TokenLayout) -> None:
        if self.record is not None:
            self.record.append(layout.gather(ids))


def qsa_layers(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[QSASelfAttention]:
    """The QSA layers of a model, or of the chunks of a pipeline stage."""
    from mcore_patches.attention.qsa.attention import QSASelfAttention

    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        for module in chunk.modules():
            if isinstance(module, QSASelfAttention):
                yield module


def discard_saved_routes(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Forget routes saved for recomputations that will not come: after a failed step, or forward passes without one.

    A recomputation that raises leaves megatron's flag for "inside a checkpoint" set; this resets it.
    """
    _unset_checkpointing()
    for layer in qsa_layers(model):
        layer.routes.discard()


@contextlib.contextmanager
def record_routes(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """Read the routes back. Inside, every forward pass adds its own.

    Yields:
        Layer number (from 1, those of MTP layers after the decoder's) to a list with one tensor a forward pass: int32
        [n, K] document-local block ids of all n tokens of the batch, ascending, -1 at the end of a row; sequences of a
        batch follow each other. With context parallelism recording is a collective of all its ranks.
    """
    layers = list(qsa_layers(model))
    recorded: dict[int, list[Tensor]] = {layer.global_layer_number: [] for layer in layers}
    for layer in layers:
        layer.routes.record = recorded[layer.global_layer_number]
    try:
        yield recorded
    finally:
        for layer in layers:
            layer.routes.record = None


@contextlib.contextmanager
def inject_routes(
    model: torch.nn.Module | Sequence[torch.nn.Module], routes: Mapping[int, Sequence[Tensor]]
) -> Iterator[None]:
    """Attend given blocks in place of selected ones, for instance those that a rollout attended.

    Args:
        routes: layer number to one tensor for each forward pass to come, both as `record_routes` yields them (any order
            in a row, any number of columns). Layers that are not named select for themselves. A recomputation uses
            none of its own.

    Raises:
        ValueError: a layer number that the model does not have, on entry.
        RouteError: on exit without another exception, when routes are left over. Further errors as in
            `LayerRoutes.take_given`, in the forward pass.
    """
    layers = {layer.global_layer_number: layer for layer in qsa_layers(model)}
    if unknown := sorted(set(routes) - set(layers)):
        raise ValueError(f"inject_routes: routes name layers {unknown}; the QSA layers here are {sorted(layers)}")
    for number, given in routes.items():
        layers[number].routes.given = deque(given)
    try:
        yield
        left: dict[int, Any] = {n: len(layers[n].routes.given or ()) for n in routes}
        if any(left.values()):
            raise RouteError(f"inject_routes: routes left over (layer: number) {left}")
    finally:
        for number in routes:
            layers[number].routes.given = None
