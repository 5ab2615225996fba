"""Comparison of a computed tensor with its reference, for the tests of all ops."""

import torch
from torch import Tensor


def assert_close(name: str, ref: Tensor, got: Tensor, tol: float, *, floor: float = 0.0, peak: float = 4.0) -> float:
    """Fail unless `got` equals `ref` within the relative error `tol`; return the error.

    The error is ``norm(got - ref) / max(norm(ref), floor)`` in float64 over the finite entries. As one wrong row hardly
    moves the norm of a large tensor, the largest single error must also stay below ``peak * tol`` times the largest
    magnitude of `ref` (or `floor`). Shapes must agree and infinities must sit at the same places with the same sign. A
    NaN on either side fails, whatever the tolerance. dtypes are not compared.

    Args:
        name: what the tensor is, for the message ("out", "dq").
        ref: the reference.
        got: what is tested, of the same shape on any device.
        tol: largest allowed relative error; 0 asks for equality.
        floor: smallest magnitude to measure against, for references that vanish up to rounding (the softmax gradient of
            a row with a single key).
        peak: how much larger than `tol` the largest single error may be, relative to the largest entry.
    """
    assert ref.shape == got.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    ref, got = (t.detach().to("cpu", torch.float64) for t in (ref, got))
    for side, tensor in (("reference", ref), ("result", got)):
        nans = int(tensor.isnan().sum())
        assert nans == 0, f"{name}: {nans} of {tensor.numel()} values of the {side} are NaN"
    infinite = ref.isinf() | got.isinf()
    wrong = int((infinite & (ref != got)).sum())
    assert wrong == 0, f"{name}: {wrong} infinite values differ"
    ref, got = (t.masked_fill(infinite, 0.0) for t in (ref, got))
    if ref.numel() == 0:
        return 0.0
    difference = got - ref
    error = _ratio(difference.norm().item(), max(ref.norm().item(), floor))
    worst = _ratio(difference.abs().max().item(), max(ref.abs().max().item(), floor))
    where = tuple(int(i) for i in torch.unravel_index(difference.abs().argmax(), difference.shape))
    assert error <= tol, f"{name}: relative error {error:.3e} > {tol:.1e}, worst at {where}"
    assert worst <= peak * tol, (
        f"{name}: largest error {worst:.3e} of the largest value > {peak} * {tol:.1e}, at {where}"
    )
    return error


def assert_identical(name: str, ref: Tensor, got: Tensor) -> None:
    """Fail unless both tensors have one dtype, one shape and the same bits, in NaNs and zeros too."""
    assert ref.dtype == got.dtype, f"{name}: dtype {got.dtype}, expected {ref.dtype}"
    assert ref.shape == got.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    ref, got = (t.detach().flatten().contiguous().view(torch.uint8) for t in (ref, got))
    differing = int((ref != got).sum())
    assert differing == 0, f"{name}: {differing} of {ref.numel()} bytes differ"


def _ratio(error: float, size: float) -> float:
    if error == 0.0:
        return 0.0
    return error / size if size > 0.0 else float("inf")
