"""Which implementation of `sparse_mla` runs, and where the TileLang kernels come in.

The kernels are this package's module `tilelang_kernels`, imported when first needed, with

    supports(q, kv, indices, v_channels) -> (bool, reason)
    forward(q, kv, indices, scale, v_channels, deterministic) -> (out, lse)
    backward(q, kv, indices, out, lse, dout, scale, v_channels, deterministic) -> (dq, dkv)
    takes_order(q, kv, indices, deterministic) -> whether that backward adds up dkv in a fixed order

on the tensors of `sparse_mla`, none of the results sharing memory with an argument.
"""

import functools
import importlib

import torch
from torch import Tensor

from mcore_patches.ops.arguments import check_tensors
from mcore_patches.ops.backend import resolve
from mcore_patches.ops.sparse_mla.inputs import OP

KERNELS = f"{__package__}.tilelang_kernels"
KERNELS_DEVICE = "cuda"


def resolve_backend(
    q: Tensor, kv: Tensor, indices: Tensor, *, v_channels: int = 512, backend: str = "auto"
) -> tuple[str, str]:
    """The backend that `sparse_mla` would run on for these arguments, and why: ("chunked", "q is on cpu, ...").

    Raises ValueError for an unknown `backend`, and for "tilelang" where `supports` declines, with its reason.
    """
    if backend in ("naive", "chunked"):
        return backend, "asked for by name"
    supported, reason = supports(q, kv, indices, v_channels=v_channels)
    name = resolve(OP, backend, (supported, reason))
    return name, "the kernels take these arguments" if supported else reason


def supports(q: Tensor, kv: Tensor, indices: Tensor, *, v_channels: int = 512) -> tuple[bool, str]:
    """Whether the TileLang kernels take these (valid) arguments of `sparse_mla`, and why not.

    Raises TypeError for what is no tensor.
    """
    check_tensors(OP, {"q": q, "kv": kv, "indices": indices}, optional={})
    if q.device.type != KERNELS_DEVICE:
        return False, f"q is on {q.device}, the TileLang kernels need {KERNELS_DEVICE}"
    fault = _import_fault()
    if fault:
        return False, fault
    # By statement: torch.compile follows it, but not a module that a function returned.
    from mcore_patches.ops.sparse_mla import tilelang_kernels

    return tilelang_kernels.supports(q, kv, indices, v_channels)


@torch.compiler.assume_constant_result
def _import_fault() -> str:
    """Why the kernels cannot be imported, or nothing if they are."""
    return _import_once()


# Failures too are remembered: an import of tilelang that fails takes as long as one that does not.
@functools.cache
def _import_once() -> str:
    try:
        importlib.import_module(KERNELS)
    # OSError: a shared library that does not load.
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == KERNELS:
            return "there are no TileLang kernels in this build"
        return f"the TileLang kernels cannot be imported: {error}"
    return ""
