"""What the tests run in launched processes: functions that yield named, plain results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from mcore_patches.cpu import checkpoint, hybrid
from mcore_patches.cpu.data import Batch, packed_batch, random_batch
from mcore_patches.cpu.models import (
    build_gpt,
    dsa_attention_spec,
    dsa_config,
    fused_indexer_declined,
    gpt_config,
    gqa_attention_spec,
    mla_attention_spec,
    mla_config,
    nope_dsa_config,
)
from mcore_patches.cpu.parallel import model_parallel
from mcore_patches.cpu.parameters import full_parameters, seed_parameters
from mcore_patches.cpu.shim import cpu_megatron
from mcore_patches.cpu.training import StepResult, build_optimizer, schedule_step, train_step, wrap_with_ddp

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of models."""

    config: Callable[..., Any]
    attention: Callable[..., Any]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, *, vp: int | None = None, **fields: Any) -> list[torch.nn.Module]:
        config = self.config(**{**self.fields, **fields}, virtual_pipeline_model_parallel_size=vp)
        chunks = [
            build_gpt(config, self.attention(config), vp_stage=stage) for stage in ([None] if vp is None else range(vp))
        ]
        seed_parameters(chunks)
        return chunks


NORMED = {"qk_layernorm": True}
KINDS = {
    "gqa": Kind(gpt_config, gqa_attention_spec),
    "gqa-normed": Kind(gpt_config, gqa_attention_spec, NORMED),
    "mla": Kind(mla_config, mla_attention_spec),
    "mla-normed": Kind(mla_config, mla_attention_spec, NORMED),
    "dsa": Kind(dsa_config, dsa_attention_spec, {"dtype": "fp32"}),
    "dsa-normed": Kind(dsa_config, dsa_attention_spec, {"dtype": "fp32", **NORMED}),
}
# A ReLU makes equal scores, and torch.topk picks among those as the tensor's layout has it.
TIELESS_DSA = Kind(dsa_config, dsa_attention_spec, {"dtype": "fp32", "dsa_indexer_scoring_relu": False})


def difference(result: StepResult, reference: StepResult) -> dict[str, Any]:
    """How two steps differ, the gradients of the indexer apart from the others."""
    mine, theirs = result.gradients, reference.gradients
    indexer = [name for name in theirs if "indexer" in name]
    errors = {
        name: ((mine[name] - gradient).norm() / gradient.norm()).item()
        for name, gradient in theirs.items()
        if name not in indexer
    }
    factors = {
        name: (mine[name].flatten() @ theirs[name].flatten() / theirs[name].norm() ** 2).item() for name in indexer
    }
    residuals = {
        name: ((mine[name] - factor * theirs[name]).norm() / mine[name].norm()).item()
        for name, factor in factors.items()
    }
    return {
        "same names": set(mine) == set(theirs),
        "count": len(theirs),
        "loss": abs(result.loss - reference.loss),
        "gradients": max(errors.items(), key=lambda item: item[1]),
        "indexer factors": sorted({round(factor, 4) for factor in factors.values()}),
        "indexer residual": max(residuals.values(), default=0.0),
    }


def mean_step(model: torch.nn.Module, batches: list[Batch]) -> StepResult:
    """The mean of plain steps, one a batch: what a schedule computes from as many microbatches of one size."""
    steps = [train_step(model, batch) for batch in batches]
    return StepResult(
        sum(step.loss for step in steps) / len(steps),
        {name: sum(step.gradients[name] for step in steps) / len(steps) for name in steps[0].gradients},
    )


def several(*functions: str) -> Iterator[tuple[str, Any]]:
    """The cases of several functions of this module, in one process."""
    for function in functions:
        yield function, dict(globals()[function]())


def one_process() -> Iterator[tuple[str, Any]]:
    """Training, megatron's schedule, optimizer and full recomputation, against plain steps."""
    batches = [random_batch(seed=seed) for seed in range(2)]
    with model_parallel():
        for name in ("gqa", "mla", "dsa"):
            kind = KINDS[name]
            for dtype in ("fp32", "bf16"):
                (model,) = kind.model(dtype=dtype)
                optimizer = torch.optim.Adam(model.parameters(), 1e-3)
                yield f"{name}-{dtype} losses", [train_step(model, batches[0], optimizer).loss for _ in range(5)]
        for name, kind in KINDS.items():
            (model,) = kind.model()
            reference = mean_step(model, batches)
            chunks = wrap_with_ddp(kind.model())
            optimizer = build_optimizer(chunks)
            step = schedule_step(chunks, batches, optimizer)
            yield f"{name} schedule", difference(step, reference)
            yield f"{name} optimizer", (step.loss, schedule_step(chunks, batches, optimizer).loss)
            step = schedule_step(wrap_with_ddp(kind.model(**FULL_RECOMPUTE)), batches)
            yield f"{name} recompute", difference(step, reference)


def two_ranks(folder: str) -> Iterator[tuple[str, Any]]:
    """Layouts of two ranks against plain steps, and sharded checkpoints between layouts."""
    batches = [random_batch(seed=seed) for seed in range(2)]
    references, weights = {}, {}
    with model_parallel() as layout:
        yield "dp", layout.dp
        for name, kind in KINDS.items():
            (model,) = kind.model()
            references[name] = mean_step(model, batches)
            weights[name] = full_parameters(model)
        # Each data-parallel rank takes one of the batches.
        step = schedule_step(wrap_with_ddp(KINDS["gqa"].model()), [batches[layout.dp_rank]])
        yield "gqa dp2", difference(step, references["gqa"])
    with model_parallel(tp=2):
        for name, kind in KINDS.items():
            chunks = kind.model(tp=2, sp=True)
            yield f"{name} tp2 weights", _equal(full_parameters(chunks), weights[name])
            checkpoint.save_checkpoint(chunks, Path(folder) / name)
            yield f"{name} tp2", difference(schedule_step(wrap_with_ddp(chunks), batches), references[name])
        step = schedule_step(wrap_with_ddp(KINDS["gqa"].model(tp=2)), batches)
        yield "gqa tp2 without sp", difference(step, references["gqa"])
        step = schedule_step(wrap_with_ddp(KINDS["mla-normed"].model(tp=2)), batches)
        yield (
            "mla-normed tp2 without sp",
            sorted(
                name.removeprefix("decoder.layers.1.")
                for name, gradient in references["mla-normed"].gradients.items()
                if name.startswith("decoder.layers.1.")
                and not torch.allclose(step.gradients[name], gradient, rtol=1e-3)
            ),
        )
    with model_parallel(pp=2):
        for name, kind in KINDS.items():
            chunks = wrap_with_ddp(kind.model(pp=2))
            yield f"{name} pp2", difference(schedule_step(chunks, batches), references[name])
            _zero(chunks)
            checkpoint.load_checkpoint(chunks, Path(folder) / name)
            yield f"{name} loaded from tp2", _equal(full_parameters(chunks), weights[name])
        yield "pp2 schedule", schedules.get_forward_backward_func().__name__
    deep = {"num_layers": 4}
    with model_parallel():
        (model,) = KINDS["gqa"].model(**deep)
        reference = mean_step(model, batches)
    with model_parallel(pp=2, virtual_pipeline_model_parallel_size=2):
        step = schedule_step(wrap_with_ddp(KINDS["gqa"].model(pp=2, vp=2, **deep)), batches)
        yield "gqa pp2 interleaved", difference(step, reference)
        yield "interleaved schedule", schedules.get_forward_backward_func().__name__


def context_parallel() -> Iterator[tuple[str, Any]]:
    """DSA on four ranks: context parallelism alone and with tensor parallelism, batched and packed."""
    kind = TIELESS_DSA
    batches = {"bshd": random_batch(seed=0), "thd": packed_batch([5, 23, 17, 9], multiple=8)}
    references = {}
    with model_parallel():
        (model,) = kind.model()
        for form, batch in batches.items():
            references[form] = train_step(model, batch)
    for name, layout, fields in (
        ("cp2", {"cp": 2}, {}),
        ("tp2 cp2", {"tp": 2, "cp": 2}, {"sp": True}),
        ("tp2 cp2 recompute", {"tp": 2, "cp": 2}, {"sp": True, **FULL_RECOMPUTE}),
    ):
        with model_parallel(**layout):
            for form, batch in batches.items():
                step = schedule_step(wrap_with_ddp(kind.model(**layout, **fields)), [batch])
                yield f"{name} {form}", difference(step, references[form])
    per_token = {"sp": True, "calculate_per_token_loss": True}
    with model_parallel(tp=2, cp=2):
        chunks = wrap_with_ddp(kind.model(tp=2, cp=2, **per_token))
        step = schedule_step(chunks, [batches["bshd"]], loss_form="sum_and_count")
        yield "tp2 cp2 per token", difference(step, references["bshd"])


def packed_and_selective() -> Iterator[tuple[str, Any]]:
    """What only 0.19 can: packed documents and selective recomputation with DSA."""
    kind = TIELESS_DSA
    lengths = [5, 23, 17, 9]
    with model_parallel():
        (model,) = kind.model()
        packed = packed_batch(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        alone = [
            train_step(
                model,
                Batch(
                    *(
                        tensor[:, start:end]
                        for tensor in (packed.tokens, packed.labels, packed.positions, packed.loss_mask)
                    )
                ),
            ).loss
            for start, end in pairwise(starts)
        ]
        yield (
            "packed",
            (
                train_step(model, packed).loss,
                train_step(model, packed_batch(lengths, multiple=8)).loss,
                sum(length * loss for length, loss in zip(lengths, alone)) / sum(lengths),
            ),
        )
        batch = random_batch(seed=0)
        (selective,) = kind.model(**SELECTIVE_RECOMPUTE)
        yield "selective", difference(train_step(selective, batch), train_step(model, batch))


def absorbed() -> Iterator[tuple[str, Any]]:
    """Models whose absorbed attention asks the fused kernel, which declines: the calls, and the training."""
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    fused = tilelang_dsa.fused_sparse_mla_absorbed
    calls: list[Any] = []

    def spy(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float, v_channels: int) -> Any:
        out = fused(query, key, indices, scale, v_channels)
        calls.append((tuple(query.shape), tuple(key.shape), tuple(indices.shape), str(query.dtype), v_channels, out))
        return out

    batch = random_batch(seed=0)
    with model_parallel():
        for name, fields in (
            ("nope", {}),
            ("unaligned", {"qk_pos_emb_head_dim": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 15}),
        ):
            steps = {}
            for backend in ("none", "tilelang"):
                config = nope_dsa_config(kernel_backend=backend, **fields)
                model = build_gpt(config, dsa_attention_spec(config))
                seed_parameters(model)
                originals = (tilelang_dsa.lighting_indexer, tilelang_dsa.lighting_indexer_indices)
                tilelang_dsa.fused_sparse_mla_absorbed = spy
                try:
                    with fused_indexer_declined():
                        steps[backend] = train_step(model, batch)
                        hidden = (tilelang_dsa.lighting_indexer, tilelang_dsa.lighting_indexer_indices)
                finally:
                    tilelang_dsa.fused_sparse_mla_absorbed = fused
                yield f"{name} {backend} calls", list(calls)
                calls.clear()
            yield f"{name} step", difference(steps["tilelang"], steps["none"])
            yield (
                f"{name} indexers",
                {
                    "hidden": hidden == (None, None),
                    "restored": originals == (tilelang_dsa.lighting_indexer, tilelang_dsa.lighting_indexer_indices),
                    "installed": None not in originals,
                },
            )


def hybrid_models() -> Iterator[tuple[str, Any]]:
    """A hybrid model of attention and MLP layers is the GPT with these in one layer."""
    batch = random_batch(seed=0)
    with model_parallel():
        for name, symbol in (("gqa", "*"), ("dsa", "D")):
            kind = KINDS[name]
            (gpt,) = kind.model()
            reference = train_step(
                gpt, batch
            )  # first: the deeper model must not trip over the indexer's log of this one
            config = kind.config(**kind.fields, num_layers=4)
            model = hybrid.build_hybrid(config, {symbol: kind.attention(config)}, f"{symbol}-{symbol}-")
            weights = full_parameters(gpt)
            with torch.no_grad():
                for name_in_hybrid, parameter in model.named_parameters():
                    parameter.copy_(weights[_name_in_gpt(name_in_hybrid)])
            step = train_step(model, batch)
            renamed = {_name_in_gpt(key): gradient for key, gradient in step.gradients.items()}
            yield name, difference(StepResult(step.loss, renamed), reference)


def refusals() -> Iterator[tuple[str, str]]:
    """Messages of the errors for bad input."""
    from mcore_patches.cpu.parallel import init_model_parallel

    yield "without shim", _message(init_model_parallel)
    with cpu_megatron():
        yield "does not divide", _message(init_model_parallel, tp=2)
        yield "size", _message(init_model_parallel, pp=0)
        yield "not initialised", _message(KINDS["gqa"].model)
    yield "dtype", _message(gpt_config, "fp16")
    yield "field", _message(mla_config, no_such_field=1)
    yield "no documents", _message(packed_batch, [])
    yield "empty document", _message(packed_batch, [3, 0])
    yield "odd shard", _message(random_batch(seq=6).context_parallel_shard, 0, 2)
    with model_parallel():
        yield "twice", _message(init_model_parallel)
        yield "sizes", _message(KINDS["gqa"].model, tp=2)
        config = gpt_config()
        yield "layers", _message(build_gpt, config, [gqa_attention_spec(config)] * 3)
        chunks = wrap_with_ddp(KINDS["gqa"].model())
        yield "microbatches", _message(schedule_step, chunks, [random_batch(seq=8), random_batch(seq=16)])
        yield "no microbatches", _message(schedule_step, chunks, [])
        yield "bf16 optimizer", _message(build_optimizer, wrap_with_ddp(KINDS["gqa"].model(dtype="bf16")))
        chunks[0].config.tensor_model_parallel_size = 2
        yield "plain step", _message(train_step, chunks[0], random_batch())


def release_refusals() -> Iterator[tuple[str, str]]:
    """Messages of the errors for what only newer releases have."""
    yield "kernel backend", _message(dsa_config, kernel_backend="tilelang")
    yield "fused indexer", _message(contextlib.ExitStack().enter_context, fused_indexer_declined())
    with model_parallel():
        config = gpt_config()
        yield "hybrid", _message(hybrid.build_hybrid, config, {"*": gqa_attention_spec(config)}, "*-")


def shards() -> Iterator[tuple[str, Any]]:
    """Context-parallel shards of a batch and of packed documents."""
    batch = random_batch(batch=1, seq=8)
    yield "bshd", [batch.context_parallel_shard(rank, 2).positions.tolist() for rank in range(2)]
    packed = packed_batch([3, 8], multiple=4)
    yield "thd", [packed.context_parallel_shard(rank, 2).positions.tolist() for rank in range(2)]
    yield "loss mask", [packed.context_parallel_shard(rank, 2).loss_mask.tolist() for rank in range(2)]
    yield "real", packed.packed.cu_seqlens_q.tolist()
    yield "padded", packed.packed.cu_seqlens_q_padded.tolist()
    plain = packed_batch([3, 8])
    yield (
        "same content",
        torch.equal(plain.tokens[0, :3], packed.tokens[0, :3])
        and torch.equal(plain.labels[0, 3:], packed.labels[0, 4:]),
    )


def _equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in theirs)


@torch.no_grad()
def _zero(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.zero_()


def _message(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _name_in_gpt(name: str) -> str:
    name = name.replace("decoder.final_norm", "decoder.final_layernorm")
    head, layers, rest = name.partition("decoder.layers.")
    if not layers:
        return name
    number, _, rest = rest.partition(".")
    return f"{head}{layers}{int(number) // 2}.{rest}"
