"""The DSA layer on a GPU: fused against torch in bounded memory, kernels built once, nothing waits, linear memory.

The layer is for megatron-core before 0.19: pack one of those, `MCORE=0.18.2 gpu_ci/pack.sh .gpu/old.tar.xz`, and run
with `PYTHONPATH=/tmp/old:$PWD`. On 0.19 the same tests run the layer by itself, as the patch has nothing to add there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_patches
from mcore_patches.demo.device import training_device
from mcore_patches.ops import block_topk, indexer_kl, sparse_mla
from mcore_patches.ops.jit import CACHE
from mcore_patches.ops.sparse_mla.ordering import PARTS_BYTES

pytestmark = [pytest.mark.h100, pytest.mark.xdist_group("dsa-layer")]

HIDDEN, HEADS, TOPK = 512, 16, 256
LENGTHS = [300, 3, 641, 1104]
OPS = (block_topk, sparse_mla, indexer_kl)


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with training_device() as device, mcore_patches.applied("dsa_parallel") as report:
        assert report["dsa_parallel"].state in ("APPLIED", "PENDING", "UPSTREAM_FIXED"), report["dsa_parallel"]
        yield device


def build(device: torch.device, **fields: Any) -> Any:
    """One attention layer of the real widths (latent 512, 64 rotated channels, index heads of 128), seeded weights."""
    from megatron.core.transformer.spec_utils import build_module

    from mcore_patches.attention.dsa import get_dsa_module_spec_for_backend
    from mcore_patches.cpu.models import CpuBackend, dsa_config
    from mcore_patches.cpu.parameters import seed_parameters

    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": True,
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": TOPK,
        "dsa_indexer_use_sparse_loss": True,
        "dsa_kernel_backend": "tilelang",
    }
    config = dsa_config("bf16", **{**settings, **fields})
    layer = build_module(get_dsa_module_spec_for_backend(config, CpuBackend()), config=config, layer_number=1)
    seed_parameters(layer)
    return layer.to(device, torch.bfloat16)


def inputs(lengths: list[int], packed: bool, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states and the rest of the layer's arguments: documents, or two sequences."""
    from tests.attention.tiny import packed_params

    total = sum(lengths)
    documents = None
    if packed:
        documents = packed_params(lengths)
        documents.cu_seqlens_q = documents.cu_seqlens_kv = documents.cu_seqlens_q.to(device)
    shape = (total, 1, HIDDEN) if packed else (total // 2, 2, HIDDEN)
    generator = torch.Generator(device).manual_seed(total)
    hidden = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    return hidden, {"attention_mask": None, "packed_seq_params": documents}


def run(layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Output and gradients, those of the indexer from its own loss."""
    layer.zero_grad()
    hidden.grad = None
    out, _ = layer(hidden, **arguments)
    weight = torch.randn(out.shape, device=out.device, generator=torch.Generator(out.device).manual_seed(1))
    (out.float() * weight).sum().backward()
    found = {"out": out.detach(), "hidden": hidden.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    assert all(t is not None and t.isfinite().all() for t in found.values()), [n for n, t in found.items() if t is None]
    return {name: t.clone() for name, t in found.items()}


@contextlib.contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every op takes its torch path."""
    with monkeypatch.context() as patch:
        for op in OPS:
            home = op.backends if hasattr(op, "backends") else op
            patch.setattr(home, "supports", lambda *_, **__: (False, "switched off by the test"))
        yield


def counted() -> dict[str, int]:
    from mcore_patches.attention.dsa import telemetry
    from mcore_patches.overlay.counters import Counters

    counters = Counters("test")
    telemetry.count_in(counters)
    return counters.routes


def relative(reference: Tensor, got: Tensor) -> float:
    reference, got = reference.double(), got.double()
    return ((got - reference).norm() / reference.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse-loss", "dense-loss"])
def test_fused_equals_unfused(
    packed: bool, sparse: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcore_patches.attention.dsa import core

    layer = build(device, dsa_indexer_use_sparse_loss=sparse)
    hidden, arguments = inputs(LENGTHS, packed, device)
    selections: list[Tensor] = []
    select, given = block_topk.select_blocks, None

    def keep(*args: Any, **settings: Any) -> Tensor:
        selections.append(select(*args, **settings))
        return selections[-1] if given is None else given

    monkeypatch.setattr(core.block_topk, "select_blocks", keep)
    routes = counted()
    fused = run(layer, hidden, arguments)
    assert routes.get("sparse_mla tilelang") == 1, routes
    assert routes.get("select_blocks tilelang") == 1, routes
    print(f"routes: {dict(routes)}")
    # Scores that differ by rounding change a few keys at the cut; the rest is compared on the same keys.
    given = selections[0]
    with without_kernels(monkeypatch):
        unfused = run(layer, hidden, arguments)
    ids, again = selections
    same = (ids[:, :, None] == again[:, None, :]).any(dim=2) & (ids >= 0)
    assert same.sum() >= 0.999 * (ids >= 0).sum(), f"{int(same.sum())} of {int((ids >= 0).sum())} keys agree"
    errors = {name: relative(unfused[name], fused[name]) for name in unfused}
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    # The indexer's gradients are differences of two distributions, and kept in bf16.
    assert all(error < (0.05 if ".indexer." in name else 0.02) for name, error in errors.items()), worst


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd"])
def test_forward_and_backward_never_wait(packed: bool, device: torch.device) -> None:
    layer = build(device)
    hidden, arguments = inputs(LENGTHS, packed, device)
    weight = torch.randn(hidden.shape, device=device)

    def step() -> None:
        out, _ = layer(hidden, **arguments)
        (out.float() * weight).sum().backward()

    step()  # kernels compile, caches fill
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_shapes_build_no_kernels(device: torch.device) -> None:
    """As the stages of a pipeline alternate between microbatches of other lengths and layouts, training and not."""
    layer = build(device)
    shapes = [([1024, 1024], False), ([384, 900, 77], True), ([2000, 2000], False), ([4096], True), (LENGTHS, True)]
    run(layer, *inputs(*shapes[0], device))
    builds = CACHE.builds
    assert builds > 0
    for _ in range(2):
        for lengths, packed in shapes:
            run(layer, *inputs(lengths, packed, device))
            with torch.no_grad():
                layer(inputs(lengths, packed, device)[0], **inputs(lengths, packed, device)[1])
    assert CACHE.builds == builds, list(CACHE.log.seconds)[builds:]


def test_memory_is_linear(device: torch.device) -> None:
    """Forward and backward at 8k to 64k tokens. Key gradients beyond the cache take a workspace of bounded size."""
    layer = build(device)
    peaks = {}
    for tokens in (8192, 16384, 32768, 65536):
        hidden, arguments = inputs([tokens], True, device)
        layer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(hidden, **arguments)[0].sum().backward()
        torch.cuda.synchronize()
        peaks[tokens] = torch.cuda.max_memory_allocated() - before
        del hidden, arguments
    print(f"peak bytes by tokens: {peaks}")
    assert peaks[32768] < 2.2 * peaks[16384], peaks
    assert peaks[65536] < 2.2 * peaks[32768] + PARTS_BYTES, peaks
    # A score of every pair in fp32 would alone take this.
    assert peaks[65536] < 4 * 65536**2, peaks
