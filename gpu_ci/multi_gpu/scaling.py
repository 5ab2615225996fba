"""Weak scaling: one QSA layer of Qwen3.8-Flash-Next, as many tokens a rank whatever the context-parallel size."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from typing import Any

import torch

import mcore_patches
from gpu_ci.multi_gpu import world
from gpu_ci.multi_gpu.plan import Job, powers_of_two
from mcore_patches.cpu.parallel import Layout

REAL: dict[str, Any] = {
    "hidden_size": 2560,
    "num_attention_heads": 24,
    "num_query_groups": 2,
    "kv_channels": 256,
    "qsa_indexer_head_dim": 128,
    "qsa_indexer_budget": 2048,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "qsa_indexer_head_dim": 16,
    "qsa_indexer_budget": 16,
}
REPEATS = 5


def layer(job: Job, device: torch.device, tokens: int) -> Iterator[dict[str, Any]]:
    """A record of each context-parallel size, forward and backward in milliseconds, with random weights.

    All ranks work at every size: those that it leaves are copies with a sequence of their own. The selection is random
    then, which shares least between neighbouring rows.
    """
    mcore_patches.apply_patches("qsa", strict=True)
    for name, cp in zip(job.case_names(), powers_of_two(job.ranks)):
        with world.model_parallel(device, cp=cp) as layout:
            world.reset_peak(device)
            forward, backward, finite = _times(layout, device, tokens)
            mine = {"forward": forward, "backward": backward, "peak": world.peak_gib(device), "finite": finite}
            ranks = world.gathered(mine)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield {
            "name": name,
            "faults": [
                f"rank {rank}: gradients are not finite" for rank, entry in enumerate(ranks) if not entry["finite"]
            ],
            "tokens": tokens * cp,
            "forward_ms": max(entry["forward"] for entry in ranks),
            "backward_ms": max(entry["backward"] for entry in ranks),
            "peaks": [entry["peak"] for entry in ranks],
        }


def _times(layout: Layout, device: torch.device, tokens: int) -> tuple[float, float, bool]:
    """Median milliseconds of forward and of backward on this rank, and whether all gradients are finite."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.spec_utils import build_module

    from mcore_patches.attention.qsa import get_qsa_module_spec_for_backend
    from mcore_patches.cpu.models import CpuBackend, gpt_config

    config = gpt_config(
        "bf16",
        cp=layout.cp,
        experimental_attention_variant="qsa",
        qsa_indexer_n_heads=4,
        qsa_indexer_loss_coeff=1.0,
        attention_output_gate=True,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        **(REAL if device.type == "cuda" else TINY),
    )
    attention = build_module(get_qsa_module_spec_for_backend(config, CpuBackend()), config=config, layer_number=1)
    attention = attention.to(device=device, dtype=torch.bfloat16)
    embedding = RotaryEmbedding(config.kv_channels, 0.25, rotary_base=10_000_000, use_cpu_initialization=True)
    table = embedding(tokens * layout.cp)  # this rank's positions of it
    generator = torch.Generator().manual_seed(layout.rank)
    shape = tokens, 1, config.hidden_size
    hidden = torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()
    gradient = torch.randn(shape, generator=generator).bfloat16().to(device)
    times = []
    for _ in range(1 + REPEATS):  # the first one builds kernels and communicators
        attention.zero_grad()
        hidden.grad = None
        moments = [_moment(device)]
        out, _ = attention(hidden, None, rotary_pos_emb=table)
        moments.append(_moment(device))
        out.backward(gradient)
        moments.append(_moment(device))
        times.append((_milliseconds(*moments[:2]), _milliseconds(*moments[1:])))
        world.barrier()
    finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in attention.parameters())
    forward, backward = (statistics.median(kind) for kind in zip(*times[1:]))
    _clear_tracker()
    return forward, backward, finite


def _moment(device: torch.device) -> Any:
    """A place on this rank's time line."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    import time

    return time.perf_counter()


def _milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


def _clear_tracker() -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    DSAIndexerLossLoggingHelper.tracker.clear()
