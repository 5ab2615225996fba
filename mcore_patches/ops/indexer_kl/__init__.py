"""The indexer's training loss: KL from the attention's block masses to the indexer's softmax over blocks.

The two losses of QSA (arXiv 2608.30320, Eq. 18-20) and, with ratio 1 and head weights, of DSA's token indexer.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_patches.ops.arguments import (
    FLOATS,
    check_bool,
    check_int,
    check_scale,
    check_tensor,
    check_tensors,
    verifies_places,
    verify_blocks,
    verify_distinct,
    verify_documents,
    verify_lse,
    verify_positions,
    verify_tokens,
)
from mcore_patches.ops.backend import kernel_module, resolve
from mcore_patches.ops.indexer_kl.chunked import indexer_kl_chunked
from mcore_patches.ops.indexer_kl.naive import indexer_kl_naive
from mcore_patches.ops.indexer_kl.tilelang_backend import warmup
from mcore_patches.ops.jit import KernelBuildError
from mcore_patches.ops.packing import complete_blocks
from mcore_patches.ops.workspace import accumulation_dtype

__all__ = ["indexer_kl", "resolve_backend", "supports", "warmup"]

_OP = "indexer_kl"
# TileLang is optional: this module imports it when kernels are asked for. It holds `supports`, `agree` and
# `indexer_kl_tilelang`, which returns what the chunked path does.
_KERNELS = f"{__name__}.tilelang_backend"
_REDUCTIONS = ("sum", "mean")


def indexer_kl(
    q_idx: Tensor,
    k_blocks: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    row_block_start: Tensor,
    *,
    scale: float,
    index_scale: float | None = None,
    ratio: int,
    weights: Tensor | None = None,
    relu: bool = True,
    valid: Tensor | None = None,
    reduction: str = "sum",
    tp_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    checked: bool = False,
) -> Tensor:
    """sum or mean over rows of KL(teacher || student), both distributions over the row's blocks.

    Support: with `block_ids` None all complete blocks of a row (Stage 1), else those named there (Stage 2).
    Teacher: ``P_j = sum over query heads of exp(scale q . k_j - lse)`` on the tokens of the support and of the tail
    (see `sparse_gqa`), the mass of a block being the largest P_j of its tokens, normalised over the support. No
    gradient reaches q, k or lse. Student: softmax over the support of
    ``I_b = index_scale * sum_h weights[h] * act(q_idx[h] . k_blocks[b])``.

    A row without blocks, or whose blocks all have mass 0, adds nothing to loss and gradients; 0 log 0 is 0, and relu
    has gradient 0 at 0. The chunked path uses four running scalars a row (fp32 sums; fp64 for fp64 inputs): near
    convergence they lose relative accuracy, so compare values with an absolute tolerance of 1e-6 a row. It computes the
    gradients in the forward pass, keeps them in the dtype of their inputs (fp16 in fp32), and backward only scales
    them.

    Args:
        q_idx: [Tq, H, d] float.
        k_blocks: [Nb, d], dtype of q_idx: floor(length / ratio) blocks a document, in document order.
        q: [Tq, Hq, D] float, the attention's queries.
        k: [Tk, Hkv, D], dtype of q, Hkv a divisor of Hq, in document order.
        lse: [Tq, Hq] fp32 (or fp64), natural logarithm of the attention's softmax denominators; None computes those of
            the teacher's own tokens.
        block_ids: [Tq, K] int32 with K >= 1, distinct within a row; ids outside the complete blocks are ignored.
        row_pos, row_start, row_block_start: [Tq] int32, position in the document (-1 is padding), index in k of its
            first token, index in k_blocks of its first block.
        scale: factor on q . k.
        index_scale: factor on the student's scores, d ** -0.5 if None.
        ratio: tokens in a block.
        weights: [Tq, H] fp32 (or fp64, for fp64 inputs); None is all ones.
        relu: apply relu to each head's product of the student.
        valid: [Tq] bool, rows that count; None is all. Padding never counts.
        reduction: "sum", or "mean" over the rows that count, those without blocks included.
        tp_group: ranks that hold different heads of q and k and the same of all else, and that all call alike. P is
            summed over them before the maximum, and each does the student's work for a part of the rows; every rank
            returns the same loss and the full gradients. At the first call of a shape the ranks tell each other whether
            their kernels are built, for which the host waits.
        backend: "auto", "naive", "chunked" or "tilelang".
        checked: look at values too, which makes the host wait for the device: rows outside k or k_blocks, repeated ids,
            NaN and an lse of -inf in a row whose support is not empty raise, and in Stage 1 rows that disagree on where
            a document begins. Unchecked, such an lse counts as 0, and rows of a document must agree. On a CPU rows
            outside always raise.

    Returns:
        Scalar fp32 (fp64 if q_idx is), differentiable in q_idx, k_blocks and weights; once, by the chunked path.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or, when checked or of rows on a CPU, value;
            or the backend.
        KernelBuildError: backend="tilelang", and a kernel does not compile, on this or another rank of tp_group; "auto"
            warns and takes the chunked path, on all ranks.
    """
    _check(
        q_idx, k_blocks, q, k, lse, block_ids, row_pos, row_start, row_block_start, scale, index_scale, ratio, weights,
        relu, valid, reduction, tp_group, checked,
    )  # fmt: skip
    if verifies_places(checked, row_pos):
        verify_positions(_OP, row_pos)
        verify_tokens(_OP, row_pos, row_start, k.shape[0])
        verify_blocks(_OP, row_pos, row_block_start, k_blocks.shape[0], ratio)
    if checked:
        if block_ids is None:
            verify_documents(_OP, row_pos, row_start, row_block_start, ratio)
        else:
            verify_distinct(_OP, block_ids, row_pos, ratio)
        if lse is not None:
            verify_lse(_OP, lse, _has_support(block_ids, row_pos, valid, ratio))
    tensors = (q_idx, k_blocks, q, k, lse, block_ids, row_pos, row_start, row_block_start)
    settings: dict[str, Any] = {
        "scale": float(scale),
        "index_scale": q_idx.shape[2] ** -0.5 if index_scale is None else float(index_scale),
        "ratio": ratio,
        "weights": weights,
        "relu": relu,
        "valid": valid,
        "reduction": reduction,
        "tp_group": tp_group,
    }
    chosen = _agreed_backend(*tensors, **settings, backend=backend)
    if chosen == "naive":
        return indexer_kl_naive(*tensors, **settings)
    needs_grad = tuple(
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q_idx, k_blocks, weights)
    )
    if chosen == "tilelang":
        kernels = kernel_module(_KERNELS)
        assert kernels is not None
        try:
            loss, *grads = kernels.indexer_kl_tilelang(*tensors, **settings, checked=checked, needs_grad=needs_grad)
        except KernelBuildError as error:
            _fall_back(backend, error)
            chosen = "chunked"
    if chosen == "chunked":
        loss, *grads = indexer_kl_chunked(*tensors, **settings, checked=checked, needs_grad=needs_grad)
    return _WithGradients.apply(q_idx, k_blocks, weights, loss, *grads) if any(needs_grad) else loss


def _has_support(block_ids: Tensor | None, row_pos: Tensor, valid: Tensor | None, ratio: int) -> Tensor:
    """Which rows count and have a block to compare, bool [Tq]."""
    blocks = complete_blocks(row_pos, ratio)
    if block_ids is None:
        has = blocks > 0
    else:
        has = ((block_ids >= 0) & (block_ids < blocks[:, None])).any(dim=1)
    return has if valid is None else has & valid


def _agreed_backend(*args: Any, backend: str, **settings: Any) -> str:
    """`resolve_backend`, after the ranks of a group have agreed on the kernels: a collective at first."""
    group = settings["tp_group"]
    several = group is not None and group.size() > 1
    kernels = kernel_module(_KERNELS) if several and backend in ("auto", "tilelang") else None
    if kernels is not None:
        try:
            kernels.agree(*args, **settings)
        except KernelBuildError as error:
            _fall_back(backend, error, stacklevel=4)
    return resolve_backend(*args, **settings, backend=backend)


def _fall_back(backend: str, error: KernelBuildError, stacklevel: int = 3) -> None:
    """Warn that the chunked path is taken, or raise where the kernels were asked for."""
    if backend == "tilelang":
        raise error
    # From now on `supports` gives the same reason.
    warnings.warn(f"{_OP} takes the chunked path: {error}", RuntimeWarning, stacklevel=stacklevel)


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known already: forward hands it on, backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        q_idx: Tensor,
        k_blocks: Tensor,
        weights: Tensor | None,
        loss: Tensor,
        *grads: Tensor | None,
    ) -> Tensor:
        ctx.dtypes = [None if x is None else x.dtype for x in (q_idx, k_blocks, weights)]
        # bfloat16 has fp32's range; in fp16 the gradients of a mean over a long sequence would vanish before they meet
        # the loss scale.
        kept = (
            grad if grad is None or dtype != torch.bfloat16 else grad.to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes)
        )
        ctx.save_for_backward(*kept)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if grad is None else (grad * grad_loss).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return (*scaled, None, None, None, None)


def supports(
    q_idx: Tensor,
    k_blocks: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    row_block_start: Tensor,
    *,
    scale: float,
    index_scale: float | None = None,
    ratio: int,
    weights: Tensor | None = None,
    relu: bool = True,
    valid: Tensor | None = None,
    reduction: str = "sum",
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[bool, str]:
    """Whether the TileLang backend runs these arguments of `indexer_kl`, and the reason if it does not.

    Raises TypeError for what is no tensor.
    """
    rows = {"row_pos": row_pos, "row_start": row_start, "row_block_start": row_block_start}
    optional = {"lse": lse, "block_ids": block_ids, "weights": weights, "valid": valid}
    check_tensors(_OP, {"q_idx": q_idx, "k_blocks": k_blocks, "q": q, "k": k, **rows}, optional=optional)
    kernels = kernel_module(_KERNELS)
    if kernels is None:
        return False, "there is no TileLang kernel for indexer_kl"
    return kernels.supports(
        q_idx, k_blocks, q, k, lse, block_ids, row_pos, row_start, row_block_start, scale=scale,
        index_scale=index_scale, ratio=ratio, weights=weights, relu=relu, valid=valid, reduction=reduction,
        tp_group=tp_group,
    )  # fmt: skip


def resolve_backend(*args: Any, backend: str = "auto", **settings: Any) -> str:
    """The backend that `indexer_kl` takes for the arguments of `supports`: "naive", "chunked" or "tilelang".

    Raises:
        ValueError: unknown backend, or "tilelang" where `supports` declines.
    """
    return resolve(_OP, backend, supports(*args, **settings))


def _check(
    q_idx: Tensor,
    k_blocks: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    row_block_start: Tensor,
    scale: float,
    index_scale: float | None,
    ratio: int,
    weights: Tensor | None,
    relu: bool,
    valid: Tensor | None,
    reduction: str,
    tp_group: dist.ProcessGroup | None,
    checked: bool,
) -> None:
    check_tensor(_OP, "q_idx", q_idx, "Tq, H, d", FLOATS)
    rows, heads, channels = q_idx.shape
    if heads < 1 or channels < 1:
        raise ValueError(f"{_OP}: q_idx must have at least one head and one channel, got {tuple(q_idx.shape)}")
    device, sizes = q_idx.device, {"Tq": rows, "H": heads, "d": channels}
    check_tensor(_OP, "k_blocks", k_blocks, "Nb, d", (q_idx.dtype,), device=device, sizes=sizes)
    check_tensor(_OP, "q", q, "Tq, Hq, D", FLOATS, device=device, sizes=sizes)
    sizes |= {"Hq": q.shape[1], "D": q.shape[2]}
    check_tensor(_OP, "k", k, "Tk, Hkv, D", (q.dtype,), device=device, sizes=sizes)
    if k.shape[1] < 1 or q.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{_OP}: q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    if lse is not None:
        dtypes = (torch.float32, accumulation_dtype(q.dtype))
        check_tensor(_OP, "lse", lse, "Tq, Hq", dtypes, device=device, sizes=sizes)
    if block_ids is not None:
        check_tensor(_OP, "block_ids", block_ids, "Tq, K", (torch.int32,), device=device, sizes=sizes)
        if block_ids.shape[1] < 1:
            raise ValueError(f"{_OP}: block_ids must have at least one column, got {tuple(block_ids.shape)}")
    for name, rows_of in (("row_pos", row_pos), ("row_start", row_start), ("row_block_start", row_block_start)):
        check_tensor(_OP, name, rows_of, "Tq", (torch.int32,), device=device, sizes=sizes)
    if weights is not None:
        dtypes = (torch.float32, accumulation_dtype(q_idx.dtype))
        check_tensor(_OP, "weights", weights, "Tq, H", dtypes, device=device, sizes=sizes)
    if valid is not None:
        check_tensor(_OP, "valid", valid, "Tq", (torch.bool,), device=device, sizes=sizes)
    check_scale(_OP, "scale", scale)
    if index_scale is not None:
        check_scale(_OP, "index_scale", index_scale)
    check_int(_OP, "ratio", ratio, 1)
    check_bool(_OP, "relu", relu)
    check_bool(_OP, "checked", checked)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_OP}: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"{_OP}: tp_group must be a torch.distributed.ProcessGroup, got {type(tp_group).__name__}")
