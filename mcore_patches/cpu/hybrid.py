"""Hybrid models (``megatron.core.models.hybrid``, from 0.18) out of self-attention and MLP layers on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mcore_patches.cpu.layers import Norm
from mcore_patches.cpu.models import check_parallel_sizes
from mcore_patches.cpu.rebinding import RebindingLog
from mcore_patches.cpu.specs import CpuBackend

__all__ = ["build_hybrid"]

_LAYERS = {"*": "attention_layer", "D": "dsa_layer", "+": "mla_layer"}


def build_hybrid(
    config: TransformerConfig,
    attention: Mapping[str, ModuleSpec],
    pattern: str,
    vocab: int = 128,
    seq: int = 64,
    **options: Any,
) -> torch.nn.Module:
    """This rank's part of a ``HybridModel`` whose layers are attention alone or an MLP alone.

    Args:
        config: ``num_layers`` is the number of layers in ``pattern``.
        attention: self-attention spec by megatron's layer symbol: "*" attention, "D" DSA, "+" MLA (0.19).
        pattern: one symbol a layer, those of ``attention`` or "-" for an MLP; "|" between pipeline stages.
        vocab, seq: as in :func:`mcore_patches.cpu.models.build_gpt`.
        options: further arguments of ``HybridModel``.

    Raises:
        ValueError: the release has no hybrid model or no such layer, or the pattern holds a symbol without a spec.
        RuntimeError: model parallelism is not initialised.
    """
    try:
        hybrid_block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
        hybrid_model = importlib.import_module("megatron.core.models.hybrid.hybrid_model")
    except ModuleNotFoundError as error:
        raise ValueError("this megatron-core release has no megatron.core.models.hybrid (0.18 is the first)") from error
    check_parallel_sizes(config)
    slots = {symbol: name for symbol, name in _LAYERS.items() if hasattr(hybrid_block.HybridStackSubmodules, name)}
    unknown = sorted(set(attention) - set(slots))
    if unknown:
        raise ValueError(f"attention for {', '.join(unknown)}: this release's hybrid stack has {', '.join(slots)}")
    missing = sorted(set(pattern) - set(attention) - set("-|"))
    if missing:
        raise ValueError(f"pattern={pattern!r}: no spec for {', '.join(missing)}")
    layers = {
        slots[symbol]: ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=Norm, self_attention=spec, self_attn_bda=get_bias_dropout_add
            ),
        )
        for symbol, spec in attention.items()
    }
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm,
            mlp=get_mlp_module_spec_for_backend(backend=CpuBackend(), num_experts=None),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    stack = ModuleSpec(
        module=hybrid_block.HybridStack, submodules=hybrid_block.HybridStackSubmodules(mlp_layer=mlp_layer, **layers)
    )
    stage: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "position_embedding_type": "rope",
    }
    log = RebindingLog()
    log.rebind(hybrid_block, "TENorm", Norm, "the stack builds its final norm from this global, not from the spec")
    try:
        model = hybrid_model.HybridModel(
            config=config,
            hybrid_stack_spec=stack,
            vocab_size=vocab,
            max_sequence_length=seq,
            hybrid_layer_pattern=pattern,
            **{**stage, **options},
        )
    finally:
        log.undo()
    return model.bfloat16() if config.bf16 else model
