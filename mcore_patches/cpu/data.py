"""Random token batches, batched or packed, and their share of a context-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams

__all__ = ["Batch", "packed_batch", "random_batch"]


@dataclass(frozen=True)
class Batch:
    """Input of one forward pass.

    Attributes:
        tokens, labels, positions: ``[b, s]`` int64; ``positions`` count from 0 in each document.
        loss_mask: ``[b, s]`` fp32, 0 where a position does not count.
        packed: document boundaries of a packed batch (``b`` is 1), always those of the whole batch.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    packed: PackedSeqParams | None = None

    @property
    def size(self) -> tuple[int, int]:
        """``(b, s)``."""
        b, s = self.tokens.shape
        return b, s

    def context_parallel_shard(self, rank: int, size: int) -> Batch:
        """What context-parallel rank ``rank`` of ``size`` computes: chunks ``rank`` and ``2 size - 1 - rank``.

        Each sequence, or each packed document, is cut into ``2 size`` chunks, so that causal attention costs every
        rank the same.

        Raises:
            ValueError: a length is not a multiple of ``2 size``.
        """
        if size == 1:
            return self
        bounds = [0, self.tokens.shape[1]] if self.packed is None else _boundaries(self.packed)
        picks = []
        for start, end in pairwise(bounds):
            if (end - start) % (2 * size):
                raise ValueError(
                    f"a length of {end - start} tokens does not divide by 2 x {size} context-parallel ranks"
                )
            chunks = torch.arange(start, end).chunk(2 * size)
            picks += [chunks[rank], chunks[2 * size - 1 - rank]]
        pick = torch.cat(picks)
        return replace(
            self,
            tokens=self.tokens[:, pick],
            labels=self.labels[:, pick],
            positions=self.positions[:, pick],
            loss_mask=self.loss_mask[:, pick],
        )


def random_batch(batch: int = 2, seq: int = 32, vocab: int = 128, *, seed: int = 0) -> Batch:
    """``batch`` sequences of ``seq`` random tokens, each labelled with its successor."""
    tokens = _random_tokens((batch, seq + 1), vocab, seed)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        positions=torch.arange(seq).expand(batch, seq).contiguous(),
        loss_mask=torch.ones(batch, seq),
    )


def packed_batch(lengths: Sequence[int], vocab: int = 128, *, multiple: int = 1, seed: int = 0) -> Batch:
    """Documents of these lengths in one row, in megatron's THD format.

    Args:
        lengths: tokens of each document.
        multiple: pad every document to a multiple of it (``2 x cp``, times the tensor-parallel size with sequence
            parallelism); padding is outside the loss.

    The documents' content depends on ``lengths`` and ``seed`` alone, so that paddings can be compared.

    Raises:
        ValueError: no documents, or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: expected at least one document, each of at least one token")
    content = _random_tokens((sum(lengths) + len(lengths),), vocab, seed).split([length + 1 for length in lengths])
    tokens, labels, positions, loss_mask = [], [], [], []
    for document in content:
        padding = -(len(document) - 1) % multiple
        pad = torch.nn.functional.pad
        tokens.append(pad(document[:-1], (0, padding)))
        labels.append(pad(document[1:], (0, padding)))
        positions.append(torch.arange(len(document) - 1 + padding))
        loss_mask.append(pad(torch.ones(len(document) - 1), (0, padding)))
    real = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    padded = torch.tensor([0, *map(len, tokens)]).cumsum(0, dtype=torch.int32)
    longest = max(map(len, tokens))
    return Batch(
        tokens=torch.cat(tokens)[None],
        labels=torch.cat(labels)[None],
        positions=torch.cat(positions)[None],
        loss_mask=torch.cat(loss_mask)[None],
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded if multiple > 1 else None,
            cu_seqlens_kv_padded=padded if multiple > 1 else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )


def _boundaries(packed: PackedSeqParams) -> list[int]:
    padded = packed.cu_seqlens_q_padded
    return (packed.cu_seqlens_q if padded is None else padded).tolist()


def _random_tokens(shape: tuple[int, ...], vocab: int, seed: int) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
