"""The TileLang backend of indexer_kl where no GPU is: what it declines, and what happens if a kernel does not build."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mcore_patches.ops.block_topk import tilelang_backend as selection
from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl import indexer_kl, resolve_backend, supports, tilelang_backend, tilelang_kernels
from mcore_patches.ops.indexer_kl.tilelang_all import seen_by_tiles
from mcore_patches.ops.indexer_kl.tilelang_selected import Rows
from mcore_patches.ops.jit import KernelBuildError, KernelCache
from mcore_patches.ops.packing import complete_blocks
from tests.ops.assertions import assert_close
from tests.ops.qsa_helpers import num_blocks_of, random_block_ids, rows_of

HOPPER = Device("sm_90a", 227 * 1024, 132)
LENGTHS = [13, 50, 33]
RATIO = 4
SETTINGS: dict[str, Any] = {"scale": 0.125, "ratio": RATIO}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend takes CPU tensors for those of a Hopper GPU."""
    monkeypatch.setattr(tilelang_backend, "KERNELS_DEVICE", "cpu")
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: HOPPER)


@pytest.fixture
def unbuilt(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCache]:
    """Kernels are not compiled, and do nothing. Yields their cache."""
    cache = KernelCache()
    for module in (tilelang_backend, tilelang_kernels, selection):
        monkeypatch.setattr(module, "CACHE", cache)
    monkeypatch.setattr(tilelang_kernels, "_build", lambda *_: lambda *_: None)
    monkeypatch.setattr(selection, "compile_kernel", lambda *_, **__: lambda *_: None)
    tilelang_kernels.kernels.cache_clear()
    yield cache
    tilelang_kernels.kernels.cache_clear()


def arguments(lengths: list[int] = LENGTHS, topk: int = 6, **changes: Any) -> tuple[Any, ...]:
    """Those of `indexer_kl` in their order, some of them changed."""
    rows = rows_of(lengths, RATIO, padding=3)
    number = len(rows.pos)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    values = {
        "q_idx": normal(number, 2, 64),
        "k_blocks": normal(num_blocks_of(lengths, RATIO), 64),
        "q": normal(number, 4, 64),
        "k": normal(sum(lengths), 2, 64),
        "lse": torch.full((number, 4), 3.0),
        "block_ids": random_block_ids(rows, topk, topk + 7),
        "row_pos": rows.pos,
        "row_start": rows.start,
        "row_block_start": rows.block_start,
    }
    return tuple((values | changes).values())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("block_ids", [None, ...], ids=["all", "selected"])
def test_takes_both_stages(block_ids: Any) -> None:
    given = arguments() if block_ids is ... else arguments(block_ids=None)
    assert supports(*given, **SETTINGS) == (True, "the kernels take these arguments")
    assert resolve_backend(*given, **SETTINGS) == "tilelang"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"lse": None}, {}, "lse is None"),
        ({"q_idx": torch.zeros(99, 65, 64).bfloat16()}, {}, "heads of q_idx must be at most 64, got 65"),
        ({"q_idx": torch.zeros(99, 2, 64)}, {}, "q_idx must be bfloat16 or float16, got float32"),
        ({"q_idx": torch.zeros(99, 2, 64).half(), "block_ids": None}, {}, "must be bfloat16 where block_ids is None"),
        ({"k_blocks": torch.zeros(0, 64).bfloat16()}, {}, "there is nothing to compare"),
        ({"k_blocks": torch.zeros(262145, 64).bfloat16()}, {}, "k_blocks may hold 262144 blocks, got 262145"),
        ({}, {"ratio": 3}, "ratio must be one of 1, 2, 4, 8, 16, got 3"),
    ],
)
def test_declines_with_a_reason(changes: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    supported, why = supports(*arguments(**changes), **(SETTINGS | settings))
    assert not supported and reason in why
    assert resolve_backend(*arguments(**changes), **(SETTINGS | settings)) == "chunked"


def test_without_a_gpu_it_declines() -> None:
    assert supports(*arguments(), **SETTINGS) == (False, "q is on cpu, the kernels need cuda")


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_selected_blocks(*_: Any, **__: Any) -> None:
        raise KernelBuildError("indexer_kl/teacher does not compile: out of registers")

    monkeypatch.setattr(tilelang_backend, "over_selected_blocks", over_selected_blocks)
    given = arguments()
    given[0].requires_grad_()
    with pytest.raises(KernelBuildError, match="out of registers"):
        indexer_kl(*given, **SETTINGS, backend="tilelang")
    with pytest.warns(RuntimeWarning, match="takes the chunked path: .*out of registers"):
        loss = indexer_kl(*given, **SETTINGS)
    assert_close("loss", indexer_kl(*given, **SETTINGS, backend="chunked"), loss, 1e-6)
    assert torch.autograd.grad(loss, given[0])[0].shape == given[0].shape


@pytest.mark.parametrize("everywhere", [False, True], ids=["selected", "all"])
def test_warmup_builds_what_a_call_takes(unbuilt: KernelCache, everywhere: bool) -> None:
    shape: dict[str, Any] = {"heads": 2, "channels": 64, "q_heads": 4, "kv_heads": 2, "dim": 64, "ratio": RATIO}
    columns = None if everywhere else 6
    assert tilelang_backend.warmup(**shape, topk=columns) > 0
    built = unbuilt.builds
    assert built == (5 if everywhere else 8)
    assert tilelang_backend.warmup(**shape, topk=columns and 500) == 0.0
    given = arguments(block_ids=None) if everywhere else arguments()
    indexer_kl(*given, **SETTINGS, backend="tilelang")
    assert unbuilt.builds == built
    # The teacher then writes a mass for each token.
    assert tilelang_backend.warmup(**shape, topk=columns, ranks=True) > 0
    with pytest.raises(ValueError, match="indexer_kl: ratio must be one of 1, 2, 4, 8, 16, got 3"):
        tilelang_backend.warmup(**(shape | {"ratio": 3}), topk=columns)
    for name, value, error in (("kv_heads", 0, "at least 1, got 0"), ("q_heads", 5, "a multiple of kv_heads=2, got 5")):
        with pytest.raises(ValueError, match=f"indexer_kl: .*heads must be {error}"):
            tilelang_backend.warmup(**(shape | {name: value}), topk=columns)
    with pytest.raises(TypeError, match="indexer_kl: ranks must be a bool, got 2"):
        tilelang_backend.warmup(**shape, topk=columns, ranks=2)


@pytest.mark.parametrize("everywhere", [False, True], ids=["selected", "all"])
def test_no_length_builds_anything_anew(unbuilt: KernelCache, everywhere: bool) -> None:
    """Other numbers of rows, keys, blocks and documents, and fewer columns than the bound."""
    counts = []
    for lengths, topk in (([50], 6), ([13, 50, 33], 6), ([5] * 6, 2), ([200, 1, 3], 40), ([7], 1), ([2100], 512)):
        given = arguments(lengths, topk, **({"block_ids": None} if everywhere else {}))
        indexer_kl(*given, **SETTINGS, backend="tilelang")
        counts.append(unbuilt.builds)
    assert counts == [5 if everywhere else 8] * 6


def test_a_scoring_kernel_that_does_not_compile_is_the_reason_from_then_on(
    unbuilt: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("ptxas fatal: out of registers")

    monkeypatch.setattr(selection, "compile_kernel", compile_kernel)
    given = arguments(block_ids=None)
    with pytest.warns(RuntimeWarning, match=r"takes the chunked path: block_topk\.score.*out of registers"):
        indexer_kl(*given, **SETTINGS)
    supported, reason = supports(*given, **SETTINGS)
    assert not supported and "out of registers" in reason
    assert supports(*arguments(), **SETTINGS)[0]


@pytest.mark.parametrize("size", [8, 64, 128])
def test_tiles_see_what_their_rows_see(size: int) -> None:
    placed = rows_of(LENGTHS, RATIO, padding=40)
    count = complete_blocks(placed.pos, RATIO)
    nothing = torch.empty(len(count), 0)
    rows = Rows(nothing, None, nothing, nothing, None, placed.start, placed.block_start, count, nothing)
    begin, end = seen_by_tiles(rows, size)
    for tile in range(-(-len(count) // size)):
        here = slice(tile * size, (tile + 1) * size)
        seen = [(f, f + c) for f, c in zip(placed.block_start[here].tolist(), count[here].tolist()) if c]
        assert int(begin[tile]) == min((f for f, _ in seen), default=2**31 - 1)
        assert int(end[tile]) == max((e for _, e in seen), default=0)
