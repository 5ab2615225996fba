"""Tiny QSA models and layers, the reference layer of transformers, and comparisons, for the tests in this folder.

Import it inside the CPU shim only where noted; everything that touches megatron is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RATIO, BUDGET = 4, 8
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
RECOMPUTE: Mapping[str, dict[str, Any]] = {"none": {}, "full": FULL, "core": CORE}
PACKED = [13, 3, 40, 9]


def qsa_config(dtype: str = "fp32", **fields: Any) -> Any:
    """`gpt_config` with QSA: 4 index heads of 16, blocks of 4, 2 blocks a query, gate, zero-centred q and k norms."""
    from mcore_patches.cpu.models import gpt_config

    defaults = {
        "experimental_attention_variant": "qsa",
        "qsa_indexer_n_heads": 4,
        "qsa_indexer_head_dim": 16,
        "qsa_indexer_budget": BUDGET,
        "qsa_indexer_compress_ratio": RATIO,
        "qsa_indexer_loss_coeff": 0.5,
        "kv_channels": 16,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "layernorm_epsilon": 1e-6,
    }
    if fields.get("qsa_stage") == "frozen":
        defaults["qsa_indexer_loss_coeff"] = None
    return gpt_config(dtype, **{**defaults, **fields})


def qsa_spec(config: Any) -> Any:
    from mcore_patches.attention.qsa import get_qsa_module_spec_for_backend
    from mcore_patches.cpu.models import CpuBackend

    return get_qsa_module_spec_for_backend(config, CpuBackend())


def qsa_layer(config: Any, seed: int = 0) -> Any:
    """One QSA self-attention with seeded weights, norms included."""
    from megatron.core.transformer.spec_utils import build_module

    from mcore_patches.cpu.parameters import seed_parameters

    layer = build_module(qsa_spec(config), config=config, layer_number=1)
    seed_parameters(layer, seed)
    return layer.to(config.params_dtype)


def rotary_table(positions: int, channels: int = 8, *, packed: bool = False) -> Tensor:
    """Angles [positions, 1, 1, channels] of megatron's rotary embedding, base 1e7."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(channels, 1.0, rotary_base=10_000_000, use_cpu_initialization=True)
    return embedding(positions, packed_seq=packed)


def packed_params(lengths: Sequence[int], padded: Sequence[int] | None = None) -> Any:
    """`PackedSeqParams` of documents of these lengths, laid out in `padded` tokens each."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    laid_out = None if padded is None else torch.tensor([0, *padded]).cumsum(0, dtype=torch.int32)
    longest = max(padded or lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=laid_out,
        cu_seqlens_kv_padded=laid_out,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def run_layer(layer: Any, hidden: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Output [S, B, hidden] of a layer, for sequences or for packed documents."""
    if lengths is None:
        return layer(hidden, None, rotary_pos_emb=rotary_table(hidden.shape[0]))[0]
    table = rotary_table(max(lengths), packed=True)
    return layer(hidden, None, rotary_pos_emb=table, packed_seq_params=packed_params(lengths))[0]


def grads_of(module: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


class Reference:
    """transformers' attention layer with the weights of a QSA layer."""

    def __init__(self, layer: Any, config: Any) -> None:
        from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextAttention, Qwen4ExpTextRotaryEmbedding

        from mcore_patches.attention.qsa import attention_weights_to_hf

        self.config = Qwen4ExpTextConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            head_dim=config.kv_channels,
            indexer_n_heads=config.qsa_indexer_n_heads,
            indexer_kv_heads=1,
            indexer_head_dim=config.qsa_indexer_head_dim,
            indexer_budget=config.qsa_indexer_budget,
            indexer_compress_ratio=config.qsa_indexer_compress_ratio,
            rms_norm_eps=config.layernorm_epsilon,
            num_hidden_layers=4,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 8 / config.kv_channels,
                "mrope_section": [2, 1, 1],
            },
            attn_implementation="eager",
        )
        self.attention = Qwen4ExpTextAttention(self.config, 0).to(config.params_dtype)
        weights = {name: p.detach() for name, p in layer.named_parameters()}
        self.attention.load_state_dict(attention_weights_to_hf([weights], config))
        self.rotary = Qwen4ExpTextRotaryEmbedding(self.config)

    def inputs(self, hidden: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Hidden states [B, S, hidden], cos and sin, and the visible places bool [B, 1, S, S]."""
        seq, batch, _ = hidden.shape
        lengths = [seq] if lengths is None else lengths
        position = torch.cat([torch.arange(n) for n in lengths]).expand(batch, -1)
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        visible = (document[:, None] == document) & torch.ones(seq, seq, dtype=torch.bool).tril()
        hidden = hidden.transpose(0, 1)
        return hidden, self.rotary(hidden, position), visible.expand(batch, 1, -1, -1)

    def selection(self, hidden: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """Tokens that each query attends, bool [B, S, S]."""
        hidden, angles, visible = self.inputs(hidden, lengths)
        with torch.no_grad():
            return (self.attention.indexer(hidden, angles, visible, None) & visible)[:, 0]

    def forward(self, hidden: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """Output [S, B, hidden]."""
        hidden, angles, visible = self.inputs(hidden, lengths)
        mask = torch.where(visible, 0.0, torch.finfo(hidden.dtype).min).to(hidden.dtype)
        return self.attention(hidden, angles, mask)[0].transpose(0, 1)

    def gradients(self, config: Any) -> dict[str, Tensor]:
        """By megatron's names; zero where there is none."""
        from mcore_patches.attention.qsa import attention_weights_from_hf

        state = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.attention.named_parameters()}
        return attention_weights_from_hf(state, config)


def attended_tokens(ids: Tensor, lengths: Sequence[int], ratio: int) -> Tensor:
    """Tokens that rows attend by their block ids and tails, bool [T, T], written out row by row."""
    attended = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    row = 0
    for length in lengths:
        start = row
        for position in range(length):
            for block in ids[row].tolist():
                if block >= 0:
                    attended[row, start + block * ratio : start + (block + 1) * ratio] = True
            attended[row, start + (position + 1) // ratio * ratio : row + 1] = True
            row += 1
    return attended


def relative_error(ref: Tensor, got: Tensor) -> float:
    """Norm of the difference over the norm of `ref`; 0 for two zeros."""
    difference = (got.double() - ref.double()).norm().item()
    return difference / ref.double().norm().item() if difference else 0.0
