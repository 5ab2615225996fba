"""What the tests of the DSA patches run in launched processes, on megatron-core 0.19: (case, what it measured)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mcore_patches
from mcore_patches.cpu.data import packed_batch, random_batch
from mcore_patches.cpu.parallel import model_parallel
from mcore_patches.cpu.training import schedule_step, wrap_with_ddp
from tests.cpu.cases import TIELESS_DSA, difference, mean_step

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
