"""The model of the demo, and a training run of it that is counted and measured."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from mcore_patches.cpu.models import build_gpt, dsa_attention_spec, fused_indexer_declined, nope_dsa_config
from mcore_patches.cpu.parameters import seed_parameters
from mcore_patches.cpu.training import train_step
from mcore_patches.demo import corpus
from mcore_patches.demo.device import device_name, training_device
from mcore_patches.demo.memory import measured
from mcore_patches.demo.progress import Progress
from mcore_patches.demo.sparse_mla_nope.attention import FusedCalls, counted, dense_score_bytes, marked, peak_bytes

LAYERS, HEADS, WIDTH, TOPK = 2, 8, 512, 65
LEARNING_RATE, WARMUP_STEPS = 2e-3, 5


@dataclass(frozen=True)
class Machine:
    """Where it runs and how long the sequences are there.

    fused_by: what a call runs on that is not declined. dense_lengths, fused_lengths: at which attention alone is
    measured, without and with the overlay.
    """

    device: torch.device
    name: str
    fused_by: str
    length: int
    dense_lengths: tuple[int, ...]
    fused_lengths: tuple[int, ...]

    @staticmethod
    def scores(length: int, heads: int = HEADS) -> int:
        """Bytes of a layer's dense fp32 scores for one sequence."""
        return dense_score_bytes(length, length, heads)


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """The device, ready to train. On a CPU megatron's fused indexer, which crashes there, is switched off."""
    with training_device() as device, contextlib.ExitStack() as stack:
        name = device_name(device)
        if device.type == "cuda":
            yield Machine(
                device, name, "TileLang kernel", 2048, (512, 1024, 2048, 4096), (512, 1024, 2048, 4096, 8192, 16384)
            )
            return
        stack.enter_context(fused_indexer_declined())
        yield Machine(device, name, "chunked torch path", 640, (320, 640, 1280), (320, 640, 1280, 2560))


@dataclass(frozen=True)
class Run:
    """A training run. attention_peaks: for each step the most bytes that one layer's attention held.

    first_gradient: of the first step, all parameters in one vector, fp32.
    """

    losses: list[float]
    first_gradient: Tensor
    calls: FusedCalls
    attention_peaks: list[int]
    seconds_per_step: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "fused_calls": self.calls.taken,
            "declined_calls": self.calls.declined,
            "dense_score_bytes": self.calls.dense_bytes,
            "attention_peak_bytes": self.attention_peaks,
            "seconds_per_step": self.seconds_per_step,
        }


def train_model(here: Machine, steps: int, progress: Progress, label: str) -> Run:
    """Build the model from the same weights as ever and train it on the same batches as ever."""
    losses, seconds = [], []
    first_gradient = torch.empty(0)
    text = corpus.tokens()
    progress.begin(label, steps)
    with measured(here.device) as meter, marked(meter), counted() as calls:
        model = _model(here)
        optimizer = _MasterWeightAdam(model, LEARNING_RATE)
        for step in range(steps):
            batch = corpus.batch(text, 1, here.length, seed=step, device=here.device)
            optimizer.scale_learning_rate(min(1.0, (step + 1) / WARMUP_STEPS))
            start = time.perf_counter()
            result = train_step(model, batch, optimizer)  # type: ignore[arg-type]  # all it takes is .step()
            losses.append(result.loss)  # already on the host, so the device is done
            seconds.append(time.perf_counter() - start)
            if step == 0:
                first_gradient = torch.cat([gradient.flatten().cpu() for gradient in result.gradients.values()])
            progress.step(f"loss {result.loss:.3f}, {calls.taken} fused, {calls.declined} declined")
    peaks = peak_bytes(meter.readings())
    by_step = [max(peaks[first : first + LAYERS]) for first in range(0, len(peaks), LAYERS)]
    return Run(losses, first_gradient, calls, by_step, statistics.median(seconds))


def attention_peaks(here: Machine, lengths: Sequence[int], progress: Progress, label: str) -> dict[int, int]:
    """Peak bytes of one layer's sparse attention alone, forward and backward, by sequence length."""
    config = _config(here)
    progress.begin(label, len(lengths))
    with measured(here.device) as meter, marked(meter):
        for length in lengths:
            _attend(config, length, here.device)
            progress.step(f"{length} tokens")
    return dict(zip(lengths, peak_bytes(meter.readings()), strict=True))


def _attend(config: MLATransformerConfig, length: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(length)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()

    query, key, up_v_weight = leaf(length, 1, HEADS, WIDTH), leaf(length, 1, 1, WIDTH), leaf(HEADS, 16, WIDTH)
    # Any positions up to the query's own; that some repeat makes no difference to memory.
    ids = (torch.rand(length, TOPK, generator=generator) * torch.arange(1, length + 1)[:, None]).long()
    output = dsa._run_sparse_attention(
        absorbed_mla=True,
        query=query,
        key=key,
        value=None,
        up_v_weight=up_v_weight,
        topk_indices=ids.to(device)[None],
        softmax_scale=WIDTH**-0.5,
        config=config,
        mask=None,
        varlen_starts=None,
        varlen_ends=None,
        key_positions=None,
    )
    output.sum().backward()


def _model(here: Machine) -> torch.nn.Module:
    config = _config(here)
    model = build_gpt(config, dsa_attention_spec(config), vocab=corpus.VOCABULARY, seq=here.length)
    seed_parameters(model)
    return model.to(here.device)


def _config(here: Machine) -> MLATransformerConfig:
    # Eight index heads of 64: what megatron's own indexer kernels take.
    return nope_dsa_config(
        "bf16",
        kernel_backend="tilelang",
        num_layers=LAYERS,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=HEADS,
        kv_lora_rank=WIDTH,
        dsa_indexer_n_heads=8,
        dsa_indexer_head_dim=64,
        dsa_indexer_topk=TOPK,
        dsa_indexer_use_sparse_loss=True,
    )


class _MasterWeightAdam:
    """Adam on fp32 copies of bf16 parameters. Megatron's own mixed-precision optimizer runs on CUDA only."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._parameters = list(model.parameters())
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._adam = torch.optim.Adam(self._masters, lr=learning_rate, betas=(0.9, 0.95))

    def scale_learning_rate(self, factor: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = factor * self._learning_rate

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._adam.step()
        for parameter, master in zip(self._parameters, self._masters):
            parameter.copy_(master)
