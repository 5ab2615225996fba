"""The blocks that queries selected: kept for recomputation, given from outside, read back.

A recomputed layer must attend what it attended the first time; a second selection may differ wherever scores tie or
kernels round differently. The first pass saves its ids and the scale of its loss, the recomputation takes them.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.random import _unset_checkpointing, is_checkpointing
from torch import Tensor

from mcore_patches.attention.qsa.layout import TokenLayout
from mcore_patches.attention.qsa.loss import LossScale
from mcore_patches.ops.arguments import verify_distinct
from mcore_patches.ops.packing import complete_blocks

if TYPE_CHECKING:
    from mcore_patches.attention.qsa.attention import QSASelfAttention

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


class LayerRoutes:
    """The routes of one layer (of one virtual pipeline stage, which has layers of its own)."""

    def __init__(self) -> None:
        self._saved: deque[SavedPass] = deque()
        self._unsettled = 0
        self.given: deque[Tensor] | None = None
        self.records: list[list[Tensor]] = []

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
                f"QSA layer {layer}: {_MOST_SAVED} forward passes wait for their recomputation, the oldest is "
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
                    f"QSA layer {layer}: {len(places)} forward passes with the same queries {tuple(queries.shape)} "
                    f"attended different blocks, and the recomputation cannot tell which of them it repeats. Run the "
                    f"backward pass of one before the forward pass of the next"
                )
            del self._saved[places[-1]]
            self._unsettled = min(self._unsettled, len(self._saved))
            return latest
        waiting = ", ".join(str(tuple(saved.shape)) for saved in self._saved) or "none"
        raise RouteError(
            f"QSA layer {layer}: the recomputation of queries {tuple(queries.shape)} in "
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
        mine = ids.to(layout.tokens.device).index_select(0, layout.tokens).clamp(min=-1)
        mine = mine.masked_fill(layout.rows.pos[:, None] < 0, -1)
        unseen = (mine >= complete_blocks(layout.rows.pos, ratio)[:, None]).any(dim=1)
        if unseen.any():
            row = int(unseen.int().argmax())
            raise ValueError(
                f"{name} must name blocks that are complete at their token; {int(unseen.sum())} rows do not, the first "
                f"is token {int(layout.tokens[row])} at position {int(layout.rows.pos[row])} with block "
                f"{int(mine[row].max())}"
            )
        mine = mine.to(torch.int32)
        verify_distinct(name, mine, layout.rows.pos, ratio)
        return mine

    def note(self, ids: Tensor, layout: TokenLayout) -> None:
        if self.records:
            gathered = layout.gather(ids)
            for record in self.records:
                record.append(gathered)


def qsa_layers(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[QSASelfAttention]:
    """The QSA layers of a model, or of the chunks of a pipeline stage."""
    from mcore_patches.attention.qsa.attention import QSASelfAttention

    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        for module in chunk.modules():
            if isinstance(module, QSASelfAttention):
                yield module


def _by_number(model: torch.nn.Module | Sequence[torch.nn.Module], caller: str) -> dict[int, QSASelfAttention]:
    layers: dict[int, QSASelfAttention] = {}
    for layer in qsa_layers(model):
        number = layer.global_layer_number
        if layer.config.qsa_stage == "warmup":
            raise ValueError(f"{caller}: qsa_stage='warmup' attends everything, so there are no routes")
        if layers.setdefault(number, layer) is not layer:
            raise ValueError(
                f"{caller}: two QSA layers have the number {number}, so the models are several; call it once for each"
            )
    return layers


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

    Raises:
        ValueError: stage "warmup", which has no routes; several models that number their layers alike.
    """
    layers = _by_number(model, "record_routes")
    recorded: dict[int, list[Tensor]] = {number: [] for number in layers}
    for number, layer in layers.items():
        layer.routes.records.append(recorded[number])
    try:
        yield recorded
    finally:
        for number, layer in layers.items():
            # By identity: the list of another recording may hold the same.
            layer.routes.records = [record for record in layer.routes.records if record is not recorded[number]]


@contextlib.contextmanager
def inject_routes(
    model: torch.nn.Module | Sequence[torch.nn.Module], routes: Mapping[int, Sequence[Tensor]]
) -> Iterator[None]:
    """Attend given blocks in place of selected ones, for instance those that a rollout attended.

    Args:
        routes: layer number to one tensor for each forward pass to come, both as `record_routes` yields them (any order
            in a row, any number of columns). Layers that are not named do as before: they select for themselves, or
            take routes of an injection around this one. A recomputation uses none of its own.

    Raises:
        ValueError: stage "warmup", a layer number that the model does not have, or several models that number their
            layers alike, on entry.
        RouteError: on exit without another exception, when routes are left over. Further errors as in
            `LayerRoutes.take_given`, in the forward pass.
    """
    layers = _by_number(model, "inject_routes")
    if unknown := sorted(set(routes) - set(layers)):
        raise ValueError(f"inject_routes: routes name layers {unknown}; the QSA layers here are {sorted(layers)}")
    before = {number: layers[number].routes.given for number in routes}
    for number, given in routes.items():
        layers[number].routes.given = deque(given)
    try:
        yield
        left: dict[int, Any] = {n: len(layers[n].routes.given or ()) for n in routes}
        if any(left.values()):
            raise RouteError(f"inject_routes: routes left over (layer: number) {left}")
    finally:
        for number, given_before in before.items():
            layers[number].routes.given = given_before
