"""`warmup` of every op: where it is, that it refuses other devices, and that the README calls it right."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

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
