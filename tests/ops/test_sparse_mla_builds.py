"""What a first call of the sparse MLA kernels builds, and `warmup`. Nothing is compiled: kernels do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.device import Device
from mcore_patches.ops.jit import KernelBuildError, KernelCache
from mcore_patches.ops.sparse_mla import backends, ordering, tilelang_builds, tilelang_kernels
from mcore_patches.ops.sparse_mla.autograd import sparse_mla_once_differentiable

HOPPER = Device("sm_90a", 227 * 1024, 132)
AMPERE = Device("sm_80", 163 * 1024, 108)
SHORT, LONG = 40, 4000  # keys
ORDER = {"mark", "rank", "locate", "sum"}


class Built:
    """Kernels that were asked for, by name and by what they are built for, in the order in which they were built."""

    def __init__(self) -> None:
        self.cache = KernelCache()
        self.refused = ""
        self.ran: set[tuple[Any, ...]] = set()

    def build(self, key: tuple[Any, ...], name: str, *_: Any) -> Any:
        if name == self.refused:
            raise RuntimeError("ptxas fatal: out of registers")
        return lambda *_: self.ran.add(key)

    def of(self, name: str) -> set[tuple[Any, ...]]:
        return {key[4:] for key in self.cache.log.seconds if key[3] == name}

    @property
    def names(self) -> set[str]:
        return {key[3] for key in self.cache.log.seconds}


def on(device: Device, monkeypatch: pytest.MonkeyPatch) -> Built:
    built = Built()
    monkeypatch.setattr(backends, "KERNELS_DEVICE", "cpu")
    monkeypatch.setattr(tilelang_kernels, "_device", lambda _: device)
    monkeypatch.setattr(tilelang_kernels, "_strides_survive", lambda: True)
    monkeypatch.setattr(tilelang_builds, "_build", built.build)
    for module in (tilelang_kernels, tilelang_builds):
        monkeypatch.setattr(module, "CACHE", built.cache)
    # So that few keys are many.
    for limit in ("", "_OF_FEW_HEADS", "_OF_MANY_HEADS"):
        monkeypatch.setattr(ordering, f"MOST_ATOMIC_BYTES{limit}", 4 * 512 * (LONG - 1))
    tilelang_builds.build_first.cache_clear()
    return built


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Built]:
    yield on(HOPPER, monkeypatch)
    tilelang_builds.build_first.cache_clear()


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Built]:
    yield on(AMPERE, monkeypatch)
    tilelang_builds.build_first.cache_clear()


def forward(
    *, heads: int = 2, keys: int = SHORT, batch: int = 1, deterministic: bool = False, megatron: bool = False
) -> Tensor:
    """out of 8 rows. megatron: q is [S, B, H, D] seen from [B, S, H, D]."""
    q = torch.zeros(8, batch, heads, 512, dtype=torch.bfloat16).transpose(0, 1)
    q = (q if megatron else q.contiguous()).requires_grad_()
    kv = torch.zeros(batch, keys, 1, 512, dtype=torch.bfloat16)
    ids = torch.zeros(batch, 8, ordering.USES_OF_A_KEY * keys // 8, dtype=torch.int32)
    settings = {"scale": 1.0, "v_channels": 512, "deterministic": deterministic, "backend": "tilelang"}
    return sparse_mla_once_differentiable(q, kv, ids, **settings)[0]  # type: ignore[arg-type]


def backward(out: Tensor, *, megatron: bool = False) -> None:
    dout = torch.zeros_like(out, memory_format=torch.contiguous_format)
    out.backward(dout.transpose(0, 1).contiguous().transpose(0, 1) if megatron else dout)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few heads": ({"heads": 16}, {"heads": 3}),
    "32 heads": ({"heads": 32}, {"heads": 24}),
    "two blocks of heads": ({"heads": 128}, {"heads": 100}),
    "deterministic": ({"heads": 64, "deterministic": True}, {"heads": 40, "deterministic": True}),
    "long, few heads": ({"heads": 16, "keys": LONG}, {"heads": 2, "keys": LONG}),
    "long": ({"heads": 64, "keys": LONG}, {"heads": 64, "keys": LONG}),
    "long, two blocks of heads": ({"heads": 128, "keys": LONG}, {"heads": 65, "keys": LONG}),
    "megatron's batch": ({"heads": 64, "strided": True}, {"heads": 64, "batch": 2, "megatron": True}),
    "megatron's long batch": (
        {"heads": 64, "strided": True, "keys": LONG},
        {"heads": 64, "batch": 2, "megatron": True, "keys": LONG},
    ),
    "megatron's only sequence": ({"heads": 64}, {"heads": 64, "megatron": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_warmup_builds_what_a_call_takes(hopper: Built, name: str) -> None:
    settings, call = CALLS[name]
    assert tilelang_kernels.warmup("cpu", width=512, **settings) > 0
    built = hopper.cache.builds
    assert tilelang_kernels.warmup("cpu", width=512, **settings) == 0.0
    backward(forward(**call), megatron=call.get("megatron", False))
    assert hopper.cache.builds == built
    assert hopper.ran == set(hopper.cache.log.seconds), "built in vain"
    # The same call without a warmup.
    hopper.cache.clear()
    tilelang_builds.build_first.cache_clear()
    backward(forward(**call), megatron=call.get("megatron", False))
    assert hopper.cache.builds == built
    ordered = settings.get("deterministic", False) or settings.get("keys", SHORT) == LONG
    assert hopper.names == {"forward", "backward", "delta", "extent"} | (ORDER if ordered else set())


@pytest.mark.parametrize("name", CALLS)
def test_forward_builds_for_its_backward(hopper: Built, name: str) -> None:
    _, call = CALLS[name]
    out = forward(**call)
    built = hopper.cache.builds
    backward(out, megatron=call.get("megatron", False))
    assert hopper.cache.builds == built


def test_plain_kernels_have_one_variant(ampere: Built) -> None:
    """Those of other GPUs copy what is strided, and leave the order to who asks for it."""
    assert tilelang_kernels.warmup("cpu", width=512, heads=64, keys=LONG, strided=True) > 0
    assert ampere.names == {"forward", "backward", "delta", "extent"}
    built = ampere.cache.builds
    for megatron in (False, True):
        backward(forward(heads=64, batch=2, megatron=megatron, keys=LONG), megatron=megatron)
    assert ampere.cache.builds == built
    backward(forward(heads=64, deterministic=True))
    assert ampere.names > ORDER


def test_torchs_switch_alone_asks_for_nothing(hopper: Built) -> None:
    """The op's own argument does."""
    torch.use_deterministic_algorithms(True)
    try:
        out = forward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert {key[0] for key in hopper.of("backward")} == {"atomic"}
    backward(out)


def test_gradients_of_other_strides_build_their_backward_alone(hopper: Built) -> None:
    out = forward(heads=64, batch=2)
    assert hopper.of("backward") == {("atomic", 64, False)}
    backward(out, megatron=True)
    assert hopper.of("backward") == {("atomic", 64, False), ("atomic", 64, True)}
    assert hopper.of("forward") == {(False,)}


def test_a_backward_that_does_not_compile_fails_the_forward(hopper: Built) -> None:
    """There a caller can still decline."""
    hopper.refused = "backward"
    with pytest.raises(KernelBuildError, match="ptxas fatal: out of registers"):
        forward(batch=2, megatron=True)


def test_a_backward_that_cannot_run_says_what_follows(hopper: Built) -> None:
    out = forward(heads=64, batch=2)
    hopper.refused = "backward"
    with pytest.raises(
        KernelBuildError, match=r"this backward cannot run, and further calls of width 512 .* out of registers"
    ):
        backward(out, megatron=True)
    assert "out of registers" in tilelang_kernels._fault("sm_90a", 512)
    assert tilelang_kernels._fault("sm_90a", 576) == ""


def test_a_batch_that_no_grid_holds_is_declined() -> None:
    q, kv = (torch.zeros(1, 1, 1, 512).expand(65536, 1, 1, 512) for _ in range(2))
    indices = torch.zeros(1, 1, 8, dtype=torch.int32).expand(65536, 1, 8)
    expected = (False, "q must have at most 65535 batch entries, got 65536")
    assert tilelang_kernels.supports(q, kv, indices, 512) == expected
    assert tilelang_kernels.supports(q[1:], kv[1:], indices[1:], 512) == (
        False,
        "q is on cpu, the kernels need a CUDA device",
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "tpu0"}, ValueError, "device must be a CPU device, got tpu0"),
        ({"device": "meta"}, ValueError, "device must be a CPU device, got meta"),
        ({"width": 640}, ValueError, "width must be 512 or 576, got 640"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"heads": True}, TypeError, "heads must be an int, got True"),
        ({"heads": 2.5}, TypeError, "heads must be an int, got 2.5"),
        ({"keys": -1}, ValueError, "keys must be at least 0, got -1"),
        ({"strided": 1}, TypeError, "strided must be a bool, got 1"),
        ({"deterministic": "no"}, TypeError, "deterministic must be a bool, got 'no'"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_warmup_names_what_is_wrong(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^sparse_mla warmup: {message}"):
        tilelang_kernels.warmup(**({"device": "cpu"} | arguments))
