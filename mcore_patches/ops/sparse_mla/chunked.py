"""Sparse MLA in bounded memory: plain torch on a few rows at a time; the backward pass recomputes the probabilities.

Neither a [S, Skv] score matrix nor the [S, K, Dqk] gather of all selected keys ever exists: rows are taken in chunks
whose temporaries stay under `workspace_bytes` (or are those of a single row, if that alone takes more). The only other
buffer beside inputs and results is the backward pass's sum of key gradients, [Skv + 1, Dqk] in the accumulation dtype.

As the backward pass has all keys of a row at hand, it takes the term sum(dout * out) of the softmax gradient from its
equal sum(P * dP), free of the rounding of `out`, which it does not need.
"""

import torch
from torch import Tensor

from mcore_patches.ops.workspace import accumulation_dtype, add_rows_, chunks, rows_per_chunk, workspace_bytes

# What a slot's id takes: it as int64, for the gather and for the sum, and the masks on the way.
_ID_BYTES = 3 * 8

_NO_KEY = float("-inf")


def forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int) -> tuple[Tensor, Tensor]:
    """(out, lse) as in `sparse_mla`, contiguous."""
    batch, num_rows, heads, _ = q.shape
    out = q.new_zeros(batch, num_rows, heads, v_channels)
    lse = q.new_full((batch, num_rows, heads), _NO_KEY, dtype=accumulation_dtype(q.dtype))
    if kv.shape[1] == 0 or indices.shape[2] == 0:
        return out, lse
    row_bytes = forward_bytes_per_row(heads, indices.shape[2], q.shape[3], v_channels, q.dtype)
    step = rows_per_chunk(row_bytes, workspace_bytes(q.device))
    with torch.autocast(q.device.type, enabled=False):
        for entry in range(batch):
            for rows in chunks(num_rows, step):
                out[entry, rows], lse[entry, rows] = _forward_rows(
                    q[entry, rows], kv[entry, :, 0], indices[entry, rows], scale, v_channels
                )
    return out, lse


def backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    needs_dq: bool,
    needs_dkv: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv) in q's and kv's shapes and dtypes, contiguous; an empty tensor for one that is not needed."""
    batch, num_rows, heads, qk_channels = q.shape
    num_keys = kv.shape[1]
    dq = q.new_zeros(q.shape if needs_dq else 0)
    dkv = kv.new_zeros(kv.shape if needs_dkv else 0)
    if num_keys == 0 or indices.shape[2] == 0:
        return dq, dkv
    row_bytes = backward_bytes_per_row(heads, indices.shape[2], qk_channels, dout.shape[3], q.dtype)
    step = rows_per_chunk(row_bytes, workspace_bytes(q.device))
    # The spare last row takes what slots without a key contribute.
    dkv_sum = kv.new_empty((num_keys + 1, qk_channels), dtype=lse.dtype) if needs_dkv else None
    with torch.autocast(q.device.type, enabled=False):
        for entry in range(batch):
            if dkv_sum is not None:
                dkv_sum.zero_()
            for rows in chunks(num_rows, step):
                _backward_rows(
                    q[entry, rows],
                    kv[entry, :, 0],
                    indices[entry, rows],
                    lse[entry, rows],
                    dout[entry, rows],
                    scale,
                    dq[entry, rows] if needs_dq else None,
                    dkv_sum,
                    deterministic,
                )
            if dkv_sum is not None:
                dkv[entry, :, 0] = dkv_sum[:num_keys]
    return dq, dkv


def forward_bytes_per_row(heads: int, topk: int, qk_channels: int, v_channels: int, dtype: torch.dtype) -> int:
    """Temporary bytes of a row in the forward pass: keys as gathered and as multiplied, scores, q and out, ids."""
    size = accumulation_dtype(dtype).itemsize
    keys = topk * qk_channels * (size if dtype == accumulation_dtype(dtype) else dtype.itemsize + size)
    return keys + heads * (topk + qk_channels + v_channels) * size + topk * _ID_BYTES


def backward_bytes_per_row(heads: int, topk: int, qk_channels: int, v_channels: int, dtype: torch.dtype) -> int:
    """Temporary bytes of a row in the backward pass: keys and their gradients, P, dS, P * dP, q, dout and dq, ids."""
    size = accumulation_dtype(dtype).itemsize
    keys = 2 * topk * qk_channels * size
    return keys + heads * (3 * topk + 2 * qk_channels + v_channels) * size + topk * _ID_BYTES


def _forward_rows(q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int) -> tuple[Tensor, Tensor]:
    """(out[R, H, Dv], lse[R, H]) in the accumulation dtype for q[R, H, Dqk], kv[Skv, Dqk], indices[R, K]."""
    keys, _, vacant = _gather(kv, indices)
    scores = _scores(q, keys, vacant, scale)
    # Where all scores are -inf their exponentials are 0: -inf - -inf would make them NaN.
    largest = scores.amax(dim=-1, keepdim=True)
    largest.masked_fill_(largest == _NO_KEY, 0.0)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lse = largest.add_(total.log()).squeeze(-1)
    out = torch.matmul(weights, keys[..., :v_channels])
    return out.div_(total.masked_fill_(total == 0.0, 1.0)), lse


def _backward_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    dq: Tensor | None,
    dkv_sum: Tensor | None,
    deterministic: bool,
) -> None:
    """Write dq[R, H, Dqk] and add to dkv_sum[Skv + 1, Dqk] what the rows contribute."""
    v_channels = dout.shape[2]
    q, dout = q.to(lse.dtype), dout.to(lse.dtype)
    keys, ids, vacant = _gather(kv, indices)
    lse = lse.unsqueeze(-1)
    probabilities = _scores(q, keys, vacant, scale).sub_(lse.masked_fill(lse == _NO_KEY, 0.0)).exp_()
    dscores = torch.matmul(dout, keys[..., :v_channels].transpose(1, 2))
    dscores.sub_((probabilities * dscores).sum(dim=-1, keepdim=True)).mul_(probabilities).mul_(scale)
    # Zero already, unless dout is not finite: a row without keys has no gradient even then.
    dscores.masked_fill_(vacant, 0.0)
    if dq is not None:
        dq.copy_(torch.matmul(dscores, keys))
    if dkv_sum is not None:
        dkeys = torch.matmul(dscores.transpose(1, 2), q)
        dkeys[..., :v_channels].baddbmm_(probabilities.transpose(1, 2), dout)
        add_rows_(dkv_sum, ids.flatten(), dkeys.flatten(0, 1), deterministic=deterministic)


def _gather(kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(keys[R, K, Dqk] in the accumulation dtype, ids[R, K] int64, vacant[R, 1, K] bool).

    A slot whose id is outside [0, Skv) is vacant: its key is zero, its id Skv.
    """
    num_keys, channels = kv.shape
    ids = indices.long()
    vacant = (ids < 0) | (ids >= num_keys)
    keys = kv.index_select(0, ids.masked_fill(vacant, 0).flatten()).view(*ids.shape, channels)
    # Whatever key 0 holds, were it NaN, must not reach a product.
    keys.masked_fill_(vacant.unsqueeze(-1), 0.0)
    return keys.to(accumulation_dtype(kv.dtype)), ids.masked_fill(vacant, num_keys), vacant.unsqueeze(1)


def _scores(q: Tensor, keys: Tensor, vacant: Tensor, scale: float) -> Tensor:
    """[R, H, K], -inf in vacant slots."""
    scores = torch.matmul(q.to(keys.dtype), keys.transpose(1, 2))
    return scores.mul_(scale).masked_fill_(vacant, _NO_KEY)
