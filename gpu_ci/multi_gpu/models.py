"""The tiny models and their batches: large enough for the kernels on CUDA, small enough for a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from gpu_ci.multi_gpu.plan import MULTIPLE, Case
from mcore_patches.attention.qsa import get_qsa_module_spec_for_backend
from mcore_patches.cpu.data import Batch, packed_batch
from mcore_patches.cpu.models import CpuBackend, build_gpt, dsa_attention_spec, dsa_config, gpt_config
from mcore_patches.cpu.parallel import Layout
from mcore_patches.cpu.parameters import seed_parameters
from mcore_patches.demo import corpus

SEQUENCES, MICROBATCHES = 2, 2
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}
# A tenth of the rows at least can select everything that they see, the others cannot.
LENGTHS = {"cuda": (1203, 3, 641, 64), "cpu": (75, 3, 40, 9)}
SEQUENCE = {"cuda": 1024, "cpu": 64}
QSA: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "kv_channels": 64},
    "cpu": {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "kv_channels": 16},
}
QSA_INDEXER: dict[str, dict[str, Any]] = {
    "cuda": {"qsa_indexer_head_dim": 128, "qsa_indexer_budget": 256},
    "cpu": {"qsa_indexer_head_dim": 16, "qsa_indexer_budget": 16},
}
DSA: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 16,
        "q_lora_rank": 128,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        # Megatron's own kernels want multiples of 8 index heads, and a multiple of 256 keys for the loss.
        "dsa_indexer_n_heads": 8,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 256,
    },
    "cpu": {
        "num_attention_heads": 4,
        "dsa_indexer_n_heads": 8,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 16,
        # A ReLU makes equal scores, between which torch.topk chooses as the tensor lies.
        "dsa_indexer_scoring_relu": False,
    },
}


def config(case: Case, layout: Layout, kind: str, **fields: Any) -> Any:
    """The configuration of a case; kind: "cuda" or "cpu"."""
    sizes: dict[str, Any] = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "sp": layout.tp > 1}
    fields = RECOMPUTE[case.recompute] | fields
    if case.model == "qsa":
        return gpt_config(
            # In so small a model bf16 would hide what a CPU can show. DSA's fused path takes nothing else.
            "bf16" if kind == "cuda" else "fp32",
            **sizes,
            experimental_attention_variant="qsa",
            qsa_indexer_n_heads=4,
            qsa_indexer_compress_ratio=4,
            qsa_indexer_loss_coeff=0.5,
            attention_output_gate=True,
            qk_layernorm=True,
            layernorm_zero_centered_gamma=True,
            layernorm_epsilon=1e-6,
            **QSA[kind],
            **QSA_INDEXER[kind],
            **fields,
        )
    return dsa_config(
        "bf16",
        **sizes,
        kernel_backend="tilelang",
        kv_lora_rank=512,
        qk_pos_emb_head_dim=64,
        qk_layernorm=True,
        dsa_indexer_loss_coeff=0.5,
        dsa_indexer_use_sparse_loss=True,
        **DSA[kind],
        **fields,
    )


def model(case: Case, layout: Layout, device: torch.device) -> torch.nn.Module:
    """This rank's part of the case's GPT, with weights that depend on their names and whole shapes alone."""
    built = config(case, layout, device.type)
    length = max(SEQUENCE[device.type], *padded(LENGTHS[device.type]))
    if case.model == "qsa":
        spec = get_qsa_module_spec_for_backend(built, CpuBackend())
        gpt = build_gpt(built, spec, vocab=corpus.VOCABULARY, seq=length, rotary_percent=0.5)
    else:
        gpt = build_gpt(built, dsa_attention_spec(built), vocab=corpus.VOCABULARY, seq=length)
    seed_parameters(gpt)
    return gpt.to(device)


def padded(lengths: Sequence[int]) -> list[int]:
    """Lengths as documents are laid out."""
    return [length + -length % MULTIPLE for length in lengths]


def batches(case: Case, step: int, device: torch.device) -> list[Batch]:
    """The whole microbatches of a step, alike on all ranks."""
    seeds = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
    text = corpus.tokens()
    if case.form == "bshd":
        length = SEQUENCE[device.type]
        return [corpus.batch(text, SEQUENCES, length, seed=seed, device=device) for seed in seeds]
    return [_on(_documents(text, LENGTHS[device.type], seed), device) for seed in seeds]


def _documents(text: torch.Tensor, lengths: Sequence[int], seed: int) -> Batch:
    batch = packed_batch(lengths, multiple=MULTIPLE, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    at = 0
    for length, laid_out in zip(lengths, padded(lengths)):
        start = int(torch.randint(0, len(text) - length, (), generator=generator))
        passage = text[start : start + length + 1]
        batch.tokens[0, at : at + length], batch.labels[0, at : at + length] = passage[:-1], passage[1:]
        at += laid_out
    return batch


def _on(batch: Batch, device: torch.device) -> Batch:
    assert batch.packed is not None
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    bounds = {name: getattr(batch.packed, name).to(device) for name in names}
    tensors = {name: getattr(batch, name).to(device) for name in ("tokens", "labels", "positions", "loss_mask")}
    return dataclasses.replace(batch, **tensors, packed=dataclasses.replace(batch.packed, **bounds))
