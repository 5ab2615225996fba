"""Exact, deterministic top-k of index blocks: which blocks of its document each query attends.

The selection of QSA (arXiv 2608.30320, Eq. 12-15) and, with ratio 1 and head weights, of DSA's token indexer.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops.arguments import (
    FLOATS,
    check_bool,
    check_int,
    check_scale,
    check_tensor,
    check_tensors,
    verifies_places,
    verify_blocks,
    verify_positions,
)
from mcore_patches.ops.backend import kernel_module, resolve
from mcore_patches.ops.block_topk.chunked import ROW_TILE, select_blocks_chunked
from mcore_patches.ops.block_topk.naive import select_blocks_naive
from mcore_patches.ops.block_topk.tilelang_backend import warmup
from mcore_patches.ops.jit import KernelBuildError
from mcore_patches.ops.row_split import deal_rows
from mcore_patches.ops.workspace import accumulation_dtype

__all__ = ["resolve_backend", "select_blocks", "supports", "warmup"]

_OP = "select_blocks"
# TileLang is optional: this module imports it when kernels are asked for. It holds `supports` and
# `select_blocks_tilelang`.
_KERNELS = f"{__name__}.tilelang_backend"


@torch.no_grad()
def select_blocks(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    ratio: int,
    topk: int,
    weights: Tensor | None = None,
    relu: bool = True,
    index_scale: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    checked: bool = False,
) -> Tensor:
    """The `topk` best complete blocks of every row.

    A row at position i of its document sees the document's first floor((i + 1) / ratio) blocks. Block b scores
    ``sum_h weights[i, h] * act(q_idx[i, h] . k_blocks[b])``, act being relu or the identity. The result is the set of
    the `topk` first blocks by (score descending, id ascending); 0.0 and -0.0 are equal. Products and the sum over
    heads, taken in ascending order of heads, are fp32, and fp64 for fp64 inputs. The result is the same bit for bit in
    every run and for every chunk size of a path. TileLang's sums over channels are those of the matrix units: its
    selection differs from the chunked path's where scores lie within a few ulps of the last one taken.

    Args:
        q_idx: [Tq, H, d] float, any strides.
        k_blocks: [Nb, d], dtype of q_idx: floor(length / ratio) blocks a document, in document order.
        row_pos: [Tq] int32, position in the document, -1 for padding.
        row_block_start: [Tq] int32, index in k_blocks of the document's first block.
        ratio: tokens in a block.
        topk: blocks to select, may exceed the number of blocks.
        weights: [Tq, H] fp32 (or fp64, for fp64 inputs), may be negative; None is all ones.
        relu: apply relu to each head's product.
        index_scale: factor on the scores, d ** -0.5 if None. Being positive it moves no block past another and is not
            applied; it is taken so that callers hand all index ops the same arguments.
        tp_group: ranks that all call with these very arguments. They share the rows in tiles of 128, so that each
            selects for a part of them, and hand each other the ids: a collective. The result is what one rank alone
            would return.
        backend: "auto", "naive", "chunked" or "tilelang".
        checked: look at values too, which makes the host wait for the device: rows outside k_blocks and NaN scores
            raise; on a CPU rows outside always do. Without it a NaN ranks by its bits, above +inf or below -inf by its
            sign; the naive path always raises. Where NaN raises, every rank of `tp_group` looks at all rows, so that
            all raise.

    Returns:
        [Tq, topk] int32 block ids within the document, ascending, -1 at the end. Padding rows hold -1 only.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or, when checked or of rows on a CPU, value;
            or the backend.
        KernelBuildError: backend="tilelang", and a kernel does not compile; "auto" warns and takes the chunked path.
    """
    _check(q_idx, k_blocks, row_pos, row_block_start, ratio, topk, weights, relu, index_scale, tp_group, checked)
    if verifies_places(checked, row_pos):
        verify_positions(_OP, row_pos)
        verify_blocks(_OP, row_pos, row_block_start, k_blocks.shape[0], ratio)
    settings: dict[str, Any] = {"ratio": ratio, "topk": topk, "relu": relu, "backend": backend, "checked": checked}
    raises_nan = checked or backend == "naive"
    if tp_group is None or tp_group.size() == 1 or raises_nan or len(q_idx) <= ROW_TILE:
        return _select(q_idx, k_blocks, row_pos, row_block_start, weights=weights, **settings)
    dealt = deal_rows(len(q_idx), tp_group, tile=ROW_TILE, device=q_idx.device)
    queries, pos, block_start = (x.index_select(0, dealt.places) for x in (q_idx, row_pos, row_block_start))
    if weights is not None:
        weights = weights.index_select(0, dealt.places)
    pos = pos.masked_fill(~dealt.real, -1)
    return dealt.gather(_select(queries, k_blocks, pos, block_start, weights=weights, **settings))


def _select(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    backend: str,
    checked: bool,
    **settings: Any,
) -> Tensor:
    tensors = (q_idx, k_blocks, row_pos, row_block_start)
    chosen = resolve_backend(*tensors, **settings, backend=backend)
    if chosen == "naive":
        return select_blocks_naive(*tensors, **settings)
    if chosen == "tilelang":
        kernels = kernel_module(_KERNELS)
        assert kernels is not None
        try:
            return kernels.select_blocks_tilelang(*tensors, **settings, checked=checked)
        except KernelBuildError as error:
            if backend == "tilelang":
                raise
            # From now on `supports` gives the same reason.
            warnings.warn(f"{_OP} takes the chunked path: {error}", RuntimeWarning, stacklevel=4)
    return select_blocks_chunked(*tensors, **settings, checked=checked)


def supports(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    ratio: int,
    topk: int,
    weights: Tensor | None = None,
    relu: bool = True,
    index_scale: float | None = None,
) -> tuple[bool, str]:
    """Whether the TileLang backend runs these arguments of `select_blocks`, and the reason if it does not.

    Raises TypeError for what is no tensor.
    """
    check_tensors(
        _OP,
        {"q_idx": q_idx, "k_blocks": k_blocks, "row_pos": row_pos, "row_block_start": row_block_start},
        optional={"weights": weights},
    )
    kernels = kernel_module(_KERNELS)
    if kernels is None:
        return False, "there is no TileLang kernel for select_blocks"
    return kernels.supports(
        q_idx, k_blocks, row_pos, row_block_start, ratio=ratio, topk=topk, weights=weights, relu=relu
    )


def resolve_backend(*args: Any, backend: str = "auto", **settings: Any) -> str:
    """The backend that `select_blocks` takes for the arguments of `supports`: "naive", "chunked" or "tilelang".

    Raises:
        ValueError: unknown backend, or "tilelang" where `supports` declines.
    """
    return resolve(_OP, backend, supports(*args, **settings))


def _check(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    ratio: int,
    topk: int,
    weights: Tensor | None,
    relu: bool,
    index_scale: float | None,
    tp_group: dist.ProcessGroup | None,
    checked: bool,
) -> None:
    check_tensor(_OP, "q_idx", q_idx, "Tq, H, d", FLOATS)
    rows, heads, channels = q_idx.shape
    if heads < 1 or channels < 1:
        raise ValueError(f"{_OP}: q_idx must have at least one head and one channel, got {tuple(q_idx.shape)}")
    device, sizes = q_idx.device, {"Tq": rows, "H": heads, "d": channels}
    check_tensor(_OP, "k_blocks", k_blocks, "Nb, d", (q_idx.dtype,), device=device, sizes=sizes)
    check_tensor(_OP, "row_pos", row_pos, "Tq", (torch.int32,), device=device, sizes=sizes)
    check_tensor(_OP, "row_block_start", row_block_start, "Tq", (torch.int32,), device=device, sizes=sizes)
    if weights is not None:
        weight_dtypes = (torch.float32, accumulation_dtype(q_idx.dtype))
        check_tensor(_OP, "weights", weights, "Tq, H", weight_dtypes, device=device, sizes=sizes)
    check_int(_OP, "ratio", ratio, 1)
    check_int(_OP, "topk", topk, 1)
    check_bool(_OP, "relu", relu)
    check_bool(_OP, "checked", checked)
    if index_scale is not None:
        check_scale(_OP, "index_scale", index_scale)
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"{_OP}: tp_group must be a torch.distributed.ProcessGroup, got {type(tp_group).__name__}")
