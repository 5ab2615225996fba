"""A dense model, and the same model with QSA layers in its two training stages, under megatron's own schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.utils import unwrap_model

from mcore_patches.attention.qsa import QSASelfAttention, freeze_backbone, get_qsa_module_spec_for_backend
from mcore_patches.cpu.data import Batch
from mcore_patches.cpu.models import CpuBackend, build_gpt, gpt_config, gqa_attention_spec
from mcore_patches.cpu.parameters import seed_parameters
from mcore_patches.cpu.training import build_optimizer, schedule_step, wrap_with_ddp
from mcore_patches.demo import corpus
from mcore_patches.demo.progress import Progress
from mcore_patches.demo.qsa.routing import Routing, observed

LAYERS, HEADS, LENGTH, RATIO, BUDGET = 2, 4, 256, 4, 32
SEQUENCES, MICROBATCHES = 2, 2
LOSS_COEFF = 1.0
WARMUP_STEPS = 10
EVALUATIONS = 6

_MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": HEADS,
    "num_query_groups": 2,
    "kv_channels": 32,
    "qk_layernorm": True,
}
_QSA: dict[str, Any] = {
    "experimental_attention_variant": "qsa",
    "qsa_indexer_n_heads": 4,
    "qsa_indexer_head_dim": 32,
    "qsa_indexer_budget": BUDGET,
    "qsa_indexer_compress_ratio": RATIO,
    "qsa_indexer_loss_coeff": LOSS_COEFF,
}


@dataclass(frozen=True)
class Evaluation:
    """On held-out text. loss: with the selected blocks, or dense before there are QSA layers, nats per byte.

    indexer_kl: mean KL per token of each layer, of the stage that the model is in. routings: of each layer.
    """

    step: int
    loss: float
    indexer_kl: list[float] = field(default_factory=list)
    routings: list[Routing] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """A finished stage. losses: of the training batches. indexer_kl: a list of the layers' for each step."""

    model: torch.nn.Module
    losses: list[float]
    indexer_kl: list[list[float]]
    evaluations: list[Evaluation]

    @property
    def first(self) -> Evaluation:
        return self.evaluations[0]

    @property
    def last(self) -> Evaluation:
        return self.evaluations[-1]


def dense_stage(steps: int, device: torch.device, progress: Progress) -> Stage:
    """Train a model with megatron's own self-attention."""
    config = gpt_config(**_MODEL)
    model = build_gpt(config, gqa_attention_spec(config), vocab=corpus.VOCABULARY, seq=LENGTH)
    seed_parameters(model)
    return _train(model.to(device), steps, 3e-3, 0, device, progress, "dense pre-training")


def warmup_stage(steps: int, dense: torch.nn.Module, device: torch.device, progress: Progress) -> Stage:
    """Stage 1: the dense model's weights, frozen, and new indexers that learn where its attention goes."""
    model = _qsa_model("warmup", device)
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    if unexpected or any(".indexer." not in name for name in missing):
        raise RuntimeError(f"the dense model's weights do not fit: missing {missing}, unexpected {unexpected}")
    freeze_backbone(model)
    return _train(model, steps, 3e-3, 1, device, progress, "Stage 1, warm-up")


def sparse_stage(steps: int, warm: torch.nn.Module, device: torch.device, progress: Progress) -> Stage:
    """Stage 2: everything trains, attention is sparse."""
    model = _qsa_model("sparse", device)
    model.load_state_dict(warm.state_dict())
    return _train(model, steps, 1e-3, 2, device, progress, "Stage 2, sparse")


def _qsa_model(stage: str, device: torch.device) -> torch.nn.Module:
    config = gpt_config(**_MODEL, **_QSA, qsa_stage=stage)
    spec = get_qsa_module_spec_for_backend(config, CpuBackend())
    return build_gpt(config, spec, vocab=corpus.VOCABULARY, seq=LENGTH).to(device)


def _train(
    model: torch.nn.Module,
    steps: int,
    learning_rate: float,
    number: int,
    device: torch.device,
    progress: Progress,
    label: str,
) -> Stage:
    text = corpus.tokens()
    held_out = corpus.batch(corpus.tokens(held_out=True), 2 * SEQUENCES, LENGTH, seed=0, device=device)
    chunks = wrap_with_ddp(model)
    optimizer = build_optimizer(chunks, learning_rate)
    losses, indexer_kl = [], []
    evaluations = [_evaluate(model, held_out, 0)]
    progress.begin(label, steps)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / WARMUP_STEPS)
        seeds = ((number * steps + step) * MICROBATCHES + n for n in range(MICROBATCHES))
        batches = [corpus.batch(text, SEQUENCES, LENGTH, seed=seed, device=device) for seed in seeds]
        with _indexer_kl(MICROBATCHES) as kl:
            losses.append(schedule_step(chunks, batches, optimizer).loss)
        indexer_kl.append(kl)
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            evaluations.append(_evaluate(model, held_out, step))
        progress.step(f"loss {losses[-1]:.3f}" + (f", indexer KL {sum(kl) / len(kl):.3f}" if kl else ""))
    return Stage(unwrap_model(model), losses, indexer_kl, evaluations)


def _evaluate(model: torch.nn.Module, batch: Batch, step: int) -> Evaluation:
    layers = [module for module in model.modules() if isinstance(module, QSASelfAttention)]
    if not layers:
        return Evaluation(step, _loss(model, batch))
    # The KL is computed where it trains, so this forward pass is one of training without its backward.
    with _indexer_kl(1) as kl:
        model(batch.tokens, batch.positions, None, labels=batch.labels)
    with _stage(layers, "sparse"), observed(layers, len(batch.tokens)) as routings:
        loss = _loss(model, batch)
    return Evaluation(step, loss, kl, routings)


@torch.no_grad()
def _loss(model: torch.nn.Module, batch: Batch) -> float:
    model.eval()
    loss = model(batch.tokens, batch.positions, None, labels=batch.labels).float().mean().item()
    model.train()
    return loss


@contextmanager
def _stage(layers: list[QSASelfAttention], stage: str) -> Iterator[None]:
    config = layers[0].config
    trained = config.qsa_stage
    config.qsa_stage = stage
    try:
        yield
    finally:
        config.qsa_stage = trained


@contextmanager
def _indexer_kl(microbatches: int) -> Iterator[list[float]]:
    """The mean KL of each layer over the forward passes inside, from megatron's tracker of indexer losses."""
    tracker: dict[str, Any] = DSAIndexerLossLoggingHelper.tracker
    # Not megatron's way to clean it, which keeps the number of layers and a row of zeros.
    tracker.clear()
    kl: list[float] = []
    yield kl
    if "values" in tracker:
        kl.extend((tracker["values"] / (LOSS_COEFF * microbatches)).tolist())
    tracker.clear()
