"""How the sparse MLA probe and its bench compare results."""

import math

import pytest
import torch

from gpu_ci.kernels import sparse_mla_probe
from gpu_ci.kernels.sparse_mla_probe import error


@pytest.mark.parametrize("part", [1, 7, 2**27])
def test_error_is_the_relative_norm_whatever_the_parts(monkeypatch, part):
    monkeypatch.setattr(sparse_mla_probe, "PART", part)
    ref = torch.randn(2, 5, 3, 4)
    for got in (ref + 0.01 * torch.randn_like(ref), ref.transpose(1, 3).clone().transpose(1, 3) * 1.5, ref):
        expected = (got.double() - ref.double()).norm() / ref.double().norm()
        assert error(ref, got) == pytest.approx(expected.item(), rel=1e-12, abs=1e-15)
    assert error(torch.zeros(3, 2), torch.zeros(3, 2)) == 0.0
    assert error(torch.zeros(3, 2), torch.ones(3, 2)) > 1e20
    assert error(torch.zeros(0, 2), torch.zeros(0, 2)) == 0.0


@pytest.mark.parametrize("part", [1, 2**27])
def test_infinities_must_agree_and_nan_is_seen(monkeypatch, part):
    monkeypatch.setattr(sparse_mla_probe, "PART", part)
    ref = torch.randn(4, 6)
    ref[1, 2] = -math.inf
    got = ref.clone()
    assert error(ref, got) == 0.0
    got[3, 0] += 1.0
    assert error(ref, got) == pytest.approx(1.0 / ref[ref.isfinite()].norm().item(), rel=1e-5)
    for place, value in (((1, 2), 0.0), ((0, 0), math.inf), ((2, 2), math.nan)):
        wrong = ref.clone()
        wrong[place] = value
        assert math.isnan(error(ref, wrong))
