"""Checkpoints of absorbed MLA: combined and split up-projections, and norms of their own or fused into projections.

Parameters keep plain MLA's names and shapes. What differs between checkpoints is

    kv_up   "combined": `linear_kv_up_proj.weight`, rows of each head's W_k then W_v, heads one after the other (plain
            MLA, and absorbed MLA of megatron-core 0.19); "split": `linear_k_up_proj.weight` and
            `linear_v_up_proj.weight` (absorbed MLA of 0.17 and 0.18).
    norms   "apart": `q_layernorm.weight`, `kv_layernorm.weight`; "fused": `linear_q_up_proj.layer_norm_weight`,
            `linear_kv_up_proj.layer_norm_weight` (plain MLA with qk_layernorm on Transformer Engine up to 0.18).

A plain `state_dict` is read in any layout. A sharded one must name what it wants before anybody sees the checkpoint:
`set_checkpoint_layout` says which layout that is.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

__all__ = ["CheckpointLayout", "load_any_layout", "set_checkpoint_layout", "to_checkpoint_layout"]

_CHOICES = {"kv_up": ("combined", "split"), "norms": ("apart", "fused")}
_FUSED_INTO = {"q_layernorm.": "linear_q_up_proj.layer_norm_", "kv_layernorm.": "linear_kv_up_proj.layer_norm_"}
_EXTRA = "_extra_state"
_COMBINED, _K, _V = "linear_kv_up_proj.", "linear_k_up_proj.", "linear_v_up_proj."


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """Layout of sharded checkpoints, read and written; the module's docstring has the choices."""

    kv_up: str = "combined"
    norms: str = "apart"

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be {' or '.join(map(repr, allowed))}")


def set_checkpoint_layout(
    model: torch.nn.Module, *, kv_up: str | None = None, norms: str | None = None
) -> CheckpointLayout:
    """Choose the layout of sharded checkpoints of all absorbed MLA layers of a model, from now on.

    Without it they are those of plain MLA of the same release and backend, if the layers come from
    `get_absorbed_mla_module_spec_for_backend`.

    Args:
        model: wrapped or not.
        kv_up: "combined" or "split"; None leaves it.
        norms: "apart" or "fused"; None leaves it.

    Returns:
        The layout of the last layer.

    Raises:
        ValueError: another choice, or a model without absorbed MLA.
    """
    given = {name: value for name, value in (("kv_up", kv_up), ("norms", norms)) if value is not None}
    chosen = None
    for layer in model.modules():
        present: Any = getattr(layer, "checkpoint_layout", None)
        if isinstance(present, CheckpointLayout):
            chosen = dataclasses.replace(present, **given)
            layer.checkpoint_layout = chosen  # type: ignore[assignment]
    if chosen is None:
        raise ValueError(f"model={type(model).__name__}: must have absorbed MLA layers, it has none")
    return chosen


def load_any_layout(layer: Any, state: dict[str, Any], prefix: str) -> None:
    """Rewrite the entries of one layer in a plain state dict, whatever their layout, to the layer's own. In place."""
    for own, fused in _FUSED_INTO.items():
        for kind in ("weight", "bias"):
            _rename(state, f"{prefix}{fused}{kind}", f"{prefix}{own}{kind}")
        if f"{prefix}{own}weight" in state:
            present = getattr(layer, own.rstrip(".")).state_dict()
            if _EXTRA in present:
                state.setdefault(f"{prefix}{own}{_EXTRA}", present[_EXTRA])
    heads, latent = layer.num_attention_heads_per_partition, layer.config.kv_lora_rank
    combined, k, v = (f"{prefix}{name}weight" for name in (_COMBINED, _K, _V))
    if layer.is_split and combined in state and k not in state and v not in state:
        weight = state.pop(combined).view(heads, -1, latent)
        key_rows = layer.config.qk_head_dim
        state[k], state[v] = weight[:, :key_rows].reshape(-1, latent), weight[:, key_rows:].reshape(-1, latent)
    elif not layer.is_split and combined not in state and k in state and v in state:
        state[combined] = torch.cat([state.pop(x).view(heads, -1, latent) for x in (k, v)], dim=1).view(-1, latent)
    _extra_state(layer, state, prefix)


def _extra_state(layer: Any, state: dict[str, Any], prefix: str) -> None:
    combined, k, v = (f"{prefix}{name}{_EXTRA}" for name in (_COMBINED, _K, _V))
    if layer.is_split:
        if combined in state:
            extra = state.pop(combined)
            state.setdefault(k, extra)
        if k in state:
            state.setdefault(v, copy.deepcopy(state[k]))
    elif k in state or v in state:
        parts = [state.pop(x) for x in (k, v) if x in state]
        state.setdefault(combined, parts[0])


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    if old in state and new not in state:
        state[new] = state.pop(old)


def to_checkpoint_layout(
    layer: Any, sharded: dict[str, Any], prefix: str, sharded_offsets: tuple[tuple[int, int, int], ...]
) -> dict[str, Any]:
    """A layer's sharded state dict with the keys of `layer.checkpoint_layout`. Changes `sharded`, which it returns.

    The names in the dict stay the layer's own, so that what a checkpoint gives goes into `load_state_dict` as it is.
    """
    if layer.checkpoint_layout.norms == "fused":
        for own, fused in _FUSED_INTO.items():
            for kind in ("weight", "bias"):
                if f"{prefix}{own}{kind}" in sharded:
                    sharded[f"{prefix}{own}{kind}"].key = f"{prefix}{fused}{kind}"
            # A fused norm has none of its own; loading puts the layer's present one back.
            sharded.pop(f"{prefix}{own}{_EXTRA}", None)
    if layer.checkpoint_layout.kv_up == ("split" if layer.is_split else "combined"):
        return sharded
    rows = layer.config.qk_head_dim, layer.config.v_head_dim
    if layer.is_split:
        for part, (name, _) in enumerate(zip((_K, _V), rows)):
            entry = f"{prefix}{name}weight"
            sharded[entry] = _part_of_combined(
                sharded[entry], f"{prefix}{_COMBINED}weight", part, rows, sharded_offsets
            )
        _move_object(sharded, f"{prefix}{_K}{_EXTRA}", f"{prefix}{_COMBINED}{_EXTRA}")
        # One object a key: the values' state is the keys' again after loading.
        sharded.pop(f"{prefix}{_V}{_EXTRA}", None)
        return sharded
    entry = f"{prefix}{_COMBINED}weight"
    sharded[entry] = _split(sharded[entry], rows, sharded_offsets)
    extra = sharded.pop(f"{prefix}{_COMBINED}{_EXTRA}", None)
    if isinstance(extra, ShardedObject):
        for name in (_K, _V):
            sharded[f"{prefix}{name}{_EXTRA}"] = dataclasses.replace(extra, key=f"{prefix}{name}{_EXTRA}")
    return sharded


def _move_object(sharded: dict[str, Any], entry: str, key: str) -> None:
    if isinstance(sharded.get(entry), ShardedObject):
        sharded[entry].key = key


def _split(
    combined: ShardedTensor, rows: tuple[int, int], offsets: tuple[tuple[int, int, int], ...]
) -> ShardedTensorFactory:
    """The combined weight (or an optimizer's state of its shape) as two tensors of a checkpoint."""
    axis, rank, ranks = _place(combined, offsets)

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None = None) -> list[ShardedTensor]:
        _refuse_flattened(flattened_range)
        # Megatron renames layers after this module made its part, and optimizers put the state's name in front.
        before, _, after = key.rpartition(_COMBINED)
        per_head = tensor.view(-1, sum(rows), tensor.shape[-1])
        parts = per_head.split(rows, dim=1)
        return [
            ShardedTensor.from_rank_offsets(
                f"{before}{name}{after}",
                part.reshape(-1, tensor.shape[-1]),
                *offsets,
                (axis, rank, ranks),
                replica_id=replica_id,
                prepend_axis_num=len(offsets),
            )
            for name, part in zip((_K, _V), parts)
        ]

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        latent = parts[0].shape[-1]
        per_head = [part.view(-1, count, latent) for part, count in zip(parts, rows)]
        return torch.cat(per_head, dim=1).view(-1, latent)

    return _factory(combined, combined.key, build, merge)


def _part_of_combined(
    own: ShardedTensor, key: str, part: int, rows: tuple[int, int], offsets: tuple[tuple[int, int, int], ...]
) -> ShardedTensorFactory:
    """W_k (part 0) or W_v (part 1) as pieces of the combined tensor of a checkpoint.

    Each head's rows are a piece between those of the other projection. Checkpoints hold grids of equal pieces, so a
    piece has as many rows as divide both.
    """
    axis, rank, ranks = _place(own, offsets)
    grid = math.gcd(*rows)
    per_head, before = sum(rows) // grid, part * rows[0] // grid

    @torch.no_grad()
    def build(name: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None = None) -> list[ShardedTensor]:
        _refuse_flattened(flattened_range)
        heads = tensor.shape[0] // rows[part]
        pieces = tensor.view(heads, -1, grid, tensor.shape[-1])
        return [
            ShardedTensor.from_rank_offsets(
                name,
                pieces[head, piece],
                *offsets,
                (axis, (rank * heads + head) * per_head + before + piece, ranks * heads * per_head),
                replica_id=replica_id,
                prepend_axis_num=len(offsets),
            )
            for head in range(heads)
            for piece in range(pieces.shape[1])
        ]

    return _factory(own, key, build, torch.cat)


def _factory(own: ShardedTensor, key: str, build: Any, merge: Any) -> ShardedTensorFactory:
    return ShardedTensorFactory(
        key, own.data, build, merge, own.replica_id, flattened_range=getattr(own, "flattened_range", None)
    )


def _place(own: ShardedTensor, offsets: tuple[tuple[int, int, int], ...]) -> tuple[int, int, int]:
    """Axis of the rows, this rank's place on it, and how many ranks share it."""
    axis = len(offsets)
    return axis, own.global_offset[axis] // own.local_shape[0], own.axis_fragmentations[axis]


def _refuse_flattened(flattened_range: slice | None) -> None:
    if flattened_range is not None:
        raise ValueError(
            f"flattened_range={flattened_range}: must be None: a distributed optimizer's flattened checkpoint keeps "
            "the layout of K and V up-projections; use its fully reshardable format"
        )
