"""dsa_declines: each reason for which a fused hook declines, what is counted and logged, and who counts what."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mcore_patches
from mcore_patches.overlay.errors import DeclinedError
from mcore_patches.overlay.patch import State
from tests import releases
from tests.launching import run
from tests.overlay.isolation import isolated
from tests.overlay.stubs import Records
from tests.patches.edited_release import state_in

ID = "dsa_declines"
EAV = "megatron.core.transformer.experimental_attention_variant"
NEWEST_FIRST = [pytest.param("0.19.2"), pytest.param("0.19.0", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("release", NEWEST_FIRST)
def test_a_model_on_declining_hooks(release: str) -> None:
    """Two layers: the indexer is not importable, and the attention is 512 wide."""
    (cases,) = run("tests.patches.dsa_cases:declines", release=release)
    assert cases["same"]
    indexer = "TileLang's indexer is not importable here (is tilelang installed?)"
    attention = "the installed kernel takes width 576, not 512; sparse_mla_nope pads"
    sparse = cases["sparse loss"]
    assert sparse[ID]["declines"] == {indexer: 4, attention: 4}
    first, second = sparse["logged"]
    assert first.startswith(f"WARNING dsa_declines: fused call declined: {indexer} (index query 32x2x4x16, index key")
    assert "for each index head, runs instead and allocates 64.0 KiB" in first  # 4 + 4 heads, 2 batches, 32 x 32
    assert second.startswith(f"WARNING dsa_declines: fused call declined: {attention} (query 32x2x4x512, key")
    assert "a dense fp32 softmax over [b, heads, sq, skv] runs instead and allocates 32.0 KiB" in second
    assert cases["no backend"] == {"logged": [], ID: sparse[ID]}
    dense = "no fused hook computes the indexer's loss over all keys (dsa_indexer_use_sparse_loss=False)"
    every = cases["loss over all keys"]
    assert every[ID]["declines"] == {indexer: 4, attention: 4, dense: 2}
    assert len(every["logged"]) == 1
    assert every["sparse_mla_nope"]["routes"] == {"chunked": 2}, "it answers for the attention"
    assert dense in cases["raised"]


@pytest.mark.parametrize("release", ["0.18.2", "0.19.0", "0.19.2"])
@isolated()
def test_every_release_has_the_known_texts(release: str) -> None:
    sys.path.insert(0, str(releases.path(release)))
    row = mcore_patches.status()[ID]
    if release == "0.18.2":
        assert row.state is State.OUT_OF_RANGE
    else:
        assert row.decision is State.PENDING
        assert [target.verdict for target in row.targets] == ["needs"] * 5


# Reasons --------------------------------------------------------------------------------------------------------------


def hooks(**ops: Any) -> Any:
    """The patched hooks of a backend whose kernels, unless given, are there and return None."""
    module = importlib.import_module(f"{EAV}.dsa_kernels")
    importlib.import_module(f"{EAV}.dsa_masking")
    assert mcore_patches.apply_patches(ID, strict=True)[ID].state is State.APPLIED
    there: dict[str, Any] = {"lighting_indexer": len, "lighting_indexer_indices": len, "SparseMLA": object}
    there["is_supported_indexer_bwd_head_count"] = lambda heads: heads <= 64
    backend = SimpleNamespace(tilelang_dsa=SimpleNamespace(**(there | ops)))
    for hook in ("run_fused_qk_topk", "run_fused_qk_topk_with_loss", "run_fused_absorbed_sparse_attention"):
        setattr(backend, hook, lambda *args, **options: None)
    module._load_backend = lambda config: backend if config.dsa_kernel_backend != "none" else None
    return module


def config(backend: str = "tilelang") -> Any:
    return SimpleNamespace(dsa_kernel_backend=backend)


def tensors(sq: int = 6, sk: int = 9, b: int = 2, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """q, k, weights of the indexer."""
    return [torch.zeros(sq, b, heads, 8, dtype=dtype), torch.zeros(sk, b, 8, dtype=dtype), torch.zeros(sq, b, heads)]


def attention(sq: int = 6, skv: int = 9, heads: int = 16, width: int = 576, k: int = 64) -> list[Any]:
    query, key = torch.zeros(sq, 2, heads, width).bfloat16(), torch.zeros(skv, 2, 1, width).bfloat16()
    return [query, key, torch.zeros(2, sq, k, dtype=torch.int32)]


def declined() -> dict[str, int]:
    return mcore_patches.status()[ID].counters["declines"]


@isolated("before-0.19.2")
def test_reasons_of_the_indexer() -> None:
    module, bounds = hooks(), (None, None, 8192)
    q, k, weights = tensors()
    query, key, _ = attention()
    calls = {
        "index query, key and weights must have 4, 3 and 3 dimensions": (q, k[0], weights),
        "index query and key must be bfloat16, not float32 and float32": tensors(dtype=torch.float32),
        "index query, key and weights differ in batch size": (q, k[:, :1], weights),
        "tilelang declined run_fused_qk_topk": (q, k, weights),
    }
    for given in calls.values():
        assert module.run_fused_qk_topk(config(), *given, 3, *bounds) is None
    assert declined() == dict.fromkeys(calls, 1)
    heads = tensors(heads=65)
    assert module.run_fused_qk_topk_with_loss(config(), *heads, 3, *bounds, query, key, 1.0, 0.1, None) is None
    assert declined()["the backward pass of TileLang's indexer does not take 65 index heads"] == 1
    assert mcore_patches.status()[ID].counters["largest_fallback_bytes"] == 4 * 2 * 6 * 9 * (65 + 16)
    assert module.run_fused_qk_topk(config("none"), q, k, weights, 3, *bounds) is None
    assert module.run_fused_qk_topk(config("cudnn"), q, k, weights, 3, *bounds) is None
    assert declined()["cudnn declined run_fused_qk_topk"] == 1
    assert sum(declined().values()) == 6


@isolated("before-0.19.2")
def test_an_indexer_that_is_not_there() -> None:
    module, bounds = hooks(lighting_indexer=None, lighting_indexer_indices=None), (None, None, 8192)
    query, key, _ = attention()
    assert module.run_fused_qk_topk(config(), *tensors(), 3, *bounds) is None
    assert module.run_fused_qk_topk_with_loss(config(), *tensors(), 3, *bounds, query, key, 1.0, 0.1, None) is None
    assert declined() == {"TileLang's indexer is not importable here (is tilelang installed?)": 2}


@isolated("before-0.19.2")
def test_reasons_of_the_attention() -> None:
    module = hooks()
    calls = {
        "the installed kernel takes width 576, not 512; sparse_mla_nope pads": attention(width=512),
        "the installed kernel takes powers of two of heads, not 24; sparse_mla_nope pads": attention(heads=24),
        "the installed kernel takes multiples of 64 of ids; sparse_mla_nope pads": attention(k=65),
        "width 320 with v_channels 512; the kernel takes widths 512 and 576 with v_channels 512": attention(width=320),
        "tilelang declined run_fused_absorbed_sparse_attention": attention(),
    }
    for given in calls.values():
        assert module.run_fused_absorbed_sparse_attention(config(), *given, 1.0, 512) is None
    assert declined() == dict.fromkeys(calls, 1)
    ops = module._load_backend(config()).tilelang_dsa
    ops.SparseMLA = None
    assert module.run_fused_absorbed_sparse_attention(config(), *attention(), 1.0, 512) is None
    assert declined()["SparseMLA is not importable here (is tilelang installed?)"] == 1
    assert mcore_patches.status()[ID].counters["largest_fallback_bytes"] == 4 * 2 * 24 * 6 * 9


def whole(module: Any, **changes: Any) -> Any:
    q, k, weights = tensors()
    query, key, _ = attention()
    given = {"query": query, "key": key, "q_indexer": q, "k_indexer": k, "indexer_weights": weights, "config": config()}
    given |= {"indexer_topk": 3, "loss_coeff": 0.1, "sparse_loss": False, **changes}
    names = ("value", "up_v_weight", "softmax_scale", "calculate_per_token_loss", "absorbed_mla", "cp_size")
    names += ("attn_mask_type", "packed_seq_params", "varlen_starts", "varlen_ends", "key_positions")
    return module.run_fused_dsa_attention(**dict.fromkeys((*names, "query_valid_rows", "use_relu")), **given)


@isolated("before-0.19.2")
def test_the_hook_for_all_at_once() -> None:
    """Other hooks follow where it declines, unless the loss is over all keys."""
    module = hooks()
    assert whole(module, sparse_loss=True) is None
    assert whole(module, loss_coeff=0.0) is None
    assert declined() == {}
    assert whole(module) is None
    (reason,) = declined()
    assert "loss over all keys" in reason
    backend = module._load_backend(config())
    backend.run_fused_dsa_attention = lambda **options: None
    assert whole(module, config=config("cudnn")) is None
    assert declined()["cudnn declined run_fused_dsa_attention"] == 1
    backend.run_fused_dsa_attention = lambda **options: ("output", "loss")
    assert whole(module, sparse_loss=True) == ("output", "loss")
    counted = mcore_patches.status()[ID].counters
    assert (counted["calls"], counted["hits"], counted["routes"]) == (3, 1, {"run_fused_dsa_attention": 1})


@isolated("before-0.19.2")
def test_a_mask_without_ranges() -> None:
    hooks()
    masking = importlib.import_module(f"{EAV}.dsa_masking")
    options = {"device": torch.device("cpu"), "varlen_starts": None, "varlen_ends": None, "key_positions": None}
    assert masking.build_fused_indexer_varlen_bounds(sq=5, skv=5, mask=None, **options) is not None
    assert declined() == {}
    mask = torch.zeros(5, 5).masked_fill(torch.eye(5, dtype=torch.bool), float("-inf"))
    assert masking.build_fused_indexer_varlen_bounds(sq=5, skv=5, mask=mask, **options) is None
    assert declined() == {"the mask is not one range of keys a row, which is all that fused indexers take": 1}


@isolated("before-0.19.2")
def test_one_warning_for_a_class_of_shapes_and_hits() -> None:
    module, log = hooks(), Records()
    for length in range(33, 65):
        module.run_fused_absorbed_sparse_attention(config(), *attention(sq=length, skv=length, k=65), 1.0, 512)
        module.run_fused_qk_topk(config(), *tensors(sq=length, sk=length), 3, None, None, 8192)
    assert [level for level, _ in log.lines()] == ["WARNING"] * 2
    backend = module._load_backend(config())
    backend.run_fused_qk_topk = lambda **options: ("ids", None)
    assert module.run_fused_qk_topk(config(), *tensors(), 3, None, None, 8192) == ("ids", None)
    counted = mcore_patches.status()[ID].counters
    assert (counted["calls"], counted["hits"], counted["routes"]) == (65, 1, {"run_fused_qk_topk": 1})


@isolated("before-0.19.2")
def test_under_torch_compile_only_raise_is_obeyed() -> None:
    import os

    module, log = hooks(), Records()
    torch.compiler.is_compiling = lambda: True
    for _ in range(2):
        assert module.run_fused_qk_topk(config(), *tensors(), 3, None, None, 8192) is None
    os.environ["MCORE_PATCHES_ON_DECLINE"] = "raise"
    with pytest.raises(DeclinedError, match="tilelang declined run_fused_qk_topk"):
        module.run_fused_qk_topk(config(), *tensors(), 3, None, None, 8192)
    assert log.lines() == []


# The decision ---------------------------------------------------------------------------------------------------------

ENABLED = "    if not _LOGGER.isEnabledFor(logging.DEBUG):\n        return\n    _LOGGER.debug(\n"
EDITS = {
    "fixed": (ENABLED.replace("_LOGGER.debug", "_LOGGER.warning"), State.UPSTREAM_FIXED),
    "other words": (ENABLED.replace("(logging.DEBUG)", "(10)"), State.DRIFTED),
    "undecidable": ("    return\n" + ENABLED, State.DRIFTED),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.thorough if k == "undecidable" else ()) for k in EDITS]
)
def test_edited_text(kind: str, tmp_path: Path) -> None:
    new, state = EDITS[kind]
    assert state_in(tmp_path, ID, [(f"{EAV}.dsa_kernels", ENABLED, new)]) is state
