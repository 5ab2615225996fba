"""The blocks that queries selected: kept for recomputation (see `common.passes`), given from outside, read back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout
from mcore_patches.attention.common.passes import PassQueue, RouteError, discard_saved_routes
from mcore_patches.ops.arguments import verify_distinct
from mcore_patches.ops.packing import complete_blocks

if TYPE_CHECKING:
    from mcore_patches.attention.qsa.attention import QSASelfAttention

__all__ = ["LayerRoutes", "RouteError", "discard_saved_routes", "inject_routes", "qsa_layers", "record_routes"]


class LayerRoutes(PassQueue):
    """The routes of one layer: saved ones, those given from outside, and the lists that record them."""

    def __init__(self) -> None:
        super().__init__("QSA")
        self.given: deque[Tensor] | None = None
        self.records: list[list[Tensor]] = []

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
