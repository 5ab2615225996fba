"""QSA on a GPU as it is used: layer and tiny GPT against the chunked path, a captured layer, 256k tokens."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_patches
from gpu_ci.test_qsa_layer import build, inputs
from mcore_patches.demo.device import training_device
from mcore_patches.ops import block_topk, indexer_kl, sparse_gqa

pytestmark = [pytest.mark.h100, pytest.mark.xdist_group("qsa-layer")]

# Relative error in the Frobenius norm of what both paths compute in bf16, each with its own rounding.
TOLERANCE = 0.02
OPS = block_topk, indexer_kl, sparse_gqa
# What a layer takes in each stage. There is no kernel for the dense attention of "warmup".
BACKENDS = {
    "frozen": {("block_topk", "tilelang"), ("sparse_gqa", "tilelang")},
    "warmup": {("indexer_kl", "tilelang"), ("sparse_gqa", "chunked")},
    "sparse": {("block_topk", "tilelang"), ("sparse_gqa", "tilelang"), ("indexer_kl", "tilelang")},
}


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with training_device() as device, mcore_patches.applied("qsa", strict=True):
        yield device


@contextlib.contextmanager
def only_chunked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for op in OPS:
            patch.setattr(op, "supports", lambda *_, **__: (False, "this test asks for the chunked path"))
        yield


@contextlib.contextmanager
def counted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], int]]:
    """How often each op takes which backend inside."""
    counts: dict[tuple[str, str], int] = {}
    with monkeypatch.context() as patch:
        for op in OPS:
            name = op.__name__.rpartition(".")[2]
            resolve = op.resolve_backend

            def noted(*args: Any, _name: str = name, _resolve: Any = resolve, **settings: Any) -> str:
                backend = _resolve(*args, **settings)
                counts[_name, backend] = counts.get((_name, backend), 0) + 1
                return backend

            patch.setattr(op, "resolve_backend", noted)
        yield counts


def relative_errors(want: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    assert want.keys() == got.keys()
    return {n: float((got[n].double() - w.double()).norm() / w.double().norm()) for n, w in want.items() if w.any()}


def layer_results(layer: Any, hidden: Tensor, arguments: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of one pass, the indexer's loss included."""
    layer.zero_grad()
    hidden = hidden.detach().requires_grad_()
    out, _ = layer(hidden, **arguments)
    (out.float() * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    if hidden.grad is not None:  # none where only the indexer trains
        gradients["hidden"] = hidden.grad
    return {"out": out.detach(), **gradients}


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd"])
@pytest.mark.parametrize("stage", ["frozen", "warmup", "sparse"])
def test_layer_equals_the_chunked_path(
    stage: str, packed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcore_patches.attention.qsa import inject_routes, record_routes

    torch.manual_seed(7)
    layer = build(stage, device)
    hidden, arguments = inputs(packed, device)
    weight = torch.randn(*hidden.shape, device=device)
    with contextlib.ExitStack() as stack:
        routes = stack.enter_context(record_routes(layer)) if stage != "warmup" else None
        counts = stack.enter_context(counted_kernels(monkeypatch))
        got = layer_results(layer, hidden, arguments, weight)
    # A path that quietly was not taken would make the comparison one of a thing with itself.
    assert set(counts) == BACKENDS[stage]
    with contextlib.ExitStack() as stack:
        if routes is not None:
            # Blocks that tie at the cut may be chosen otherwise; what follows from a choice must not differ.
            stack.enter_context(inject_routes(layer, {n: list(passes) for n, passes in routes.items()}))
        stack.enter_context(only_chunked())
        want = layer_results(layer, hidden, arguments, weight)
    assert ("hidden" in got) == (stage != "warmup")
    errors = relative_errors(want, got)
    assert max(errors.values()) < TOLERANCE, errors


def test_gpt_equals_the_chunked_path(device: torch.device) -> None:
    """Loss and gradients of two layers, embedding and head, with the first pass's routes."""
    from mcore_patches.attention.qsa import get_qsa_module_spec_for_backend, inject_routes, record_routes
    from mcore_patches.cpu.data import random_batch
    from mcore_patches.cpu.models import CpuBackend, build_gpt
    from mcore_patches.cpu.parameters import seed_parameters
    from tests.attention.tiny import qsa_config

    config = qsa_config(
        "bf16",
        num_layers=2,
        hidden_size=256,
        kv_channels=128,
        qsa_stage="sparse",
        qsa_indexer_head_dim=128,
        qsa_indexer_budget=64,
    )
    model = build_gpt(config, get_qsa_module_spec_for_backend(config, CpuBackend()), vocab=512, seq=777)
    seed_parameters(model)
    model = model.to(device)
    batch = random_batch(2, 777, 512, seed=3)
    tokens, positions, labels = (x.to(device) for x in (batch.tokens, batch.positions, batch.labels))

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(tokens, positions, None, labels=labels).float().mean()
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert len(found) == len(list(model.parameters()))
        return {"loss": loss.detach(), **found}

    with record_routes(model) as routes:
        got = step()
    with inject_routes(model, {n: list(passes) for n, passes in routes.items()}), only_chunked():
        want = step()
    assert abs(want.pop("loss") - got["loss"]) < 2e-3 * got.pop("loss")
    # Of small gradients that come through several layers, some are mostly rounding: they may differ by more than all
    # gradients together.
    errors = relative_errors(want, got)
    assert max(errors.values()) < 0.1, errors
    difference = sum(float((got[n].double() - w.double()).square().sum()) for n, w in want.items())
    assert difference**0.5 < 0.05 * sum(float(w.double().square().sum()) for w in want.values()) ** 0.5, errors


def test_a_captured_layer_gives_what_a_call_gives(device: torch.device) -> None:
    """Forward and backward of the layer in one CUDA graph, replayed on other hidden states."""
    layer = build("sparse", device)
    hidden, arguments = inputs(False, device)
    weight = torch.randn(*hidden.shape, device=device)
    static = hidden.detach().clone().requires_grad_()

    def step(x: Tensor) -> tuple[Tensor, ...]:
        out, _ = layer(x, **arguments)
        trained = [p for p in layer.parameters() if p.requires_grad]
        return (out, *torch.autograd.grad((out.float() * weight).sum(), (x, *trained)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for seed in (1, 2):
        torch.manual_seed(seed)
        other = torch.randn_like(hidden)
        with torch.no_grad():
            static.copy_(other)
        graph.replay()
        want = step(other.requires_grad_())
        for a, b in zip(want, captured, strict=True):
            assert torch.equal(a, b)


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("kind", ["correlated", "random"])
def test_256k_tokens_in_twelve_gib(kind: str) -> None:
    """Selection, attention and the indexer's loss of one layer, forward and backward, above inputs and gradients."""
    from gpu_ci.bench.qsa import layer_of_ops

    torch.utils.deterministic.fill_uninitialized_memory = False
    peak = layer_of_ops(2**18, kind)
    assert peak < 12, f"{peak:.2f} GiB"
    gc.collect()
