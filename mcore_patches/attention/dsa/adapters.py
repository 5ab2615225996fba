"""What differs between megatron-core 0.16.1, 0.17.1 and 0.18.2 (and 0.19) for attention modules, behind one name each.

constructor keywords   0.18 hands `name` and `pp_layer_offset` down to attention and linear layers, 0.17 only
                       `pp_layer_offset`, and only to some; older classes reject them: `accepted`.
optional norms         from 0.17 megatron calls what stands in a norm's slot, so it must not be None: `or_identity`.
rotary embeddings      `RotaryEmbedding` returns a table, `YarnRotaryEmbedding` a table and a factor, and both cut the
                       table for context parallelism unless told that the batch is packed: `whole_rotary_table`. How
                       0.19 tells the rotation of MLA from others (`mla_rotary_interleaved`) older releases do not know:
                       `rotate_pairs` takes the place of megatron's `apply_rotary_pos_emb`.
fused projections      Transformer Engine's linear layer with a norm in front looks different in each release; it is
                       known by the norm's weight: `has_fused_norm`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

__all__ = ["accepted", "has_fused_norm", "or_identity", "rotate_pairs", "whole_rotary_table"]


def accepted(callee: Any, optional: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `optional` keywords that a class, a function or a spec's class takes.

    For keywords that a release may lack and that change nothing there, such as the `name` of a layer, which is shown in
    traces only.
    """
    if isinstance(callee, ModuleSpec):
        callee = callee.module
    parameters = inspect.signature(callee.__init__ if inspect.isclass(callee) else callee).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(optional)
    return {name: value for name, value in optional.items() if name in parameters}


def or_identity(slot: Any) -> Any:
    """What stands in a slot for a norm, `IdentityOp` for None."""
    return IdentityOp if slot is None else slot


def has_fused_norm(linear: torch.nn.Module) -> bool:
    """Whether a built linear layer norms its input itself, as `TELayerNormColumnParallelLinear` does."""
    return getattr(linear, "layer_norm_weight", None) is not None


def whole_rotary_table(rotary_pos_emb: Any, length: int) -> tuple[Tensor, float]:
    """Angles fp32 [length, 1, 1, channels] of positions 0 to length - 1 on every rank, and YaRN's factor (else 1)."""
    table = rotary_pos_emb(length, packed_seq=True)
    return table if isinstance(table, tuple) else (table, 1.0)


def rotate_pairs(x: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate neighbouring channels (2j, 2j + 1) and put the results at j and j + channels / 2, as megatron's MLA does.

    The order of channels is the same for queries and keys, so that scores do not depend on it.

    Args:
        x: [..., heads, channels].
        angles: broadcastable to x, over its leading channels: the rest is passed through. Both halves of the last
            dimension hold the same angles.
        factor: multiplies what is rotated.

    Returns:
        x's shape and dtype. Sine and cosine are taken in the angles' dtype and cast to x's, in which the rotation runs.
    """
    rotated, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    even, odd = rotated[..., 0::2], rotated[..., 1::2]
    angles = angles[..., : even.shape[-1]]
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin, rest), dim=-1)
