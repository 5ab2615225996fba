"""Tiny megatron models on a CPU: a config and a self-attention spec go in, a model comes out.

config = gpt_config()
model = build_gpt(config, gqa_attention_spec(config))
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_patches.cpu.configs import dsa_config, gpt_config, mla_config, nope_dsa_config
from mcore_patches.cpu.layers import DuplicatedLinear, Norm
from mcore_patches.cpu.rebinding import RebindingLog
from mcore_patches.cpu.specs import (
    CpuBackend,
    block_spec,
    dsa_attention_spec,
    gqa_attention_spec,
    layer_spec,
    mla_attention_spec,
    stage_block_spec,
)

__all__ = [
    "CpuBackend",
    "DuplicatedLinear",
    "Norm",
    "block_spec",
    "build_gpt",
    "check_parallel_sizes",
    "dsa_attention_spec",
    "dsa_config",
    "fused_indexer_declined",
    "gpt_config",
    "gqa_attention_spec",
    "layer_spec",
    "mla_attention_spec",
    "mla_config",
    "nope_dsa_config",
    "stage_block_spec",
]


def build_gpt(
    config: TransformerConfig,
    attention: ModuleSpec | Sequence[ModuleSpec] | TransformerBlockSubmodules,
    vocab: int = 128,
    seq: int = 64,
    *,
    vp_stage: int | None = None,
    **options: Any,
) -> GPTModel:
    """This rank's part of a GPT with separate input and output embeddings and rotary positions.

    Args:
        config: its parallel sizes must be those of the initialised model parallelism.
        attention: self-attention spec for all layers or one a layer (see :func:`block_spec`), or a finished block.
        vocab: vocabulary size, a multiple of the tensor-parallel size.
        seq: longest sequence.
        vp_stage: virtual pipeline stage, with an interleaved pipeline.
        options: further arguments of ``GPTModel``.

    Raises:
        RuntimeError: model parallelism is not initialised.
        ValueError: config and model parallelism disagree on a size.
    """
    check_parallel_sizes(config)
    if not isinstance(attention, TransformerBlockSubmodules):
        attention = block_spec(config, attention, vp_stage=vp_stage)
    stage: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }
    model = GPTModel(
        config=config,
        transformer_layer_spec=attention,
        vocab_size=vocab,
        max_sequence_length=seq,
        vp_stage=vp_stage,
        **{**stage, **options},
    )
    # Megatron's Float16Module does the same; some parameters are created in fp32 whatever params_dtype says.
    return model.bfloat16() if config.bf16 else model


@contextlib.contextmanager
def fused_indexer_declined() -> Iterator[None]:
    """Inside, the fused indexer of 0.19 declines and torch's runs, so that the fused attention hook is reached.

    For models with ``dsa_kernel_backend="tilelang"``: the TileLang indexer does not decline CPU tensors, it fails on
    them. ``fused_sparse_mla_absorbed`` is left alone; it is called and decides for itself. Note that the module's
    ``SparseMLA`` is not None wherever TileLang is installed, CUDA or not.

    Raises:
        ValueError: the installed release has no fused DSA kernels.
    """
    name = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa"
    try:
        kernels = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"this megatron-core release has no fused DSA kernels ({name})") from error
    log = RebindingLog()
    for indexer in ("lighting_indexer", "lighting_indexer_indices"):
        log.rebind(kernels, indexer, None, "None means not installed: the hook then declines")
    try:
        yield
    finally:
        log.undo()


def check_parallel_sizes(config: TransformerConfig) -> None:
    """Raise unless model parallelism is initialised (RuntimeError) with the config's sizes (ValueError)."""
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("model parallelism is not initialised: call init_model_parallel() first")
    for field, initialised in (
        ("tensor_model_parallel_size", parallel_state.get_tensor_model_parallel_world_size()),
        ("context_parallel_size", parallel_state.get_context_parallel_world_size()),
        ("pipeline_model_parallel_size", parallel_state.get_pipeline_model_parallel_world_size()),
    ):
        if getattr(config, field) != initialised:
            raise ValueError(f"config.{field}={getattr(config, field)}, but model parallelism has {initialised}")
