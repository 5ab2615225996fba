"""A small GPT with sparse attention: the release's own, and that of the patch, on the same text; memory by length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mcore_patches.attention.dsa import get_dsa_module_spec_for_backend
from mcore_patches.cpu.data import Batch
from mcore_patches.cpu.models import CpuBackend, build_gpt, dsa_attention_spec, dsa_config
from mcore_patches.cpu.parameters import seed_parameters
from mcore_patches.cpu.training import build_optimizer, schedule_step, wrap_with_ddp
from mcore_patches.demo import corpus
from mcore_patches.demo.memory import measured
from mcore_patches.demo.progress import Progress

LAYERS, HEADS, LENGTH, TOPK = 2, 4, 192, 32
SEQUENCES, MICROBATCHES = 2, 2
LOSS_COEFF = 1.0
LEARNING_RATE, WARMUP_STEPS = 3e-3, 10
DOCUMENTS = (100, 37, 55)

_FIELDS: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": HEADS,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_loss_coeff": LOSS_COEFF,
    "dsa_indexer_use_sparse_loss": True,
}


@dataclass(frozen=True)
class Run:
    """A training run. losses: nats per byte. indexer_kl: mean KL a layer and token, step by step."""

    losses: list[float]
    indexer_kl: list[float]
    seconds_per_step: float

    def as_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "indexer_kl": self.indexer_kl, "seconds_per_step": self.seconds_per_step}


def config_of(opt_in: bool, topk: int = TOPK) -> Any:
    fields = {**_FIELDS, "dsa_indexer_topk": topk}
    if opt_in:
        fields["dsa_kernel_backend"] = "tilelang"
    return dsa_config("fp32", **fields)


def spec_of(config: Any, opt_in: bool) -> Any:
    return get_dsa_module_spec_for_backend(config, CpuBackend()) if opt_in else dsa_attention_spec(config)


def model_of(opt_in: bool, device: torch.device, topk: int = TOPK) -> torch.nn.Module:
    """A GPT with seeded weights, the same for both."""
    config = config_of(opt_in, topk)
    model = build_gpt(config, spec_of(config, opt_in), vocab=corpus.VOCABULARY, seq=LENGTH)
    seed_parameters(model)
    return model.to(device)


def train_model(opt_in: bool, steps: int, device: torch.device, progress: Progress, label: str) -> Run:
    """Train under megatron's schedule, two microbatches a step."""
    text = corpus.tokens()
    chunks = wrap_with_ddp(model_of(opt_in, device))
    optimizer = build_optimizer(chunks, LEARNING_RATE)
    losses, indexer_kl, seconds = [], [], []
    progress.begin(label, steps)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        seeds = (step * MICROBATCHES + n for n in range(MICROBATCHES))
        batches = [corpus.batch(text, SEQUENCES, LENGTH, seed=seed, device=device) for seed in seeds]
        start = time.perf_counter()
        losses.append(schedule_step(chunks, batches, optimizer).loss)
        seconds.append(time.perf_counter() - start)
        tracker: dict[str, Any] = DSAIndexerLossLoggingHelper.tracker
        indexer_kl.append((tracker["values"] / (LOSS_COEFF * MICROBATCHES)).mean().item())
        tracker.clear()
        progress.step(f"loss {losses[-1]:.3f}, indexer KL {indexer_kl[-1]:.3f}")
    return Run(losses, indexer_kl, statistics.median(seconds))


@torch.no_grad()
def loss_on(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Loss of every token, [B, S]."""
    model.eval()
    extra = {} if batch.packed is None else {"packed_seq_params": batch.packed}
    return model(batch.tokens, batch.positions, None, labels=batch.labels, **extra).float()


def documents(device: torch.device) -> tuple[Batch, list[Batch]]:
    """Passages of other lengths: packed into one row, and each alone."""
    text = corpus.tokens()
    alone = [corpus.batch(text, 1, length, seed=length, device=device) for length in DOCUMENTS]
    bounds = torch.tensor([0, *DOCUMENTS]).cumsum(0, dtype=torch.int32).to(device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(DOCUMENTS),
        max_seqlen_kv=max(DOCUMENTS),
    )
    parts = ("tokens", "labels", "positions", "loss_mask")
    row = {name: torch.cat([getattr(batch, name) for batch in alone], dim=1) for name in parts}
    return Batch(**row, packed=packed), alone


def attention_peaks(
    opt_in: bool, lengths: Sequence[int], device: torch.device, progress: Progress, label: str
) -> dict[int, int]:
    """Peak bytes of one attention layer, forward and backward, beyond its weights, by tokens of a sequence."""
    config = config_of(opt_in)
    layer = build_module(spec_of(config, opt_in), config=config, layer_number=1).to(device)
    seed_parameters(layer)
    progress.begin(label, len(lengths))
    with measured(device) as meter:
        for length in lengths:
            hidden = torch.randn(length, 1, config.hidden_size, device=device, requires_grad=True)
            mask = None if opt_in else ~torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
            meter.mark("before")
            layer(hidden, mask)[0].sum().backward()
            meter.mark("after")
            layer.zero_grad()
            del hidden, mask
            progress.step(f"{length} tokens")
    DSAIndexerLossLoggingHelper.tracker.clear()
    readings = meter.readings()
    pairs = zip(readings[0::2], readings[1::2], strict=True)
    return {length: after.peak - before.live for length, (before, after) in zip(lengths, pairs, strict=True)}
