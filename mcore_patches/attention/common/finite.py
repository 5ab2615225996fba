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
    if not keys.numel() or not q_idx.numel():
        return
    real = layout.rows.pos >= 0
    bound = _largest(q_idx, real) * _largest(keys, real_keys) * (q_idx.shape[1] * q_idx.shape[2])
    if weights is not None:
        bound = bound * _largest(weights, real)
    torch._assert_async(
        bound <= torch.finfo(bound.dtype).max,
        f"{name}: index queries or keys are not finite, or so large that their scores are not; the layer's input or "
        f"the indexer's weights hold NaN or infinity",
    )


def _largest(x: Tensor, real: Tensor) -> Tensor:
    """The largest magnitude in the rows of x [N, ...] that are `real`, bool [N]; NaN if there is one."""
    rows = x.flatten(1)
    # Row by row first: neither the magnitudes nor the rows without padding need a copy of x.
    largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)).masked_fill(~real, 0).amax()
    return largest.to(torch.promote_types(largest.dtype, torch.float32))
