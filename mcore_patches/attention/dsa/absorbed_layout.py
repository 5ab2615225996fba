"""Where the tokens of a rank lie, and the rotary angles at their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout, batch_layout, packed_layout
from mcore_patches.attention.dsa.adapters import whole_rotary_table

__all__ = ["angles_of", "token_layout"]


def token_layout(
    seq: int, batch: int, packed_seq_params: Any, device: torch.device, cp_group: torch.distributed.ProcessGroup
) -> TokenLayout:
    """Layout of [seq, batch, ...], a rank's share of each sequence, or of packed documents [seq, ...].

    Raises:
        ValueError, RuntimeError: boundaries of documents that do not fit, see `packed_layout`.
    """
    if packed_seq_params is not None:
        return packed_layout(packed_seq_params, seq, 1, cp_group)
    return batch_layout(seq, batch, 1, device, cp_group)


def angles_of(rotary_pos_emb: Any, layout: TokenLayout, packed_seq_params: Any) -> tuple[Tensor, float]:
    """Rotary angles at this rank's positions, to rotate [S, B, heads, P] or packed [T, heads, P]; and YaRN's factor.

    Padding gets the angles of position 0. Never waits for the device.

    Returns:
        fp32 [S, 1, 1, channels] or packed [T, 1, channels], and the factor.
    """
    if layout.packed:
        # Documents may be longer than what the caller says only by padding, which has no position.
        longest = packed_seq_params.max_seqlen_q
        length = layout.num_tokens if longest is None else int(longest)
    else:
        length = layout.num_tokens // layout.batch
    table, factor = whole_rotary_table(rotary_pos_emb, length)
    positions = layout.rows.pos[: layout.rows.pos.shape[0] // layout.batch].clamp(min=0)
    angles = table.to(positions.device).index_select(0, positions)
    return (angles.squeeze(1) if layout.packed else angles), factor
