"""How the tokens of a rank lie in the batch, and keys of all context-parallel ranks in document order.

Batches [S, B] and packed documents (THD) are one case: rows of documents, a batch being B documents of S tokens laid
out one after the other. Under context parallelism each document is cut into 2 N chunks, of which rank r of N holds the
r-th and the r-th from the end (the zigzag layout of Transformer Engine and megatron); what follows the last document is
cut into N pieces in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mcore_patches.ops.packing import PackedRows, block_first_tokens, bshd_cu_seqlens, packed_rows


@dataclass(frozen=True)
class TokenLayout:
    """Placement of this rank's rows; n tokens are in the whole batch, T of them on this rank.

    rows: their positions, document starts and block starts (see `ops.packing`), int32 [T].
    tokens: their places in the batch, int64 [T].
    batch: sequences in the second dimension of hidden states, 1 for packed documents.
    packed: whether these are packed documents.
    num_valid: tokens of the whole batch that are not padding, a scalar tensor.
    cu_seqlens: cumulative document lengths as laid out, int32 [documents + 1].
    all_rows: like rows, for all n tokens.
    block_tokens: first token of each block, int32 [n // ratio]; -1 where there are fewer blocks.
    source: where token i is found among the rows of all ranks put one after the other, int64 [n]; None with one rank.
    cp_group: the context-parallel group.
    """

    rows: PackedRows
    tokens: Tensor
    batch: int
    packed: bool
    num_valid: Tensor
    cu_seqlens: Tensor
    all_rows: PackedRows
    block_tokens: Tensor
    source: Tensor | None
    cp_group: dist.ProcessGroup

    @property
    def num_tokens(self) -> int:
        return self.all_rows.pos.shape[0]

    @property
    def most_blocks(self) -> int:
        """No document has more blocks than this."""
        return self.block_tokens.shape[0] // self.batch

    def to_rows(self, x: Tensor) -> Tensor:
        """[S, B, ...] to [T, ...], one sequence after the other."""
        return x.transpose(0, 1).flatten(0, 1)

    def from_rows(self, x: Tensor) -> Tensor:
        """[T, ...] to [S, B, ...], the inverse of `to_rows`."""
        return x.unflatten(0, (self.batch, -1)).transpose(0, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Rows [T, ...] of all ranks in document order, [n, ...]; backward sums over ranks. A collective."""
        if self.source is None:
            return x
        return gather_from_sequence_parallel_region(x, group=self.cp_group).index_select(0, self.source)


def batch_layout(seq: int, batch: int, ratio: int, device: torch.device, cp_group: dist.ProcessGroup) -> TokenLayout:
    """Layout of hidden states [seq, batch, ...], `seq` being this rank's share of each sequence."""
    whole = seq * cp_group.size()
    cu_seqlens = bshd_cu_seqlens(batch, whole, device)
    return _layout(cu_seqlens, None, seq * batch, batch, False, ratio, cp_group)


def check_causal_mask(mask: Tensor, layout: TokenLayout) -> None:
    """Refuse an attention mask that hides more or less than the future. Never waits for the device.

    A mask of padding or of documents would otherwise be ignored in silence. Reading it takes no more memory than a row
    of it.

    Args:
        mask: bool [1 or B, 1, S, whole S], True is hidden, as megatron's data loaders make it; S are this rank's rows
            under context parallelism.

    Raises:
        ValueError: another dtype or shape.
        RuntimeError: other values. On CUDA this is a device-side assertion.
    """
    seq = layout.tokens.shape[0] // layout.batch
    whole = layout.num_tokens // layout.batch
    advice = "the layer is causal over whole sequences; pass None, and tell padding and documents by packed_seq_params"
    shapes = [(batch, 1, seq, whole) for batch in dict.fromkeys((1, layout.batch))]
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        raise ValueError(
            f"attention_mask is {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}, must be bool "
            f"{' or '.join(map(str, shapes))}: {advice}"
        )
    hidden = mask.view(torch.uint8)
    # Hidden are the last tokens exactly if the first hidden one is where their number says.
    future = whole - 1 - layout.rows.pos[:seq]
    first = torch.where(future > 0, whole - future, 0)
    causal = (hidden.sum(dim=-1, dtype=torch.int32) == future) & (hidden.argmax(dim=-1) == first)
    torch._assert_async(causal.all(), f"attention_mask is not the causal one: {advice}")


def packed_layout(packed: Any, num_rows: int, ratio: int, cp_group: dist.ProcessGroup) -> TokenLayout:
    """Layout of packed documents, of which this rank holds `num_rows` tokens.

    Args:
        packed: `PackedSeqParams`: `cu_seqlens_q` are the true cumulative lengths, `cu_seqlens_q_padded` those as laid
            out, if documents are padded. Both describe the whole batch, whatever the number of ranks.

    Raises:
        ValueError: no boundaries, or dynamic context parallelism.
        RuntimeError: boundaries that do not ascend from 0, leave the batch, or differ between queries and keys; with
            context parallelism a document that, as laid out, is not a multiple of twice the ranks. On CUDA these are
            device-side assertions.
    """
    if packed.cu_seqlens_q is None:
        raise ValueError("packed_seq_params.cu_seqlens_q=None: the layer needs the cumulative lengths of the documents")
    if packed.local_cp_size is not None or packed.cp_group is not None:
        raise ValueError(
            f"packed_seq_params.local_cp_size={packed.local_cp_size}: dynamic context parallelism is not supported"
        )
    _check_boundaries(packed, num_rows * cp_group.size())
    return _layout(packed.cu_seqlens_q, packed.cu_seqlens_q_padded, num_rows, 1, True, ratio, cp_group)


def _check_boundaries(packed: Any, num_tokens: int) -> None:
    """Refuse boundaries that describe no batch of `num_tokens` tokens. Never waits for the device."""
    true, laid_out = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    ascending = (true[0] == 0) & (true.diff() >= 0).all()
    torch._assert_async(ascending, "packed_seq_params.cu_seqlens_q must ascend from 0")
    if laid_out is None:
        laid_out = true
    else:
        room = (laid_out[0] == 0) & (laid_out.diff() >= true.diff()).all()
        torch._assert_async(room, "packed_seq_params.cu_seqlens_q_padded must start at 0 and hold every document")
    torch._assert_async(
        laid_out[-1] <= num_tokens, f"packed_seq_params: the documents end after the batch's {num_tokens} tokens"
    )
    for suffix, queries in ("", true), ("_padded", laid_out):
        keys = getattr(packed, f"cu_seqlens_kv{suffix}")
        if keys is None or keys is queries:
            continue
        if keys.shape != queries.shape:
            raise ValueError(
                f"packed_seq_params.cu_seqlens_kv{suffix} {tuple(keys.shape)} and cu_seqlens_q{suffix} "
                f"{tuple(queries.shape)} differ: the layer is self-attention"
            )
        torch._assert_async(
            (keys == queries).all(), f"packed_seq_params.cu_seqlens_kv{suffix} must equal cu_seqlens_q{suffix}"
        )


def _layout(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    num_rows: int,
    batch: int,
    packed: bool,
    ratio: int,
    cp_group: dist.ProcessGroup,
) -> TokenLayout:
    ranks = cp_group.size()
    num_tokens = num_rows * ranks
    all_rows = packed_rows(cu_seqlens, num_tokens, ratio, cu_seqlens_padded=cu_seqlens_padded)
    laid_out = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if ranks == 1:
        tokens, source, rows = torch.arange(num_rows, device=laid_out.device), None, all_rows
    else:
        torch._assert_async(
            (laid_out % (2 * ranks) == 0).all(),
            f"a document, as laid out, must be a multiple of {2 * ranks} tokens with {ranks} context-parallel ranks",
        )
        order = torch.cat([zigzag_tokens(laid_out, num_rows, rank, ranks) for rank in range(ranks)])
        source = torch.empty_like(order)
        source[order] = torch.arange(num_tokens, device=order.device)
        tokens = order.unflatten(0, (ranks, num_rows))[cp_group.rank()]
        rows = all_rows.take(tokens)
    return TokenLayout(
        rows=rows,
        tokens=tokens,
        batch=batch,
        packed=packed,
        num_valid=cu_seqlens[-1],
        cu_seqlens=laid_out,
        all_rows=all_rows,
        block_tokens=block_first_tokens(cu_seqlens, num_tokens, ratio, cu_seqlens_padded=cu_seqlens_padded),
        source=source,
        cp_group=cp_group,
    )


def zigzag_tokens(cu_seqlens: Tensor, num_rows: int, rank: int, ranks: int) -> Tensor:
    """Places in the batch of the tokens that one rank holds, in its order: int64 [num_rows].

    Args:
        cu_seqlens: cumulative lengths as laid out, multiples of 2 `ranks`. Never waits for the device.
    """
    bounds = cu_seqlens.long()
    local = bounds // ranks
    row = torch.arange(num_rows, device=bounds.device)
    document = torch.searchsorted(local[1:].contiguous(), row, right=True)
    past_the_end = document == local.shape[0] - 1
    document = document.clamp(max=local.shape[0] - 2)
    offset = row - local[document]
    chunk = (local[document + 1] - local[document]) // 2
    first = rank * chunk + offset
    second = (2 * ranks - 2 - rank) * chunk + offset
    inside = bounds[document] + torch.where(offset < chunk, first, second)
    rest = bounds[-1] + rank * (num_rows - local[-1]) + (row - local[-1])
    return torch.where(past_the_end, rest, inside)
