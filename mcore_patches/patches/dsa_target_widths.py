"""dsa_target_widths: the fused target of the sparse indexer loss takes every top-k that megatron hands it.

megatron-core 0.19 runs its TileLang kernel for any top-k that is a multiple of 64 (the top-k is capped at the number of
keys, so that short batches give any such width). TileLang before 0.1.11 finds no layout for widths above 256 that
are no multiple of 256 (320, 384, 448, 576 ...) and raises in the middle of a forward pass. Ids of -1 are masked, have
no part in the softmax, and their columns of the target are 0: padding them to a width that compiles and cutting the
target is exact, to the bit. A TileLang that compiles the width gets it as it is.
Upstream: NVIDIA/Megatron-LM#7091, which declines these widths.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mcore_patches.overlay.copies import with_globals
from mcore_patches.overlay.patch import Below, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases

_MAY = "_can_use_fused_sparse_indexer_target"

KNOWN_GOOD = (0, 1, 11)
"""The first TileLang whose layout inference takes every width: 0.1.9 and 0.1.10 fail (width 320, sm_90a)."""
THREADS = 256
"""Of the kernel's block: up to here any multiple of 64 compiles, above it what the threads divide among themselves."""


def build(below: Below) -> Callable[..., Any]:
    """Make the replacement for one live `tilelang_indexer_loss` module."""
    import torch
    from torch.nn.functional import pad

    counters = below.counters
    is_compiling = torch.compiler.is_compiling

    def sparse_indexer_target_interface(query: Any, key: Any, topk_indices: Any, softmax_scale: float) -> Any:
        topk = topk_indices.size(1)
        width = compiling_width(topk, tilelang_release())
        if width == topk:
            target = below.call(query, key, topk_indices, softmax_scale)
        else:
            ids = pad(topk_indices, (0, width - topk), value=-1)
            # The caller divides the target in place, so it gets one of its own.
            target = below.call(query, key, ids, softmax_scale)[:, :topk].contiguous()
        if not is_compiling():
            counters.hit("kernel" if width == topk else "padded")
        return target

    return sparse_indexer_target_interface


def compiling_width(topk: int, tilelang: tuple[int, ...] | None) -> int:
    """The least width from `topk` on that this TileLang compiles; of an unknown one (None) what 0.1.9 does."""
    if topk <= THREADS or (tilelang is not None and tilelang >= KNOWN_GOOD):
        return topk
    return -(-topk // THREADS) * THREADS


@functools.cache
def tilelang_release() -> tuple[int, ...] | None:
    """The imported TileLang's release, e.g. (0, 1, 15); None where it does not say."""
    from packaging.version import InvalidVersion, Version

    try:
        import tilelang

        return Version(tilelang.__version__).release
    except (ImportError, OSError, AttributeError, InvalidVersion):  # OSError: a shared library that does not load
        return None


def probe(probing: Probing) -> Finding:
    """Whether megatron's own test of what the kernel takes, asked with stand-ins for CUDA tensors, declines 320."""
    import torch

    (module,) = probing.modules.values()
    asking = importlib.import_module(f"{module.__name__.rpartition('.')[0]}.tilelang_dsa")
    may = with_globals(asking, vars(asking)[_MAY], sparse_indexer_target_interface=lambda *_: None)

    def takes(width: int) -> bool:
        def on_cuda(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            return SimpleNamespace(is_cuda=True, ndim=len(shape), shape=shape, dtype=dtype, size=shape.__getitem__)

        return bool(may(on_cuda(8, 32, 576), on_cuda(64, 576), on_cuda(8, width, dtype=torch.int32)))

    if not takes(512):
        return Finding(False, "undecidable: it declines a top-k of 512, which every version takes")
    return Finding(not takes(320), f"it {'takes' if takes(320) else 'declines'} a top-k of 320")


PATCH = Patch(
    id="dsa_target_widths",
    summary="the fused target of the sparse indexer loss takes every top-k that megatron hands it",
    upstream="NVIDIA/Megatron-LM#7091",
    delete_when="the pinned release declines widths that do not compile: status() says UPSTREAM_FIXED",
    releases=Releases((0, 19, 0), None),
    late_safe=True,
    probe=probe,
    targets=(
        Target(
            modules=("megatron.core.transformer.experimental_attention_variant.ops.tilelang_indexer_loss",),
            qualname="sparse_indexer_target_interface",
            relies_on=(
                # The kernel, which masks ids of -1, and who builds it for each width.
                "sparse_indexer_target",
                "_get_target_kernel",
                # Which calls reach it, and its one caller, which takes the target's columns for those of its ids.
                f".tilelang_dsa:{_MAY}",
                ".tilelang_dsa:fused_qk_topk_lighting_with_streaming_sparse_kl",
            ),
            releases=Releases((0, 19, 0), None),
            build=build,
            known={
                # 0.19.0, 0.19.2
                "9535592ee96d5f80e796836efeacf25735af406543f690fac05380e7f9d459da": "needs",
            },
        ),
    ),
)
