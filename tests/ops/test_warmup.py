"""`warmup` of every op: where it is, that it refuses other devices, and that the README calls it right."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"^(\w+)\.warmup\((.*)\)", README, re.MULTILINE)
OPS = ("block_topk", "indexer_kl", "sparse_gqa", "sparse_mla")


@pytest.mark.parametrize("op", OPS)
def test_every_op_exports_it(op: str) -> None:
    module = importlib.import_module(f"mcore_patches.ops.{op}")
    assert "warmup" in module.__all__
    assert (module.warmup.__doc__ or "").startswith("Build ")


def test_the_readme_shows_a_valid_call_of_each() -> None:
    assert sorted(op for op, _ in EXAMPLES) == sorted(OPS)
    for op, arguments in EXAMPLES:
        warmup = importlib.import_module(f"mcore_patches.ops.{op}").warmup
        positional, named = eval(f"(lambda *a, **k: (a, k))({arguments})")
        inspect.signature(warmup).bind(*positional, **named)
        for device in ("cpu", "tpu0"):
            with pytest.raises(ValueError, match=f"device must be a CUDA device, got {device}"):
                warmup(*positional, **(named | {"device": device}))


def calls() -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Each op's warmup as the README calls it."""
    found = []
    for op, arguments in EXAMPLES:
        warmup = importlib.import_module(f"mcore_patches.ops.{op}").warmup
        found.append((op, warmup, *eval(f"(lambda *a, **k: (a, k))({arguments})")))
    return found


def test_a_machine_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.cuda, "current_device", none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _, warmup, positional, named in calls():
        with pytest.raises(
            ValueError, match="device must be a CUDA device, got cuda: torch finds none on this machine"
        ):
            warmup(*positional, **named)
        with pytest.raises(ValueError, match=r"device must be a CUDA device, got 3\.5"):
            warmup(*positional, **(named | {"device": 3.5}))


def test_a_dtype_is_no_text() -> None:
    for op, warmup, positional, named in calls():
        if op != "sparse_mla":
            with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, got 'bfloat16'"):
                warmup(*positional, **(named | {"dtype": "bfloat16"}))
