"""dsa_shared_topk: layers that share the index's top-k read that of their own forward pass, also when recomputed.

With `dsa_indexer_topk_freq` > 1 most DSA layers take the ids that an earlier layer selected. megatron-core 0.19 keeps
these on the batch's PackedSeqParams, else on the attention mask, else on the config, which outlives the forward pass.
Several passes may be under way (pipelines, accumulated losses): the recomputation of one then attends what a later
batch selected, without an error. And a checkpoint hands its recomputation another mask tensor, without the ids.

Here each forward pass has a carrier of its own. Whatever runs in a checkpoint notes the carrier that it used, and its
recomputation uses that one. A pass has begun when a layer that selects finds its own ids in the newest carrier. A
recomputation by another checkpoint than megatron's gets the newest carrier of its config or PackedSeqParams, which is
what megatron does. Upstream: NVIDIA/Megatron-LM#6793.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from mcore_patches.overlay.copies import with_globals
from mcore_patches.overlay.patch import Below, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_CHECKPOINT = "megatron.core.tensor_parallel.random"
_TE = "megatron.core.extensions.transformer_engine"


class Carrier:
    """Holds, as attributes that megatron sets, what the selecting layers of one forward pass selected."""


Used = dict[int, Carrier]
"""id of a config or PackedSeqParams -> the carrier in use for it."""


class _Underway(threading.local):
    """What this thread is in: noting are checkpoints in their first pass, replayed is what a recomputation has."""

    def __init__(self) -> None:
        self.noting: tuple[Used, ...] = ()
        self.replayed: Used | None = None


_underway = _Underway()
_newest: dict[int, tuple[weakref.ref[Any], Carrier]] = {}
"""id of a config or PackedSeqParams -> itself, and the carrier of the newest forward pass. Both compare by value, and
a config is copied and pickled, so neither can be a key, nor hold the carrier."""


def carrier_of(owner: object, holder: str, layer_number: int, selects: bool) -> Carrier:
    """The carrier of the forward pass that runs.

    Args:
        owner: config or PackedSeqParams of the pass. holder: attribute of a carrier that maps numbers of layers to ids.
        layer_number, selects: of the layer that asks, and whether it selects by itself.
    """
    replayed = _underway.replayed
    if replayed is not None and id(owner) in replayed:
        carrier = replayed[id(owner)]
    else:
        carrier = _newest_of(owner)
        if selects and layer_number in getattr(carrier, holder, ()) and not _recomputes():
            carrier = _renewed(owner)
    for used in _underway.noting:
        used[id(owner)] = carrier
    return carrier


def _newest_of(owner: object) -> Carrier:
    entry = _newest.get(id(owner))
    return entry[1] if entry is not None and entry[0]() is owner else _renewed(owner)


def _renewed(owner: object) -> Carrier:
    key, carrier = id(owner), Carrier()

    def forget(dead: weakref.ref[Any]) -> None:
        entry = _newest.get(key)
        if entry is not None and entry[0] is dead:
            del _newest[key]

    _newest[key] = (weakref.ref(owner, forget), carrier)
    return carrier


def _recomputes() -> bool:
    """Whether this runs inside a backward pass, where only a recomputation would run forward."""
    import torch

    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint's function that notes the carriers of its first call and has the same ones in later calls."""
    used: Used = {}
    called = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        first, called = not called, True
        with _noting(used) if first else _replaying(used):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _noting(used: Used) -> Iterator[None]:
    before = _underway.noting
    _underway.noting = (*before, used)
    try:
        yield
    finally:
        _underway.noting = before


@contextlib.contextmanager
def _replaying(used: Used) -> Iterator[None]:
    before = _underway.replayed
    _underway.replayed = used
    try:
        yield
    finally:
        _underway.replayed = before


def build_carrier(below: Below) -> Callable[..., Any]:
    def _get_index_share_carrier(self: Any, packed_seq_params: Any, attention_mask: Any) -> object:
        owner = self.config if packed_seq_params is None else packed_seq_params
        return carrier_of(owner, self._HOLDER_ATTR, self.layer_number, not self.skip_topk)

    return _get_index_share_carrier


def build_checkpoint(below: Below) -> Callable[..., Any]:
    def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        return below.call(carried(function), distribute_saved_activations, *args)

    return checkpoint


def build_te_checkpoint(below: Below) -> Callable[..., Any]:
    def te_checkpoint(
        forward_func: Callable[..., Any],
        distribute_saved_activations: Any,
        get_rng_state_tracker: Any,
        tp_group: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        function = carried(forward_func)
        return below.call(function, distribute_saved_activations, get_rng_state_tracker, tp_group, *args, **kwargs)

    return te_checkpoint


def probe(probing: Probing) -> Finding:
    """Two forward passes with full recomputation, of which the first is then recomputed: whose ids does it read?

    Runs a copy of megatron's function for full recomputation with a stand-in for the checkpoint and for the layer.
    """
    import torch
    from megatron.core import recompute

    attention_class = probing.modules[f"{_DSA}:DSAttention._get_index_share_carrier"].DSAttention  # type: ignore[attr-defined]
    attention = attention_class.__new__(attention_class)
    torch.nn.Module.__init__(attention)
    attention.config = SimpleNamespace(
        distribute_saved_activations=False,
        dsa_indexer_topk_freq=2,
        experimental_attention_variant="dsa",
        fp4=None,
        fp8=None,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    attention.layer_number, attention.skip_topk = 1, False
    selected: list[str] = []
    read: list[str] = []
    functions: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def layer(hidden_states: Any, attention_mask: Any, packed_seq_params: Any, **_: Any) -> Any:
        holder = attention._get_index_share_topk_holder(packed_seq_params, attention_mask)
        if selected:
            holder[1] = selected.pop()
        read.append(holder.get(1))
        return hidden_states

    def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        functions.append((function, args))
        return function(*args)

    stand_in = SimpleNamespace(checkpoint=checkpoint)
    function = with_globals(recompute, recompute.checkpointed_forward, tensor_parallel=stand_in)
    block = SimpleNamespace(config=attention.config, layers=[layer], num_layers_per_pipeline_rank=1, pg_collection=None)
    for ids in ("first", "second"):
        selected.append(ids)
        function(block, torch.zeros(1), None, None, None, None, None, None, False)
    first, arguments = functions[0]
    first(*arguments)
    if read[:2] != ["first", "second"]:
        return Finding(False, f"undecidable: two forward passes read {read[:2]}")
    return Finding(read[2] == "first", f"a recomputation of the first of two forward passes reads the {read[2]} one's")


PATCH = Patch(
    id="dsa_shared_topk",
    summary="DSA layers that share a top-k read that of their own forward pass, also when recomputed",
    upstream="NVIDIA/Megatron-LM#6793",
    delete_when="the pinned release keeps shared ids by forward pass: status() says UPSTREAM_FIXED",
    releases=Releases((0, 19, 0), None),
    late_safe=True,
    probe=probe,
    targets=(
        Target(
            modules=(_DSA,),
            qualname="DSAttention._get_index_share_carrier",
            # Who asks for a carrier and what they do with it: two attributes, written after they were read.
            relies_on=(
                "DSAttention._get_index_share_topk_holder",
                "DSAttention._get_index_share_topk_length_holder",
                "DSAttention.__init__",
                "DSAttention.forward",
            ),
            releases=Releases((0, 19, 0), None),
            build=build_carrier,
            known={
                # 0.19.0, 0.19.2
                "98e33b5fafce50a474dcd03f9abf63135eb73b8957699c70e4df48909d0df775": "needs",
            },
        ),
        Target(
            modules=(_CHECKPOINT,),
            qualname="checkpoint",
            relies_on=("CheckpointFunction",),
            releases=Releases((0, 19, 0), None),
            build=build_checkpoint,
            known={
                # 0.19.0, 0.19.2
                "440ca0edc76db98fa6245007ebcb880b3aa9957e51b20a908f87f95476c7445e": "needs",
            },
        ),
        Target(
            modules=(_TE,),
            qualname="te_checkpoint",
            releases=Releases((0, 19, 0), None),
            build=build_te_checkpoint,
            known={
                # 0.19.0, 0.19.2
                "e35cadd4c22e1cd2844813b505dea3218db11d7b9321418df3a1c7a19d9c8d70": "needs",
            },
        ),
    ),
)
