"""Attention of each query row over its own selected latent keys (DeepSeek sparse attention on absorbed MLA).

`sparse_mla` is the op. `resolve_backend` tells which backend a call would run on and why, `supports` whether the
TileLang kernels take it.
"""

from torch import Tensor

from mcore_patches.ops.backend import BACKENDS
from mcore_patches.ops.sparse_mla.autograd import sparse_mla_once_differentiable
from mcore_patches.ops.sparse_mla.backends import resolve_backend, supports
from mcore_patches.ops.sparse_mla.inputs import check_inputs
from mcore_patches.ops.sparse_mla.naive import sparse_mla_naive
from mcore_patches.ops.sparse_mla.tilelang_kernels import warmup

__all__ = ["BACKENDS", "resolve_backend", "sparse_mla", "supports", "warmup"]


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    v_channels: int = 512,
    deterministic: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Softmax attention of row (b, s) over the keys kv[b, indices[b, s, :]], whose first `v_channels` are the values.

        p[b,s,h,j]   = softmax over j of scale * q[b,s,h] . kv[b, indices[b,s,j], 0]
        out[b,s,h]   = sum over j of p[b,s,h,j] * kv[b, indices[b,s,j], 0, :v_channels]

    This is equation 2 of the DeepSeek-V3.2 report in the multi-query form of MLA (DeepSeek-V2 report, section 2.1, with
    the up-projections absorbed): all heads share one latent key, whose latent part is the value. Causality is up to
    whoever chose the ids.

    Args:
        q: [B, S, H, Dqk], bfloat16, float16, float32 or float64, any strides.
        kv: [B, Skv, 1, Dqk] of q's dtype and device, any strides.
        indices: [B, S, K] int32 or int64. Ids outside [0, Skv) are ignored. An id that occurs n times in a row counts n
            times, as if the key were there n times. The order does not matter beyond rounding.
        scale: factor of the scores, above 0 and at most 1e38, as the kernels compute in float32. They take scaled
            scores up to 1e9 in magnitude; rounding of larger ones exceeds float32's exponents: out may be 0 or NaN.
        v_channels: Dv, from 1 to Dqk.
        deterministic: ask for gradients that are equal bit for bit from run to run on CUDA too; on a CPU they always
            are. The kernels then round each row's part of dkv to bfloat16, store it, and add parts in the order of
            rows, chunk by chunk of rows within a bounded workspace (`ordering`), instead of adding them in float32 as
            they come. On Hopper they do so unasked where dkv in float32 is far larger than the cache, which is faster
            there; `ordering.BY_ITSELF = False` stops that.
        backend: "naive" (dense, for reference), "chunked" (torch, bounded memory), "tilelang" (CUDA kernels), or
            "auto": tilelang where `supports` says yes, else chunked.

    Returns:
        out: [B, S, H, Dv] of q's dtype, accumulated in float32 (float64 for float64 inputs). 0 for a row without keys.
        lse: [B, S, H] natural logarithm of the sum of exponentiated scores, float32 (float64 for float64 inputs), not
            differentiable. -inf for a row without keys, and for one whose scores all overflow to -inf, which is
            treated alike; by the kernels also for one whose scores all lie below -2**30 before `scale`.

    Gradients flow to q and kv, once: differentiating them again raises RuntimeError, except with backend "naive". A row
    without keys gets and gives zero gradients. Keys that no row selects are never used, even if they hold NaN. Nothing
    here makes the host wait for the device. A forward that is the first of its kind builds the kernels of its backward
    too, where they run.

    Raises:
        TypeError: an argument's type or dtype is not one of those above.
        ValueError: a shape, device, `scale` or `v_channels` does not fit, `backend` is unknown, or it is "tilelang" and
            the kernels do not take these inputs.
        KernelBuildError: a kernel does not compile; `supports` gives the reason from then on. Of a backward only where
            gradients come in other strides than q's.
    """
    check_inputs(q, kv, indices, scale, v_channels, deterministic)
    name, _ = resolve_backend(q, kv, indices, v_channels=v_channels, backend=backend)
    if name == "naive":
        return sparse_mla_naive(q, kv, indices, scale=float(scale), v_channels=v_channels)
    return sparse_mla_once_differentiable(
        q, kv, indices, scale=float(scale), v_channels=v_channels, deterministic=deterministic, backend=name
    )
