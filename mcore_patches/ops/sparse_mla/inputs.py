"""Which arguments `sparse_mla` takes."""

import math
from numbers import Real

import torch
from torch import Tensor

from mcore_patches.ops.arguments import FLOATS, check_bool, check_int, check_tensor

OP = "sparse_mla"
INTS = (torch.int32, torch.int64)


def check_inputs(q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int, deterministic: bool) -> None:
    """Raise TypeError or ValueError for the first argument that does not fit. No values are read: nothing waits."""
    check_tensor(OP, "q", q, "B, S, H, Dqk", FLOATS)
    batch, rows, _, channels = q.shape
    sizes = {"B": batch, "S": rows, "1": 1, "Dqk": channels}
    check_tensor(OP, "kv", kv, "B, Skv, 1, Dqk", (q.dtype,), device=q.device, sizes=sizes)
    check_tensor(OP, "indices", indices, "B, S, K", INTS, device=q.device, sizes=sizes)
    check_int(OP, "v_channels", v_channels, 1)
    if v_channels > channels:
        raise ValueError(f"{OP}: v_channels must be at most the {channels} channels of q, got {v_channels}")
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{OP}: scale must be a number, got {scale!r}")
    # Comparisons, false for NaN, also work where torch.compile takes the scale as a symbol; math.isfinite does not.
    if not 0 < scale < math.inf:
        raise ValueError(f"{OP}: scale must be finite and above 0, got {scale!r}")
    if is_too_large(scale):
        raise ValueError(f"{OP}: scale must be at most 1e38, got {scale!r}")
    check_bool(OP, "deterministic", deterministic)


def is_too_large(scale: float) -> bool:
    """Whether the kernels, which multiply the scale by 1 / ln 2 in float32, cannot hold it."""
    return scale > 1e38  # no global constant: torch.compile(dynamic=True) makes an input of one, and traces twice
