"""What the DSA layers of this package do not run with: `refusal` enforces it, `support_markdown` prints it.

What absorbed MLA as such does not run with is refused by `absorbed_checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _comm_types(config: Any) -> list[str]:
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    return [kind.replace("_", "").lower() for kind in kinds if kind is not None]


# (name, when it is asked for, why not)
FEATURES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "attention without latents",
        lambda c: not c.multi_latent_attention,
        "DSA attends latents: build an MLATransformerConfig with multi_latent_attention=True",
    ),
    (
        "linear layers with a bias",
        lambda c: c.add_bias_linear,
        "the up-projections are absorbed as matrices: set add_bias_linear=False",
    ),
    (
        "tensor parallelism without sequence parallelism",
        lambda c: c.tensor_model_parallel_size > 1 and not c.sequence_parallel,
        "absorbed MLA needs it: set sequence_parallel=True",
    ),
    (
        "context parallelism other than all-gather",
        lambda c: c.context_parallel_size > 1 and any(kind != "allgather" for kind in _comm_types(c)),
        "selected keys may lie on any rank: set cp_comm_type=None or 'allgather'",
    ),
    (
        "dynamic or hierarchical context parallelism",
        lambda c: bool(
            getattr(c, "hybrid_context_parallel", False)
            or getattr(c, "dynamic_context_parallel", False)
            or c.hierarchical_context_parallel_sizes
        ),
        "the layout of a sequence over ranks must be the zigzag of one group: unset hybrid_context_parallel, "
        "dynamic_context_parallel and hierarchical_context_parallel_sizes",
    ),
    (
        "fused rotary embedding",
        lambda c: c.apply_rope_fusion,
        "rows are rotated by their place in a document: set apply_rope_fusion=False",
    ),
    (
        "interleaved rotary embedding",
        lambda c: c.rotary_interleaved,
        "MLA interleaves by itself: set rotary_interleaved=False",
    ),
    ("attention dropout", lambda c: c.attention_dropout != 0, "the sparse attention has none: set attention_dropout=0"),
    (
        "sliding windows",
        lambda c: c.window_size is not None,
        "the selection takes the place of a window: set window_size=None",
    ),
    ("attention sinks", lambda c: c.softmax_type != "vanilla", "the softmax has no sink: set softmax_type='vanilla'"),
    (
        "query-key layer scaling",
        lambda c: c.apply_query_key_layer_scaling,
        "the indexer's teacher would see other scores: set apply_query_key_layer_scaling=False",
    ),
    ("L2 norm of q and k", lambda c: c.qk_l2_norm, "MLA has none: set qk_l2_norm=False"),
    (
        "largest attention logits",
        lambda c: getattr(c, "qk_clip", False) or getattr(c, "log_max_attention_logit", False),
        "the sparse attention does not keep the largest logits: set qk_clip=False and log_max_attention_logit=False",
    ),
    (
        "fp8 or fp4",
        lambda c: bool(c.fp8 or getattr(c, "fp4", None)),
        "quantised projections are untested with these layers: unset fp8 and fp4",
    ),
    (
        "delayed weight gradients",
        lambda c: getattr(c, "delay_wgrad_compute", False),
        "nobody would compute those of the indexer's projections: set delay_wgrad_compute=False",
    ),
    ("Kitchen attention", lambda c: c.use_kitchen, "DSA brings its own attention: set use_kitchen=False"),
    (
        "CUDA graphs",
        lambda c: getattr(c, "cuda_graph_impl", "none") != "none" or getattr(c, "enable_cuda_graph", False),
        "selections of a recomputation are kept on the host: set cuda_graph_impl='none'",
    ),
    (
        "offloading of attention activations",
        lambda c: (
            getattr(c, "fine_grained_activation_offloading", False)
            and bool({"qkv_linear", "core_attn", "attn_proj"} & set(c.offload_modules or ()))
        ),
        "not built: take qkv_linear, core_attn and attn_proj out of offload_modules",
    ),
    ("CPU offloading of activations", lambda c: c.cpu_offloading, "not built: set cpu_offloading=False"),
    (
        "inference-optimised layers",
        lambda c: c.transformer_impl == "inference_optimized" or c.flash_decode or c.cache_mla_latents,
        "DSA layers train and evaluate only: set transformer_impl='transformer_engine' or 'local', flash_decode=False, "
        "cache_mla_latents=False",
    ),
)


def refusal(config: Any) -> str | None:
    """Why this `TransformerConfig` does not run with these layers: the first reason, None if it does."""
    for feature, asked, why_not in FEATURES:
        if asked(config):
            return f"dsa_kernel_backend={config.dsa_kernel_backend!r} does not support {feature}: {why_not}"
    return None


def support_markdown() -> str:
    """What is refused when the config is built, for the README."""
    return "\n".join(f"- {feature}: {why_not}." for feature, _, why_not in FEATURES)
