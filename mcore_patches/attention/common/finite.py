"""Index scores that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout


@torch.no_grad()
def check_scores_finite(
    q_idx: Tensor, keys: Tensor, real_keys: Tensor, layout: TokenLayout, name: str, weights: Tensor | None = None
) -> None:
    """Raise RuntimeError unless every score of these index queries and keys is finite. Never waits for the device.

    A NaN would rank by its bits and choose blocks without a word. On CUDA this is a device-side assertion. Its cost is
    one pass over queries and keys, not over scores: no score is larger than heads times channels times the largest
    entries of both (and of the weights). Padding does not count.

    Args:
        q_idx: [T, H, d]. keys: [N, d]. real_keys: bool [N], keys that are no padding. name: of the layer, for the
            error. weights: [T, H].
    """
    padding = layout.rows.pos < 0
    q_idx = q_idx.masked_fill(padding[:, None, None], 0)
    keys = keys.masked_fill(~real_keys[:, None], 0)
    if not keys.numel() or not q_idx.numel():
        return
    bound = _largest(q_idx) * _largest(keys) * (q_idx.shape[1] * q_idx.shape[2])
    if weights is not None:
        bound = bound * _largest(weights.masked_fill(padding[:, None], 0))
    torch._assert_async(
        bound <= torch.finfo(bound.dtype).max,
        f"{name}: index queries or keys are not finite, or so large that their scores are not; the layer's input or "
        f"the indexer's weights hold NaN or infinity",
    )


def _largest(x: Tensor) -> Tensor:
    largest = x.abs().amax()
    return largest.to(torch.promote_types(largest.dtype, torch.float32))
