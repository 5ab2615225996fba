"""`indexer_kl` on TileLang: which arguments the kernels take and why not others, and the calls for chunks of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops.arguments import check_bool, check_dtype, check_heads, check_sizes, verify_not_nan
from mcore_patches.ops.block_topk.design import topk_capacity
from mcore_patches.ops.device import Device, cuda_device, device_of
from mcore_patches.ops.indexer_kl.chunked import LossAndGradients
from mcore_patches.ops.indexer_kl.design import UNION_WORDS, Shape, shape_of
from mcore_patches.ops.indexer_kl.tilelang_all import over_all_blocks, scoring
from mcore_patches.ops.indexer_kl.tilelang_kernels import failure, kernels, named_builds
from mcore_patches.ops.indexer_kl.tilelang_selected import Rows, over_selected_blocks
from mcore_patches.ops.jit import CACHE, KernelBuildError, build_together, import_fault
from mcore_patches.ops.packing import complete_blocks, first_tokens_of_visible_blocks
from mcore_patches.ops.row_split import sum_over_ranks_
from mcore_patches.ops.workspace import readable

KERNELS_DEVICE = "cuda"
LARGEST_INDEX = 2**31 - 1
# Of each group of ranks and each shape that it has asked for: why the group does not take the kernels, or nothing.
_AGREED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], str]] = WeakKeyDictionary()


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
    ratio: int,
    weights: Tensor | None = None,
    relu: bool = True,
    tp_group: dist.ProcessGroup | None = None,
    **_: Any,
) -> tuple[bool, str]:
    """Whether the kernels run these (valid) arguments of `indexer_kl`, and why not. No value is read.

    Of several ranks none takes the kernels where another cannot; that is known from the first call of a shape on.
    """
    reason = _refused_by_every_rank(k_blocks, q, k, lse, block_ids)
    if not reason:
        shape = _shape_or_fault(q_idx, q, k, block_ids, ratio, weights, relu, tp_group)
        reason = shape if isinstance(shape, str) else failure(device_of(q.device), shape)
    if not reason and _several(tp_group):
        reason = _refused_by_agreement(tp_group, _key(q_idx, q, k, block_ids, ratio, weights, relu))
    return not reason, reason or "the kernels take these arguments"


@torch.compiler.disable
def agree(
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
    ratio: int,
    weights: Tensor | None = None,
    relu: bool = True,
    tp_group: dist.ProcessGroup | None = None,
    **_: Any,
) -> None:
    """Build the kernels and hear from the other ranks of `tp_group` whether theirs are built, once for each shape.

    The paths issue other collectives: a rank that took the chunked one by itself would leave the others waiting. A
    collective, after which the host waits for the device; later calls of a shape do nothing. The arguments are those
    of `supports`, which answers alike on all ranks from here on.

    Raises:
        KernelBuildError: a kernel does not compile here, or some, but not all, ranks cannot take the kernels.
    """
    if not _several(tp_group) or _refused_by_every_rank(k_blocks, q, k, lse, block_ids):
        return
    agreed, key = _AGREED.setdefault(tp_group, {}), _key(q_idx, q, k, block_ids, ratio, weights, relu)
    if key in agreed:
        return
    error = None
    shape = _shape_or_fault(q_idx, q, k, block_ids, ratio, weights, relu, tp_group)
    reason = shape if isinstance(shape, str) else ""
    if isinstance(shape, Shape):
        try:
            _build(device_of(q.device), shape)
        except KernelBuildError as caught:
            error, reason = caught, str(caught)
    failed = torch.tensor([1.0 if reason else 0.0], device=q.device)
    sum_over_ranks_(failed, tp_group)
    number, size = int(failed), tp_group.size()
    elsewhere = (
        f"{number} of the {size} ranks of tp_group cannot take the kernels, each of them says why" if number else ""
    )
    agreed[key] = reason or elsewhere
    if error is not None:
        raise error
    if number not in (0, size):
        raise KernelBuildError(agreed[key])


@torch.compiler.disable
def _refused_by_agreement(tp_group: dist.ProcessGroup, key: tuple[Any, ...]) -> str:
    return _AGREED.get(tp_group, {}).get(key, "")


def _several(tp_group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    return tp_group is not None and tp_group.size() > 1


def _refused_by_every_rank(k_blocks: Tensor, q: Tensor, k: Tensor, lse: Tensor | None, block_ids: Tensor | None) -> str:
    """Why the kernels do not take a call, for reasons that are the same on all ranks, or nothing."""
    if q.device.type != KERNELS_DEVICE:
        return f"q is on {q.device}, the kernels need {KERNELS_DEVICE}"
    if lse is None:
        return "lse is None: the kernels do not compute the attention's, hand over what it returned"
    if min(len(q), len(k), len(k_blocks)) == 0:
        sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, k_blocks {tuple(k_blocks.shape)}"
        return f"there is nothing to compare: {sizes}"
    if block_ids is not None and len(k_blocks) > 32 * UNION_WORDS:
        return f"k_blocks may hold {32 * UNION_WORDS} blocks, got {len(k_blocks)}"
    if max(len(q), len(k)) > LARGEST_INDEX:
        return f"tokens are numbered by int32, got q {tuple(q.shape)} and k {tuple(k.shape)}"
    return ""


def _shape_or_fault(
    q_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_ids: Tensor | None,
    ratio: int,
    weights: Tensor | None,
    relu: bool,
    tp_group: dist.ProcessGroup | None,
) -> Shape | str:
    return import_fault() or _shape(device_of(q.device), q_idx, q, k, block_ids, ratio, weights, relu, tp_group)


def _key(
    q_idx: Tensor, q: Tensor, k: Tensor, block_ids: Tensor | None, ratio: int, weights: Tensor | None, relu: bool
) -> tuple[Any, ...]:
    """What the kernels of a call depend on, but for the GPU: the same on all ranks, also on one that has no kernels."""
    columns = None if block_ids is None else topk_capacity(block_ids.shape[1])
    heads = q_idx.shape[1:], q.shape[1:], k.shape[1]
    return (*heads, q_idx.dtype, q.dtype, columns, ratio, weights is not None, relu)


def _build(device: Device, shape: Shape) -> None:
    """Build all kernels of a shape, as its first call would."""
    kernels(device, shape)
    if not shape.capacity:
        scoring(device, shape)


@torch.compiler.disable
@torch.no_grad()
def indexer_kl_tilelang(
    q_idx: Tensor,
    k_blocks: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    row_block_start: Tensor,
    *,
    scale: float,
    index_scale: float,
    ratio: int,
    weights: Tensor | None,
    relu: bool,
    valid: Tensor | None,
    reduction: str,
    tp_group: dist.ProcessGroup | None = None,
    checked: bool = False,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    row_chunk: int | None = None,
) -> LossAndGradients:
    """Arguments as in `indexer_kl`, for those that `supports` takes; `row_chunk` replaces the rows taken at once.

    The gradient of a bfloat16 q_idx comes in bfloat16, the others in fp32.

    Raises:
        KernelBuildError: a kernel does not compile; `supports` declines from then on.
    """
    device = device_of(q.device)
    shape = _shape(device, q_idx, q, k, block_ids, ratio, weights, relu, tp_group)
    assert isinstance(shape, Shape)
    counted = row_pos >= 0 if valid is None else (row_pos >= 0) & valid
    number = counted.sum().clamp_(min=1) if reduction == "mean" else None
    # A row that does not count selects nothing, and one without blocks adds nothing: it may hold anything.
    blocks = complete_blocks(row_pos, ratio) * counted
    live = blocks > 0
    rows = Rows(
        q_idx=readable(q_idx),
        weights=None if weights is None else weights.detach().contiguous(),
        q=readable(q),
        lse=lse.contiguous(),
        block_ids=None if block_ids is None else block_ids.contiguous(),
        start=row_start.contiguous(),
        first=row_block_start.contiguous(),
        count=blocks,
        weight=live.float() if number is None else live / number,
    )
    settings: dict[str, Any] = {
        "scale": scale,
        "index_scale": index_scale,
        "tp_group": tp_group,
        "row_chunk": row_chunk,
    }
    tensors = readable(k_blocks), readable(k)
    if block_ids is None:
        first = first_tokens_of_visible_blocks(row_pos, row_start, row_block_start, ratio, len(k_blocks))
        first = first.clamp_(0, max(len(k) - ratio, 0)).int()
        sums = over_all_blocks(device, shape, rows, *tensors, first, **settings)
    else:
        sums = over_selected_blocks(device, shape, rows, *tensors, **settings)
    if checked:
        verify_not_nan("indexer_kl", sums.kl.isnan(), "scores of visible blocks, attention scores and lse")
    loss = sums.kl.sum(dtype=torch.float64)
    grads = (grad if need else None for grad, need in zip((sums.q_idx, sums.k_blocks, sums.weights), needs_grad))
    return LossAndGradients((loss if number is None else loss / number).float(), *grads)


def warmup(
    heads: int,
    channels: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    *,
    ratio: int,
    topk: int | None,
    weighted: bool = False,
    relu: bool = True,
    ranks: bool = False,
    device: torch.device | str = "cuda",
    index_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Build all kernels of a shape side by side; seconds it took, 0 if all were built. The first call does the same.

    Of several processes on one host one compiles and the others load.

    Args:
        heads, channels, index_dtype: of q_idx. q_heads, dim, dtype: of this rank's q, kv_heads of its k.
        topk: columns of block_ids, None for all blocks.
        weighted: whether there are weights. ranks: whether there is a tp_group of several ranks.

    Raises:
        TypeError, ValueError: a size is no int or below 1, a flag no bool, or there are no kernels for the shape or the
            device.
        KernelBuildError: one of them does not compile.
    """
    check_sizes("indexer_kl", heads=heads, channels=channels, q_heads=q_heads, kv_heads=kv_heads, dim=dim, ratio=ratio)
    if topk is not None:
        check_sizes("indexer_kl", topk=topk)
    check_heads("indexer_kl", "q_heads", q_heads, kv_heads)
    for name, flag in (("weighted", weighted), ("relu", relu), ("ranks", ranks)):
        check_bool("indexer_kl", name, flag)
    check_dtype("indexer_kl", "index_dtype", index_dtype)
    check_dtype("indexer_kl", "dtype", dtype)
    described = device_of(cuda_device("indexer_kl", device))
    shape = shape_of(
        described.arch,
        described.shared_bytes,
        index_dtype,
        dtype,
        heads=heads,
        channels=channels,
        q_heads=q_heads,
        kv_heads=kv_heads,
        dim=dim,
        ratio=ratio,
        topk=topk,
        weighted=weighted,
        relu=relu,
        ranks=ranks,
    )
    if isinstance(shape, str):
        raise ValueError(f"indexer_kl: {shape}")
    before = CACHE.builds
    builds: list[Callable[[], Any]] = list(named_builds(described, shape).values())
    if topk is None:
        builds.append(functools.partial(scoring, described, shape))
    seconds = build_together(builds)
    return seconds if CACHE.builds > before else 0.0


def _shape(
    device: Device,
    q_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_ids: Tensor | None,
    ratio: int,
    weights: Tensor | None,
    relu: bool,
    tp_group: dist.ProcessGroup | None,
) -> Shape | str:
    return shape_of(
        device.arch,
        device.shared_bytes,
        q_idx.dtype,
        q.dtype,
        heads=q_idx.shape[1],
        channels=q_idx.shape[2],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        dim=q.shape[2],
        ratio=ratio,
        topk=None if block_ids is None else block_ids.shape[1],
        weighted=weights is not None,
        relu=relu,
        ranks=tp_group is not None and tp_group.size() > 1,
    )
