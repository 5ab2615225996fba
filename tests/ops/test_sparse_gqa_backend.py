"""The TileLang backend of sparse GQA where no GPU is: what it declines, gradients, what is built and when."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.device import Device
from mcore_patches.ops.jit import KernelBuildError, KernelCache
from mcore_patches.ops.sparse_gqa import resolve_backend, sparse_gqa, supports, tilelang_backend, tilelang_kernels
from mcore_patches.ops.sparse_gqa.naive import sparse_gqa_naive
from tests.ops.assertions import assert_close, assert_identical
from tests.ops.qsa_helpers import no_host_reads, random_block_ids, rows_of, strided

HOPPER = Device("sm_90a", 227 * 1024, 132)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCache]:
    """The backend takes CPU tensors for those of a Hopper GPU; kernels are not built. Yields the kernel cache."""
    cache = KernelCache()
    monkeypatch.setattr(tilelang_backend, "KERNELS_DEVICE", "cpu")
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: HOPPER)
    monkeypatch.setattr(tilelang_backend, "import_fault", lambda: "")
    for module in (tilelang_backend, tilelang_kernels):
        monkeypatch.setattr(module, "CACHE", cache)
    monkeypatch.setattr(tilelang_kernels, "_build", lambda key, *_: fake_kernel(key))
    caches = tilelang_backend._choose_once, tilelang_backend._build
    for cached in caches:
        cached.cache_clear()
    yield cache
    for cached in caches:
        cached.cache_clear()


def fake_kernel(key: tuple[Any, ...]) -> Any:
    def run(*arguments: Any) -> None:
        if str(key[6]).endswith("plan"):
            arguments[4].fill_(-1)  # no tile is shared

    return run


@pytest.fixture
def oracle(on_cpu: KernelCache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of the kernels give what the oracle does. The list says which ran."""
    calls: list[str] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: Any, scale: float) -> tuple[Tensor, Tensor]:
        assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
        assert all(x.is_contiguous() for x in (rows.block_ids, rows.pos, rows.start))
        return sparse_gqa_naive(q, k, v, rows.block_ids, rows.pos, rows.start, scale=scale, block_size=4)

    def forward(kernels: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append("forward")
        return attend(*arguments)

    def backward(
        kernels: Any, q: Tensor, k: Tensor, v: Tensor, rows: Any, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        calls.append("backward")
        assert dout.is_contiguous() and dout.dtype == q.dtype
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again, again_lse = attend(*leaves, rows, scale)
        assert_identical("out", out, again.detach())
        assert_identical("lse", lse, again_lse)
        return torch.autograd.grad(again, leaves, dout)

    monkeypatch.setattr(tilelang_backend, "forward", forward)
    monkeypatch.setattr(tilelang_backend, "backward", backward)
    return calls


def arguments(
    lengths: list[int], *, topk: int = 6, heads: int = 4, kv_heads: int = 2, dim: int = 64, padding: int = 3
) -> dict[str, Any]:
    rows = rows_of(lengths, 4, padding)
    q, k, v = (torch.randn(len(rows.pos), h, dim).bfloat16() for h in (heads, kv_heads, kv_heads))
    ids = random_block_ids(rows, topk, max(lengths) // 4 + topk)
    return {"q": q, "k": k, "v": v, "block_ids": ids, "row_pos": rows.pos, "row_start": rows.start}


SETTINGS: dict[str, Any] = {"scale": 0.125, "block_size": 4}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"block_ids": None}, "block_ids is None: there is no kernel for dense attention"),
        ({"block_ids": torch.zeros(99, 0, dtype=torch.int32)}, r"nothing to attend to: .* block_ids \(99, 0\)"),
        ({"block_size": 3}, "block_size must be one of 1, 2, 4, 8, 16, got 3"),
        ({"q": torch.zeros(99, 10, 64).bfloat16()}, "query heads a KV head must be one of .*, got 5"),
        ({n: torch.zeros(99, 2, 64).half() for n in "qkv"}, "q, k and v must be bfloat16, got float16"),
        ({n: torch.zeros(99, 2, 32).bfloat16() for n in "qkv"}, "the head width must be one of .*, got 32"),
    ],
)
def test_every_decline_has_a_reason(change: dict[str, Any], reason: str) -> None:
    call = arguments([13, 50, 33]) | SETTINGS | change
    supported, _ = supports(**call)
    assert supported == (reason == "")
    if supported:
        assert resolve_backend(**call) == "tilelang"
        return
    assert resolve_backend(**call) == "chunked"
    with pytest.raises(ValueError, match=rf"backend='tilelang' does not run these arguments: .*{reason}"):
        sparse_gqa(**call, backend="tilelang")


def test_cpu_tensors_are_declined() -> None:
    assert supports(**arguments([13]), **SETTINGS) == (False, "q is on cpu, the kernels need cuda")


@pytest.mark.usefixtures("on_cpu")
def test_gpus_without_bf16_matrix_units_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: Device("sm_75", 64 * 1024, 40))
    assert supports(**arguments([13]), **SETTINGS) == (False, "sm_75 has no bfloat16 matrix units")


def test_other_gpus_take_the_plain_kernels(on_cpu: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_backend, "device_of", lambda _: Device("sm_120a", 99 * 1024, 188))
    call = arguments([13, 50])
    call["v"].requires_grad_()
    sparse_gqa(**call, **SETTINGS, backend="tilelang")[0].sum().backward()
    backward = {"backward_row", "backward_window", "backward_delta", "backward_order", "backward_list"}
    assert {key[6] for key in on_cpu.log.seconds} == {"row_forward"} | backward


@pytest.mark.usefixtures("on_cpu")
def test_without_tilelang_the_reason_is_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_backend, "import_fault", lambda: "tilelang cannot be imported: No module named 'tvm'")
    assert supports(**arguments([13]), **SETTINGS) == (False, "tilelang cannot be imported: No module named 'tvm'")


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "misaligned"])
def test_gradients_reach_the_inputs(oracle: list[str], wanted: str, layout: str) -> None:
    call = arguments([13, 50, 33])
    reference = {n: x.clone().requires_grad_(n in wanted) if n in "qkv" else x for n, x in call.items()}
    spread = {"contiguous": lambda x: x, "strided": strided, "misaligned": misaligned}[layout]
    given = {n: spread(x).requires_grad_(n in wanted) if n in "qkv" else x for n, x in call.items()}
    if layout == "strided":
        given |= {n: x.repeat_interleave(2, dim=-1)[..., ::2] for n, x in call.items() if n not in "qkv"}
    dout = torch.randn(call["q"].shape).bfloat16().transpose(0, 1).contiguous().transpose(0, 1)
    want, want_lse = sparse_gqa_naive(**reference, **SETTINGS)
    want.backward(dout)
    out, lse = sparse_gqa(**given, **SETTINGS)
    assert not lse.requires_grad
    out.backward(dout)
    assert oracle == ["forward", "backward"]
    assert_identical("out", want.detach(), out.detach())
    assert_identical("lse", want_lse, lse)
    for name in "qkv":
        if name in wanted:
            assert_close(f"d{name}", reference[name].grad, given[name].grad, 0.0)
        else:
            assert given[name].grad is None


def misaligned(x: Tensor) -> Tensor:
    """A contiguous copy that begins two bytes behind a multiple of sixteen."""
    buffer = torch.empty(x.numel() + 8, dtype=x.dtype)
    view = buffer[1 : 1 + x.numel()].view(x.shape)
    view.copy_(x)
    assert view.is_contiguous() and view.data_ptr() % 16 == 2
    return view


def test_gradients_are_not_differentiable_again(oracle: list[str]) -> None:
    call = arguments([13])
    call["q"].requires_grad_()
    out, _ = sparse_gqa(**call, **SETTINGS)
    (dq,) = torch.autograd.grad(out.square().sum(), call["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    assert oracle == ["forward", "backward"]


def test_no_length_builds_anything_anew(on_cpu: KernelCache) -> None:
    """Other numbers of rows, keys and documents, other lengths, and fewer blocks than the budget."""
    counts = []
    for lengths, topk in (([50], 6), ([13, 50, 33], 6), ([5] * 6, 2), ([200, 1, 3], 40), ([7], 1), ([2100], 512)):
        call = arguments(lengths, topk=topk)
        call["q"].requires_grad_()
        sparse_gqa(**call, **SETTINGS, backend="tilelang")[0].sum().backward()
        counts.append(on_cpu.builds)
    assert counts == [counts[0]] * 6
    assert counts[0] == len(tilelang_backend._choose(HOPPER, torch.bfloat16, 4, 2, 64, 4, 6).named_builds())


def test_without_gradients_the_backward_is_not_built(on_cpu: KernelCache) -> None:
    call = arguments([50])
    sparse_gqa(**call, **SETTINGS)
    forward = {key[6] for key in on_cpu.log.seconds}
    assert forward == {"plan", "union_forward", "row_forward"}
    call["v"].requires_grad_()
    with torch.no_grad():
        sparse_gqa(**call, **SETTINGS)
    assert on_cpu.builds == len(forward)
    sparse_gqa(**call, **SETTINGS)
    assert on_cpu.builds > len(forward)


def test_warmup_builds_what_a_call_takes(on_cpu: KernelCache) -> None:
    assert tilelang_backend.warmup(4, 2, 64, block_size=4, topk=6) > 0
    built = on_cpu.builds
    assert tilelang_backend.warmup(4, 2, 64, block_size=4, topk=500) == 0.0
    call = arguments([50])
    call["k"].requires_grad_()
    sparse_gqa(**call, **SETTINGS)
    assert on_cpu.builds == built
    with pytest.raises(ValueError, match="sparse_gqa: the head width must be one of 64, 128, 256, got 32"):
        tilelang_backend.warmup(4, 2, 32, block_size=4, topk=6)
    # Rounded down, 25 // 2 is a group that there are kernels for.
    with pytest.raises(ValueError, match="sparse_gqa: heads must be a multiple of kv_heads=2, got 25"):
        tilelang_backend.warmup(25, 2, 64, block_size=4, topk=6)
    for name in ("heads", "kv_heads", "dim", "block_size", "topk"):
        sizes = {"heads": 4, "kv_heads": 2, "dim": 64, "block_size": 4, "topk": 6}
        with pytest.raises(ValueError, match=f"sparse_gqa: {name} must be at least 1, got 0"):
            tilelang_backend.warmup(**(sizes | {name: 0}))
    assert on_cpu.builds == built


def test_a_kernel_that_does_not_compile_is_declined_with_its_reason(
    on_cpu: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: tuple[Any, ...], *_: Any) -> Any:
        if key[6] == "row_forward":
            raise RuntimeError("ptxas fatal: out of registers")
        return fake_kernel(key)

    monkeypatch.setattr(tilelang_kernels, "_build", fail)
    call = arguments([13, 50]) | SETTINGS
    with pytest.raises(KernelBuildError, match=r"row_forward.*ptxas fatal: out of registers"):
        sparse_gqa(**call, backend="tilelang")
    on_cpu.clear()
    with pytest.warns(RuntimeWarning, match=r"sparse_gqa takes the chunked path: .*ptxas fatal: out of registers"):
        out, _ = sparse_gqa(**call)
    assert_close("out", sparse_gqa_naive(**call)[0], out, 0.01)
    supported, reason = supports(**call)
    assert not supported
    assert "row_forward" in reason and "ptxas fatal: out of registers" in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_gqa(**call)


def test_the_host_reads_nothing(on_cpu: KernelCache) -> None:
    call = arguments([13, 50, 33])
    call["q"].requires_grad_()
    with no_host_reads():
        sparse_gqa(**call, **SETTINGS, backend="tilelang")[0].sum().backward()
    assert on_cpu.builds > 0
