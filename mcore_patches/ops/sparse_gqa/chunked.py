"""Block-sparse GQA in bounded memory: plain torch on a few rows at a time, gradients by recomputing the probabilities.

Selected blocks: the keys and values of a chunk of rows are gathered, [rows, K * r + r - 1, D], and multiplied row by
row.
Dense causal attention: keys are streamed in tiles with a running softmax; neither direction holds [Tq, Tk]. Tiles that
no row of a chunk sees are computed and masked: to skip them the host would have to wait for the positions.

Beside inputs and results the only buffers that grow with the sequence are copies of one KV head at a time in the
accumulation dtype (k and v, and the sums of their gradients). One zero row ends the copies: whatever a row does not see
reads that row, so padding may hold anything, NaN included.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_patches.ops.arguments import check_row_fits
from mcore_patches.ops.packing import token_support
from mcore_patches.ops.workspace import accumulation_dtype, add_rows_, chunks, rows_per_chunk, workspace_bytes

# Keys of one step of the dense path: wide enough for an efficient product, and rows of scores stay a few KiB.
KEY_TILE = 1024


@torch.compiler.disable
def sparse_gqa_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    *,
    scale: float,
    block_size: int,
    deterministic: bool = True,
    workspace: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `sparse_gqa`. `workspace`: bytes of temporaries of a chunk of rows.

    Raises:
        ValueError: block_size is so large that the blocks of a single row take gigabytes.
    """
    if block_ids is not None:
        group, dtype = q.shape[1] // k.shape[1], accumulation_dtype(q.dtype)
        token_bytes = (3 * q.shape[2] + 4 * group) * dtype.itemsize  # of the backward, which takes more
        check_row_fits("sparse_gqa", "block_size", block_size, block_ids.shape[1] + 1, token_bytes)
    budget = workspace_bytes(q.device) if workspace is None else workspace
    return _ChunkedGQA.apply(q, k, v, block_ids, row_pos, row_start, scale, block_size, deterministic, budget)


class _ChunkedGQA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_ids: Tensor | None,
        row_pos: Tensor,
        row_start: Tensor,
        scale: float,
        block_size: int,
        deterministic: bool,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            if block_ids is None:
                out, lse = _dense_forward(q, k, v, row_pos, row_start, scale, budget)
            else:
                out, lse = _sparse_forward(q, k, v, block_ids, row_pos, row_start, scale, block_size, budget)
        # With all of a row's keys at hand, the sparse backward takes sum(dout * out) from the probabilities instead.
        ctx.save_for_backward(q, k, v, block_ids, row_pos, row_start, out if block_ids is None else None, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.settings = scale, block_size, deterministic, budget
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 10
        q, k, v, block_ids, row_pos, row_start, out, lse = ctx.saved_tensors
        scale, block_size, deterministic, budget = ctx.settings
        with torch.autocast(q.device.type, enabled=False):
            if block_ids is None:
                grads = _dense_backward(grad_out, q, k, v, row_pos, row_start, out, lse, scale, budget)
            else:
                grads = _sparse_backward(
                    grad_out, q, k, v, block_ids, row_pos, row_start, lse, scale, block_size, deterministic, budget
                )
        needed = (grad if need else None for grad, need in zip(grads, ctx.needs_input_grad))
        return (*needed, *(None,) * 7)


def head_with_spare_row(x: Tensor, head: int, dtype: torch.dtype) -> Tensor:
    """x[:, head] in `dtype`, contiguous, with a row of zeros at the end: [T + 1, D] from [T, Hkv, D]."""
    copy = x.new_zeros((x.shape[0] + 1, x.shape[2]), dtype=dtype)
    copy[:-1] = x[:, head]
    return copy


def finite_lse(lse: Tensor) -> Tensor:
    """lse[..., None] with 0 for rows without keys, whose masked scores of -inf then give exp(-inf - 0) = 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)


def _sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    row_pos: Tensor,
    row_start: Tensor,
    scale: float,
    block_size: int,
    budget: int,
) -> tuple[Tensor, Tensor]:
    (num_rows, q_heads, channels), (num_keys, kv_heads, _) = q.shape, k.shape
    group, dtype = q_heads // kv_heads, accumulation_dtype(q.dtype)
    width = block_ids.shape[1] * block_size + block_size - 1
    row_bytes = width * (2 * channels + 3 * group) * dtype.itemsize
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, q_heads, dtype=dtype, device=q.device)
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys, values = (head_with_spare_row(x, kv_head, dtype) for x in (k, v))
        for rows in chunks(num_rows, rows_per_chunk(row_bytes, budget)):
            tokens, seen = token_support(block_ids[rows], row_pos[rows], row_start[rows], block_size, spare=num_keys)
            scores = torch.bmm(q[rows, heads].to(dtype), _gather(keys, tokens).mT).mul_(scale)
            scores.masked_fill_(~seen[:, None], float("-inf"))
            chunk_lse = scores.logsumexp(dim=-1)
            probabilities = scores.sub_(finite_lse(chunk_lse)).exp_()
            out[rows, heads] = torch.bmm(probabilities, _gather(values, tokens)).to(q.dtype)
            lse[rows, heads] = chunk_lse
    return out, lse


def _sparse_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    row_pos: Tensor,
    row_start: Tensor,
    lse: Tensor,
    scale: float,
    block_size: int,
    deterministic: bool,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    (num_rows, q_heads, channels), (num_keys, kv_heads, _) = q.shape, k.shape
    group, dtype = q_heads // kv_heads, lse.dtype
    width = block_ids.shape[1] * block_size + block_size - 1
    row_bytes = width * (3 * channels + 4 * group) * dtype.itemsize
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys, values = (head_with_spare_row(x, kv_head, dtype) for x in (k, v))
        key_sums, value_sums = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in chunks(num_rows, rows_per_chunk(row_bytes, budget)):
            tokens, seen = token_support(block_ids[rows], row_pos[rows], row_start[rows], block_size, spare=num_keys)
            queries, dout = q[rows, heads].to(dtype), grad_out[rows, heads].to(dtype)
            chunk_keys = _gather(keys, tokens)
            scores = torch.bmm(queries, chunk_keys.mT).mul_(scale).masked_fill_(~seen[:, None], float("-inf"))
            probabilities = scores.sub_(finite_lse(lse[rows, heads])).exp_()
            dscores = torch.bmm(dout, _gather(values, tokens).mT)
            dscores.sub_((probabilities * dscores).sum(dim=-1, keepdim=True)).mul_(probabilities).mul_(scale)
            # A padding row has no gradient, whatever its dout holds.
            dscores.masked_fill_(~seen[:, None], 0.0)
            dq[rows, heads] = torch.bmm(dscores, chunk_keys).to(q.dtype)
            del chunk_keys
            for sums, left, right in ((key_sums, dscores, queries), (value_sums, probabilities, dout)):
                contributions = torch.bmm(left.mT, right).flatten(0, 1)
                add_rows_(sums, tokens.flatten(), contributions, deterministic=deterministic)
        dk[:, kv_head], dv[:, kv_head] = key_sums[:-1].to(k.dtype), value_sums[:-1].to(v.dtype)
    return dq, dk, dv


def _gather(head: Tensor, tokens: Tensor) -> Tensor:
    return head.index_select(0, tokens.flatten()).view(*tokens.shape, head.shape[1])


def _dense_forward(
    q: Tensor, k: Tensor, v: Tensor, row_pos: Tensor, row_start: Tensor, scale: float, budget: int
) -> tuple[Tensor, Tensor]:
    (num_rows, q_heads, _), (num_keys, kv_heads, _) = q.shape, k.shape
    group, dtype = q_heads // kv_heads, accumulation_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, q_heads, dtype=dtype, device=q.device)
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys, values = (head_with_spare_row(x, kv_head, dtype) for x in (k, v))
        for rows in chunks(num_rows, _dense_rows(group, dtype, budget)):
            queries = q[rows, heads].to(dtype)
            softmax = _RunningSoftmax(queries.shape[:2], dtype, q.device)
            summed = torch.zeros_like(queries)
            for tile in chunks(num_keys, KEY_TILE):
                visible = _visible(tile, row_pos[rows], row_start[rows])
                weights, decay = softmax.add(_dense_scores(queries, keys[tile], visible, scale))
                used = values[tile].masked_fill(~visible.any(dim=0)[:, None], 0.0)
                summed = summed * decay + (weights.flatten(0, 1) @ used).view_as(summed)
            out[rows, heads] = (summed / softmax.total.masked_fill(softmax.total == 0.0, 1.0)).to(q.dtype)
            lse[rows, heads] = softmax.lse()
    return out, lse


def dense_lse(q: Tensor, k: Tensor, row_pos: Tensor, row_start: Tensor, *, scale: float, budget: int) -> Tensor:
    """The lse [Tq, Hq] of dense causal attention within documents, without its output."""
    (num_rows, q_heads, _), (num_keys, kv_heads, _) = q.shape, k.shape
    group, dtype = q_heads // kv_heads, accumulation_dtype(q.dtype)
    lse = torch.empty(num_rows, q_heads, dtype=dtype, device=q.device)
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys = head_with_spare_row(k, kv_head, dtype)
        for rows in chunks(num_rows, _dense_rows(group, dtype, budget)):
            queries = q[rows, heads].to(dtype)
            softmax = _RunningSoftmax(queries.shape[:2], dtype, q.device)
            for tile in chunks(num_keys, KEY_TILE):
                visible = _visible(tile, row_pos[rows], row_start[rows])
                softmax.add(_dense_scores(queries, keys[tile], visible, scale))
            lse[rows, heads] = softmax.lse()
    return lse


class _RunningSoftmax:
    """Maximum and denominator of softmaxes whose scores [R, G, S] arrive in tiles."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.largest = torch.full((*shape, 1), float("-inf"), dtype=dtype, device=device)
        self.total = torch.zeros_like(self.largest)

    def add(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """exp(scores - maximum so far), in place of the scores, and the factor [R, G, 1] on all earlier sums."""
        largest = torch.maximum(self.largest, scores.amax(dim=-1, keepdim=True))
        # Before a row's first visible key its sums are 0 and stay so: exp(-inf - 0) is 0.
        reference = largest.masked_fill(largest == float("-inf"), 0.0)
        decay = (self.largest - reference).exp_()
        weights = scores.sub_(reference).exp_()
        self.total = self.total * decay + weights.sum(dim=-1, keepdim=True)
        self.largest = largest
        return weights, decay

    def lse(self) -> Tensor:
        """[R, G]; log 0 makes it -inf for rows without keys."""
        return (self.largest.masked_fill(self.largest == float("-inf"), 0.0) + self.total.log()).squeeze(-1)


def _dense_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_pos: Tensor,
    row_start: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    (num_rows, q_heads, _), (num_keys, kv_heads, _) = q.shape, k.shape
    group, dtype = q_heads // kv_heads, lse.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys, values = (head_with_spare_row(x, kv_head, dtype) for x in (k, v))
        key_sums, value_sums = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in chunks(num_rows, _dense_rows(group, dtype, budget)):
            # Padding rows take part in the sums over rows below, with zeros whatever they hold.
            padding = (row_pos[rows] < 0)[:, None, None]
            queries, dout = (x[rows, heads].to(dtype).masked_fill(padding, 0.0) for x in (q, grad_out))
            delta = (dout * out[rows, heads].to(dtype)).sum(dim=-1, keepdim=True)
            row_lse = finite_lse(lse[rows, heads])
            dqueries = torch.zeros_like(queries)
            for tile in chunks(num_keys, KEY_TILE):
                visible = _visible(tile, row_pos[rows], row_start[rows])
                unused = ~visible.any(dim=0)[:, None]
                tile_keys, tile_values = (x[tile].masked_fill(unused, 0.0) for x in (keys, values))
                scores = _dense_scores(queries, tile_keys, visible, scale)
                probabilities = scores.sub_(row_lse).exp_()
                dscores = (dout.flatten(0, 1) @ tile_values.mT).view_as(probabilities)
                dscores.sub_(delta).mul_(probabilities).mul_(scale)
                dqueries += (dscores.flatten(0, 1) @ tile_keys).view_as(queries)
                key_sums[tile] += dscores.flatten(0, 1).mT @ queries.flatten(0, 1)
                value_sums[tile] += probabilities.flatten(0, 1).mT @ dout.flatten(0, 1)
            dq[rows, heads] = dqueries.to(q.dtype)
        dk[:, kv_head], dv[:, kv_head] = key_sums[:-1].to(k.dtype), value_sums[:-1].to(v.dtype)
    return dq, dk, dv


def _dense_rows(group: int, dtype: torch.dtype, budget: int) -> int:
    return rows_per_chunk(4 * group * KEY_TILE * dtype.itemsize, budget)


def _visible(tile: slice, row_pos: Tensor, row_start: Tensor) -> Tensor:
    place = torch.arange(tile.start, tile.stop, device=row_pos.device) - row_start[:, None]
    return (place >= 0) & (place <= row_pos[:, None])


def _dense_scores(queries: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    scores = (queries.flatten(0, 1) @ keys.mT).view(*queries.shape[:2], keys.shape[0])
    return scores.mul_(scale).masked_fill_(~visible[:, None], float("-inf"))
