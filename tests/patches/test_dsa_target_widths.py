"""dsa_target_widths: which width the kernel is built for, and that padding changes nothing of the target."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_patches
from mcore_patches.overlay.patch import State
from mcore_patches.patches import dsa_target_widths
from tests import releases
from tests.overlay.isolation import isolated
from tests.patches.edited_release import state_in

ID = "dsa_target_widths"
OPS = "megatron.core.transformer.experimental_attention_variant.ops"
OLD, NEW = (0, 1, 10), (0, 1, 11)


@pytest.mark.parametrize("tilelang", [OLD, None, NEW])
def test_widths(tilelang: tuple[int, ...] | None) -> None:
    for topk in range(64, 2305, 64):
        width = dsa_target_widths.compiling_width(topk, tilelang)
        if tilelang == NEW or topk <= 256 or topk % 256 == 0:
            assert width == topk
        else:
            assert width % 256 == 0
            assert topk < width < topk + 256


@pytest.mark.parametrize("release", ["0.19.0", "0.19.2"])
@isolated()
def test_every_release_has_the_known_texts(release: str) -> None:
    sys.path.insert(0, str(releases.path(release)))
    row = mcore_patches.status()[ID]
    assert (row.decision, row.targets[0].verdict) == (State.PENDING, "needs")


class Kernel:
    """Stands for the compiled kernel of one width, in float64 and, as it, tile by tile: an online softmax."""

    def __init__(self, heads: int, dim: int, topk: int, scale: float) -> None:
        assert topk % 64 == 0
        self.topk, self.scale = topk, scale

    def __call__(self, query: torch.Tensor, key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert ids.shape == (query.size(0), self.topk)
        assert ids.dtype is torch.int32
        assert ids.is_contiguous()
        valid = ((ids >= 0) & (ids < key.size(0)))[:, None]
        scores = torch.einsum("shd,skd->shk", query.double(), key.double()[ids.clamp(0, key.size(0) - 1).long()])
        scores = (scores * self.scale).masked_fill(~valid, float("-inf"))
        top = torch.full(scores.shape[:2], -(2.0**30), dtype=torch.float64)
        total = torch.zeros_like(top)
        for tile in scores.split(64, -1):
            new = torch.maximum(top, tile.amax(-1))
            total = total * (top - new).exp() + (tile - new[..., None]).exp().sum(-1)
            top = new
        weights = (scores - top[..., None]).exp() / total.clamp(min=1e-300)[..., None]
        return weights.masked_fill(~valid, 0.0).sum(1).float()


def patched(tilelang: tuple[int, ...]) -> tuple[Any, Any, list[int]]:
    """The module that megatron calls the function from, upstream's function, and the widths of kernels to be built."""
    loss = importlib.import_module(f"{OPS}.tilelang_indexer_loss")
    dsa = importlib.import_module(f"{OPS}.tilelang_dsa")
    upstream = loss.sparse_indexer_target_interface
    assert mcore_patches.apply_patches(ID, strict=True)[ID].state is State.APPLIED
    built: list[int] = []

    def kernel(heads: int, dim: int, topk: int, scale: float) -> Kernel:
        built.append(topk)
        return Kernel(heads, dim, topk, scale)

    loss._get_target_kernel = kernel
    dsa_target_widths.tilelang_release = lambda: tilelang  # type: ignore[assignment]
    return dsa, upstream, built


@isolated("before-0.19.2")
def test_a_padded_target_is_that_of_the_width_itself() -> None:
    dsa, upstream, built = patched(OLD)
    generator = torch.Generator().manual_seed(0)
    for topk, heads in ((64, 3), (256, 1), (320, 5), (448, 2), (512, 2), (576, 33)):
        query = torch.randn(7, heads, 32, generator=generator).bfloat16()
        key = torch.randn(50, 32, generator=generator).bfloat16()
        ids = torch.randint(-20, 60, (7, topk), generator=generator, dtype=torch.int32)
        ids[2] = -1
        before = ids.clone()
        built.clear()
        got = dsa.sparse_indexer_target_interface(query, key, ids, 0.3)
        expected = upstream(query, key, ids, 0.3)
        assert built == [topk if topk in (64, 256, 512) else -(-topk // 256) * 256, topk]
        assert torch.equal(got, expected)
        assert (got.stride(), got.dtype) == (expected.stride(), expected.dtype)
        assert not got[2].any()
        assert torch.equal(ids, before)
    counted = mcore_patches.status()[ID].counters
    assert (counted["calls"], counted["routes"]) == (6, {"kernel": 3, "padded": 3})


@isolated("before-0.19.2")
def test_a_tilelang_that_compiles_the_width_gets_it() -> None:
    dsa, _, built = patched(NEW)
    query, key = torch.randn(3, 2, 32).bfloat16(), torch.randn(9, 32).bfloat16()
    ids = torch.randint(-1, 9, (3, 320), dtype=torch.int32)
    assert dsa.sparse_indexer_target_interface(query, key, ids, 0.3).shape == (3, 320)
    assert built == [320]


@isolated("plain")
def test_release_of_tilelang() -> None:
    from types import ModuleType

    for version, release in (("0.1.9", (0, 1, 9)), ("0.1.15+cu130.git", (0, 1, 15)), ("unknown", None), (None, None)):
        sys.modules["tilelang"] = module = ModuleType("tilelang")
        if version:
            module.__version__ = version  # type: ignore[attr-defined]
        dsa_target_widths.tilelang_release.cache_clear()
        assert dsa_target_widths.tilelang_release() == release
    sys.modules["tilelang"] = None  # type: ignore[assignment]
    dsa_target_widths.tilelang_release.cache_clear()
    assert dsa_target_widths.tilelang_release() is None


GUARD = "        and topk_indices.ndim == 2\n        and topk_indices.size(-1) % 64 == 0\n    )\n"
WIDTH = "topk_indices.size(-1) % 64 == 0"
EDITS = {
    # In words of our own: widths that the threads of a block cannot share are declined.
    "fixed": (f"{WIDTH} and topk_indices.size(-1) in (64, 128, 192, 256, 512)", State.UPSTREAM_FIXED),
    "other words": ("not topk_indices.size(-1) % 64", State.DRIFTED),
    "undecidable": (f"{WIDTH} and topk_indices.size(-1) < 512", State.DRIFTED),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.thorough if k == "undecidable" else ()) for k in EDITS]
)
def test_edited_text(kind: str, tmp_path: Path) -> None:
    new, state = EDITS[kind]
    assert state_in(tmp_path, ID, [(f"{OPS}.tilelang_dsa", GUARD, GUARD.replace(WIDTH, new))]) is state
