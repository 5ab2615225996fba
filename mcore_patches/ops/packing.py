"""Where each row of a packed batch sits: document positions, document starts, and the r-token block grid.

The sparse attention ops see a batch as rows. A row is one query token; three int32 numbers place it:

    pos          its position in its own document, -1 for padding
    start        the index in `k` of that document's first token
    block_start  the index in `k_blocks` of that document's first block

Blocks of `ratio` tokens are counted from each document's first token, so a document of `n` tokens owns `n // ratio`
blocks and its last `n % ratio` tokens belong to none. Padded batches [B, S] are the packed case with documents of
length S (`bshd_cu_seqlens`). Everything here is a pure function of its arguments and never waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_INTEGERS = (torch.int32, torch.int64)


class PackedRows(NamedTuple):
    """Placement of rows: three int32 tensors of one shape [T] (module docstring gives their meaning)."""

    pos: Tensor
    start: Tensor
    block_start: Tensor

    def take(self, index: Tensor) -> "PackedRows":
        """The rows at `index` [n] (int32 or int64), for instance the tokens that one context-parallel rank holds."""
        return PackedRows(*(field.index_select(0, index) for field in self))


class TokenSupport(NamedTuple):
    """Keys that each row may attend.

    tokens  int64 [T, K * ratio + ratio - 1], indices into `k`; the first K * ratio belong to the selected blocks in the
            order of `block_ids`, the rest to the tail. Entries that are not seen hold the caller's spare index.
    seen    bool, same shape
    """

    tokens: Tensor
    seen: Tensor


def bshd_cu_seqlens(batch: int, seqlen: int, device: torch.device | str | None = None) -> Tensor:
    """Boundaries, int32 [batch + 1], of `batch` documents of `seqlen` tokens laid out one after the other."""
    if batch < 1 or seqlen < 0:
        raise ValueError(f"batch and seqlen must be at least 1 and 0, got batch={batch}, seqlen={seqlen}")
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def packed_rows(
    cu_seqlens: Tensor, total_tokens: int, ratio: int, *, cu_seqlens_padded: Tensor | None = None
) -> PackedRows:
    """Place every token of a packed batch.

    Args:
        cu_seqlens: int32 or int64 [documents + 1], ascending from 0: cumulative true lengths.
        total_tokens: length T of the token dimension. Tokens past the last document are padding.
        ratio: tokens in a block.
        cu_seqlens_padded: same shape, cumulative lengths as laid out, if documents are padded one by one; document n
            then holds tokens `cu_seqlens_padded[n]` onwards and what follows its true length is padding.

    Returns:
        PackedRows over T tokens. Padding has pos -1, start 0 and block_start 0.
    """
    _check_boundaries(cu_seqlens, total_tokens, ratio, cu_seqlens_padded)
    layout = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    lengths = cu_seqlens.diff()
    token = torch.arange(total_tokens, device=layout.device, dtype=layout.dtype)
    # Boundaries may repeat (documents of no tokens): counting the ends that lie at or before the token skips them.
    document = torch.searchsorted(layout[1:].contiguous(), token, right=True).clamp_(max=lengths.shape[0] - 1)
    position = token - layout[document]
    real = position < lengths[document]
    block_starts = _blocks_before(lengths, ratio)
    return PackedRows(
        torch.where(real, position, -1).to(torch.int32),
        torch.where(real, layout[document], 0).to(torch.int32),
        torch.where(real, block_starts[document], 0).to(torch.int32),
    )


def block_first_tokens(
    cu_seqlens: Tensor, total_tokens: int, ratio: int, *, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """First token of every complete block, in document order: what pooling needs to build `k_blocks`.

    Arguments as in `packed_rows`. The number of blocks depends on the lengths, which stay on the device, so the result
    has the largest possible number of slots.

    Returns:
        int32 [total_tokens // ratio], indices of tokens; -1 in the spare slots at the end.
    """
    _check_boundaries(cu_seqlens, total_tokens, ratio, cu_seqlens_padded)
    layout = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    lengths = cu_seqlens.diff()
    block_starts = _blocks_before(lengths, ratio)
    block_ends = block_starts + torch.div(lengths, ratio, rounding_mode="floor")
    slot = torch.arange(total_tokens // ratio, device=layout.device, dtype=layout.dtype)
    document = torch.searchsorted(block_ends, slot, right=True).clamp_(max=lengths.shape[0] - 1)
    first = layout[document] + (slot - block_starts[document]) * ratio
    return torch.where(slot < block_ends[-1], first, -1).to(torch.int32)


def complete_blocks(row_pos: Tensor, ratio: int) -> Tensor:
    """Blocks that lie whole in a row's causal prefix, floor((pos + 1) / ratio), so 0 for padding. Keeps the dtype."""
    return torch.div(row_pos + 1, ratio, rounding_mode="floor")


def token_support(block_ids: Tensor, row_pos: Tensor, row_start: Tensor, ratio: int, *, spare: int) -> TokenSupport:
    """Tokens of the selected blocks and of the tail, row by row.

    Args:
        block_ids: int32 [T, K], block numbers within the row's document; those outside [0, complete blocks) are
            ignored.
        row_pos, row_start: int32 [T].
        ratio: tokens in a block.
        spare: index written where a row sees nothing; the caller keeps a row of zeros there.
    """
    blocks = complete_blocks(row_pos, ratio)
    ids = torch.cat((block_ids, blocks[:, None]), dim=1).long()
    # The tail is the block after the last complete one, cut by causality; it holds at most ratio - 1 tokens.
    chosen = (block_ids >= 0) & (block_ids < blocks[:, None])
    local = ids[:, :, None] * ratio + torch.arange(ratio, device=ids.device)
    seen = torch.cat((chosen[:, :, None].expand(-1, -1, ratio), local[:, -1:] <= row_pos[:, None, None]), dim=1)
    width = block_ids.shape[1] * ratio + ratio - 1
    tokens = (local + row_start[:, None, None]).flatten(1)[:, :width]
    seen = seen.flatten(1)[:, :width]
    return TokenSupport(torch.where(seen, tokens, spare), seen)


def first_tokens_of_visible_blocks(
    row_pos: Tensor, row_start: Tensor, row_block_start: Tensor, ratio: int, num_blocks: int
) -> Tensor:
    """First token of each block of `k_blocks`, worked out from the rows alone: int64 [num_blocks].

    Right for every block that some row sees. Blocks that no row sees get some number, to be clamped and masked.
    """
    device = row_pos.device
    row = torch.arange(row_pos.shape[0], device=device)
    sees = complete_blocks(row_pos, ratio) > 0
    # One row of each document marks its first block; every later block looks back to the nearest mark.
    marks = torch.full((num_blocks + 1,), -1, dtype=torch.int64, device=device)
    marks.scatter_reduce_(0, torch.where(sees, row_block_start, num_blocks).long(), row, "amax")
    block = torch.arange(num_blocks, device=device)
    nearest = torch.where(marks[:-1] >= 0, block, 0).cummax(0).values if num_blocks else block
    if row_pos.shape[0] == 0:
        return torch.zeros_like(block)
    witness = marks[:-1].index_select(0, nearest).clamp_(min=0)
    return row_start[witness].long() + (block - row_block_start[witness].long()) * ratio


def _blocks_before(lengths: Tensor, ratio: int) -> Tensor:
    blocks = torch.div(lengths, ratio, rounding_mode="floor")
    return (blocks.cumsum(0) - blocks).to(lengths.dtype)


def _check_boundaries(cu_seqlens: Tensor, total_tokens: int, ratio: int, cu_seqlens_padded: Tensor | None) -> None:
    for name, boundaries in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if boundaries is None:
            continue
        if boundaries.dim() != 1 or boundaries.shape[0] < 2 or boundaries.dtype not in _INTEGERS:
            raise ValueError(
                f"{name} must be int32 or int64 [documents + 1] with at least one document, "
                f"got {boundaries.dtype} {tuple(boundaries.shape)}"
            )
    if cu_seqlens_padded is not None and (
        cu_seqlens_padded.shape != cu_seqlens.shape
        or cu_seqlens_padded.dtype != cu_seqlens.dtype
        or cu_seqlens_padded.device != cu_seqlens.device
    ):
        raise ValueError(
            "cu_seqlens_padded must have the shape, dtype and device of cu_seqlens "
            f"({tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}, {cu_seqlens.device}), got "
            f"{tuple(cu_seqlens_padded.shape)}, {cu_seqlens_padded.dtype}, {cu_seqlens_padded.device}"
        )
    if total_tokens < 0:
        raise ValueError(f"total_tokens must be at least 0, got {total_tokens}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
