"""Packed batches, selections and tripwires for the tests of the ops on packed rows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_patches.ops import arguments
from mcore_patches.ops.packing import PackedRows, packed_rows

# Odd lengths off any global grid, documents shorter than a block, many tiny documents, one document.
PACKED = [[13, 50, 33], [1, 3, 4, 41, 7, 40], [5] * 6, [96]]
TINY = [[1], [2], [3], [4], [5]]


def lengths_id(lengths: list[int]) -> str:
    return "L" + "x".join(map(str, lengths))


def rows_of(lengths: list[int], ratio: int, padding: int = 0) -> PackedRows:
    """The rows of documents of these lengths, followed by `padding` tokens that belong to none."""
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed_rows(cu_seqlens, sum(lengths) + padding, ratio)


def num_blocks_of(lengths: list[int], ratio: int) -> int:
    return sum(length // ratio for length in lengths)


def random_block_ids(rows: PackedRows, width: int, highest: int) -> Tensor:
    """Distinct ids from -1 to `highest` in random order, many of them outside a row's complete blocks: [T, width]."""
    assert width <= highest + 2
    picks = torch.rand(len(rows.pos), highest + 2).argsort(dim=1)[:, :width] - 1
    return picks.to(torch.int32)


def strided(x: Tensor) -> Tensor:
    """The same values in a tensor whose dimensions are all strided."""
    spread = x.new_full([2 * size for size in x.shape], float("nan"))
    view = spread[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    assert x.numel() <= 1 or not view.is_contiguous()
    return view


class HostRead(AssertionError):
    """An operator made the host wait for a value or a shape that depends on values."""


class _Tripwire(TorchDispatchMode):
    FORBIDDEN = (
        "aten._local_scalar_dense",
        "aten.is_nonzero",
        "aten.equal",
        "aten.nonzero",
        "aten.masked_select",
        "aten.repeat_interleave.Tensor",
        "aten._unique",
        "aten.unique",
        "aten.bincount",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        by_mask = name.startswith(("aten.index.", "aten.index_put", "aten._index_put")) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if by_mask or name.startswith(self.FORBIDDEN):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Inside, operators that would synchronise a CUDA device raise, on CPU tensors too, which stand for such a device.

    Not seen: `tolist` and `numpy` of a CPU tensor, which read memory without an operator.
    """
    with pytest.MonkeyPatch.context() as patch, _Tripwire():
        patch.setattr(arguments, "HOST", "none")
        yield
