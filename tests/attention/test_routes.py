"""Routes: replayed in recomputations, given from outside, read back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_patches.attention.common import passes as passes_module
from mcore_patches.attention.common.loss import LossScale
from mcore_patches.attention.common.passes import sketch
from mcore_patches.attention.qsa import attention, discard_saved_routes, freeze_backbone, inject_routes, record_routes
from mcore_patches.attention.qsa.routes import RouteError, qsa_layers
from mcore_patches.cpu.data import packed_batch, random_batch
from mcore_patches.cpu.models import build_gpt
from mcore_patches.cpu.parameters import full_gradients, seed_parameters
from mcore_patches.cpu.training import schedule_step, wrap_with_ddp
from tests.attention.tiny import (
    CORE,
    FULL,
    RATIO,
    grads_of,
    packed_params,
    qsa_config,
    qsa_layer,
    qsa_spec,
    relative_error,
    rotary_table,
    run_layer,
)

pytestmark = pytest.mark.usefixtures("megatron")


def _model(**fields: Any) -> Any:
    config = qsa_config(**fields)
    model = build_gpt(config, qsa_spec(config), rotary_percent=0.5)
    seed_parameters(model)
    return model


def _loss(model: Any, batch: Any) -> Tensor:
    return model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed).float().sum()


class Selections:
    """Counts selections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:

        self.calls = 0
        self._select = attention.block_topk.select_blocks
        monkeypatch.setattr(attention.block_topk, "select_blocks", self)

    def __call__(self, q_idx: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self._select(q_idx, *args, **kwargs)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "all-tied"])
@pytest.mark.parametrize("recompute", ["full", "block", "core"])
@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd"])
def test_recomputation_attends_what_the_first_pass_attended(
    recompute: str, packed: bool, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    fields = {"full": FULL, "block": block, "core": CORE}[recompute]
    batch = packed_batch([13, 3, 40], seed=3) if packed else random_batch(2, 32, seed=3)

    def run(fields: dict[str, Any]) -> tuple[dict[int, list[Tensor]], dict[str, Tensor], int]:
        model = _model(**fields)
        if ties:
            for layer in qsa_layers(model):
                # Equal index queries for all, without a direction: every score is 0.
                layer.indexer.q_layernorm.weight.data.fill_(-1.0)
        selections = Selections(monkeypatch)
        with record_routes(model) as routes:
            _loss(model, batch).backward()
        assert all(len(layer.routes) == 0 for layer in qsa_layers(model))
        return routes, full_gradients(model), selections.calls

    routes, gradients, _ = run({})
    replayed, regained, selections = run(fields)
    assert selections == 2, "one selection a layer"
    for layer in routes:
        assert len(routes[layer]) == len(replayed[layer]) == 1
        assert torch.equal(routes[layer][0], replayed[layer][0])
    assert gradients.keys() == regained.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, regained[name]), name


def test_recomputation_never_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a selection that answers differently each time, gradients are still those of the first answer."""
    batch = random_batch(1, 48, seed=5)
    answers: list[Tensor] = []

    def select(q_idx: Tensor, k_blocks: Tensor, row_pos: Tensor, *_: Any, ratio: int, topk: int, **__: Any) -> Tensor:
        generator = torch.Generator().manual_seed(len(answers))
        noise = torch.rand(len(row_pos), 12, generator=generator)
        noise.masked_fill_(torch.arange(12) >= ((row_pos + 1) // ratio)[:, None], -1.0)
        best, ids = noise.topk(topk)
        ids = ids.masked_fill(best < 0, 99).sort(dim=1).values.int()
        answers.append(ids.masked_fill(ids == 99, -1))
        return answers[-1]

    monkeypatch.setattr(attention.block_topk, "select_blocks", select)
    model = _model(**FULL)
    _loss(model, batch).backward()
    assert len(answers) == 2
    monkeypatch.undo()
    given = _model()
    with inject_routes(given, {layer: [ids] for layer, ids in zip((1, 2), answers)}):
        _loss(given, batch).backward()
    expected = full_gradients(given)
    for name, gradient in full_gradients(model).items():
        assert torch.equal(expected[name], gradient), name


def test_sum_of_losses_recomputes_in_reverse() -> None:
    batches = [random_batch(1, 32, seed=s) for s in range(3)]
    gradients = []
    for fields in ({}, FULL):
        model = _model(**fields)
        sum(_loss(model, batch) for batch in batches).backward()
        gradients.append(full_gradients(model))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_route_of_another_forward_pass_is_refused() -> None:
    """A stale route, left by a pass in training mode without gradients, does not stand in for one that is missing."""
    model = _model(**FULL)
    with torch.no_grad():
        _loss(model, random_batch(1, 32, seed=1))
    assert [len(layer.routes) for layer in qsa_layers(model)] == [1, 1]
    loss = _loss(model, random_batch(1, 32, seed=2))
    for layer in qsa_layers(model):
        layer.routes._saved.pop()  # the route of the second pass
    with pytest.raises(RouteError, match=r"QSA layer 2: the recomputation of queries \(32, 4, 16\) in 1 documents"):
        loss.backward()

    discard_saved_routes(model)
    _loss(model, random_batch(1, 32, seed=2)).backward()
    assert all(len(layer.routes) == 0 for layer in qsa_layers(model))


def test_stale_routes_do_not_disturb_training() -> None:
    model = _model(**FULL)
    with torch.no_grad():
        _loss(model, random_batch(1, 32, seed=1))
    _loss(model, random_batch(1, 32, seed=2)).backward()
    assert [len(layer.routes) for layer in qsa_layers(model)] == [1, 1]


def test_stale_route_of_the_same_batch_is_not_taken() -> None:
    """Log-probabilities in training mode, then an update: the recomputation must repeat the pass after the update."""
    batch, gradients = random_batch(1, 64, seed=1), []
    for fields in ({}, FULL):
        model = _model(**fields)
        torch.manual_seed(0)
        with torch.no_grad():
            _loss(model, batch)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.abs().mean() * 0.02)
        _loss(model, batch).backward()
        gradients.append(full_gradients(model))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_equal_passes_with_different_given_routes_are_told_apart_or_refused() -> None:
    token = torch.arange(32)
    first = torch.where(token < 3, -1, 0)[:, None]
    last = torch.where(token < 3, -1, (token + 1) // 4 - 1)[:, None]
    model, batch = _model(**FULL), random_batch(1, 32, seed=1)
    with inject_routes(model, {1: [first, last], 2: [first, last]}):
        loss = _loss(model, batch) + _loss(model, batch)
    # Layer 2 sees what layer 1 attended and can tell the passes apart; layer 1 cannot.
    with pytest.raises(RouteError, match="QSA layer 1: 2 forward passes with the same queries"):
        loss.backward()
    discard_saved_routes(model)


def test_passes_without_a_backward_pass_do_not_pile_up() -> None:
    layer = qsa_layer(qsa_config())
    batches = [torch.randn(8, 1, 64) for _ in range(passes_module._MOST_SAVED + 3)]

    def checkpointed(x: Tensor) -> Tensor:
        return tensor_parallel.checkpoint(partial(run_layer, layer), False, x.requires_grad_())

    @torch.no_grad()
    def without_gradients() -> None:
        for x in batches:
            checkpointed(x)

    with pytest.warns(RuntimeWarning, match="QSA layer 1: 64 forward passes wait for their recomputation"):
        without_gradients()
    assert len(layer.routes) == passes_module._MOST_SAVED
    # Those that are forgotten are missed, not replaced by others.
    outputs = [checkpointed(x) for x in batches[:2]]
    outputs[1].sum().backward()
    discard_saved_routes(layer)
    with pytest.raises(RouteError, match="finds no forward pass that it repeats"):
        outputs[0].sum().backward()
    discard_saved_routes(layer)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("stage", ["sparse", "warmup", "frozen"])
def test_checkpoints_of_torch_are_refused(stage: str, use_reentrant: bool) -> None:
    """They would select twice, and count the indexer's loss twice."""
    layer = qsa_layer(qsa_config(qsa_stage=stage))
    if stage == "warmup":
        freeze_backbone(layer)
    x = torch.randn(32, 1, 64, requires_grad=True)
    out = checkpoint(partial(run_layer, layer), x, use_reentrant=use_reentrant)
    with pytest.raises(RouteError, match=r"recompute by recompute_granularity, not by torch\.utils\.checkpoint"):
        out.sum().backward()


def test_recomputation_takes_the_loss_scale_of_its_pass() -> None:
    """Also past an equal pass that was left behind, and one that is under way outside of a schedule."""
    x, gradients = torch.randn(32, 1, 64), {}
    for stage in ("sparse", "warmup"):
        for scale in (None, 0.25):
            layer = qsa_layer(qsa_config(qsa_stage=stage))
            if stage == "warmup":
                freeze_backbone(layer)

            def checkpointed(layer: Any = layer) -> Tensor:
                return tensor_parallel.checkpoint(partial(run_layer, layer), False, x.clone().requires_grad_())

            with torch.no_grad():
                checkpointed()
            layer.loss_scale = LossScale()
            out = checkpointed()
            layer.loss_scale.value = None if scale is None else torch.tensor(scale)
            layer.loss_scale = LossScale()
            layer.loss_scale.value = torch.tensor(1e6)
            out.mul(0.0).sum().backward()
            gradients[scale] = layer.indexer.index_qk_proj.weight.grad
            discard_saved_routes(layer)
        assert torch.equal(0.25 * gradients[None], gradients[0.25])
        assert gradients[0.25].any()


@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_passes_of_a_schedule_without_gradients_leave_nothing_behind(mode: str) -> None:
    """RL workers compute log-probabilities with forward_only, some with the model in training mode."""
    chunks = wrap_with_ddp(_model(**FULL))
    chunks[0].train(mode == "training")
    batches = [random_batch(1, 32, seed=s) for s in range(2)]

    def forward_step(data: Any, model: Any) -> Any:
        batch = next(data)
        losses = model(batch.tokens, batch.positions, None, labels=batch.labels)
        return losses, partial(lambda x: (x.sum(), {}))

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=chunks,
            num_microbatches=2,
            seq_length=32,
            micro_batch_size=1,
            forward_only=True,
        )
    assert all(len(layer.routes) == 0 for layer in qsa_layers(chunks))
    chunks[0].train()
    schedule_step(chunks, batches)
    assert all(len(layer.routes) == 0 for layer in qsa_layers(chunks))


def test_sketch_bears_rounding_and_tells_inputs_apart() -> None:
    q = torch.randn(700, 4, 128).bfloat16()
    own = sketch(q)

    def distance(other: Tensor) -> float:
        return ((sketch(other) - own).norm() / own.norm()).item()

    assert distance(q) == 0.0
    assert distance((q.float() * (1 + 2**-7 * torch.randn_like(q, dtype=torch.float32))).bfloat16()) < 0.03
    assert distance(q.roll(1, dims=0)) > 0.5
    assert distance(torch.randn(700, 4, 128).bfloat16()) > 0.5
    assert distance(q + torch.randn(4, 128)) > 0.5
    # Relative distance of sketches follows that of the tensors.
    noise = torch.randn(8, *q.shape)
    estimates = [distance(q.float() + 0.1 * n) for n in noise]
    assert 0.05 < sum(estimates) / 8 < 0.2
    assert passes_module._TOLERANCE < 0.5


def test_recorded_routes_can_be_injected_again() -> None:
    config = qsa_config()
    layer = qsa_layer(config)
    hidden = torch.randn(32, 3, 64)
    with record_routes(layer) as routes:
        out = run_layer(layer, hidden)
    out.square().sum().backward()
    (ids,) = routes[1]
    assert ids.dtype is torch.int32
    assert ids.shape == (96, 2)
    expected = {name: grad.clone() for name, grad in grads_of(layer).items()}
    layer.zero_grad()
    shuffled = torch.cat((ids.flip(1), torch.full((96, 1), -1)), dim=1)  # any order, any width, int64
    with inject_routes(layer, {1: [shuffled]}):
        again = run_layer(layer, hidden)
    again.square().sum().backward()
    assert relative_error(out, again) < 1e-6
    for name, grad in grads_of(layer).items():
        assert relative_error(expected[name], grad) < 2e-6, name


@pytest.mark.parametrize("fields", [FULL, CORE], ids=["full", "core"])
def test_recomputation_replays_injected_routes(fields: dict[str, Any]) -> None:
    batch = random_batch(1, 32, seed=7)
    first_block = torch.where(torch.arange(32) < RATIO - 1, -1, 0)[:, None]
    given = {1: [first_block], 2: [first_block]}
    gradients = []
    for recompute in ({}, fields):
        model = _model(**recompute)
        with inject_routes(model, given):
            _loss(model, batch).backward()
        gradients.append(full_gradients(model))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_injected_routes_decide_what_is_attended() -> None:
    """Blocks 0 and 1 for everyone: then later tokens hang on the first 8 tokens and their own tail only."""
    layer = qsa_layer(qsa_config())
    hidden = torch.randn(32, 1, 64)
    ids = torch.tensor([0, 1]).expand(32, 2).clone()
    ids[ids >= ((torch.arange(32) + 1) // RATIO)[:, None]] = -1
    with torch.no_grad(), inject_routes(layer, {1: [ids, ids]}):
        out = run_layer(layer, hidden)
        changed = hidden.clone()
        changed[8:28] += 1.0
        other = run_layer(layer, changed)
    assert torch.equal(out[:8], other[:8])
    assert relative_error(out[28:], other[28:]) < 1e-6
    assert relative_error(out[8:28], other[8:28]) > 0.1


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(9, 2, dtype=torch.int32), ValueError, r"must be \[8, blocks\], .* got \(9, 2\)"),
        (torch.zeros(8, dtype=torch.int32), ValueError, r"must be \[8, blocks\]"),
        (torch.zeros(8, 2), TypeError, "must be int32 or int64, got float32"),
        (
            torch.zeros(8, 1, dtype=torch.int32),
            ValueError,
            "3 rows do not, the first is token 0 at position 0 with block 0",
        ),
        (
            torch.tensor([[-1, -1]] * 3 + [[0, 0]] * 5),
            ValueError,
            "must be distinct within a row; 5 rows break it, the first is row 3",
        ),
    ],
    ids=["rows", "rank", "dtype", "incomplete", "twice"],
)
def test_injected_routes_are_checked(ids: Tensor, error: type[Exception], message: str) -> None:
    layer = qsa_layer(qsa_config())
    with pytest.raises(error, match=message), inject_routes(layer, {1: [ids]}):
        run_layer(layer, torch.randn(8, 1, 64))


def test_given_routes_of_padding_are_not_looked_at() -> None:
    """A rollout's buffer holds anything behind its last token."""
    layer = qsa_layer(qsa_config()).eval()
    hidden, packed = torch.randn(12, 1, 64), packed_params([9], [12])
    ids = torch.where(torch.arange(12) < RATIO - 1, -1, 0)[:, None]
    ids[9:] = 7
    with torch.no_grad(), inject_routes(layer, {1: [ids]}):
        out, _ = layer(hidden, None, rotary_pos_emb=rotary_table(12, packed=True), packed_seq_params=packed)
    assert (out[9:] == 0).all()
    assert (out[:9].abs().amax(dim=2) > 0).all()


def test_recordings_and_injections_nest() -> None:
    layer = qsa_layer(qsa_config()).eval()
    x, ids = torch.randn(8, 1, 64), torch.full((8, 1), -1)
    first = torch.where(torch.arange(8) < RATIO - 1, -1, 0)[:, None]
    with record_routes(layer) as outer, inject_routes(layer, {1: [first, first]}):
        run_layer(layer, x)
        with record_routes(layer) as inner, inject_routes(layer, {1: [ids]}):
            run_layer(layer, x)
        with inject_routes(layer, {}):
            run_layer(layer, x)
    assert [torch.equal(got, want.int()) for got, want in zip(outer[1], (first, ids, first), strict=True)] == [True] * 3
    assert [torch.equal(got, want.int()) for got, want in zip(inner[1], (ids,), strict=True)] == [True]
    run_layer(layer, x)
    assert (len(outer[1]), len(inner[1])) == (3, 1)


def test_models_that_number_their_layers_alike_are_refused() -> None:
    models = [qsa_layer(qsa_config()), qsa_layer(qsa_config())]
    with pytest.raises(ValueError, match="record_routes: two QSA layers have the number 1"), record_routes(models):
        pass
    with pytest.raises(ValueError, match="inject_routes: two QSA layers have the number 1"), inject_routes(models, {}):
        pass
    with record_routes(models[:1] * 2) as routes:
        run_layer(models[0], torch.randn(8, 1, 64))
    assert len(routes[1]) == 1


@pytest.mark.parametrize("far", [2**32, 2**32 + 1, 2**62])
def test_injected_ids_do_not_wrap(far: int) -> None:
    layer, ids = qsa_layer(qsa_config()).eval(), torch.full((8, 2), -(2**40))
    with inject_routes(layer, {1: [ids]}):
        run_layer(layer, torch.randn(8, 1, 64))  # all of it is padding
    ids[7, 1] = far
    with (
        pytest.raises(ValueError, match=f"the first is token 7 at position 7 with block {far}"),
        inject_routes(layer, {1: [ids]}),
    ):
        run_layer(layer, torch.randn(8, 1, 64))


def test_injection_counts_forward_passes() -> None:
    layer = qsa_layer(qsa_config()).eval()
    x, ids = torch.randn(8, 1, 64), torch.full((8, 2), -1)
    with inject_routes(layer, {1: [ids]}):
        run_layer(layer, x)
        with pytest.raises(RouteError, match="more forward passes than routes"):
            run_layer(layer, x)
    with (
        pytest.raises(RouteError, match=r"routes left over \(layer: number\) \{1: 1\}"),
        inject_routes(layer, {1: [ids, ids]}),
    ):
        run_layer(layer, x)
    with (
        pytest.raises(ValueError, match=r"routes name layers \[3\]; the QSA layers here are \[1\]"),
        inject_routes(layer, {3: []}),
    ):
        pass
    run_layer(layer, x)  # selects for itself again


def test_dense_warmup_has_no_routes() -> None:
    layer = qsa_layer(qsa_config(qsa_stage="warmup"))
    message = "qsa_stage='warmup' attends everything, so there are no routes"
    with pytest.raises(ValueError, match=f"inject_routes: {message}"), inject_routes(layer, {1: []}):
        pass
    with pytest.raises(ValueError, match=f"record_routes: {message}"), record_routes(layer):
        pass
    layer.config.qsa_stage = "sparse"
    with record_routes(layer) as routes:
        run_layer(layer.eval(), torch.randn(8, 1, 64))
    assert len(routes[1]) == 1
