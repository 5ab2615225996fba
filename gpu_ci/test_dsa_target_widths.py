"""dsa_target_widths on the real kernel: a padded width gives the same target to the bit."""

from __future__ import annotations

import pytest
import torch

import mcore_patches
from mcore_patches.patches import dsa_target_widths

pytestmark = pytest.mark.h100


def inputs(width: int, heads: int, topk: int, *, sq: int = 197, skv: int = 1500):
    g = torch.Generator("cuda").manual_seed(7919 * width + 31 * heads + topk)
    query = torch.randn(sq, heads, width, device="cuda", generator=g).bfloat16()
    key = torch.randn(skv, width, device="cuda", generator=g).bfloat16()
    ids = torch.rand(sq, skv, device="cuda", generator=g).argsort(-1)[:, :topk].to(torch.int32)
    ids = torch.where(torch.rand(ids.shape, device="cuda", generator=g) < 0.1, -1, ids)
    ids[5] = -1
    return query, key, ids


def dense(query, key, ids, scale):
    scores = torch.einsum("shd,skd->shk", query.double(), key.double()[ids.clamp(min=0).long()]) * scale
    scores = scores.masked_fill((ids < 0)[:, None], float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)).sum(1)


@pytest.mark.parametrize(("heads", "width", "topk"), [(32, 576, 320), (8, 576, 448), (48, 512, 1088)])
def test_a_padded_width_gives_the_same_target(heads, width, topk, monkeypatch):
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_indexer_loss

    query, key, ids = inputs(width, heads, topk)
    native = tilelang_indexer_loss.sparse_indexer_target_interface(query, key, ids, 0.05)
    with mcore_patches.applied("dsa_target_widths", strict=True):
        monkeypatch.setattr(dsa_target_widths, "tilelang_release", lambda: (0, 1, 9))
        padded = tilelang_indexer_loss.sparse_indexer_target_interface(query, key, ids, 0.05)
        assert mcore_patches.status()["dsa_target_widths"].counters["routes"] == {"padded": 1}
    assert torch.equal(padded, native)
    assert padded.stride() == native.stride()
    expected = dense(query, key, ids, 0.05)
    assert (padded.double() - expected).norm() < 1e-4 * expected.norm()
    assert not padded[5].any()
