"""sparse_mla_fast: absorbed MLA on the TileLang kernels of ops/sparse_mla instead of the installed SparseMLA.

`fused_sparse_mla_absorbed` is the one place where megatron-core 0.19 calls SparseMLA. It keeps `out` and drops the
kernel's log-sum-exp (fp32, base 2, scaled, 0 for a row without keys), and the targets of the sparse KL loss come from
query and key by `sparse_indexer_target_interface`: nothing depends on a statistic of the kernel replaced here. CUDA
tensors that our kernels do not take, and all CPU tensors, go one layer down: to sparse_mla_nope where that is in place,
else to upstream's function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from mcore_patches.overlay.errors import said
from mcore_patches.overlay.patch import Below, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases
from mcore_patches.patches.sparse_mla_nope import (
    DENSE,
    KERNEL_WIDTH,
    MODULES,
    RELIES_ON,
    TOPK_MULTIPLE,
    UNDECIDABLE,
    count_decline,
    declines,
    dense_bytes,
    trial_of,
    wide_ids,
)

if TYPE_CHECKING:
    import torch

OURS, ORDERED, BELOW = "ours", "ours with an ordered backward", "upstream"
"""Routes in the report: calls on our kernels, those of them whose backward adds up stored parts of dkv, in a workspace
of its own, and declined ones that a kernel one layer down ran all the same."""


def build(below: Below) -> Callable[..., Any]:
    """Make the replacement for one live `tilelang_dsa` module."""
    import torch

    from mcore_patches.ops.jit import KernelBuildError
    from mcore_patches.ops.sparse_mla import sparse_mla, supports

    counters = below.counters
    is_compiling = torch.compiler.is_compiling

    def attend(
        query: torch.Tensor, key: torch.Tensor, topk_indices: torch.Tensor, softmax_scale: float | None, v_channels: int
    ) -> tuple[torch.Tensor | None, str]:
        """The output, or None and why our kernels do not run this call."""
        reason = declines(query, key, topk_indices, v_channels)
        reason = reason or _cannot(query, key, topk_indices, softmax_scale, v_channels)
        if reason is not None:
            return None, reason
        q, kv = query.permute(1, 0, 2, 3), key.permute(1, 0, 2, 3)
        ids = wide_ids(topk_indices)
        supported, reason = supports(q, kv, ids, v_channels=v_channels)
        if not supported:
            return None, reason
        scale = query.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
        deterministic = torch.are_deterministic_algorithms_enabled()
        try:
            out, _ = sparse_mla(
                q, kv, ids, scale=scale, v_channels=v_channels, deterministic=deterministic, backend="tilelang"
            )
        except KernelBuildError as error:
            return None, str(error)
        return out.permute(1, 0, 2, 3).contiguous(), ""

    def fused_sparse_mla_absorbed(
        query: torch.Tensor, key: torch.Tensor, topk_indices: torch.Tensor, softmax_scale: float, v_channels: int
    ) -> torch.Tensor | None:
        if not _on_device(query):
            return below.call(query, key, topk_indices, softmax_scale, v_channels)
        out, reason = attend(query, key, topk_indices, softmax_scale, v_channels)
        if out is not None:
            if not is_compiling():
                counters.hit(_route(query, key, topk_indices))
            return out
        return hand_down(reason, query, key, topk_indices, softmax_scale, v_channels)

    def hand_down(
        reason: str,
        query: torch.Tensor,
        key: torch.Tensor,
        topk_indices: torch.Tensor,
        softmax_scale: float,
        v_channels: int,
    ) -> torch.Tensor | None:
        from mcore_patches.overlay import settings

        # The layer below must not run, nor decline, what is an error here.
        out = None
        if settings.on_decline() != "raise":
            out = below.call(query, key, topk_indices, softmax_scale, v_channels)
        if out is None:
            fallback, fallback_bytes = DENSE, dense_bytes(query, key)
        else:
            fallback, fallback_bytes = "the installed SparseMLA", out.numel() * out.element_size()
            if not is_compiling():
                counters.routes[BELOW] = counters.routes.get(BELOW, 0) + 1
        count_decline(counters, reason, query, key, topk_indices, fallback, fallback_bytes)
        return out

    return fused_sparse_mla_absorbed


def _route(query: torch.Tensor, key: torch.Tensor, topk_indices: torch.Tensor) -> str:
    """How a call on our kernels is counted; without gradients there is no backward to tell of."""
    import torch

    from mcore_patches.ops.sparse_mla import tilelang_kernels

    if not torch.is_grad_enabled() or not (query.requires_grad or key.requires_grad):
        return OURS
    q, kv = query.permute(1, 0, 2, 3), key.permute(1, 0, 2, 3)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return ORDERED if tilelang_kernels.takes_order(q, kv, topk_indices, deterministic) else OURS


def _on_device(query: torch.Tensor) -> bool:
    """Whether this call is for CUDA kernels at all; others go one layer down uncounted."""
    return query.is_cuda


def _cannot(query: Any, key: Any, topk_indices: Any, softmax_scale: float | None, v_channels: int) -> str | None:
    """Why a well-formed call is not for our kernels, or None. Without tensor sizes, so that equal reasons count."""
    if not (query.numel() and key.size(0) and topk_indices.size(-1)):
        return "there is nothing to attend to: query, key or topk_indices is empty"
    if not isinstance(v_channels, int):
        return "v_channels must be an int"
    if softmax_scale is None:
        return None
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real):
        return "softmax_scale must be a number"
    if not 0 < softmax_scale < math.inf:
        return "softmax_scale must be finite and above 0"
    # By statement: torch.compile follows it.
    from mcore_patches.ops.sparse_mla.inputs import is_too_large

    return "softmax_scale must be at most 1e38" if is_too_large(softmax_scale) else None


def probe(probing: Probing) -> Finding:
    """Text that is not known has the fix if its function returns a result without calling SparseMLA."""
    returned, called = trial_of(probing)(KERNEL_WIDTH, TOPK_MULTIPLE)
    if not returned:
        return Finding(False, UNDECIDABLE)
    return Finding(not called, f"it {'calls' if called else 'does not call'} SparseMLA for width 576 with top-k 64")


def health(probing: Probing) -> str | None:
    """INERT where CUDA tensors are to be expected and nothing can compile our kernels."""
    import torch

    # device_count asks NVML first: it does not initialise CUDA in a process that will fork.
    if torch.cuda.device_count() == 0:
        return None
    try:
        import tilelang  # noqa: F401
    except (ImportError, OSError) as exc:  # OSError: a shared library that does not load
        return f"tilelang does not import ({said(exc)}), so calls with CUDA tensors are declined"
    return None


PATCH = Patch(
    id="sparse_mla_fast",
    summary="faster sparse MLA kernels: native width 512, any heads and top-k, optionally deterministic",
    upstream="not sent upstream",
    delete_when="the installed kernels are as fast (python -m gpu_ci.bench.sparse_mla), or are no longer called",
    releases=Releases((0, 19, 0), None),
    late_safe=True,
    probe=probe,
    health=health,
    targets=(
        Target(
            modules=MODULES,
            qualname="fused_sparse_mla_absorbed",
            relies_on=RELIES_ON,  # its caller, and the kernels that ours stand in for
            build=build,
            level=1,  # above sparse_mla_nope, so that it sees tensors before they are padded
            known={
                # 0.19.0 to 0.19.2, and main until 2026-08-22
                "b1d606b45c7afb0f2d484c6d4bb090db0372453b0bfbc0c01664be2523f61f5c": "needs",
            },
        ),
    ),
)
