"""Who trains in which stage: what is refused in the forward pass of a layer, and `freeze_backbone`."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import _unset_checkpointing
from torch import Tensor

from mcore_patches.attention.qsa import QSASelfAttention, freeze_backbone, freezing
from mcore_patches.attention.qsa.config import STAGES
from tests.attention.tiny import qsa_config, qsa_layer, run_layer

pytestmark = pytest.mark.usefixtures("megatron")


def test_warmup_refuses_a_trained_backbone() -> None:
    layer = qsa_layer(qsa_config(qsa_stage="warmup"))
    with pytest.raises(RuntimeError, match=r"trains only the indexer, but linear_proj\.weight requires a gradient"):
        run_layer(layer, torch.randn(8, 1, 64))
    freeze_backbone(layer)
    run_layer(layer, torch.randn(8, 1, 64)).sum().backward()
    assert all(p.grad is not None for p in layer.indexer.parameters())


class Around(torch.nn.Module):
    """A module with a parameter of its own around a layer."""

    def __init__(self, inside: torch.nn.Module, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.inside, self.own, self.checkpointed = inside, torch.nn.Linear(64, 64), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        run = partial(run_layer, self.inside) if isinstance(self.inside, QSASelfAttention) else self.inside
        return self.own(tensor_parallel.checkpoint(run, False, x) if self.checkpointed else run(x))


def test_warmup_looks_at_all_modules_that_hold_the_layer() -> None:
    model = Around(Around(qsa_layer(qsa_config(qsa_stage="warmup"))))
    freeze_backbone(model.inside)
    x = torch.randn(8, 1, 64)
    model.inside(x)
    with pytest.raises(RuntimeError, match=r"trains only the indexer, but own\.weight requires a gradient"):
        model(x)
    freeze_backbone(model)
    model(x).sum().backward()
    model.own.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"trains only the indexer, but own\.bias requires a gradient"):
        model(x)


def test_warmup_collects_the_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with recomputations in between, which no module outside the checkpoint calls."""
    collected, collect = [], freezing._backbone
    monkeypatch.setattr(freezing, "_backbone", lambda model: collected.append(model) or collect(model))
    model = Around(qsa_layer(qsa_config(qsa_stage="warmup")), checkpointed=True)
    freeze_backbone(model)
    for _ in range(3):
        model(torch.randn(8, 1, 64, requires_grad=True)).sum().backward()
    assert collected == [model]


def _built(stage: str) -> Any:
    layer = qsa_layer(qsa_config(qsa_stage=stage))
    if stage == "warmup":
        freeze_backbone(layer)
    return layer


@pytest.mark.parametrize(("built", "set_to"), list(permutations(STAGES, 2)))
def test_stage_of_a_built_model_cannot_be_changed(built: str, set_to: str) -> None:
    layer = _built(built)
    layer.config.qsa_stage = set_to
    layer.config.qsa_indexer_loss_coeff = None if set_to == "frozen" else 0.5
    with pytest.raises(RuntimeError, match=f"qsa_stage='{set_to}', but the model was built in stage '{built}'"):
        run_layer(layer, torch.randn(8, 1, 64))
    run_layer(layer.eval(), torch.randn(8, 1, 64))  # evaluation trains nothing


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_the_indexer_are_left_to_the_stage(stage: str) -> None:
    layer = _built(stage)
    layer.indexer.requires_grad_(stage == "frozen")
    says = "does not train the indexer, but .*weight requires a" if stage == "frozen" else "weight requires no"
    with pytest.raises(RuntimeError, match=f"qsa_stage='{stage}' .*{says} gradient"):
        run_layer(layer, torch.randn(8, 1, 64))


def test_coefficient_of_a_built_model_is_still_needed() -> None:
    layer = qsa_layer(qsa_config())
    layer.config.qsa_indexer_loss_coeff = None
    with pytest.raises(ValueError, match="qsa_indexer_loss_coeff=None: qsa_stage='sparse' trains the indexer"):
        run_layer(layer, torch.randn(8, 1, 64))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (torch.nn.Linear(2, 2), ValueError, "freeze_backbone: Linear has no QSA layers and its config asks for none"),
        ([torch.nn.Linear(2, 2)], ValueError, "freeze_backbone: Linear has no QSA layers"),
        ("gpt", TypeError, "freeze_backbone: model must be a module or a sequence of them, got str"),
        ([3], TypeError, "freeze_backbone: model must be a module or a sequence of them, got list"),
        (None, TypeError, "got NoneType"),
        ([], ValueError, "freeze_backbone: model is an empty sequence"),
    ],
    ids=["module", "modules", "str", "int", "None", "empty"],
)
def test_freeze_backbone_wants_a_model_with_qsa(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        freeze_backbone(model)
    if isinstance(model, torch.nn.Module):
        assert model.weight.requires_grad


@pytest.mark.parametrize("stage", ["sparse", "frozen"])
def test_freeze_backbone_wants_stage_warmup(stage: str) -> None:
    layer = qsa_layer(qsa_config(qsa_stage=stage))
    with pytest.raises(ValueError, match=f"freeze_backbone: qsa_stage='{stage}' trains the backbone, must be 'warmup'"):
        freeze_backbone(layer)
    assert layer.linear_proj.weight.requires_grad


def test_freeze_backbone_freezes_stages_without_qsa_layers() -> None:
    stage = torch.nn.Linear(2, 2)
    stage.config = qsa_config(qsa_stage="warmup")  # type: ignore[assignment]
    freeze_backbone([stage])
    assert not stage.weight.requires_grad


def test_warmup_in_a_checkpoint_needs_freeze_backbone() -> None:
    """Frozen by hand, the input of a checkpoint requires no gradient and its indexer would not train."""
    layer = qsa_layer(qsa_config(qsa_stage="warmup"))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("indexer."))
    with pytest.raises(RuntimeError, match=r"with full recomputation: .*freeze_backbone\(model\) sees to that"):
        tensor_parallel.checkpoint(lambda x: run_layer(layer, x), False, torch.randn(8, 1, 64))
    _unset_checkpointing()
    run_layer(layer, torch.randn(8, 1, 64))
