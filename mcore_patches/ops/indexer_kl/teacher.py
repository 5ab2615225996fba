"""The attention's mass on blocks, for chunks of rows."""

import torch
from torch import Tensor

from mcore_patches.ops.packing import TokenSupport, complete_blocks, first_tokens_of_visible_blocks, token_support
from mcore_patches.ops.row_split import RowSplit
from mcore_patches.ops.sparse_gqa.chunked import dense_lse, finite_lse, head_with_spare_row
from mcore_patches.ops.workspace import accumulation_dtype


class Teacher:
    """max over a block's tokens of the head-summed probabilities.

    Under tensor parallelism the sum over heads includes a sum over ranks, token by token, before the maximum: of a
    chunk every rank works out its heads' part for all rows, and is given the sum for its own.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        row_pos: Tensor,
        row_start: Tensor,
        row_block_start: Tensor,
        *,
        scale: float,
        ratio: int,
    ) -> None:
        self.dtype = accumulation_dtype(q.dtype)
        self.ratio = ratio
        self.channels = q.shape[2]
        self.group = q.shape[1] // k.shape[1]
        self._q, self._k, self._lse, self._scale = q, k, lse, scale
        self._pos, self._start, self._block_start = row_pos, row_start, row_block_start
        self._complete = complete_blocks(row_pos, ratio)
        self._num_keys = k.shape[0]
        self._keys = [head_with_spare_row(k, kv_head, self.dtype) for kv_head in range(k.shape[1])]

    def selected(self, split: RowSplit, block_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For block_ids [Tq, K] in the R rows `split.own`: mass [R, K], which of them are visible [R, K], and their
        indices in k_blocks [R, K]. A collective."""
        rows, num_selected = split.rows, block_ids.shape[1]
        support = token_support(block_ids[rows], self._pos[rows], self._start[rows], self.ratio, spare=self._num_keys)
        mass = self._selected_token_mass(rows, support)[:, : num_selected * self.ratio]
        block_mass = split.reduce_scatter(mass).unflatten(1, (num_selected, self.ratio)).amax(dim=2)
        ids = block_ids[split.own]
        visible = (ids >= 0) & (ids < self._complete[split.own, None])
        return block_mass, visible, ids.long() + self._block_start[split.own, None]

    def _selected_token_mass(self, rows: slice, support: TokenSupport) -> Tensor:
        mass = torch.zeros(support.tokens.shape, dtype=self.dtype, device=self._q.device)
        for kv_head, keys in enumerate(self._keys):
            heads = self._heads_of(kv_head)
            gathered = keys.index_select(0, support.tokens.flatten()).view(*support.tokens.shape, self.channels)
            scores = torch.bmm(self._q[rows, heads].to(self.dtype), gathered.mT).mul_(self._scale)
            scores.masked_fill_(~support.seen[:, None], float("-inf"))
            lse = scores.logsumexp(dim=-1) if self._lse is None else self._lse[rows, heads].to(self.dtype)
            mass += scores.sub_(finite_lse(lse)).exp_().sum(dim=1)
        return mass

    def prepare_tiles(self, num_blocks: int, budget: int) -> None:
        """Work out what `tile` needs: each block's first token, and the lse over all of a row's keys if not given."""
        self._first_tokens = first_tokens_of_visible_blocks(
            self._pos, self._start, self._block_start, self.ratio, num_blocks
        )
        if self._lse is None:
            self._lse = dense_lse(self._q, self._k, self._pos, self._start, scale=self._scale, budget=budget)

    def tile(self, split: RowSplit, blocks: slice) -> tuple[Tensor, Tensor]:
        """Mass of `blocks` of k_blocks for each row of `split.own`, and which of them are visible: [R, B] both. A
        collective."""
        assert self._lse is not None
        rows = split.rows
        device = self._q.device
        local = torch.arange(blocks.start, blocks.stop, device=device) - self._block_start[rows, None]
        visible = (local >= 0) & (local < self._complete[rows, None])
        within = torch.arange(self.ratio, device=device)
        tokens = (self._first_tokens[blocks, None] + within).clamp_(0, self._num_keys)
        mass = torch.zeros(*visible.shape, self.ratio, dtype=self.dtype, device=device)
        for kv_head, keys in enumerate(self._keys):
            heads = self._heads_of(kv_head)
            queries = self._q[rows, heads].to(self.dtype)
            scores = queries.flatten(0, 1) @ keys.index_select(0, tokens.flatten()).mT
            scores = scores.view(*queries.shape[:2], *tokens.shape).mul_(self._scale)
            scores.masked_fill_(~visible[:, None, :, None], float("-inf"))
            lse = finite_lse(self._lse[rows, heads].to(self.dtype)).unsqueeze(-1)
            mass += scores.sub_(lse).exp_().sum(dim=1)
        own = slice(split.own.start - rows.start, split.own.stop - rows.start)
        return split.reduce_scatter(mass).amax(dim=2), visible[own]

    def _heads_of(self, kv_head: int) -> slice:
        return slice(kv_head * self.group, (kv_head + 1) * self.group)
