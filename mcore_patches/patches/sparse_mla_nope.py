"""sparse_mla_nope: run NoPE (512-wide) and unaligned-top-k absorbed MLA through the installed SparseMLA kernel.

megatron-core 0.19's `fused_sparse_mla_absorbed` declines unless query and key are 576 wide, heads (at least 16) are a
power of two and the top-k is a multiple of 64; a declined call runs a dense fp32 softmax of batch x heads x sq x skv.
Zero channels add nothing to q.k and the value is the first 512 channels, zero heads are sliced off again, and ids of -1
are masked, so padding to what the kernel takes is exact; autograd of pad and slice gives gradients in the caller's
shapes. Upstream: NVIDIA/Megatron-LM#7617. Beyond it: any head count, and ids outside [0, skv) are masked, not read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mcore_patches.overlay.copies import with_globals
from mcore_patches.overlay.errors import said
from mcore_patches.overlay.patch import Below, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases

if TYPE_CHECKING:
    import torch

log = logging.getLogger("mcore_patches")

# What the installed kernels are built for (megatron-core 0.19: ops/tilelang_sparse_mla_fwd.py).
KERNEL_WIDTH, V_CHANNELS, MIN_HEADS, TOPK_MULTIPLE = 576, 512, 16, 64
WIDTHS = (512, 576)
UNDECIDABLE = "undecidable: it declines width 576 with top-k 64, which every version takes"
DENSE = "a dense fp32 softmax over [b, heads, sq, skv]"


def declines(query: Any, key: Any, topk_indices: Any, v_channels: int) -> str | None:
    """Why this call cannot be fused, or None. Without tensor sizes, so that equal reasons count together."""
    import torch

    if query.ndim != 4 or key.ndim != 4 or topk_indices.ndim != 3:
        return "query and key must have 4 dimensions [s, b, heads, width] and topk_indices 3 [b, sq, k]"
    if query.dtype is not torch.bfloat16 or key.dtype is not torch.bfloat16:
        return f"query and key must be bfloat16, not {short(query.dtype)} and {short(key.dtype)}"
    sq, b, heads, width = query.shape
    if key.size(2) != 1:
        return f"key must have one head (absorbed MLA), not {key.size(2)}"
    if key.size(1) != b or topk_indices.size(0) != b:
        return "query, key and topk_indices differ in batch size"
    if topk_indices.size(1) != sq:
        return "query and topk_indices differ in rows"
    if key.size(-1) != width:
        return f"query and key differ in width: {width} and {key.size(-1)}"
    if width not in WIDTHS or v_channels != V_CHANNELS:
        return f"width {width} with v_channels {v_channels}; the kernel takes widths 512 and 576 with v_channels 512"
    if heads == 0:
        return "query has no heads"
    return None


def build(below: Below) -> Callable[..., Any]:
    """Make the replacement for one live `tilelang_dsa` module."""
    import torch
    from torch.nn.functional import pad

    from mcore_patches.ops.sparse_mla import sparse_mla

    module, counters = below.module, below.counters
    is_compiling = torch.compiler.is_compiling

    def fused_sparse_mla_absorbed(
        query: torch.Tensor, key: torch.Tensor, topk_indices: torch.Tensor, softmax_scale: float, v_channels: int
    ) -> torch.Tensor | None:
        reason = declines(query, key, topk_indices, v_channels)
        kernel = module.SparseMLA  # type: ignore[attr-defined]  # looked up at each call, as upstream does
        on_kernel = reason is None and _runs_kernel(query)
        if on_kernel and kernel is None:
            reason = "SparseMLA is not importable here (is tilelang installed?)"
        if reason is not None:
            count_decline(counters, reason, query, key, topk_indices, DENSE, dense_bytes(query, key))
            return None

        heads, width = query.size(2), query.size(3)
        query_bshd = query.permute(1, 0, 2, 3)
        key_bshd = key.permute(1, 0, 2, 3)
        if not on_kernel:
            scale = width**-0.5 if softmax_scale is None else softmax_scale
            out, _ = sparse_mla(query_bshd, key_bshd, wide_ids(topk_indices), scale=scale, v_channels=V_CHANNELS)
            if not is_compiling():
                counters.hit("chunked")
            return out.permute(1, 0, 2, 3).contiguous()

        kernel_heads = max(MIN_HEADS, 1 << (heads - 1).bit_length())
        wider, more_ids = KERNEL_WIDTH - width, -topk_indices.size(-1) % TOPK_MULTIPLE
        if wider or kernel_heads != heads:
            query_bshd = pad(query_bshd, (0, wider, 0, kernel_heads - heads))
        if wider:
            key_bshd = pad(key_bshd, (0, wider))
            if softmax_scale is None:  # the kernel would take its own, padded width
                softmax_scale = width**-0.5
        ids = valid_ids(topk_indices, key.size(0))
        if more_ids:
            ids = pad(ids, (0, more_ids), value=-1)
        ids, given = ids.unsqueeze(2).contiguous(), topk_indices.unsqueeze(2)
        if not more_ids and given.is_contiguous() and ids.stride() != given.stride():
            # Only sizes of 1 or 0 differ: upstream hands over the caller's strides there.
            ids = ids.as_strided(given.shape, given.stride())
        if not is_compiling():
            counters.hit("padded" if wider or more_ids or kernel_heads != heads else "kernel")
        out, _ = kernel.apply(query_bshd.contiguous(), key_bshd.contiguous(), ids, softmax_scale)
        return out[:, :, :heads].permute(1, 0, 2, 3).contiguous()

    return fused_sparse_mla_absorbed


def wide_ids(topk_indices: torch.Tensor) -> torch.Tensor:
    """Ids of a type that holds -1 and every row: int32 and int64 as they are, other types as int64."""
    import torch

    return topk_indices if topk_indices.dtype in (torch.int32, torch.int64) else topk_indices.to(torch.int64)


def valid_ids(topk_indices: torch.Tensor, skv: int) -> torch.Tensor:
    """int32 ids with everything outside [0, skv) turned into -1, which the kernel masks.

    The kernel masks -1 only, reads -2 as row 0, and runs out of bounds from skv on.
    """
    import torch

    # Masked before the cast to int32: an int64 id of 2**32 must not become 0.
    topk_indices = wide_ids(topk_indices)
    if topk_indices.is_cuda and not torch.compiler.is_compiling():
        ids = _in_one_launch(topk_indices, skv)
        if ids is not None:
            return ids.to(torch.int32)
    ids = torch.threshold(topk_indices, -1, -1)
    return ids.masked_fill_(ids >= skv, -1).to(torch.int32)


_one_launch_works: dict[tuple[int | None, Any], bool] = {}
"""(device, dtype) -> whether the kernel could be built for it, once that has been tried."""


def _in_one_launch(ids: torch.Tensor, skv: int) -> torch.Tensor | None:
    """The masked ids, or None where the kernel cannot be built, which is told once, or must not be built now."""
    import torch

    key = (ids.device.index, ids.dtype)
    works = _one_launch_works.get(key)
    if works:
        return _valid_ids_kernel()(ids, skv=skv)
    # The first call compiles and loads a module, which may break a capture; a later call outside of one builds it.
    if works is False or torch.cuda.is_current_stream_capturing():
        return None
    try:
        masked = _valid_ids_kernel()(ids, skv=skv)
    except torch.OutOfMemoryError:
        raise
    except Exception as exc:  # NVRTC is missing, or too old for the device
        log.warning("%s: ids are masked in three launches instead of one, because %s", PATCH.id, said(exc))
        _one_launch_works[key] = False
        return None
    _one_launch_works[key] = True
    return masked


@functools.cache
def _valid_ids_kernel() -> Callable[..., Any]:
    """One launch in place of three, each of which costs the host 5 to 14 us: calls that need no padding feel it."""
    import torch

    code = "template <typename T> T valid_id(T id, T skv) { return id >= T(0) && id < skv ? id : T(-1); }"
    return torch.cuda.jiterator._create_jit_fn(code, skv=0)


def _runs_kernel(query: torch.Tensor) -> bool:
    """Whether the CUDA kernel takes this tensor; CPU tensors take the chunked path of ops/sparse_mla."""
    return query.is_cuda


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def count_decline(
    counters: Any, reason: str, query: Any, key: Any, topk_indices: Any, fallback: str, fallback_bytes: int | None
) -> None:
    """Count the decline and warn, except under torch.compile, where only MCORE_PATCHES_ON_DECLINE=raise is obeyed."""
    import torch

    from mcore_patches.overlay import settings

    if torch.compiler.is_compiling() and settings.on_decline() != "raise":
        return
    top_k = rounded(topk_indices.size(-1)) if topk_indices.ndim else 0
    shape_class = f"query {shape_text(query)}, key {shape_text(key)}, top-k up to {top_k}, {short(query.dtype)}"
    counters.decline(reason, shape_class=shape_class, fallback=fallback, fallback_bytes=fallback_bytes)


def dense_bytes(query: Any, key: Any) -> int | None:
    """What megatron's own path allocates for the scores [b, heads, sq, skv] in fp32; None if the shapes do not tell."""
    if query.ndim != 4 or key.ndim != 4:
        return None
    sq, b, heads, _ = query.shape
    return 4 * b * heads * sq * key.size(0)


def shape_text(tensor: Any) -> str:
    """The sizes, that of the sequence rounded: one warning for a class of shapes, not for every sequence length."""
    return "x".join(str(n if i else rounded(n)) for i, n in enumerate(tensor.shape)) or "scalar"


def rounded(n: int) -> int:
    """The next power of two; 0 of 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def probe(probing: Probing) -> Finding:
    """Whether the installed function pads: a result for an input that the kernel does not take means that it does."""
    trial = trial_of(probing)
    if not trial(KERNEL_WIDTH, TOPK_MULTIPLE)[0]:
        return Finding(False, UNDECIDABLE)
    (width, _), (topk, _) = trial(512, TOPK_MULTIPLE), trial(KERNEL_WIDTH, TOPK_MULTIPLE + 1)
    verbs = ["takes" if taken else "declines" for taken in (width, topk)]
    return Finding(width and topk, f"it {verbs[0]} width 512 and {verbs[1]} an unaligned top-k of 65")


def trial_of(probing: Probing) -> Callable[[int, int], tuple[bool, bool]]:
    """(width, top-k) -> whether a copy of the installed function returned a result, and whether it called SparseMLA.

    It gets CPU zeros and a stand-in for SparseMLA. The module's own functions are copied with it, so that helpers see
    the stand-in too; nothing of the module changes.
    """
    import torch

    (module,), (original,) = probing.modules.values(), probing.originals.values()
    calls = []

    class FakeSparseMLA:
        @staticmethod
        def apply(q: torch.Tensor, *rest: Any, **options: Any) -> tuple[Any, Any]:
            calls.append(q.shape)
            return q[..., :V_CHANNELS], q[..., 0].float()

    function = with_globals(module, original, SparseMLA=FakeSparseMLA)

    def trial(width: int, topk: int) -> tuple[bool, bool]:
        calls.clear()
        zeros = torch.zeros(8, 1, MIN_HEADS, width, dtype=torch.bfloat16)
        out = function(zeros, zeros[:, :, :1], torch.zeros(1, 8, topk, dtype=torch.int32), 1.0, V_CHANNELS)
        return out is not None and tuple(out.shape) == (8, 1, MIN_HEADS, V_CHANNELS), bool(calls)

    return trial


def health(probing: Probing) -> str | None:
    """INERT where CUDA tensors are to be expected and the kernel is missing: calls with them are declined."""
    import torch

    (module,) = probing.modules.values()
    # device_count asks NVML first: it does not initialise CUDA in a process that will fork.
    if module.SparseMLA is None and torch.cuda.device_count() > 0:  # type: ignore[attr-defined]
        return "SparseMLA did not import (is tilelang installed?), so calls with CUDA tensors are declined"
    return None


RELIES_ON = (
    # Its one caller, which must go on finding it as a global of the module.
    "run_fused_absorbed_sparse_attention",
    # What runs the kernels: the widths and top-k that it takes, its scale, which heads and rows it masks.
    ".sparse_mla:SparseMLA",
    ".tilelang_sparse_mla_fwd:sparse_mla_fwd_interface",
    ".tilelang_sparse_mla_bwd:sparse_mla_bwd",
)

MODULES = (
    "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa",
    "megatron.core.ops.attention.dsa.ops.tilelang_dsa",
    "megatron.core.ops.attention.dsa.kernels.tilelang_dsa",  # main since; the first one passes on to it
)

PATCH = Patch(
    id="sparse_mla_nope",
    summary="NoPE width 512, any head count and any top-k through the fused sparse MLA kernel",
    upstream="NVIDIA/Megatron-LM#7617",
    delete_when="the pinned release pads inside fused_sparse_mla_absorbed: status() says UPSTREAM_FIXED",
    releases=Releases((0, 19, 0), None),
    late_safe=True,
    probe=probe,
    health=health,
    targets=(
        Target(
            modules=MODULES,
            qualname="fused_sparse_mla_absorbed",
            relies_on=RELIES_ON,
            build=build,
            known={
                # 0.19.0 to 0.19.2, and main until 2026-08-22
                "b1d606b45c7afb0f2d484c6d4bb090db0372453b0bfbc0c01664be2523f61f5c": "needs",
            },
        ),
    ),
)
