"""Sparse MLA on TileLang: which arguments the kernels take, and the calls of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.jit import CACHE, Key, compile_kernel

VALUE_WIDTH = 512
WIDTHS = (512, 576)


def supports(q: Tensor, kv: Tensor, indices: Tensor, v_channels: int) -> tuple[bool, str]:
    """Whether the kernels run these arguments, and if not, why."""
    if not q.is_cuda:
        return False, f"q is on {q.device}, the kernels need a CUDA device"
    if q.dtype != torch.bfloat16 or kv.dtype != torch.bfloat16:
        return False, f"q and kv must be bfloat16, got {q.dtype} and {kv.dtype}"
    if q.shape[-1] not in WIDTHS:
        return False, f"the width must be 512 or 576, got {q.shape[-1]}"
    if v_channels != VALUE_WIDTH:
        return False, f"v_channels must be 512, got {v_channels}"
    if indices.shape[-1] == 0 or q.numel() == 0 or kv.shape[1] == 0:
        return False, "there is nothing to attend to"
    return True, ""


def _arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def kernel(name: str, width: int, arch: str) -> Any:
    """The compiled kernel "forward", "backward" or "delta" for one width, built on the first call.

    Raises:
        KernelBuildError: it does not compile for `arch`.
    """
    key = (f"sparse_mla_{name}", width, arch)
    return CACHE.get(key, lambda: _build(key, name, width, arch))


def _build(key: Key, name: str, width: int, arch: str) -> Any:
    from mcore_patches.ops.sparse_mla import tilelang_backward, tilelang_forward

    source, builder = {
        "forward": (tilelang_forward, lambda: tilelang_forward.forward_kernel(width, VALUE_WIDTH)),
        "backward": (tilelang_backward, lambda: tilelang_backward.backward_kernel(width, VALUE_WIDTH)),
        "delta": (tilelang_backward, lambda: tilelang_backward.delta_kernel(width)),
    }[name]
    return compile_kernel(key, builder(), arch=arch, pass_configs=source.PASS_CONFIGS)


def _int32(indices: Tensor) -> Tensor:
    if indices.dtype == torch.int32:
        return indices.contiguous()
    return indices.clamp(-1, 2**31 - 1).to(torch.int32)


def forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int) -> tuple[Tensor, Tensor]:
    """out bf16 [B,S,H,512] and lse fp32 [B,S,H] (natural log) of q [B,S,H,D], kv [B,Skv,1,D], indices [B,S,K]."""
    batch, rows, heads, width = q.shape
    out = torch.empty(batch, rows, heads, v_channels, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    kernel("forward", width, _arch(q.device))(
        q.contiguous(), kv.contiguous().squeeze(2), _int32(indices), scale, out, lse
    )
    return out, lse


def backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    v_channels: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """dq bf16 [B,S,H,D] and dkv bf16 [B,Skv,1,D]."""
    batch, rows, heads, width = q.shape
    arch = _arch(q.device)
    dout, lse = dout.contiguous(), lse.contiguous()
    delta = torch.empty_like(lse)
    kernel("delta", v_channels, arch)(out.reshape(-1, v_channels), dout.view(-1, v_channels), delta.view(-1))
    dq = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(batch, kv.shape[1], width, dtype=torch.float32, device=q.device)
    kernel("backward", width, arch)(
        q.contiguous(), kv.contiguous().squeeze(2), dout, _int32(indices), lse, delta, scale, dq, dkv
    )
    return dq, dkv.to(kv.dtype).unsqueeze(2)
