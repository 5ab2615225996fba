"""The TileLang backend of sparse GQA: which arguments it takes, why not others, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_patches.ops.arguments import check_dtype, check_heads, check_sizes
from mcore_patches.ops.device import Device, cuda_device, device_of
from mcore_patches.ops.jit import CACHE, build_together, import_fault
from mcore_patches.ops.sparse_gqa.design import Design, sparse_gqa_design
from mcore_patches.ops.sparse_gqa.tilelang_backward import backward
from mcore_patches.ops.sparse_gqa.tilelang_forward import Rows, forward
from mcore_patches.ops.sparse_gqa.tilelang_kernels import Kernels, Shape, topk_class
from mcore_patches.ops.workspace import readable

KERNELS_DEVICE = "cuda"
LARGEST_INDEX = 2**31 - 1


def supports(
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
) -> tuple[bool, str]:
    """Whether the kernels run these (valid) arguments of `sparse_gqa`, and why not. Reads no value, compiles nothing.

    Sums are in a fixed order with `deterministic` or without.
    """
    if q.device.type != KERNELS_DEVICE:
        return False, f"q is on {q.device}, the kernels need {KERNELS_DEVICE}"
    if block_ids is None:
        return False, "block_ids is None: there is no kernel for dense attention"
    if min(q.numel(), k.numel(), block_ids.numel()) == 0:
        sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, block_ids {tuple(block_ids.shape)}"
        return False, f"there is nothing to attend to: {sizes}"
    if max(len(q) * q.shape[1], len(k)) > LARGEST_INDEX:
        return False, f"rows and heads are numbered by int32, got q {tuple(q.shape)} and k {tuple(k.shape)}"
    if fault := import_fault():
        return False, fault
    chosen = _choose(device_of(q.device), q.dtype, q.shape[1], k.shape[1], q.shape[2], block_size, block_ids.shape[1])
    if isinstance(chosen, str):
        return False, chosen
    fault = CACHE.failure_of(*chosen.shape.key) or ""
    return not fault, fault or "the kernels take these arguments"


@torch.compiler.disable
def sparse_gqa_tilelang(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    row_pos: Tensor,
    row_start: Tensor,
    *,
    scale: float,
    block_size: int,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `sparse_gqa`, for arguments that `supports` takes.

    All kernels that the call and its gradients need are built here, the first time.

    Raises:
        KernelBuildError: one of them does not compile.
    """
    del deterministic  # sums are in a fixed order anyway
    kernels = _kernels(q, k, block_ids, block_size)
    _build(kernels, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    return _TileLangGQA.apply(q, k, v, block_ids, row_pos, row_start, float(scale), kernels)


class _TileLangGQA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_ids: Tensor,
        row_pos: Tensor,
        row_start: Tensor,
        scale: float,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        rows = Rows(block_ids.contiguous(), row_pos.contiguous(), row_start.contiguous())
        out, lse = forward(kernels, readable(q), readable(k), readable(v), rows, scale)
        ctx.save_for_backward(q, k, v, block_ids, row_pos, row_start, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.settings = scale, kernels
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 8
        q, k, v, block_ids, row_pos, row_start, out, lse = ctx.saved_tensors
        scale, kernels = ctx.settings
        rows = Rows(block_ids.contiguous(), row_pos.contiguous(), row_start.contiguous())
        sources = readable(q), readable(k), readable(v)
        grads = backward(kernels, *sources, rows, out, lse, readable(dout), scale)
        needed = (grad if need else None for grad, need in zip(grads, ctx.needs_input_grad))
        return (*needed, *(None,) * 5)


def warmup(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    block_size: int,
    topk: int,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Build all kernels of a shape side by side; seconds it took, 0 if all were built. The first call does the same.

    Of several processes on one host one compiles and the others load.

    Raises:
        TypeError, ValueError: a size is no int or below 1, or there are no kernels for the shape or the device.
        KernelBuildError: one of them does not compile.
    """
    check_sizes("sparse_gqa", heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, topk=topk)
    check_heads("sparse_gqa", "heads", heads, kv_heads)
    check_dtype("sparse_gqa", "dtype", dtype)
    chosen = _choose(device_of(cuda_device("sparse_gqa", device)), dtype, heads, kv_heads, dim, block_size, topk)
    if isinstance(chosen, str):
        raise ValueError(f"sparse_gqa: {chosen}")
    before = CACHE.builds
    seconds = build_together(chosen.builds(backward=True))
    return seconds if CACHE.builds > before else 0.0


def _kernels(q: Tensor, k: Tensor, block_ids: Tensor, block_size: int) -> Kernels:
    shape = q.shape[1], k.shape[1], q.shape[2], block_size, block_ids.shape[1]
    chosen = _choose(device_of(q.device), q.dtype, *shape)
    if isinstance(chosen, str):
        raise ValueError(f"sparse_gqa: {chosen}")
    return chosen


def _choose(
    device: Device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, topk: int
) -> Kernels | str:
    """The kernels of a shape, or why there are none."""
    return _choose_once(device, dtype, heads, kv_heads, dim, block_size, topk_class(topk))


@functools.cache
def _choose_once(
    device: Device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, most: int
) -> Kernels | str:
    design = sparse_gqa_design(device.arch, device.shared_bytes, dtype, dim, heads // kv_heads, block_size, most)
    if isinstance(design, Design):
        return Kernels(Shape(device.arch, heads, kv_heads, dim, block_size, most, device.multiprocessors), design)
    return design


@functools.cache
def _build(kernels: Kernels, backward: bool) -> None:
    build_together(kernels.builds(backward=backward))
