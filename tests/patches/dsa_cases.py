"""What the tests of the DSA patches run in launched processes, on megatron-core 0.19: (case, what it measured)."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

import mcore_patches
from mcore_patches.cpu.data import Batch, packed_batch, random_batch
from mcore_patches.cpu.models import build_gpt, dsa_attention_spec, fused_indexer_declined, nope_dsa_config
from mcore_patches.cpu.parallel import model_parallel
from mcore_patches.cpu.parameters import full_gradients, seed_parameters
from mcore_patches.cpu.training import StepResult, schedule_step, train_step, wrap_with_ddp
from mcore_patches.overlay.errors import DeclinedError
from tests.cpu.cases import FULL_RECOMPUTE, SELECTIVE_RECOMPUTE, TIELESS_DSA, difference, mean_step

CP_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mean": ("bshd", {}, "mean"),
    "sum and count": ("bshd", {}, "sum_and_count"),
    "sparse loss": ("bshd", {"dsa_indexer_use_sparse_loss": True}, "sum_and_count"),
    "sparse loss, packed": ("thd", {"dsa_indexer_use_sparse_loss": True}, "mean"),
    "per token": ("bshd", {"calculate_per_token_loss": True}, "sum_and_count"),
    "scaled": ("bshd", {"grad_scale_func": lambda loss: 8 * loss}, "sum_and_count"),
}
"""Name -> form of the batches, fields of the config, form of the loss function."""


def cp_gradient() -> Iterator[tuple[str, Any]]:
    """Two microbatches on two context-parallel ranks against one process, as released and with dsa_cp_gradient."""
    batches = {
        "bshd": [random_batch(seed=seed) for seed in range(2)],
        # Lengths that need no padding, which this release's loss of the indexer would count.
        "thd": [packed_batch([12, 24, 4, 8], seed=seed) for seed in range(2)],
    }
    references = {}
    with model_parallel():
        for name, (form, fields, _) in CP_CASES.items():
            own = {k: v for k, v in fields.items() if k == "dsa_indexer_use_sparse_loss"}
            references[name] = mean_step(TIELESS_DSA.model(**own)[0], batches[form])
    for ids in ((), ("dsa_cp_gradient", "qsa")):
        if ids:
            report = mcore_patches.apply_patches(ids, strict=True)
            assert all(report[i].state == "APPLIED" for i in ids), str(report)
        with model_parallel(cp=2):
            for name, (form, fields, loss_form) in CP_CASES.items():
                step = schedule_step(
                    wrap_with_ddp(TIELESS_DSA.model(cp=2, **fields)),
                    batches[form],
                    loss_form=loss_form,  # type: ignore[arg-type]
                )
                if "grad_scale_func" in fields:  # no optimizer here takes the factor out again
                    step.gradients.update({n: g / 8 for n, g in step.gradients.items()})
                yield f"{name}, {'patched' if ids else 'released'}", difference(step, references[name])


SHARED = {"num_layers": 4, "dsa_indexer_topk_freq": 2}
"""Layers 1 and 3 select, 2 and 4 take their ids."""
RECOMPUTATIONS = {"full": FULL_RECOMPUTE, "core_attn": SELECTIVE_RECOMPUTE}


def two_at_once(
    batches: list[Batch], fields: dict[str, Any], *, masked: bool = False, in_turn: bool = False
) -> StepResult:
    """Forward passes of two batches and then their backward passes, or one batch after the other; summed gradients."""
    (model,) = TIELESS_DSA.model(**SHARED, **fields)
    losses = []
    for batch in batches:
        # True hides a key; the layers are causal, whatever the mask says.
        mask = torch.ones(1, 1, batch.size[1], batch.size[1], dtype=torch.bool).triu(1) if masked else None
        packed = {} if batch.packed is None else {"packed_seq_params": batch.packed}
        out = model(batch.tokens, batch.positions, mask, labels=batch.labels, **packed)
        losses.append((out.float() * batch.loss_mask).sum() / batch.loss_mask.sum())
        if in_turn:
            losses[-1].backward()
    for loss in [] if in_turn else losses:
        loss.backward()
    return StepResult(sum(loss.item() for loss in losses), full_gradients(model))


def shared_topk() -> Iterator[tuple[str, Any]]:
    """Two batches under way at once, recomputed, against one after the other without; then the same on a pipeline."""
    batches = {
        "bshd": [random_batch(seed=seed) for seed in range(2)],
        "thd": [packed_batch([12, 24, 4, 8], seed=seed) for seed in range(2)],
    }
    # A trainer may hand all microbatches of equal lengths the same object.
    batches["thd, one PackedSeqParams"] = [
        dataclasses.replace(batch, packed=batches["thd"][0].packed) for batch in batches["thd"]
    ]
    references: dict[str, StepResult] = {}
    four = [random_batch(seed=seed) for seed in range(4)]
    with model_parallel():
        for form in batches:
            references[form] = two_at_once(batches[form], {}, in_turn=True)
        references["pp2"] = mean_step(TIELESS_DSA.model(**SHARED)[0], four)
    for ids in ((), ("dsa_shared_topk",)):
        if ids:
            row = mcore_patches.apply_patches(ids, strict=True)["dsa_shared_topk"]
            assert row.state == "APPLIED", row
        how = "patched" if ids else "released"
        with model_parallel():
            for form, pair in batches.items():
                for name, fields in RECOMPUTATIONS.items():
                    yield f"{form}, {name}, {how}", difference(two_at_once(pair, fields), references[form])
            yield f"none, {how}", difference(two_at_once(batches["bshd"], {}), references["bshd"])
            for name, fields in RECOMPUTATIONS.items():
                try:
                    found: Any = difference(two_at_once(batches["bshd"], fields, masked=True), references["bshd"])
                except RuntimeError as error:
                    found = str(error)
                yield f"masked, {name}, {how}", found
            (model,) = TIELESS_DSA.model(**SHARED)
            model(batches["bshd"][0].tokens, batches["bshd"][0].positions, None, labels=batches["bshd"][0].labels)
            yield f"on the config, {how}", [name for name in vars(model.config) if "holder" in name]
        with model_parallel(pp=2):
            for name, fields in RECOMPUTATIONS.items():
                step = schedule_step(wrap_with_ddp(TIELESS_DSA.model(pp=2, **SHARED, **fields)), four)
                yield f"pp2, {name}, {how}", difference(step, references["pp2"])


def declines() -> Iterator[tuple[str, Any]]:
    """Declined hooks of a model whose backend is TileLang: what is counted and logged; nothing else changes."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("mcore_patches").addHandler(handler)
    batch = random_batch(seed=0)

    def step(backend: str = "tilelang", **fields: Any) -> StepResult:
        config = nope_dsa_config(kernel_backend=backend, **fields)
        model = build_gpt(config, dsa_attention_spec(config))
        seed_parameters(model)
        with fused_indexer_declined():
            return train_step(model, batch)

    def found(*ids: str) -> dict[str, Any]:
        status = mcore_patches.status()
        logged, records[:] = list(records), []
        return {"logged": logged, **{i: status[i].counters for i in ids}}

    sparse = {"dsa_indexer_use_sparse_loss": True}
    with model_parallel():
        released = step(**sparse)
        mcore_patches.apply_patches("dsa_declines", strict=True)
        again = [step(**sparse) for _ in range(2)]
        yield (
            "same",
            all(
                each.loss == released.loss
                and all(torch.equal(g, each.gradients[n]) for n, g in released.gradients.items())
                for each in again
            ),
        )
        yield "sparse loss", found("dsa_declines")
        step(**sparse, backend="none")
        yield "no backend", found("dsa_declines")
        mcore_patches.revert("dsa_declines")
        mcore_patches.apply_patches(["dsa_declines", "sparse_mla_nope", "sparse_mla_fast"], strict=True)
        step()
        yield "loss over all keys", found("dsa_declines", "sparse_mla_nope")
        os.environ["MCORE_PATCHES_ON_DECLINE"] = "raise"
        try:
            step()
        except DeclinedError as error:
            yield "raised", str(error)
        del os.environ["MCORE_PATCHES_ON_DECLINE"]
