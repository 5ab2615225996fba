"""Sparse MLA on TileLang: which arguments the kernels take, how kernels are built, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.device import HOPPER, Device, SparseMLADesign, device_of, sparse_mla_design
from mcore_patches.ops.jit import CACHE, TRACING, Key, build_together, compile_kernel

VALUE_WIDTH = 512
# Parts of dKV that the ordered backward stores before it sums them.
PARTS_BYTES = 2 * 2**30
# An fp32 dKV above this leaves a Hopper's L2 cache (50 MB) too often for atomics: storing parts and adding them up is
# faster from about here on (gpu_ci/kernels/NOTES.md).
MOST_ATOMIC_BYTES = 96 * 2**20
ALIGNMENT = 16  # bytes: of the copy engine's strides and of one asynchronous copy


def supports(q: Tensor, kv: Tensor, indices: Tensor, v_channels: int) -> tuple[bool, str]:
    """Whether the kernels run these arguments, and if not, why. No value is read and nothing is compiled."""
    if not q.is_cuda:
        return False, f"q is on {q.device}, the kernels need a CUDA device"
    if indices.shape[-1] == 0 or q.numel() == 0 or kv.shape[1] == 0:
        return False, f"there is nothing to attend to: q {tuple(q.shape)}, kv {tuple(kv.shape)}, K={indices.shape[-1]}"
    device = _device(q.device)
    design = sparse_mla_design(device.arch, device.shared_bytes, q.dtype, q.shape[-1], v_channels)
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


def _design(device: Device, width: int) -> SparseMLADesign:
    design = sparse_mla_design(device.arch, device.shared_bytes, torch.bfloat16, width, VALUE_WIDTH)
    if isinstance(design, str):
        raise ValueError(f"sparse_mla: {design}")
    return design


def kernel(name: str, device: Device, width: int, **shape: Any) -> Any:
    """The compiled kernel called `name`, built on the first call; `shape` is what its builder takes besides widths.

    Raises:
        KernelBuildError: it does not compile for the device's architecture.
    """
    key = ("sparse_mla", device.arch, width, name, *shape.values())
    return CACHE.get(key, functools.partial(_build, key, name, device, width, shape))


def _build(key: Key, name: str, device: Device, width: int, shape: dict[str, Any]) -> Any:
    from mcore_patches.ops.sparse_mla import (
        tilelang_backward,
        tilelang_delta,
        tilelang_extent,
        tilelang_few_heads,
        tilelang_forward,
        tilelang_ordered,
        tilelang_plain_backward,
        tilelang_plain_forward,
    )

    design = _design(device, width)
    source: Any
    build: Callable[..., Any]
    if name == "forward" and design.forward is None:
        source, build = tilelang_forward, functools.partial(tilelang_forward.forward_kernel, width, VALUE_WIDTH)
    elif name == "forward":
        source = tilelang_plain_forward
        build = functools.partial(source.forward_kernel, width, VALUE_WIDTH, tiles=design.forward)
    elif name == "backward" and design.backward is None and shape["head_rows"] == tilelang_few_heads.HEAD_ROWS:
        source, shape = tilelang_few_heads, {n: v for n, v in shape.items() if n != "head_rows"}
        build = functools.partial(source.backward_kernel, width, VALUE_WIDTH)
    elif name == "backward" and design.backward is None:
        source, build = tilelang_backward, functools.partial(tilelang_backward.backward_kernel, width, VALUE_WIDTH)
    elif name == "backward":
        source = tilelang_plain_backward
        build = functools.partial(source.backward_kernel, width, VALUE_WIDTH, tiles=design.backward)
    elif name == "delta":
        source, build = tilelang_delta, functools.partial(tilelang_delta.delta_kernel, VALUE_WIDTH)
    elif name == "extent":
        source, build = tilelang_extent, tilelang_extent.extent_kernel
    elif name == "sum":
        source, build = tilelang_ordered, functools.partial(tilelang_ordered.sum_kernel, width)
    else:
        source, build = tilelang_ordered, getattr(tilelang_ordered, f"{name}_kernel")
    with TRACING:
        function = build(**shape)
    return compile_kernel(key, function, arch=device.arch, pass_configs=source.PASS_CONFIGS)


def warmup(
    device: torch.device | str = "cuda", *, width: int = 576, heads: int = 64, deterministic: bool = False
) -> float:
    """Build what forward and backward of one width need, side by side; seconds it took, 0 if all was built.

    The first call of `forward` does the same, so that the backward does not wait a second time. Only whether there are
    up to 16, 32 or more `heads` matters, and to the deterministic backward their number of blocks.

    Raises:
        KernelBuildError: one of them does not compile.
    """
    builds = _first_builds(_device(torch.device(device)), width, deterministic, heads)
    before = CACHE.builds
    seconds = build_together(builds)
    return seconds if CACHE.builds > before else 0.0


@functools.cache
def _build_first(device: Device, width: int, deterministic: bool, heads: int) -> None:
    build_together(_first_builds(device, width, deterministic, heads))


def _first_builds(device: Device, width: int, deterministic: bool, heads: int) -> list[Callable[[], Any]]:
    design = _design(device, width)
    shape: dict[str, Any] = _head_rows(heads) | {"strided": False} if design.backward is None else {}
    names: list[tuple[str, dict[str, Any]]] = [
        ("backward", {"reduction": "store" if deterministic else "atomic", **shape}),
        ("forward", {} if design.forward else {"strided": False}),
        ("delta", {}),
        ("extent", {}),
    ]
    if deterministic:
        names += [("mark", {}), ("rank", {}), ("locate", {})]
        names.append(("sum", {"parts_of_entry": -(-heads // design.backward_heads)}))
    return [functools.partial(kernel, name, device, width, **values) for name, values in names]


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


def _head_rows(heads: int) -> dict[str, int]:
    """How many heads the Hopper backward is built for. Up to 16 it is another kernel."""
    return {"head_rows": 16 if heads <= 16 else 32 if heads <= 32 else 64}


def _extent(indices: Tensor, keys: int, device: Device, width: int) -> Tensor:
    extent = torch.empty(indices.shape[:2], dtype=torch.int32, device=indices.device)
    kernel("extent", device, width)(indices.view(-1, indices.shape[-1]), keys, extent.view(-1))
    return extent


def _tiled(design_is_plain: bool, *tensors: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    """The shape of the kernel that reads these tensors by the copy engine, and the tensors as it takes them."""
    if design_is_plain:
        return {}, [_readable(t.contiguous()) for t in tensors]
    if all(t.is_contiguous() for t in tensors) or not _strides_survive():
        return {"strided": False}, [_readable(t.contiguous()) for t in tensors]
    return {"strided": True}, [_readable(t) for t in tensors]


def forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int) -> tuple[Tensor, Tensor]:
    """out bf16 [B,S,H,512] and lse fp32 [B,S,H] (natural log) of q [B,S,H,D], kv [B,Skv,1,D], indices [B,S,K]."""
    batch, rows, heads, width = q.shape
    device = _device(q.device)
    ordered = order_is_faster(device, rows, indices.shape[-1], kv.shape[1], width)
    _build_first(device, width, ordered or torch.are_deterministic_algorithms_enabled(), heads)
    shape, (q,) = _tiled(_design(device, width).forward is not None, q)
    ids = _int32(indices)
    out = torch.empty(batch, rows, heads, v_channels, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    extent = _extent(ids, kv.shape[1], device, width)
    kernel("forward", device, width, **shape)(q, _readable(kv.squeeze(2)), ids, extent, scale, out, lse)
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
    """
    batch, rows, heads, width = q.shape
    device = _device(q.device)
    if ordered is None:
        ordered = deterministic or order_is_faster(device, rows, indices.shape[-1], kv.shape[1], width)
    _build_first(device, width, ordered, heads)
    plain = _design(device, width).backward is not None
    shape, (q, dout) = _tiled(plain, q, dout)
    if not plain:
        shape = _head_rows(heads) | shape
    ids, kv, lse = _int32(indices), _readable(kv.squeeze(2)), lse.contiguous()
    delta = torch.empty_like(lse)
    kernel("delta", device, width)(out.contiguous(), dout, delta)
    extent = _extent(ids, kv.shape[1], device, width)
    dq = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(batch, kv.shape[1], width, dtype=torch.float32, device=q.device)
    reduction = "store" if ordered else "atomic"
    run = kernel("backward", device, width, reduction=reduction, **shape)
    if ordered:
        for b in range(batch):
            _backward_in_order(run, device, q, kv, dout, ids, extent, lse, delta, scale, dq, dkv, b)
    else:
        run(q, kv, dout, ids, ids, extent, lse, delta, scale, dq, dkv)
    return dq, _channels_in_order(dkv, device, reduction).unsqueeze(2)


def order_is_faster(device: Device, rows: int, topk: int, keys: int, width: int) -> bool:
    """Whether adding up stored parts of dKV beats atomics: it is too large for the cache, and keys are used often.

    Measured on Hopper only, so other GPUs take atomics.
    """
    return device.arch == HOPPER and 4 * keys * width > MOST_ATOMIC_BYTES and rows * topk >= 4 * keys


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
    head_blocks = -(-heads // _design(device, width).backward_heads)
    chunk = rows_in_order(rows, topk, width, head_blocks, device.multiprocessors)
    words = -(-chunk // 32)
    new = functools.partial(torch.empty, dtype=torch.int32, device=q.device)
    parts = new(1, chunk * topk * head_blocks, width, dtype=q.dtype)
    slots, before, count = new(chunk, topk), new(words, keys), new(keys)
    for start in range(0, rows, chunk):
        here = (slice(b, b + 1), slice(start, min(start + chunk, rows)))
        mine = ids[here][0]
        bits, times = torch.zeros_like(before), new(chunk * topk).zero_()
        slot = slots[: mine.shape[0]]
        kernel("mark", device, width)(mine, bits)
        kernel("rank", device, width)(bits, before, count)
        ends = count.cumsum(0, dtype=torch.int32)
        kernel("locate", device, width)(mine, bits, before, count, ends, slot, times)
        run(
            q[here],
            kv[b : b + 1],
            dout[here],
            ids[here],
            slot.unsqueeze(0),
            extent[here],
            lse[here],
            delta[here],
            scale,
            dq[here],
            parts,
        )
        add = kernel("sum", device, width, parts_of_entry=head_blocks)
        add(parts[0], count, ends, times, dkv[b])


def rows_in_order(rows: int, topk: int, width: int, head_blocks: int, multiprocessors: int) -> int:
    """Rows of a chunk of the deterministic backward: parts of about `PARTS_BYTES`, whole waves of blocks.

    Entries are numbered by int32.
    """
    most = min(PARTS_BYTES // (2 * topk * width * head_blocks), (2**31 - 1) // (topk * head_blocks))
    if most >= rows:
        return rows
    wave = -(-multiprocessors // head_blocks)
    return max(1, most // wave * wave or most)


def _channels_in_order(dkv: Tensor, device: Device, reduction: str) -> Tensor:
    """dkv [B, Skv, D] rounded to bf16, its channels where they belong (see `tilelang_scatter.group`)."""
    from mcore_patches.ops.sparse_mla.tilelang_scatter import WGMMA_COLUMNS, group

    width = dkv.shape[-1]
    if _design(device, width).backward is not None:
        return dkv.to(torch.bfloat16)
    tiles = group(reduction) // WGMMA_COLUMNS
    result = torch.empty(dkv.shape, dtype=torch.bfloat16, device=dkv.device)
    result.unflatten(-1, (-1, tiles, 4, 2)).copy_(dkv.unflatten(-1, (-1, 4, tiles, 2)).transpose(-3, -2))
    return result
