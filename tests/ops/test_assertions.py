"""The helpers that judge all ops can fail."""

import pytest
import torch

from tests.ops.assertions import assert_close, assert_identical
from tests.ops.memory import peak_extra_bytes


def test_close_returns_the_relative_norm_error() -> None:
    ref = torch.tensor([3.0, 4.0])
    assert assert_close("x", ref, ref + torch.tensor([0.0, 0.05]), 0.011) == pytest.approx(0.01, rel=1e-5)


def test_close_names_the_tensor_and_the_error() -> None:
    with pytest.raises(AssertionError, match=r"dq: relative error 1\.000e-01"):
        assert_close("dq", torch.tensor([1.0]), torch.tensor([1.1], dtype=torch.float64), 0.01)


@pytest.mark.parametrize("side", ["ref", "got", "both"])
def test_nan_never_passes(side: str) -> None:
    clean, dirty = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    ref, got = (dirty if side in (name, "both") else clean for name in ("ref", "got"))
    with pytest.raises(AssertionError, match="x: 1 of 3 values of the"):
        assert_close("x", ref, got, float("inf"))


def test_infinities_must_agree_in_place_and_sign() -> None:
    inf = float("inf")
    assert assert_close("lse", torch.tensor([-inf, 1.0]), torch.tensor([-inf, 1.0]), 0.0) == 0.0
    for got in ([inf, 1.0], [0.0, 1.0], [-inf, -inf]):
        with pytest.raises(AssertionError, match="lse: 1 infinite values differ"):
            assert_close("lse", torch.tensor([-inf, 1.0]), torch.tensor(got), 1.0)


def test_one_wrong_entry_of_many_fails_though_the_norm_hardly_moves() -> None:
    ref = torch.ones(100_000)
    got = ref.clone()
    got[4321] = 2.0
    with pytest.raises(AssertionError, match=r"largest error 1\.000e\+00.*at \(4321,\)"):
        assert_close("out", ref, got, 0.01)


def test_zero_reference_needs_a_floor() -> None:
    ref, got = torch.zeros(2), torch.full((2,), 1e-9)
    with pytest.raises(AssertionError, match="relative error inf"):
        assert_close("dq", ref, got, 1e-3)
    assert_close("dq", ref, got, 1e-3, floor=1.0)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close("x", torch.zeros(2, 1), torch.zeros(2), 1.0)


def test_identical_sees_one_bit() -> None:
    x = torch.randn(5, dtype=torch.float64)
    assert_identical("x", x, x.clone())
    y = x.clone()
    y[3] = torch.nextafter(y[3], torch.tensor(9.0, dtype=torch.float64))
    with pytest.raises(AssertionError, match="of 40 bytes differ"):
        assert_identical("x", x, y)
    with pytest.raises(AssertionError, match="dtype"):
        assert_identical("x", x, x.float())


def test_peak_counts_what_lives_at_one_time() -> None:
    def one_after_another() -> torch.Tensor:
        for _ in range(4):
            x = torch.empty(1000, dtype=torch.float64)
            del x
        return torch.empty(500, dtype=torch.float64)

    def together() -> list[torch.Tensor]:
        return [torch.empty(1000, dtype=torch.float64) for _ in range(4)]

    assert peak_extra_bytes(one_after_another) == 8000
    assert peak_extra_bytes(together) == 32000
