"""The oracle: dense masked attention. Autograd differentiates it."""

import torch
from torch import Tensor

from mcore_patches.ops.workspace import accumulation_dtype


def attended_keys(
    block_ids: Tensor | None, row_pos: Tensor, row_start: Tensor, block_size: int, num_keys: int
) -> Tensor:
    """Which keys each row attends: bool [Tq, Tk]."""
    key = torch.arange(num_keys, device=row_pos.device)
    place = key - row_start[:, None]
    causal = (place >= 0) & (place <= row_pos[:, None])
    if block_ids is None:
        return causal
    complete = torch.div(row_pos + 1, block_size, rounding_mode="floor")[:, None]
    # One column for every block that a document of num_keys tokens could have, and one more for ids to be ignored.
    columns = num_keys // block_size + 1
    ids = torch.where((block_ids >= 0) & (block_ids < complete), block_ids, columns).long()
    chosen = torch.zeros(len(ids), columns + 1, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
    block = torch.div(place, block_size, rounding_mode="floor")
    in_chosen_block = chosen[:, :columns].gather(1, block.clamp(0, columns - 1))
    in_tail = block >= complete
    return causal & (in_chosen_block | in_tail)


def sparse_gqa_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    *,
    scale: float,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `sparse_gqa`; holds [Hq, Tq, Tk]."""
    dtype = accumulation_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        attended = attended_keys(block_ids, row_pos, row_start, block_size, k.shape[0])
        # Padding rows and keys that no row attends may hold anything, NaN included, and 0 * NaN is NaN.
        queries = q.to(dtype).masked_fill((row_pos < 0)[:, None, None], 0.0)
        unused = ~attended.any(dim=0)[:, None, None]
        keys = k.to(dtype).masked_fill(unused, 0.0).repeat_interleave(group, dim=1)
        values = v.to(dtype).masked_fill(unused, 0.0).repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", queries, keys) * scale
        scores = scores.masked_fill(~attended, float("-inf"))
        lse = scores.detach().logsumexp(dim=-1)
        # A softmax over no key is NaN, in its gradient too: such rows get scores to work on and lose the result.
        empty = ~attended.any(dim=1)[:, None]
        probabilities = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
        out = torch.einsum("hts,shd->thd", probabilities, values).masked_fill(empty[:, :, None], 0.0)
    return out.to(q.dtype), lse.T.contiguous()
