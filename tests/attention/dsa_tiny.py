"""Tiny DSA models, the same for 0.19's own DSA and for the layers of this package, and what they are compared by.

Everything that touches megatron is imported when it is called, inside the CPU shim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.attention.tiny import PACKED

REFERENCE = "0.19.2"
"""The release whose own DSA is the oracle."""

SPARSE = {"dsa_indexer_use_sparse_loss": True}
# name: (fields, packed documents, microbatches, form of the loss). One process of the reference runs each.
CASES: Mapping[str, tuple[dict[str, Any], bool, int, str]] = {
    "BSHD": ({}, False, 2, "mean"),
    "THD": ({}, True, 2, "mean"),
    "BSHD, sparse loss": (SPARSE, False, 2, "mean"),
    "THD, sparse loss": (SPARSE, True, 2, "mean"),
    "relu, interleaved, own epsilon": (
        {
            "dsa_indexer_n_heads": 16,
            "dsa_indexer_scoring_relu": True,
            "dsa_indexer_rope_interleaved": True,
            "dsa_indexer_k_norm_epsilon": 1e-3,
            "dsa_indexer_k_norm_fp32": True,
        },
        True,
        2,
        "mean",
    ),
    "half rotated, interleaved": (
        {"rotary_percent": 0.5, "dsa_indexer_rope_interleaved": True, **SPARSE},
        True,
        1,
        "mean",
    ),
    "yarn, no norms": (
        {
            "rope_type": "yarn",
            "qk_layernorm": False,
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        True,
        2,
        "mean",
    ),
    "no query latent": ({"q_lora_rank": None, "qk_layernorm": False, **SPARSE}, False, 2, "mean"),
    "shared selection": ({"dsa_indexer_topk_freq": 2, "num_layers": 4}, True, 2, "mean"),
    "no loss": ({"dsa_indexer_loss_coeff": 0.0}, True, 2, "mean"),
    "per token": ({"calculate_per_token_loss": True, **SPARSE}, True, 2, "sum_and_count"),
    "1 microbatch": (SPARSE, True, 1, "mean"),
    "4 microbatches": (SPARSE, True, 4, "mean"),
}

FEW = ("BSHD, sparse loss", "THD", "yarn, no norms", "4 microbatches")
"""Those that run on every release."""


def dsa_config(
    fields: Mapping[str, Any],
    layout: Mapping[str, Any] | None = None,
    *,
    opt_in: bool = True,
) -> Any:
    """`dsa_config` with norms of the latents and without what rounds (the rotation) or ties (relu) in fp32."""
    from mcore_patches.cpu.models import dsa_config as tiny

    defaults: dict[str, Any] = {
        "qk_layernorm": True,
        "dsa_indexer_scoring_relu": False,
        "dsa_indexer_rotate_activation": False,
    }
    if opt_in:
        defaults["dsa_kernel_backend"] = "tilelang"
    sizes = {name: size for name, size in (layout or {}).items() if name != "vp"}
    return tiny(**{"dtype": "fp32", **defaults, **sizes, **fields})


def dsa_spec(config: Any) -> Any:
    """What the release's own spec function gives, patched or not."""
    import megatron.core.models.gpt.experimental_attention_variant_module_specs as specs

    from mcore_patches.cpu.models import CpuBackend

    return specs.get_experimental_attention_variant_module_spec(config, CpuBackend())


def batches(packed: bool, count: int) -> list[Any]:
    """Two sequences of 32, or documents of odd lengths, padded to multiples of 8."""
    from mcore_patches.cpu.data import packed_batch, random_batch

    return [packed_batch(PACKED, multiple=8, seed=s) if packed else random_batch(2, 32, seed=s) for s in range(count)]


def reference(cases: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(case, (loss, gradients as arrays, tracked losses)) of the reference's own DSA in one process.

    Its documents are not padded: it counts padding in the indexer's loss. Arrays, as releases differ in how they
    pickle tensors.
    """
    from mcore_patches.cpu import parallel
    from mcore_patches.cpu.data import packed_batch, random_batch
    from mcore_patches.cpu.models import build_gpt
    from mcore_patches.cpu.parameters import seed_parameters
    from mcore_patches.cpu.training import schedule_step, wrap_with_ddp
    from tests.attention.cases import tracked

    for name in cases:
        fields, packed, count, form = CASES[name]
        with parallel.model_parallel():
            config = dsa_config(fields, opt_in=False)
            model = build_gpt(config, dsa_spec(config))
            seed_parameters(model)
            data = [packed_batch(PACKED, seed=s) if packed else random_batch(2, 32, seed=s) for s in range(count)]
            step = schedule_step(wrap_with_ddp(model), data, loss_form=form)  # type: ignore[arg-type]
            gradients = {parameter: gradient.numpy() for parameter, gradient in step.gradients.items()}
            yield name, (step.loss, gradients, tracked())


@contextlib.contextmanager
def no_ties() -> Iterator[list[int]]:
    """Assert of every selection inside that the scores around the cut differ: `torch.topk` leaves ties open.

    Yields:
        A list that gains, for each selection, the rows that had to leave keys out.
    """
    from mcore_patches.attention.dsa import core

    select, cut = core.block_topk.select_blocks, []

    def checked(queries: Tensor, keys: Tensor, pos: Tensor, start: Tensor, **settings: Any) -> Tensor:
        scores = torch.einsum("qhd,kd->qhk", queries.double(), keys.double())
        scores = scores.relu() if settings["relu"] else scores
        scores = (scores * settings["weights"].double().unsqueeze(-1)).sum(dim=1)
        place = torch.arange(len(keys)) - start[:, None]
        scores = scores.masked_fill((place < 0) | (place > pos[:, None]), -torch.inf)
        topk = settings["topk"]
        if scores.shape[1] > topk:
            ranked = scores.sort(dim=1, descending=True).values
            gap, scale = ranked[:, topk - 1] - ranked[:, topk], ranked[:, 0].abs()
            leaves_out = ranked[:, topk] > -torch.inf
            assert (gap > 1e-6 * scale)[leaves_out].all(), "scores tie at the cut"
            cut.append(int(leaves_out.sum()))
        return select(queries, keys, pos, start, **settings)

    core.block_topk.select_blocks = checked
    try:
        yield cut
    finally:
        core.block_topk.select_blocks = select
