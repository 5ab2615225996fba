"""The stand-in layers against torch and against the definition of the transform."""

from types import SimpleNamespace

import pytest
import torch

from mcore_patches.cpu.layers import DuplicatedLinear, Norm, hadamard_transform, rotate_activation


def config(**fields):
    return SimpleNamespace(
        **{"normalization": "RMSNorm", "params_dtype": torch.float32, "sequence_parallel": False, **fields}
    )


def hadamard_matrix(n):
    """Sylvester's: entry (i, j) is -1 to the number of ones that i and j share in binary."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 8, 12, 128], ids="N{}".format)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_hadamard(n, dtype):
    x = torch.randn(3, 2, n, dtype=torch.float64).to(dtype)
    padded = 1 << (n - 1).bit_length()
    expected = torch.nn.functional.pad(x.double(), (0, padded - n)) @ hadamard_matrix(padded) * 0.25
    result = hadamard_transform(x, scale=0.25)
    assert result.dtype == dtype
    assert result.shape == x.shape
    torch.testing.assert_close(
        result, expected[..., :n].to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_hadamard_of_strided_input():
    x = torch.randn(8, 5, dtype=torch.float64).T
    torch.testing.assert_close(hadamard_transform(x), x @ hadamard_matrix(8))


def test_rotation_is_its_own_inverse():
    x = torch.randn(4, 64)
    torch.testing.assert_close(rotate_activation(rotate_activation(x)), x)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norm(normalization):
    norm = Norm(config(normalization=normalization, sequence_parallel=True), 6, eps=1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(6))
    x = torch.randn(2, 3, 6)
    if normalization == "RMSNorm":
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    else:
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)
    assert {parameter.sequence_parallel for parameter in norm.parameters()} == {True}


@pytest.mark.parametrize(("bias", "skip"), [(False, False), (True, False), (True, True)], ids=["plain", "bias", "skip"])
def test_duplicated_linear(bias, skip):
    linear = DuplicatedLinear(
        4,
        3,
        config=config(),
        init_method=torch.nn.init.normal_,
        bias=bias,
        skip_bias_add=skip,
        parallel_mode="duplicated",
    )
    if bias:
        torch.nn.init.normal_(linear.bias)
    x = torch.randn(2, 4)
    expected = x @ linear.weight.T
    output, returned = linear(x)
    if skip:
        assert returned is linear.bias
    else:
        assert returned is None
        expected = expected + linear.bias if bias else expected
    torch.testing.assert_close(output, expected)
