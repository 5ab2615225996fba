"""Rotary embedding by rows, any token at any place; casts as in megatron's unfused path and in transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """cos and sin [N, rotary channels] of N tokens."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the leading channels of x [N, ..., channels] in half-split pairs, in the dtype of x."""
        width = self.cos.shape[-1]
        shape = (-1, *[1] * (x.dim() - 2), width)
        cos, sin = (t.to(x.dtype).view(shape) for t in self)
        rotated, rest = x[..., :width], x[..., width:]
        low, high = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-high, low), dim=-1) * sin
        return torch.cat((rotated, rest), dim=-1)


def rotation(angles: Tensor, concentration: float) -> Rotation:
    """The rotation by angles [N, rotary channels]; concentration: factor on cos and sin, YaRN's attention factor."""
    return Rotation(angles.cos() * concentration, angles.sin() * concentration)
