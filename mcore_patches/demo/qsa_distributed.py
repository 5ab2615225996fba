"""Train a tiny QSA GPT over several processes on a CPU, in any layout that the patch supports:

    torchrun --nproc-per-node 4 -m mcore_patches.demo.qsa_distributed --tp 2 --cp 2

What the sizes leave of the processes is data parallel. Documents of odd lengths are packed (THD); sequence parallelism
is on with tensor parallelism. Prints the language-model loss and the indexer's loss of each layer after each step.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import mcore_patches
from mcore_patches.cpu import parallel
from mcore_patches.cpu.data import Batch, packed_batch
from mcore_patches.demo.corpus import tokens
from mcore_patches.demo.device import quiet

_LENGTHS = (37, 50, 21, 84)
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    # Later releases of torch rename collectives that megatron calls by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    trained = []
    with quiet(), parallel.model_parallel(options.tp, options.cp, options.pp) as layout:
        mcore_patches.apply_patches("qsa", strict=True)
        for step, (loss, indexer) in enumerate(train(options, layout)):
            trained.append(sum(indexer) if options.stage == "warmup" else loss)
            if layout.rank == 0:
                shown = " ".join(f"{value:.4f}" for value in indexer)
                print(f"step {step + 1:3d}  loss {loss:.4f}  indexer loss by layer {shown}", flush=True)
    return 0 if len(trained) == 1 or trained[-1] < trained[0] else 1


def train(options: argparse.Namespace, layout: parallel.Layout) -> Iterator[tuple[float, list[float]]]:
    """Yields after each step the mean loss per token and megatron's tracked indexer loss of each layer."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    from mcore_patches.attention.qsa import freeze_backbone, get_qsa_module_spec_for_backend
    from mcore_patches.cpu.models import CpuBackend, build_gpt, gpt_config
    from mcore_patches.cpu.training import build_optimizer, schedule_step, wrap_with_ddp

    config = gpt_config(
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        sp=layout.tp > 1,
        experimental_attention_variant="qsa",
        qsa_stage=options.stage,
        qsa_indexer_n_heads=4,
        qsa_indexer_head_dim=16,
        qsa_indexer_budget=16,
        qsa_indexer_compress_ratio=4,
        qsa_indexer_loss_coeff=None if options.stage == "frozen" else 1.0,
        attention_output_gate=True,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        **_RECOMPUTE[options.recompute],
    )
    model = build_gpt(config, get_qsa_module_spec_for_backend(config, CpuBackend()), rotary_percent=0.5)
    if options.stage == "warmup":
        freeze_backbone(model)
    chunks = wrap_with_ddp(model)
    optimizer = build_optimizer(chunks, lr=options.lr)
    tracker = DSAIndexerLossLoggingHelper
    for step in range(options.steps):
        microbatches = [
            _packed_text(seed=(step * options.microbatches + number) * layout.dp + layout.dp_rank, layout=layout)
            for number in range(options.microbatches)
        ]
        result = schedule_step(chunks, microbatches, optimizer)
        tracker.reduce_loss_in_tracker()
        indexer = [value / options.microbatches for value in tracker.tracker.get("values", torch.zeros(0)).tolist()]
        tracker.clean_loss_in_tracker()
        yield result.loss, indexer


def _packed_text(seed: int, layout: parallel.Layout) -> Batch:
    """Passages of the demo's text as packed documents, padded as the layout needs."""
    text = tokens()
    generator = torch.Generator().manual_seed(seed)
    multiple = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
    batch = packed_batch(_LENGTHS, multiple=multiple, seed=seed)
    at = 0
    for length in _LENGTHS:
        start = int(torch.randint(0, len(text) - length, (), generator=generator))
        passage = text[start : start + length + 1]
        batch.tokens[0, at : at + length], batch.labels[0, at : at + length] = passage[:-1], passage[1:]
        at += length + -length % multiple
    return batch


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m mcore_patches.demo.qsa_distributed",
        description="Train a tiny QSA GPT over several processes on a CPU. Exit status 1 if what trains did not fall.",
    )
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{meaning}-parallel size, default 1")
    parser.add_argument("--stage", choices=("frozen", "warmup", "sparse"), default="sparse", help="default %(default)s")
    parser.add_argument("--recompute", choices=tuple(_RECOMPUTE), default="none", help="default %(default)s")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default %(default)s")
    parser.add_argument("--microbatches", type=int, default=2, metavar="N", help="a step, default %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate, default %(default)s")
    options = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", 1))
    for name in ("tp", "cp", "pp", "steps", "microbatches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if world % (options.tp * options.cp * options.pp):
        parser.error(f"--tp {options.tp} x --cp {options.cp} x --pp {options.pp} must divide the {world} processes")
    if options.pp > 2:
        parser.error(f"--pp {options.pp}: the model has 2 layers, so at most 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
