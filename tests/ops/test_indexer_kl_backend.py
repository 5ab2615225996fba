"""The TileLang backend of indexer_kl where no GPU is: what it declines, and what happens if a kernel does not build."""

from typing import Any

import pytest
import torch

from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl import indexer_kl, resolve_backend, supports, tilelang_backend
from mcore_patches.ops.indexer_kl.tilelang_all import seen_by_tiles
from mcore_patches.ops.indexer_kl.tilelang_selected import Rows
from mcore_patches.ops.jit import KernelBuildError
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


def arguments(**changes: Any) -> tuple[Any, ...]:
    """Those of `indexer_kl` in their order, some of them changed."""
    rows = rows_of(LENGTHS, RATIO, padding=3)
    number = len(rows.pos)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    values = {
        "q_idx": normal(number, 2, 64),
        "k_blocks": normal(num_blocks_of(LENGTHS, RATIO), 64),
        "q": normal(number, 4, 64),
        "k": normal(sum(LENGTHS), 2, 64),
        "lse": torch.full((number, 4), 3.0),
        "block_ids": random_block_ids(rows, 6, 13),
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
        ({"q_idx": torch.zeros(99, 9, 64).bfloat16()}, {}, "heads of q_idx must be at most 8, got 9"),
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
