"""dsa_cp_gradient: the DSA indexer's gradient under context parallelism is that of one process, not cp_size times it.

The indexer's loss of a rank is the mean over the rank's own query rows, as the main loss of a rank is over its tokens,
and DDP averages gradients over data- and context-parallel ranks. megatron-core 0.19's schedules multiply the scale of
the indexer's loss by cp_size all the same, unless `calculate_per_token_loss`: `cp_size` belongs to losses that are
divided by the rows of all context-parallel ranks. With `calculate_per_token_loss` the loss is a sum, and its scale
right. A hook of the user's own, `experimental_attention_variant_loss_scale_func`, gets what megatron gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mcore_patches.overlay.copies import with_globals
from mcore_patches.overlay.patch import Below, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases

_EAV = "megatron.core.transformer.experimental_attention_variant"
_HOOK = "_get_experimental_attention_variant_loss_scale_func"


def build(below: Below) -> Callable[..., Any]:
    """Make the replacement for one live `schedules` module."""
    module: Any = below.module

    def forward_step_calc_loss(
        model: Any,
        output_tensor: Any,
        loss_func: Any,
        config: Any,
        vp_stage: Any,
        collect_non_loss_data: Any,
        num_microbatches: int,
        forward_data_store: Any,
        cp_group_size: int | None = None,
        is_last_stage: bool | None = None,
    ) -> Any:
        result = below.call(
            model,
            output_tensor,
            loss_func,
            config,
            vp_stage,
            collect_non_loss_data,
            num_microbatches,
            forward_data_store,
            cp_group_size,
            is_last_stage,
        )
        if cp_group_size != 1 and not config.calculate_per_token_loss:
            set_loss_scale = _dsa_hook(module, config)
            if set_loss_scale is not None:
                device = module.get_tensor_device(output_tensor)
                set_loss_scale(module._compute_loss_scale(config, device) / num_microbatches)
        return result

    return forward_step_calc_loss


def _dsa_hook(module: Any, config: Any) -> Callable[..., None] | None:
    """`DSAIndexerLossAutoScaler.set_loss_scale` where that is what the schedule calls, else None."""
    hook = getattr(module, _HOOK)(config)
    if getattr(hook, "__qualname__", "") == "DSAIndexerLossAutoScaler.set_loss_scale":
        return hook
    return None


def probe(probing: Probing) -> Finding:
    """The scale that a schedule of one microbatch and two context-parallel ranks sets: 1 is right, 2 is the fault."""
    import torch

    (module,), (original,) = probing.modules.values(), probing.originals.values()
    scales: list[float] = []
    function = with_globals(module, original, **{_HOOK: lambda config: lambda scale: scales.append(float(scale))})
    config = SimpleNamespace(
        calculate_per_token_loss=False,
        experimental_attention_variant="dsa",
        grad_scale_func=None,
        mtp_num_layers=None,
        num_moe_experts=None,
        timers=None,
    )
    function(None, torch.zeros(1), None, config, None, False, 1, [], 2, False)
    if len(scales) != 1:
        return Finding(False, f"undecidable: it sets {len(scales)} scales for a microbatch instead of one")
    return Finding(scales[0] == 1.0, f"with two context-parallel ranks it scales the indexer's loss by {scales[0]:g}")


PATCH = Patch(
    id="dsa_cp_gradient",
    summary="the DSA indexer's gradient under context parallelism is that of one process, not cp_size times it",
    upstream="not sent upstream",
    delete_when="the pinned release's schedules scale the indexer's loss without cp_size: status() says UPSTREAM_FIXED",
    releases=Releases((0, 19, 0), None),
    late_safe=True,
    probe=probe,
    targets=(
        Target(
            modules=("megatron.core.pipeline_parallel.schedules",),
            qualname="forward_step_calc_loss",
            relies_on=(
                # Which function sets the scale, and what the schedule multiplies it by besides cp_size.
                _HOOK,
                "_compute_loss_scale",
                # What the scale is for: a mean over the rank's own rows.
                f"{_EAV}.dsa:DSAIndexerLossAutoScaler",
                f"{_EAV}.dsa_indexer_loss:reduce_indexer_kl_sum",
            ),
            releases=Releases((0, 19, 0), None),
            build=build,
            known={
                # 0.19.0, 0.19.2
                "752bd85a779c5bbb6e1e9526e0d01981078fbb05135445470882d6df9e72546e": "needs",
            },
        ),
    ),
)
