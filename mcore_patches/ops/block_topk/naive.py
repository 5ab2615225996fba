"""The oracle: all scores at once, then a Python sort of each row."""

import torch
from torch import Tensor

from mcore_patches.ops.arguments import verify_not_nan
from mcore_patches.ops.packing import complete_blocks
from mcore_patches.ops.workspace import accumulation_dtype


def block_scores_naive(q_idx: Tensor, k_blocks: Tensor, *, weights: Tensor | None, relu: bool) -> Tensor:
    """Unscaled scores sum_h w_h act(q_h . k_b) of every row against every block of every document: [Tq, Nb]."""
    dtype = accumulation_dtype(q_idx.dtype)
    with torch.autocast(q_idx.device.type, enabled=False):
        products = torch.einsum("thd,bd->htb", q_idx.to(dtype), k_blocks.to(dtype))
        if relu:
            products = products.relu()
        if weights is not None:
            products = products * weights.to(dtype).T[:, :, None]
        return products.sum(dim=0)


def select_blocks_naive(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    ratio: int,
    topk: int,
    weights: Tensor | None,
    relu: bool,
) -> Tensor:
    """Arguments and result as in `select_blocks`. Holds [Tq, Nb], moves scores to the host, always refuses NaN."""
    scores = block_scores_naive(q_idx, k_blocks, weights=weights, relu=relu)
    counts = complete_blocks(row_pos, ratio).tolist()
    starts = row_block_start.tolist()
    visible = [scores[row, start : start + count] for row, (start, count) in enumerate(zip(starts, counts))]
    if visible:
        nan_rows = torch.stack([row.isnan().any() for row in visible])
        verify_not_nan("select_blocks", nan_rows, "scores of visible blocks")
    ids = torch.full((q_idx.shape[0], topk), -1, dtype=torch.int32)
    for row, row_scores in enumerate(visible):
        values = row_scores.tolist()
        # Python compares 0.0 and -0.0 as equal, and floats of a tensor are exact.
        ranked = sorted(range(len(values)), key=lambda b: (-values[b], b))
        chosen = sorted(ranked[:topk])
        ids[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return ids.to(q_idx.device)
