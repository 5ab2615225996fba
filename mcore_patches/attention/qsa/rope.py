"""The rotary embedding of tokens and of blocks, from what megatron hands to an attention layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout
from mcore_patches.attention.common.rope import Rotation, rotation


class Rotations(NamedTuple):
    """rows: of this rank's tokens. blocks: of the first token of each block of the whole batch."""

    rows: Rotation
    blocks: Rotation


def rotations(table: Tensor, layout: TokenLayout, concentration: float) -> Rotations:
    """The rotations of tokens and of blocks. A collective under context parallelism.

    Args:
        table: what megatron's rotary embeddings return, angles [positions, 1 or B, 1, rotary channels]. For batches a
            row for each of this rank's places; for packed documents a row for each position in a document or, if it has
            as many rows as the batch has tokens, for each token.
        concentration: factor on cos and sin, YaRN's attention factor.

    Raises:
        ValueError: batches and a table of another length. RuntimeError: packed documents and a table that ends before
            the longest; on CUDA this is a device-side assertion.
    """
    _check_length(table, layout)
    first = layout.block_tokens.clamp(min=0)
    if not layout.packed:
        angles = layout.to_rows(table[:, :, 0].expand(-1, layout.batch, -1))
        blocks = layout.gather(angles).index_select(0, first)
    elif table.shape[0] == layout.num_tokens:
        angles = table[:, 0, 0].index_select(0, layout.tokens)
        blocks = table[:, 0, 0].index_select(0, first)
    else:
        angles = table[:, 0, 0].index_select(0, layout.rows.pos.clamp(min=0))
        blocks = table[:, 0, 0].index_select(0, layout.all_rows.pos.index_select(0, first).clamp(min=0))
    return Rotations(rotation(angles, concentration), rotation(blocks, concentration))


def _check_length(table: Tensor, layout: TokenLayout) -> None:
    rows = table.shape[0]
    if not layout.packed:
        places = layout.tokens.shape[0] // layout.batch
        if rows != places:
            raise ValueError(f"rotary_pos_emb has {rows} rows, must have one for each of {places} places in a sequence")
    elif rows != layout.num_tokens:
        torch._assert_async(
            (layout.all_rows.pos < rows).all(), f"rotary_pos_emb has {rows} rows, and a document is longer than that"
        )
