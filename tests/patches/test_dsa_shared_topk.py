"""dsa_shared_topk: whose top-k a recomputed layer reads, in real models and where passes and checkpoints interleave."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mcore_patches
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.patch import Below, State
from mcore_patches.patches import dsa_shared_topk
from tests import releases
from tests.launching import run
from tests.overlay.isolation import isolated
from tests.patches.edited_release import state_in

ID = "dsa_shared_topk"
DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
NEWEST_FIRST = [pytest.param("0.19.2"), pytest.param("0.19.0", marks=pytest.mark.thorough)]
TOLERANCE = 1e-5


@pytest.mark.parametrize("release", NEWEST_FIRST)
def test_passes_under_way_at_once_equal_one_after_the_other(release: str) -> None:
    """Forward, forward, backward, backward in one process, and four microbatches on a pipeline of two stages."""
    for cases in run("tests.patches.dsa_cases:shared_topk", nprocs=2, release=release):
        assert len(cases) == 24
        for name, found in cases.items():
            form, *_, how = name.split(", ")
            if form == "on the config":
                assert bool(found) == (how == "released"), name
            elif how == "patched" or name.startswith(("none", "thd, full", "thd, core")):
                assert found["same names"], name
                assert found["indexer factors"] == pytest.approx([1.0], abs=1e-4), name
                assert max(found["loss"], found["gradients"][1], found["indexer residual"]) < TOLERANCE, (name, found)
            elif form == "masked":
                assert "needs top-k indices from source computing layer" in found, name
            else:
                assert found["gradients"][1] > 0.1, (name, "the fault is gone")


@pytest.mark.parametrize("release", ["0.18.2", "0.19.0", "0.19.2"])
@isolated()
def test_every_release_has_the_known_texts(release: str) -> None:
    sys.path.insert(0, str(releases.path(release)))
    row = mcore_patches.status()[ID]
    if release == "0.18.2":
        assert row.state is State.OUT_OF_RANGE
    else:
        assert row.decision is State.PENDING
        assert [target.verdict for target in row.targets] == ["needs"] * 3


# Carriers -------------------------------------------------------------------------------------------------------------

HOLDER = "holder"


class Owner:
    """Stands for a config: compares by value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner)

    __hash__ = None  # type: ignore[assignment]


def select(owner: Owner, layer: int, ids: str) -> None:
    carrier = dsa_shared_topk.carrier_of(owner, HOLDER, layer, True)
    if not hasattr(carrier, HOLDER):
        setattr(carrier, HOLDER, {})
    getattr(carrier, HOLDER)[layer] = ids


def read(owner: Owner, layer: int) -> Any:
    return getattr(dsa_shared_topk.carrier_of(owner, HOLDER, layer + 1, False), HOLDER, {}).get(layer)


def checkpointed(owner: Owner, layer: int, ids: str | None = None) -> Any:
    """A checkpoint around a layer that selects, or around one that reads."""
    function = dsa_shared_topk.carried(lambda: select(owner, layer, ids) if ids is not None else read(owner, layer))
    first = function()
    assert ids is not None or first is not None
    return function


@isolated()
def test_each_pass_has_its_own_carrier() -> None:
    config = Owner()
    readers = []
    for ids in ("first", "second", "third"):
        checkpointed(config, 1, ids)
        readers.append(checkpointed(config, 1))
    for _ in range(2):  # a graph may be kept for another backward pass
        assert [reader() for reader in readers] == ["first", "second", "third"]


@isolated()
def test_a_recomputed_selection_replaces_that_of_its_own_pass_only() -> None:
    config = Owner()
    first, reader = checkpointed(config, 1, "first"), checkpointed(config, 1)
    second, reader_of_second = checkpointed(config, 1, "second"), checkpointed(config, 1)
    first()
    second()
    assert (reader(), reader_of_second(), read(config, 1)) == ("first", "second", "second")


@isolated()
def test_chunks_of_an_interleaved_pipeline_share_a_config() -> None:
    """Microbatches 0 and 1 through the chunk with layer 1, then both through that with layer 5."""
    config = Owner()
    readers = {}
    for layer in (1, 5):
        for microbatch in (0, 1):
            checkpointed(config, layer, f"layer {layer} of {microbatch}")
            readers[layer, microbatch] = checkpointed(config, layer)
    for (layer, microbatch), reader in readers.items():
        assert reader() == f"layer {layer} of {microbatch}"


@isolated()
def test_a_checkpoint_inside_a_checkpoint() -> None:
    config = Owner()
    inner: list[Any] = []

    def block() -> None:
        select(config, 1, "first")
        inner.append(checkpointed(config, 1))

    outer = dsa_shared_topk.carried(block)
    outer()
    select(config, 1, "second")
    outer()
    assert [reader() for reader in inner] == ["first", "first"]
    assert read(config, 1) == "second"


@isolated()
def test_two_configs_of_equal_value_are_two() -> None:
    policy, reference = Owner(), Owner()
    select(policy, 1, "policy")
    select(reference, 1, "reference")
    assert (read(policy, 1), read(reference, 1)) == ("policy", "reference")
    del policy
    gc.collect()
    assert [entry[0]() for entry in dsa_shared_topk._newest.values()] == [reference]
    del reference
    gc.collect()
    assert not dsa_shared_topk._newest


@isolated()
def test_an_exception_leaves_no_checkpoint_open() -> None:
    config = Owner()

    def fails() -> None:
        select(config, 1, "lost")
        raise KeyError

    function = dsa_shared_topk.carried(fails)
    for _ in range(2):
        with pytest.raises(KeyError):
            function()
        assert (dsa_shared_topk._underway.noting, dsa_shared_topk._underway.replayed) == ((), None)


@isolated("torch")
def test_a_recomputation_by_another_checkpoint_gets_the_newest_carrier() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    config, seen = Owner(), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        select(config, 1, "recomputed" if seen else "first")
        seen.append(dsa_shared_topk._newest[id(config)][1])
        return (x * x).exp()

    for reentrant in (True, False):
        seen.clear()
        checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=reentrant).backward()
        assert len(seen) == 2
        assert seen[0] is seen[1], "a recomputation begins no forward pass"
        assert read(config, 1) == "recomputed"


@isolated()
def test_transformer_engine_s_checkpoint_is_wrapped_too() -> None:
    """Stands in for Transformer Engine, which needs CUDA; arguments pass through."""
    config, calls = Owner(), []

    def theirs(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((function, args, kwargs))
        return function()

    module = SimpleNamespace()
    te_checkpoint = dsa_shared_topk.build_te_checkpoint(Below(theirs, theirs, module, Counters(ID)))  # type: ignore[arg-type]
    for ids in ("first", "second"):
        te_checkpoint(lambda ids=ids: select(config, 1, ids), False, "tracker", "group", 1, mask=2)
        te_checkpoint(lambda: read(config, 1), False, "tracker", "group", 1, mask=2)
    assert [args for _, args, _ in calls] == [(False, "tracker", "group", 1)] * 4
    assert [kwargs for _, _, kwargs in calls] == [{"mask": 2}] * 4
    assert [calls[1][0](), calls[3][0]()] == ["first", "second"]


# The decision ---------------------------------------------------------------------------------------------------------

RECOMPUTE = "megatron.core.recompute"
CARRIER = (
    "        if packed_seq_params is not None:\n            return packed_seq_params\n        return attention_mask"
)
OF_THE_PASS = "        if _PASS:\n            return _PASS[-1]\n"
EDITS = {
    # In words of our own: full recomputation opens a carrier for each call and enters it in every checkpoint.
    "fixed": (
        [
            (DSA, "def is_dsa_skip_topk_layer(", "_PASS = []\n\n\ndef is_dsa_skip_topk_layer("),
            (DSA, CARRIER, OF_THE_PASS + CARRIER),
            (RECOMPUTE, "    def custom(start: int, end: int):", "    def bare(start: int, end: int):"),
            (
                RECOMPUTE,
                "    def chunk_runner(",
                "    from types import SimpleNamespace\n\n"
                "    from megatron.core.transformer.experimental_attention_variant import dsa\n\n"
                "    carrier = SimpleNamespace()\n\n"
                "    def custom(start, end):\n"
                "        inner = bare(start, end)\n\n"
                "        def run(*args):\n"
                "            dsa._PASS.append(carrier)\n"
                "            try:\n"
                "                return inner(*args)\n"
                "            finally:\n"
                "                dsa._PASS.pop()\n\n"
                "        return run\n\n"
                "    def chunk_runner(",
            ),
        ],
        State.UPSTREAM_FIXED,
    ),
    "other words": ([(DSA, CARRIER, "        assert self.index_share\n" + CARRIER)], State.DRIFTED),
    "undecidable": ([(DSA, CARRIER, "        return object()\n" + CARRIER)], State.DRIFTED),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.thorough if k == "undecidable" else ()) for k in EDITS]
)
def test_edited_text(kind: str, tmp_path: Path) -> None:
    edits, state = EDITS[kind]
    assert state_in(tmp_path, ID, edits) is state
