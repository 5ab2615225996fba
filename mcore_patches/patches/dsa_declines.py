"""dsa_declines: a fused DSA hook that declines says so: a warning with the reason and the bytes, and counters.

megatron-core 0.19 asks the backend chosen by `dsa_kernel_backend` first. A backend that declines returns None, which
leaves one line at DEBUG level, or none at all where the mask or the loss rules the hook out, and a dense fp32 path runs
instead. Here each decline is counted with its reason, the first of a reason and shape class is a warning, and
`MCORE_PATCHES_ON_DECLINE=raise` makes it an error. What is computed stays the same. Calls of the sparse attention are
left to sparse_mla_nope and sparse_mla_fast where one of these is in place, as they count and warn by themselves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mcore_patches.overlay.copies import with_globals
from mcore_patches.overlay.layers import stack_on
from mcore_patches.overlay.patch import Below, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases
from mcore_patches.patches.sparse_mla_nope import (
    DENSE,
    KERNEL_WIDTH,
    MIN_HEADS,
    TOPK_MULTIPLE,
    declines,
    dense_bytes,
    rounded,
    shape_text,
    short,
)

_EAV = "megatron.core.transformer.experimental_attention_variant"
_HOOKS = f"{_EAV}.dsa_kernels"
_MASKING = f"{_EAV}.dsa_masking"
INDEX = "a dense fp32 scoring of all keys by each index head, [sq, b, index heads, sk],"
LOSS = "a dense fp32 loss over [b, heads, sq, sk], and over as much for each index head,"


def build_topk(below: Below) -> Callable[..., Any]:
    def run_fused_qk_topk(
        config: Any, q: Any, k: Any, weights: Any, index_topk: int, *args: Any, **options: Any
    ) -> Any:
        result = below.call(config, q, k, weights, index_topk, *args, **options)
        _count(below, config, "run_fused_qk_topk", result, _index_reason, (q, k, weights), index_topk, INDEX)
        return result

    return run_fused_qk_topk


def build_topk_with_loss(below: Below) -> Callable[..., Any]:
    def run_fused_qk_topk_with_loss(
        config: Any,
        q: Any,
        k: Any,
        weights: Any,
        index_topk: int,
        starts: Any,
        ends: Any,
        block_size: int,
        query: Any,
        key: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        result = below.call(config, q, k, weights, index_topk, starts, ends, block_size, query, key, *args, **options)
        tensors = (q, k, weights, query, key)
        _count(below, config, "run_fused_qk_topk_with_loss", result, _index_reason, tensors, index_topk, LOSS)
        return result

    return run_fused_qk_topk_with_loss


def build_attention(below: Below) -> Callable[..., Any]:
    def run_fused_absorbed_sparse_attention(
        config: Any,
        query: Any,
        key: Any,
        topk_indices: Any,
        softmax_scale: float,
        v_channels: int,
        *args: Any,
        **kw: Any,
    ) -> Any:
        result = below.call(config, query, key, topk_indices, softmax_scale, v_channels, *args, **kw)
        if not _counted_below(below.module, config):
            tensors = (query, key, topk_indices, v_channels)
            topk = topk_indices.size(-1)
            _count(
                below, config, "run_fused_absorbed_sparse_attention", result, _attention_reason, tensors, topk, DENSE
            )
        return result

    return run_fused_absorbed_sparse_attention


def build_whole(below: Below) -> Callable[..., Any]:
    """The hook for indexer and attention at once: other hooks follow its decline, except for a loss over all keys."""

    def run_fused_dsa_attention(**options: Any) -> Any:
        result = below.call(**options)
        if result is not None or (options["loss_coeff"] > 0 and not options["sparse_loss"]):
            tensors = tuple(options[n] for n in ("q_indexer", "k_indexer", "indexer_weights", "query", "key"))
            topk = options["indexer_topk"]
            _count(below, options["config"], "run_fused_dsa_attention", result, _loss_reason, tensors, topk, LOSS)
        return result

    return run_fused_dsa_attention


def build_bounds(below: Below) -> Callable[..., Any]:
    """Asked only where a fused indexer is wanted; without bounds none of its hooks is called."""

    def build_fused_indexer_varlen_bounds(*, sq: int, skv: int, **options: Any) -> Any:
        bounds = below.call(sq=sq, skv=skv, **options)
        if bounds is None:
            reason = "the mask is not one range of keys a row, which is all that fused indexers take"
            _decline(below.counters, reason, f"queries up to {rounded(sq)}, keys up to {rounded(skv)}", INDEX, None)
        return bounds

    return build_fused_indexer_varlen_bounds


def _count(
    below: Below,
    config: Any,
    hook: str,
    result: Any,
    explain: Callable[..., str | None],
    tensors: tuple[Any, ...],
    topk: int,
    fallback: str,
) -> None:
    """Count a call of a hook that a backend was asked for."""
    import torch

    module: Any = below.module
    backend = module._get_dsa_kernel_backend(config)
    if backend == "none":
        return
    if result is not None:
        if not torch.compiler.is_compiling():
            below.counters.hit(hook)
        return
    live = module._load_backend(config)
    if explain is not _loss_reason and not hasattr(live, hook):
        reason = f"dsa_kernel_backend={backend!r} has no hook {hook}"
    else:
        reason = (explain(live, *tensors) if backend == "tilelang" else None) or f"{backend} declined {hook}"
    names = ("query", "key") if len(tensors) == 4 else ("index query", "index key", "weights", "query", "key")
    shapes = [f"{name} {shape_text(t)}" for name, t in zip(names, tensors) if name != "weights"]
    shape_class = f"{', '.join(shapes)}, top-k up to {rounded(topk)}, {short(tensors[0].dtype)}"
    _decline(below.counters, reason, shape_class, fallback, _bytes(*tensors))


def _decline(counters: Any, reason: str, shape_class: str, fallback: str, fallback_bytes: int | None) -> None:
    """Count and warn, except under torch.compile, where only MCORE_PATCHES_ON_DECLINE=raise is obeyed."""
    import torch

    from mcore_patches.overlay import settings

    if torch.compiler.is_compiling() and settings.on_decline() != "raise":
        return
    counters.decline(reason, shape_class=shape_class, fallback=fallback, fallback_bytes=fallback_bytes)


def _bytes(*tensors: Any) -> int | None:
    """Of the fp32 scores: those of the index heads, those of the attention, or both, by what the hook was given."""
    pairs = [tensors[:2], *([tensors[3:]] if len(tensors) == 5 else [])]
    total = 0
    for query, key in pairs:
        part = dense_bytes(query, key.unsqueeze(2) if key.ndim == 3 else key)
        if part is None:
            return None
        total += part
    return total


def _counted_below(module: Any, config: Any) -> bool:
    """Whether a patch on the kernel's adapter has counted this call."""
    live = module._load_backend(config)
    adapter = getattr(getattr(live, "tilelang_dsa", None), "fused_sparse_mla_absorbed", None)
    stack = stack_on(adapter)
    return stack is not None and bool(stack.ids)


def _index_reason(live: Any, q: Any, k: Any, weights: Any, query: Any = None, key: Any = None) -> str | None:
    """Why TileLang's indexer declines, without sizes of the batch, so that equal reasons count together."""
    import torch

    ops = live.tilelang_dsa
    if (ops.lighting_indexer_indices if query is None else ops.lighting_indexer) is None:
        return "TileLang's indexer is not importable here (is tilelang installed?)"
    if q.ndim != 4 or k.ndim != 3 or weights.ndim != 3:
        return "index query, key and weights must have 4, 3 and 3 dimensions"
    if q.dtype is not torch.bfloat16 or k.dtype is not torch.bfloat16:
        return f"index query and key must be bfloat16, not {short(q.dtype)} and {short(k.dtype)}"
    if query is not None and not ops.is_supported_indexer_bwd_head_count(q.size(2)):
        return f"the backward pass of TileLang's indexer does not take {q.size(2)} index heads"
    if k.size(1) != q.size(1) or weights.size(1) != q.size(1):
        return "index query, key and weights differ in batch size"
    return None


def _loss_reason(live: Any, *tensors: Any) -> str:
    return "no fused hook computes the indexer's loss over all keys (dsa_indexer_use_sparse_loss=False)"


def _attention_reason(live: Any, query: Any, key: Any, topk_indices: Any, v_channels: int) -> str | None:
    """Why the installed adapter declines."""
    if live.tilelang_dsa.SparseMLA is None:
        return "SparseMLA is not importable here (is tilelang installed?)"
    reason = declines(query, key, topk_indices, v_channels)
    if reason is not None:
        return reason
    heads = query.size(2)
    if query.size(-1) != KERNEL_WIDTH:
        return f"the installed kernel takes width {KERNEL_WIDTH}, not {query.size(-1)}; sparse_mla_nope pads"
    if heads > MIN_HEADS and heads & (heads - 1):
        return f"the installed kernel takes powers of two of heads, not {heads}; sparse_mla_nope pads"
    if topk_indices.size(-1) % TOPK_MULTIPLE:
        return f"the installed kernel takes multiples of {TOPK_MULTIPLE} of ids; sparse_mla_nope pads"
    return None


def probe(probing: Probing) -> Finding:
    """Whether a hook whose backend declines logs above DEBUG level, in text that is not known."""
    name = f"{_HOOKS}:run_fused_absorbed_sparse_attention"
    levels: list[int] = []
    named = {"debug": 10, "info": 20, "warning": 30, "warning_once": 30, "error": 40}
    logger = SimpleNamespace(
        isEnabledFor=lambda level: True,
        log=lambda level, *args, **options: levels.append(level),
        **{name: functools.partial(_note, levels, level) for name, level in named.items()},
    )
    function = with_globals(
        probing.modules[name],
        probing.originals[name],
        _resolve_fused_hook=lambda config, hook: lambda *args, **options: None,
        _LOGGER=logger,
    )
    if function(SimpleNamespace(dsa_kernel_backend="tilelang"), None, None, None, 1.0, 512) is not None or not levels:
        return Finding(False, "undecidable: a hook whose backend returns None does not log that it declined")
    loudest = max(levels)
    return Finding(loudest >= logging.WARNING, f"a declined hook logs at level {logging.getLevelName(loudest)}")


def _note(levels: list[int], level: int, *args: Any, **options: Any) -> None:
    levels.append(level)


def _hook(qualname: str, build: Callable[[Below], Callable[..., Any]], fingerprint: str) -> Target:
    return Target(
        modules=(_HOOKS,),
        qualname=qualname,
        relies_on=("_log_declined_hook", "_resolve_fused_hook", "_load_backend", "_get_dsa_kernel_backend"),
        releases=Releases((0, 19, 0), None),
        build=build,
        known={fingerprint: "needs"},  # 0.19.0, 0.19.2
    )


PATCH = Patch(
    id="dsa_declines",
    summary="declined fused DSA hooks warn with the reason and the bytes of the dense path, and are counted",
    upstream="not sent upstream",
    delete_when="the pinned release warns where a fused hook declines: status() says UPSTREAM_FIXED",
    releases=Releases((0, 19, 0), None),
    late_safe=True,
    probe=probe,
    targets=(
        _hook("run_fused_qk_topk", build_topk, "5f9c0f44f1aaca1b6818d51a73626fe5021d47a11b07f3fa55ec7cea46a5ae66"),
        _hook(
            "run_fused_qk_topk_with_loss",
            build_topk_with_loss,
            "07db00727cc64835586c7e3c654e3bcc012e4eae85f0f3733e665481a351423b",
        ),
        _hook(
            "run_fused_absorbed_sparse_attention",
            build_attention,
            "169188d4ca6e6ac80fe539e02a24e8db48225d862949546ec3a91ef5ef091fb1",
        ),
        _hook(
            "run_fused_dsa_attention", build_whole, "dd6cf6e24a0380a860021a8100f413c9e93156aed08f5c4173a51d7dc12835c4"
        ),
        Target(
            modules=(_MASKING,),
            qualname="build_fused_indexer_varlen_bounds",
            releases=Releases((0, 19, 0), None),
            build=build_bounds,
            known={"4a600bfeef9584ca84d54c53abcfb9f6e7e0d5ae84c53512579b4ffedbe023aa": "needs"},  # 0.19.0, 0.19.2
        ),
    ),
)
