"""Sparse MLA on TileLang: which arguments the kernels take, `warmup`, and the launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.arguments import check_bool, check_int
from mcore_patches.ops.device import Device, cuda_device, device_of, sparse_mla_design
from mcore_patches.ops.jit import CACHE, KernelBuildError, build_together
from mcore_patches.ops.sparse_mla import backends
from mcore_patches.ops.sparse_mla.ordering import ROWS_PER_WORD, USES_OF_A_KEY, order_is_faster, rows_in_order
from mcore_patches.ops.sparse_mla.tilelang_builds import (
    backward_shape,
    build_first,
    design_of,
    first_builds,
    forward_shape,
    head_blocks_of,
    kernel,
    reduction_of,
)

WIDTHS = (512, 576)
MOST_BATCH_ENTRIES = 65535  # of a grid's second dimension
ALIGNMENT = 16  # bytes: of the copy engine's strides and of one asynchronous copy


def supports(q: Tensor, kv: Tensor, indices: Tensor, v_channels: int) -> tuple[bool, str]:
    """Whether the kernels run these arguments, and if not, why. No value is read and nothing is compiled."""
    if q.shape[0] > MOST_BATCH_ENTRIES:
        return False, f"q must have at most {MOST_BATCH_ENTRIES} batch entries, got {q.shape[0]}"
    if not q.is_cuda:
        return False, f"q is on {q.device}, the kernels need a CUDA device"
    if indices.shape[-1] == 0 or q.numel() == 0 or kv.shape[1] == 0:
        return False, f"there is nothing to attend to: q {tuple(q.shape)}, kv {tuple(kv.shape)}, K={indices.shape[-1]}"
    device = _device(q.device)
    design = sparse_mla_design(device.arch, device.shared_bytes, q.dtype, q.shape[-1], v_channels, q.shape[2])
    if isinstance(design, str):
        return False, design
    fault = _fault(device.arch, q.shape[-1])
    return not fault, fault


@torch.compiler.assume_constant_result
def _device(device: torch.device) -> Device:
    return device_of(device)


@torch.compiler.assume_constant_result
def _fault(arch: str, width: int) -> str:
    """Why a kernel of this width did not compile, or nothing."""
    return CACHE.failure_of("sparse_mla", arch, width) or ""


def takes_order(q: Tensor, kv: Tensor, indices: Tensor, deterministic: bool) -> bool:
    """Whether the backward of such a call adds up dkv in a fixed order: it is asked to, or that is faster."""
    heads, width = q.shape[2:]
    rows, topk = indices.shape[1:]
    return deterministic or order_is_faster(_device(q.device), rows, topk, kv.shape[1], width, heads)


def warmup(
    device: torch.device | str = "cuda",
    *,
    width: int = 576,
    heads: int = 64,
    keys: int = 0,
    strided: bool = False,
    deterministic: bool = False,
) -> float:
    """Build what forward and backward of such calls take, side by side; seconds it took, 0 if all was built.

    The first call of `forward` does the same, so that the backward does not wait a second time.

    Args:
        width: Dqk, 512 or 576.
        heads: only whether there are up to 16, up to 32 or more matters, and to the ordered backward their number of
            blocks.
        keys: Skv of calls with as many rows; for long sequences they take the ordered backward by themselves.
        strided: q is not contiguous, as megatron-core's [S, B, H, D] seen from [B, S, H, D] is for B > 1.
        deterministic: calls ask for it.

    Raises:
        TypeError, ValueError: an argument is none of these, or the kernels do not run on the device.
        KernelBuildError: one of them does not compile.
    """
    op = "sparse_mla warmup"
    where = cuda_device(op, device, backends.KERNELS_DEVICE)
    if width not in WIDTHS:
        raise ValueError(f"{op}: width must be 512 or 576, got {width!r}")
    check_int(op, "heads", heads, 1)
    check_int(op, "keys", keys, 0)
    check_bool(op, "strided", strided)
    check_bool(op, "deterministic", deterministic)
    there = _device(where)
    ordered = deterministic or order_is_faster(there, keys, USES_OF_A_KEY, keys, width, heads)
    before = CACHE.builds
    seconds = build_together(first_builds(there, width, heads, strided and _strides_survive(), ordered, True))
    return seconds if CACHE.builds > before else 0.0


def _int32(indices: Tensor) -> Tensor:
    if indices.dtype == torch.int32:
        return indices.contiguous()
    return indices.clamp(-1, 2**31 - 1).to(torch.int32)


def _readable(tensor: Tensor) -> Tensor:
    """`tensor` if rows of it can be read 16 bytes at a time by stride, else a contiguous copy."""
    wide = ALIGNMENT // tensor.element_size()
    aligned = tensor.data_ptr() % ALIGNMENT == 0 and tensor.stride(-1) == 1
    if aligned and all(s % wide == 0 and s > 0 for s in tensor.stride()[:-1]):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def _strides_survive() -> bool:
    """Whether this torch and tilelang hand strides of axes of length 1 on as they are.

    The copy engine needs multiples of 16 bytes there too; DLPack exporters may put 1 instead.
    """
    import tvm_ffi

    return tuple(tvm_ffi.from_dlpack(torch.empty(8).as_strided((1, 1), (8, 1))).strides) == (8, 1)


def _extent(indices: Tensor, keys: int, device: Device, width: int) -> Tensor:
    extent = torch.empty(indices.shape[:2], dtype=torch.int32, device=indices.device)
    kernel("extent", device, width)(indices.view(-1, indices.shape[-1]), keys, extent.view(-1))
    return extent


def _as_taken(plain: bool, *tensors: Tensor) -> tuple[bool, list[Tensor]]:
    """The tensors as a kernel takes them, and whether by their strides, which the Hopper kernels can."""
    strided = not plain and not all(t.is_contiguous() for t in tensors) and _strides_survive()
    return strided, [_readable(t if strided else t.contiguous()) for t in tensors]


def forward(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """out bf16 [B,S,H,512] and lse fp32 [B,S,H] (natural log) of q [B,S,H,D], kv [B,Skv,1,D], indices [B,S,K].

    The first call builds the kernels of the backward as well, here where a caller can still decline, and also without
    gradients: activation recomputation begins like that. deterministic: which backward that is.
    """
    batch, rows, heads, width = q.shape
    device = _device(q.device)
    design = design_of(device, width, heads)
    strided, (q,) = _as_taken(design.forward is not None, q)
    ordered = takes_order(q, kv, indices, deterministic)
    build_first(device, width, heads, strided, ordered, True)
    ids = _int32(indices)
    out = torch.empty(batch, rows, heads, v_channels, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    extent = _extent(ids, kv.shape[1], device, width)
    run = kernel("forward", device, width, **forward_shape(design, strided))
    run(q, _readable(kv.squeeze(2)), ids, extent, scale, out, lse)
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
    *,
    ordered: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """dq bf16 [B,S,H,D] and dkv bf16 [B,Skv,1,D].

    dkv is summed in fp32 by atomics, or, if `ordered`, from parts rounded to bf16 (as P and dS are) in a fixed order.
    None: in order where `deterministic` asks for it or `order_is_faster`.

    Raises:
        KernelBuildError: a kernel that the forward did not need to build, as that for a dout of other strides than q's,
            does not compile.
    """
    batch, rows, heads, width = q.shape
    device = _device(q.device)
    if ordered is None:
        ordered = takes_order(q, kv, indices, deterministic)
    design = design_of(device, width, heads)
    strided, (q, dout) = _as_taken(design.backward is not None, q, dout)
    try:
        build_first(device, width, heads, strided, ordered, False)
    except KernelBuildError as error:
        raise KernelBuildError(
            f"sparse_mla: this backward cannot run, and further calls of width {width} will be declined: {error}"
        ) from error
    ids, kv, lse = _int32(indices), _readable(kv.squeeze(2)), lse.contiguous()
    delta = torch.empty_like(lse)
    kernel("delta", device, width)(out.contiguous(), dout, delta)
    extent = _extent(ids, kv.shape[1], device, width)
    dq = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(batch, kv.shape[1], width, dtype=torch.float32, device=q.device)
    reduction = reduction_of(ordered)
    run = kernel("backward", device, width, reduction=reduction, **backward_shape(design, heads, strided))
    if ordered:
        for b in range(batch):
            _backward_in_order(run, device, q, kv, dout, ids, extent, lse, delta, scale, dq, dkv, b)
    else:
        run(q, kv, dout, ids, ids, extent, lse, delta, scale, dq, dkv)
    return dq, (dkv.to(q.dtype) if design.backward is not None else _channels_in_order(dkv, reduction)).unsqueeze(2)


def _backward_in_order(
    run: Any,
    device: Device,
    q: Tensor,
    kv: Tensor,
    dout: Tensor,
    ids: Tensor,
    extent: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dq: Tensor,
    dkv: Tensor,
    b: int,
) -> None:
    """Batch entry `b` of dq and dkv, by chunks of rows: what a chunk stores is summed before the next begins."""
    heads, width = q.shape[2:]
    rows, topk = ids.shape[1:]
    keys = kv.shape[1]
    head_blocks = head_blocks_of(heads, device, width)
    chunk = rows_in_order(rows, topk, keys, width, head_blocks, device.multiprocessors)
    parts = torch.empty(1, chunk * topk * head_blocks, width, dtype=q.dtype, device=q.device)
    numbers = PartNumbers(device, width, chunk, topk, keys, q.device)
    for start in range(0, rows, chunk):
        here = (slice(b, b + 1), slice(start, min(start + chunk, rows)))
        slots = numbers.number(ids[here][0])
        run(
            q[here],
            kv[b : b + 1],
            dout[here],
            ids[here],
            slots.unsqueeze(0),
            extent[here],
            lse[here],
            delta[here],
            scale,
            dq[here],
            parts,
        )
        numbers.add(parts[0], head_blocks, dkv[b])


class PartNumbers:
    """Where the ordered backward stores the parts of a chunk of rows, in buffers that serve one chunk at a time.

    `tilelang_ordered` says how parts are numbered.
    """

    def __init__(self, device: Device, width: int, chunk: int, topk: int, keys: int, where: torch.device) -> None:
        new = functools.partial(torch.empty, dtype=torch.int32, device=where)
        words = -(-chunk // ROWS_PER_WORD)
        self._kernel = functools.partial(kernel, device=device, width=width)
        self._bits, self._before, self._count = new(words, keys), new(words, keys), new(keys)
        self._ends, self._slots, self._times = new(keys), new(chunk, topk), new(chunk * topk)

    def number(self, ids: Tensor) -> Tensor:
        """Slots int32 [rows, K] of the parts of ids [rows, K], at most a chunk of rows; valid until the next call."""
        slots = self._slots[: len(ids)]
        self._bits.zero_()
        self._times.fill_(1)
        self._kernel("mark")(ids, self._bits, slots)
        self._kernel("rank")(self._bits, self._before, self._count)
        torch.cumsum(self._count, 0, dtype=torch.int32, out=self._ends)
        self._kernel("locate")(ids, self._bits, self._before, self._count, self._ends, slots, self._times)
        return slots

    def add(self, parts: Tensor, parts_of_entry: int, dkv: Tensor) -> None:
        """Add the parts [slots * parts_of_entry, D] that are stored by the last numbers to dkv fp32 [keys, D]."""
        add = self._kernel("sum", parts_of_entry=parts_of_entry)
        add(parts, self._count, self._ends, self._times, dkv)


def _channels_in_order(dkv: Tensor, reduction: str) -> Tensor:
    """dkv [B, Skv, D] of the Hopper kernels rounded to bf16, channels where they belong (`tilelang_scatter.group`)."""
    from mcore_patches.ops.sparse_mla.tilelang_scatter import WGMMA_COLUMNS, group

    tiles = group(reduction) // WGMMA_COLUMNS
    result = torch.empty(dkv.shape, dtype=torch.bfloat16, device=dkv.device)
    result.unflatten(-1, (-1, tiles, 4, 2)).copy_(dkv.unflatten(-1, (-1, 4, tiles, 2)).transpose(-3, -2))
    return result
