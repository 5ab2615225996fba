"""Bounds on temporaries, and sums into rows, for the ops that take a few rows at a time."""

import torch
from torch import Tensor


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if any of `dtypes` is, else float32: what scores, probabilities and sums are kept in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def workspace_bytes(device: torch.device) -> int:
    """Bytes of temporaries that one chunk of rows may take.

    On a CPU a chunk that stays in the last-level cache is fastest, and glibc maps allocations above 32 MiB afresh each
    time; a GPU wants enough rows in flight to fill it.
    """
    return 24 * 2**20 if device.type == "cpu" else 512 * 2**20


def rows_per_chunk(bytes_per_row: int, budget: int) -> int:
    """Rows whose temporaries fit `budget` bytes, at least one."""
    return max(1, budget // max(1, bytes_per_row))


def chunks(total: int, size: int) -> list[slice]:
    """Slices of `size` that cover range(total), the last one shorter where `size` does not divide `total`."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def add_rows_(target: Tensor, index: Tensor, values: Tensor, *, deterministic: bool = True) -> None:
    """target[index[n]] += values[n] for target [R, D], index int64 [N], values [N, D]; indices may repeat.

    With `deterministic` the order of each sum is fixed. CPU index_add_ goes through `index` in order; on CUDA it uses
    atomics, whereas index_put_ with accumulate sorts by a stable key first.
    """
    if deterministic and target.is_cuda:
        target.index_put_((index,), values, accumulate=True)
    else:
        target.index_add_(0, index, values)


def readable(tensor: Tensor) -> Tensor:
    """`tensor` without its graph and contiguous, from an address that 16-byte copies can read."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
