"""The QSA layer on a GPU: it never waits for the device, and what it checks there it still checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_patches
from mcore_patches.demo.device import training_device

pytestmark = [pytest.mark.h100, pytest.mark.xdist_group("qsa-layer")]

LENGTHS = [300, 3, 641]


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with training_device() as device, mcore_patches.applied("qsa", strict=True):
        yield device


def build(stage: str, device: torch.device) -> Any:
    from mcore_patches.attention.qsa import freeze_backbone
    from tests.attention.tiny import qsa_config, qsa_layer

    config = qsa_config(
        "bf16",
        hidden_size=256,
        kv_channels=256,
        qsa_stage=stage,
        qsa_indexer_head_dim=128,
        qsa_indexer_budget=256,
    )
    layer = qsa_layer(config).to(device)
    if stage == "warmup":
        freeze_backbone(layer)
    return layer


def inputs(packed: bool, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states, and the rest of the layer's arguments: documents, or two sequences under megatron's mask."""
    from tests.attention.tiny import packed_params, rotary_table

    total = sum(LENGTHS)
    shape, mask, documents = (total // 2, 2), None, None
    if packed:
        shape, documents = (total, 1), packed_params(LENGTHS)
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            setattr(documents, name, documents.cu_seqlens_q.to(device))
    else:
        mask = ~torch.ones(shape[0], shape[0], dtype=torch.bool, device=device).tril()[None, None]
    table = rotary_table(max(LENGTHS) if packed else shape[0], packed=packed).to(device)
    hidden = torch.randn(*shape, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    return hidden, {"attention_mask": mask, "rotary_pos_emb": table, "packed_seq_params": documents}


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd"])
@pytest.mark.parametrize("stage", ["frozen", "warmup", "sparse"])
def test_forward_and_backward_never_wait(stage: str, packed: bool, device: torch.device) -> None:
    layer = build(stage, device)
    hidden, arguments = inputs(packed, device)

    def step() -> None:
        out, _ = layer(hidden, **arguments)
        (out.float() * weight).sum().backward()

    weight = torch.randn(*hidden.shape, device=device)
    step()  # kernels compile, caches fill
    layer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trained = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.isfinite().all()}
    assert trained == {name for name, p in layer.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("weights", "QSA layer 1: index queries or keys are not finite"),
        ("mask", "attention_mask is not the causal one"),
    ],
)
def test_faults_are_device_side_assertions(fault: str, message: str) -> None:
    """In a process of its own, as CUDA is of no use there afterwards."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu_ci.test_qsa_layer", fault],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert message in done.stdout + done.stderr, done.stderr[-2000:]


def run_into(fault: str) -> None:
    with training_device() as device, mcore_patches.applied("qsa", strict=True):
        layer = build("sparse", device).eval()
        hidden, arguments = inputs(False, device)
        layer(hidden, **arguments)
        torch.cuda.synchronize()
        if fault == "weights":
            layer.indexer.index_qk_proj.weight.data[0, 0] = float("nan")
        else:
            arguments["attention_mask"][..., :2] = True
        layer(hidden, **arguments)
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_into(sys.argv[1])
