"""The settings that megatron-core 0.19 added to DSA, as fields for older releases, and what a config must satisfy.

Imports neither torch nor megatron: the patch descriptor reads `FIELDS` before either is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from mcore_patches.attention.dsa.support import refusal

VARIANT = "dsa"
BACKENDS = ("none", "tilelang", "cudnn")


class AddedField(NamedTuple):
    """A field that `TransformerConfig` gains. type: as an annotation would say it; meaning: one line for users."""

    name: str
    type: Any
    default: Any
    meaning: str


# Names and defaults of 0.19.
FIELDS = (
    AddedField(
        "dsa_kernel_backend",
        Literal["none", "tilelang", "cudnn"],
        "none",
        "'tilelang' opts in: fused kernels where they run, else torch in bounded memory. 'none' leaves DSA as the "
        "release has it. 'cudnn' is an error",
    ),
    AddedField("dsa_indexer_rope_interleaved", bool, False, "rotate neighbouring index channels as MLA does"),
    AddedField(
        "dsa_indexer_rotate_activation",
        bool,
        True,
        "Hadamard rotation of index queries and keys; bf16 and the package fast_hadamard_transform only",
    ),
    AddedField("dsa_indexer_scoring_relu", bool, True, "relu on each index head's product"),
    AddedField("dsa_indexer_k_norm_epsilon", float | None, None, "of the index keys' norm; None is layernorm_epsilon"),
    AddedField("dsa_indexer_k_norm_fp32", bool, False, "norm the index keys in fp32"),
    AddedField("dsa_indexer_topk_freq", int, 1, "layers that share one selection, the first of them making it"),
    AddedField("dsa_indexer_skip_topk_offset", int, 0, "layers at the start that select for themselves"),
    AddedField(
        "experimental_attention_variant_loss_scale_func",
        Callable | None,
        None,
        "called after each microbatch with the factor on its auxiliary losses; the layers here need no such function",
    ),
)


def fields_markdown() -> str:
    """The table of fields for the README."""
    lines = ["| field | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{field.name}` | `{field.default!r}` | {field.meaning} |" for field in FIELDS]
    return "\n".join(lines)


def uses_dsa(config: Any) -> bool:
    """Whether a config asks for the DSA layers of this package: variant "dsa" and the opt-in."""
    # Schedules also run models whose config is a ModelParallelConfig, which has no attention.
    if getattr(config, "experimental_attention_variant", None) != VARIANT:
        return False
    return getattr(config, "dsa_kernel_backend", "none") != "none"


def trains_indexer(config: Any) -> bool:
    return (config.dsa_indexer_loss_coeff or 0.0) > 0


def selects(layer_number: int, config: Any) -> bool:
    """Whether a layer (from 1) selects for itself, or attends what an earlier layer selected."""
    return source_layer(layer_number, config) == layer_number


def source_layer(layer_number: int, config: Any) -> int:
    """The layer (from 1) whose selection a layer attends: itself, or the nearest one before that selects."""
    first = max(config.dsa_indexer_skip_topk_offset, 1)
    if layer_number <= first:
        return layer_number
    return layer_number - (layer_number - first) % config.dsa_indexer_topk_freq


def validate(config: Any) -> None:
    """Check the DSA fields of a finished `TransformerConfig`.

    Raises:
        ValueError: the first fault: the field, its value and what is allowed.
    """
    backend = getattr(config, "dsa_kernel_backend", "none")
    if backend not in BACKENDS:
        raise ValueError(f"dsa_kernel_backend={backend!r}: must be one of {', '.join(map(repr, BACKENDS))}")
    variant = getattr(config, "experimental_attention_variant", None)
    if variant != VARIANT:
        if backend != "none":
            raise ValueError(
                f"dsa_kernel_backend={backend!r} with experimental_attention_variant={variant!r}, so that nothing "
                f"would use it: set experimental_attention_variant={VARIANT!r}, or leave it 'none'"
            )
        return
    if not uses_dsa(config):
        _check_unused(config)
        return
    if config.dsa_kernel_backend == "cudnn":
        raise ValueError(
            "dsa_kernel_backend='cudnn': its kernels come with megatron-core 0.19; on this release it must be "
            "'tilelang', or 'none' for the release's own DSA"
        )
    for name, least in (("n_heads", 1), ("head_dim", 1), ("topk", 1), ("topk_freq", 1), ("skip_topk_offset", 0)):
        _check_int(config, f"dsa_indexer_{name}", least)
    for name in ("rope_interleaved", "rotate_activation", "scoring_relu", "k_norm_fp32"):
        value = getattr(config, f"dsa_indexer_{name}")
        if not isinstance(value, bool):
            raise ValueError(f"dsa_indexer_{name}={value!r}: must be True or False")
    sparse_loss = getattr(config, "dsa_indexer_use_sparse_loss", None)
    if sparse_loss is not None and not isinstance(sparse_loss, bool):
        raise ValueError(f"dsa_indexer_use_sparse_loss={sparse_loss!r}: must be True or False")
    scale = config.experimental_attention_variant_loss_scale_func
    if scale is not None and not callable(scale):
        raise ValueError(f"experimental_attention_variant_loss_scale_func={scale!r}: must be None or a function")
    _check_number(config, "dsa_indexer_loss_coeff", 0.0)
    _check_number(config, "dsa_indexer_k_norm_epsilon", 0.0)
    if refused := refusal(config):
        raise ValueError(refused)
    if config.qk_pos_emb_head_dim % 2:
        raise ValueError(f"qk_pos_emb_head_dim={config.qk_pos_emb_head_dim}: must be even, channels rotate in pairs")
    if config.dsa_indexer_head_dim < config.qk_pos_emb_head_dim:
        raise ValueError(
            f"dsa_indexer_head_dim={config.dsa_indexer_head_dim}: must be at least "
            f"qk_pos_emb_head_dim={config.qk_pos_emb_head_dim}, the rotated channels of an index head"
        )
    if config.dsa_indexer_rotate_activation and not config.bf16:
        raise ValueError(
            "dsa_indexer_rotate_activation=True: the Hadamard rotation takes bf16 only, set it to False or train in "
            "bf16"
        )


def _check_unused(config: Any) -> None:
    for field in FIELDS:
        value = getattr(config, field.name, field.default)
        if value != field.default:
            raise ValueError(
                f"{field.name}={value!r} with dsa_kernel_backend='none', so that nothing would use it: set "
                f"dsa_kernel_backend='tilelang', or leave it {field.default!r}"
            )


def _check_int(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be an int of at least {least}")


def _check_number(config: Any, name: str, least: float) -> None:
    value = getattr(config, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be None or a finite number of at least {least:g}")
