"""Causal grouped-query attention over selected blocks of keys, or dense, within packed documents.

The attention of QSA (arXiv 2608.30320, Eq. 16-17).
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.arguments import (
    FLOATS,
    check_bool,
    check_int,
    check_scale,
    check_tensor,
    check_tensors,
    verifies_places,
    verify_distinct,
    verify_positions,
    verify_tokens,
)
from mcore_patches.ops.backend import kernel_module, resolve
from mcore_patches.ops.jit import KernelBuildError
from mcore_patches.ops.sparse_gqa.chunked import sparse_gqa_chunked
from mcore_patches.ops.sparse_gqa.naive import sparse_gqa_naive
from mcore_patches.ops.sparse_gqa.tilelang_backend import warmup

__all__ = ["resolve_backend", "sparse_gqa", "supports", "warmup"]

_OP = "sparse_gqa"
# TileLang is optional: this module imports it when kernels are asked for. It holds `supports` and
# `sparse_gqa_tilelang`.
_KERNELS = f"{__name__}.tilelang_backend"


def sparse_gqa(
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
    backend: str = "auto",
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the keys that each row's blocks name.

    A row at position i of its document attends the tokens of its selected complete blocks, those with ids in
    [0, floor((i + 1) / block_size)), and the tail, the tokens from block_size * floor((i + 1) / block_size) up to
    itself. The tail needs no id; it is empty where i + 1 is a multiple of block_size, and such a row attends its own
    token only if it selected its own block. Query head h reads KV head h // (Hq / Hkv). Scores, softmax and sums are
    fp32, fp64 for fp64 inputs. Differentiable once in q, k and v by the chunked path, any number of times by the naive
    one; block_ids is a constant.

    Args:
        q: [Tq, Hq, D] float, any strides.
        k, v: [Tk, Hkv, D], dtype of q, Hkv a divisor of Hq, in document order. What lies between and after documents
            is never read.
        block_ids: [Tq, K] int32, block numbers within the row's document, in any order. Ids outside the complete blocks
            (-1 above all) are ignored. An id may stand once in a row: twice is undefined, and an error when checked.
            None attends every token up to the row's own: dense causal attention within each document.
        row_pos: [Tq] int32, position in the document, -1 for padding.
        row_start: [Tq] int32, index in k of the document's first token.
        scale: factor on q . k.
        block_size: tokens in a block.
        deterministic: fix the order of all sums, so that a repeated call gives the same bits; on CUDA this costs the
            chunked path a sort.
        backend: "auto", "naive", "chunked" or "tilelang".
        checked: look at values too, which makes the host wait for the device: rows outside k and repeated ids raise.
            On a CPU rows outside k always do.

    Returns:
        out [Tq, Hq, D] in q's dtype, and lse [Tq, Hq], the natural logarithm of the softmax's denominator, fp32 (fp64
        for fp64 inputs), not differentiable. Rows without keys: out 0, lse -inf, gradients 0.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or, when checked or of rows on a CPU, value;
            or the backend.
        KernelBuildError: backend="tilelang", and a kernel does not compile; "auto" warns and takes the chunked path.
    """
    _check(q, k, v, block_ids, row_pos, row_start, scale, block_size, deterministic, checked)
    if verifies_places(checked, row_pos):
        verify_positions(_OP, row_pos)
        verify_tokens(_OP, row_pos, row_start, k.shape[0])
    if checked and block_ids is not None:
        verify_distinct(_OP, block_ids, row_pos, block_size)
    tensors = (q, k, v, block_ids, row_pos, row_start)
    settings: dict[str, Any] = {"scale": float(scale), "block_size": block_size, "deterministic": deterministic}
    chosen = resolve_backend(*tensors, **settings, backend=backend)
    if chosen == "naive":
        return sparse_gqa_naive(*tensors, scale=float(scale), block_size=block_size)
    if chosen == "tilelang":
        kernels = kernel_module(_KERNELS)
        assert kernels is not None
        try:
            return kernels.sparse_gqa_tilelang(*tensors, **settings)
        except KernelBuildError as error:
            if backend == "tilelang":
                raise
            # From now on `supports` gives the same reason.
            warnings.warn(f"{_OP} takes the chunked path: {error}", RuntimeWarning, stacklevel=2)
    return sparse_gqa_chunked(*tensors, **settings)


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
    """Whether the TileLang backend runs these arguments of `sparse_gqa`, and the reason if it does not.

    Raises TypeError for what is no tensor.
    """
    check_tensors(
        _OP, {"q": q, "k": k, "v": v, "row_pos": row_pos, "row_start": row_start}, optional={"block_ids": block_ids}
    )
    kernels = kernel_module(_KERNELS)
    if kernels is None:
        return False, "there is no TileLang kernel for sparse_gqa"
    return kernels.supports(
        q, k, v, block_ids, row_pos, row_start, scale=scale, block_size=block_size, deterministic=deterministic
    )


def resolve_backend(*args: Any, backend: str = "auto", **settings: Any) -> str:
    """The backend that `sparse_gqa` takes for the arguments of `supports`: "naive", "chunked" or "tilelang".

    Raises:
        ValueError: unknown backend, or "tilelang" where `supports` declines.
    """
    return resolve(_OP, backend, supports(*args, **settings))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    scale: float,
    block_size: int,
    deterministic: bool,
    checked: bool,
) -> None:
    check_tensor(_OP, "q", q, "Tq, Hq, D", FLOATS)
    rows, q_heads, channels = q.shape
    device, sizes = q.device, {"Tq": rows, "D": channels}
    check_tensor(_OP, "k", k, "Tk, Hkv, D", (q.dtype,), device=device, sizes=sizes)
    sizes |= {"Tk": k.shape[0], "Hkv": k.shape[1]}
    check_tensor(_OP, "v", v, "Tk, Hkv, D", (q.dtype,), device=device, sizes=sizes)
    if k.shape[1] < 1 or q_heads < 1 or q_heads % k.shape[1]:
        raise ValueError(f"{_OP}: q must have a multiple of k's {k.shape[1]} heads, got {q_heads}")
    if block_ids is not None:
        check_tensor(_OP, "block_ids", block_ids, "Tq, K", (torch.int32,), device=device, sizes=sizes)
    check_tensor(_OP, "row_pos", row_pos, "Tq", (torch.int32,), device=device, sizes=sizes)
    check_tensor(_OP, "row_start", row_start, "Tq", (torch.int32,), device=device, sizes=sizes)
    check_scale(_OP, "scale", scale)
    check_int(_OP, "block_size", block_size, 1)
    check_bool(_OP, "deterministic", deterministic)
    check_bool(_OP, "checked", checked)
