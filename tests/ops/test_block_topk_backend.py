"""The TileLang backend of select_blocks where no GPU is: what it declines, and what it hands to its kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.block_topk import resolve_backend, select_blocks, supports, tilelang_backend
from mcore_patches.ops.block_topk.design import GROUP
from mcore_patches.ops.block_topk.naive import select_blocks_naive
from mcore_patches.ops.device import Device
from mcore_patches.ops.jit import KernelBuildError, KernelCache
from tests.ops.assertions import assert_identical
from tests.ops.kernels_in_torch import score
from tests.ops.qsa_helpers import num_blocks_of, rows_of, strided

HOPPER = Device("sm_90a", 227 * 1024, 132)
LENGTHS = [13, 50, 333, 3]


def select(keys: Tensor, maxima: Tensor, first: Tensor, count: Tensor, ids: Tensor) -> None:
    """What the selection writes."""
    assert maxima.shape == (keys.numel() // GROUP,)
    for row, (start, number) in enumerate(zip(first.tolist(), count.tolist())):
        ranked = sorted(range(number), key=lambda b: (-int(keys[row, start + b]), b))
        chosen = sorted(ranked[: ids.shape[1]])
        ids[row] = torch.tensor(chosen + [-1] * (ids.shape[1] - len(chosen)), dtype=torch.int32)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backend takes CPU tensors for those of a Hopper GPU. Returns what kernels were asked for."""
    asked: list[Any] = []

    def kernels(*scoring: Any, capacity: int) -> tuple[Any, Any]:
        asked.append((scoring, capacity))
        return score, select

    monkeypatch.setattr(tilelang_backend, "KERNELS_DEVICE", "cpu")
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: HOPPER)
    monkeypatch.setattr(tilelang_backend, "_kernels", kernels)
    return asked


def arguments(ratio: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    rows = rows_of(LENGTHS, ratio, padding=3)
    q_idx = torch.randint(-2, 3, (len(rows.pos), 3, 64)).to(dtype)
    return q_idx, torch.randint(-2, 3, (num_blocks_of(LENGTHS, ratio), 64)).to(dtype), rows.pos, rows.block_start


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("ratio", "topk"), [(1, 7), (4, 5), (4, 600)])
def test_auto_equals_the_oracle(on_cpu: list[Any], ratio: int, topk: int, weighted: bool) -> None:
    tensors = arguments(ratio)
    weights = torch.randint(1, 3, tensors[0].shape[:2]).float() if weighted else None
    settings = {"ratio": ratio, "topk": topk, "weights": weights, "relu": True}
    assert resolve_backend(*tensors, **settings) == "tilelang"
    assert_identical("ids", select_blocks_naive(*tensors, **settings), select_blocks(*tensors, **settings))
    got = tilelang_backend.select_blocks_tilelang(*tensors, **settings, row_chunk=128)
    assert_identical("ids in chunks", select_blocks_naive(*tensors, **settings), got)
    assert {capacity for _, capacity in on_cpu} == {512 if topk <= 512 else 1024}


def test_strided_arguments_are_made_contiguous(on_cpu: list[Any]) -> None:
    q_idx, k_blocks, pos, first = arguments(2)
    settings = {"ratio": 2, "topk": 5}
    want = select_blocks(q_idx, k_blocks, pos, first, **settings)
    placement = (torch.stack((x, x), dim=1)[:, 0] for x in (pos, first))
    got = select_blocks(strided(q_idx), strided(k_blocks), *placement, **settings, backend="tilelang")
    assert_identical("ids", want, got)


@pytest.mark.parametrize("row", [1, 380])
def test_checked_refuses_nan_in_rows_of_few_and_of_many_blocks(on_cpu: list[Any], row: int) -> None:
    q_idx, k_blocks, pos, first = arguments(1)
    settings = {"ratio": 1, "topk": 5, "backend": "tilelang", "checked": True}
    select_blocks(q_idx, k_blocks, pos, first, **settings)
    q_idx[row, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"must not be NaN; 1 rows break it, the first is row {row}"):
        select_blocks(q_idx, k_blocks, pos, first, **settings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: (t[0].float(), t[1].float(), *t[2:]), "q_idx must be bfloat16 or float16, got float32"),
        (lambda t: (t[0][:, :, :48], t[1][:, :48], *t[2:]), "q_idx must have 64, 128, 256 channels, got 48"),
        (lambda t: (t[0], t[1][:0], t[2] * 0 - 1, t[3]), "there is nothing to select"),
    ],
)
def test_declines_with_a_reason(on_cpu: list[Any], change: Any, reason: str) -> None:
    tensors = change(arguments(4))
    supported, why = supports(*tensors, ratio=4, topk=5)
    assert not supported and reason in why
    assert resolve_backend(*tensors, ratio=4, topk=5) == "chunked"
    with pytest.raises(ValueError, match=reason):
        select_blocks(*tensors, ratio=4, topk=5, backend="tilelang")


def test_without_a_gpu_it_declines() -> None:
    assert supports(*arguments(4), ratio=4, topk=5) == (False, "q_idx is on cpu, the kernels need cuda")


def test_a_kernel_that_does_not_compile(on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(*_: Any, **__: Any) -> None:
        raise KernelBuildError("block_topk.score does not compile: out of registers")

    monkeypatch.setattr(tilelang_backend, "_kernels", kernels)
    tensors = arguments(4)
    with pytest.raises(KernelBuildError, match="out of registers"):
        select_blocks(*tensors, ratio=4, topk=5, backend="tilelang")
    with pytest.warns(RuntimeWarning, match="takes the chunked path: .*out of registers"):
        got = select_blocks(*tensors, ratio=4, topk=5)
    assert_identical("ids", select_blocks(*tensors, ratio=4, topk=5, backend="chunked"), got)


def test_a_failure_to_compile_is_the_reason_from_then_on(on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = arguments(4)
    failed = {"block_topk.select": "block_topk.select does not compile: out of registers"}
    monkeypatch.setattr(tilelang_backend.CACHE, "failure_of", lambda name, *_: failed.get(name))
    assert supports(*tensors, ratio=4, topk=5) == (False, failed["block_topk.select"])


def test_warmup_builds_what_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache()
    built: list[Any] = []

    def compile_kernel(key: Any, function: Any, *, arch: str, pass_configs: Any) -> Any:
        built.append((key[0], arch))
        return lambda *_: None

    monkeypatch.setattr(tilelang_backend, "CACHE", cache)
    monkeypatch.setattr(tilelang_backend, "compile_kernel", compile_kernel)
    monkeypatch.setattr(tilelang_backend, "KERNELS_DEVICE", "cpu")
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: HOPPER)
    tilelang_backend._kernels.cache_clear()
    try:
        assert tilelang_backend.warmup(3, 64, topk=5) > 0
        assert sorted(built) == [("block_topk.score", "sm_90a"), ("block_topk.select", "sm_90a")]
        assert tilelang_backend.warmup(3, 64, topk=500) == 0.0
        q_idx, k_blocks, pos, first = arguments(4)
        for rows, topk in ((slice(None), 5), (slice(0, 1), 1), (slice(20, 350), 512)):
            given = q_idx[rows], k_blocks, pos[rows], first[rows]
            select_blocks(*given, ratio=4, topk=topk, backend="tilelang")
        assert cache.builds == 2, "another number of rows or of blocks to select builds nothing anew"
        assert tilelang_backend.warmup(3, 64, topk=5, weighted=True) > 0
        assert cache.builds == 3
    finally:
        tilelang_backend._kernels.cache_clear()
    with pytest.raises(ValueError, match="select_blocks: q_idx must have 64, 128, 256 channels, got 48"):
        tilelang_backend.warmup(3, 48, topk=5)
    with pytest.raises(ValueError, match="select_blocks: topk must be at least 1, got -9"):
        tilelang_backend.warmup(3, 64, topk=-9)
    with pytest.raises(TypeError, match="select_blocks: weighted must be a bool, got 1"):
        tilelang_backend.warmup(3, 64, topk=5, weighted=1)
