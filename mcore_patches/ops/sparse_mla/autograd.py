"""Gradients of the implementations that bring their own backward pass, and their operators for torch.compile.

Forward and backward are custom operators, each one node of a compiled graph: of the chunked implementation not an
unrolled loop, which the scheduler could reorder into holding all chunks at once, and of the kernels not their launches.
"""

from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.sparse_mla import chunked
from mcore_patches.ops.workspace import accumulation_dtype


def sparse_mla_once_differentiable(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, v_channels: int, deterministic: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `sparse_mla`, for backend "chunked" or "tilelang"."""
    return _SparseMLA.apply(q, kv, indices, scale, v_channels, deterministic, backend)


class _SparseMLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        v_channels: int,
        deterministic: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_op(q, kv, indices, scale, v_channels, deterministic, backend)
        # The chunked backward sees all keys of a row at a time and needs no `out`.
        ctx.save_for_backward(q, kv, indices, out if backend == "tilelang" else None, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.scale = scale
        ctx.deterministic = deterministic
        ctx.backend = backend
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 7
        if dout is None:
            return nothing
        needs_dq, needs_dkv = ctx.needs_input_grad[:2]
        dq, dkv = backward_op(*ctx.saved_tensors, dout, ctx.scale, needs_dq, needs_dkv, ctx.deterministic, ctx.backend)
        return dq if needs_dq else None, dkv if needs_dkv else None, *nothing[2:]


@torch.library.custom_op("mcore_patches::sparse_mla_forward", mutates_args=())
def forward_op(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int, deterministic: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, lse). Nothing here depends on `deterministic`: the kernels of the backward are built with the forward's."""
    if backend == "tilelang":
        from mcore_patches.ops.sparse_mla import tilelang_kernels

        return tilelang_kernels.forward(q, kv, indices, scale, v_channels, deterministic)
    return chunked.forward(q, kv, indices, scale, v_channels)


@forward_op.register_fake
def _(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int, deterministic: bool, backend: str
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v_channels)), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("mcore_patches::sparse_mla_backward", mutates_args=())
def backward_op(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor | None,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    needs_dq: bool,
    needs_dkv: bool,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv); an empty tensor for one that is not needed."""
    if backend == "tilelang":
        from mcore_patches.ops.sparse_mla import tilelang_kernels

        assert out is not None
        dq, dkv = tilelang_kernels.backward(q, kv, indices, out, lse, dout, scale, dout.shape[3], deterministic)
        return dq if needs_dq else q.new_empty(0), dkv if needs_dkv else kv.new_empty(0)
    return chunked.backward(q, kv, indices, lse, dout, scale, needs_dq, needs_dkv, deterministic)


@backward_op.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor | None,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    needs_dq: bool,
    needs_dkv: bool,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape if needs_dq else 0), kv.new_empty(kv.shape if needs_dkv else 0)


def _refuse_second_derivative(ctx: Any, *_grads: Tensor) -> None:
    raise RuntimeError("the gradients of sparse_mla cannot be differentiated again, except with backend='naive'")


# Autograd's own once_differentiable sees only whether dout requires grad: it would drop the terms of q and kv unseen.
backward_op.register_autograd(_refuse_second_derivative)
