"""Argument checks shared by the ops on packed rows. Errors name the op, the argument, its value and what is allowed.

`check_*` on types, shapes, dtypes and devices look at no values and cost nothing on a GPU. The `verify_*` functions
read values, so the host waits for the device; ops call them with `checked=True`, and those that look at each row's
place on a CPU always.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from mcore_patches.ops.packing import complete_blocks

LARGEST_ROW_BYTES = 4 * 2**30  # of what a chunked path may gather for one row
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INT32_MAX = 2**31 - 1
MOST_SCALE = 1e38  # kernels multiply scales by 1 / ln 2 in float32
HOST = "cpu"
"""The devices whose values the host reads without waiting."""


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    layout: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
    sizes: dict[str, int] | None = None,
) -> None:
    """Fail unless `tensor` has one of `dtypes`, the rank of `layout` ("Tq, Hq, D") and the `sizes` of its names."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor [{layout}], got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, torch.strided, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"{op}: {name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")
    axes = layout.split(", ")
    wrong = tensor.dim() != len(axes) or any(
        sizes is not None and axis in sizes and size != sizes[axis] for axis, size in zip(axes, tensor.shape)
    )
    if wrong:
        known = [f"{axis}={sizes[axis]}" for axis in axes if sizes and axis in sizes]
        where = f" with {', '.join(known)}" if known else ""
        raise ValueError(f"{op}: {name} must be [{layout}]{where}, got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {tensor.device}")


def check_tensors(op: str, tensors: dict[str, Tensor], *, optional: dict[str, Tensor | None]) -> None:
    """Fail unless all of `tensors` are tensors, and all of `optional` or None."""
    for name, tensor in (tensors | {n: t for n, t in optional.items() if t is not None}).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")


def check_int(op: str, name: str, value: int, least: int) -> None:
    """Positions are int32, and a larger `value` would be cut to its low bits without a word."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if value > INT32_MAX:
        raise ValueError(f"{op}: {name} must be at most {INT32_MAX}, got {value}")


def check_sizes(op: str, **sizes: int) -> None:
    """Fail unless each is an int of at least 1."""
    for name, value in sizes.items():
        check_int(op, name, value, 1)


def check_row_fits(op: str, name: str, value: int, blocks: int, token_bytes: int) -> None:
    """Fail if a row's `blocks` of `value` tokens, `token_bytes` each, exceed ``LARGEST_ROW_BYTES``.

    Chunked paths take whole rows, however few: without this a far too large `value` exhausts the memory instead.
    """
    most = max(1, LARGEST_ROW_BYTES // (blocks * token_bytes))
    if value > most:
        raise ValueError(
            f"{op}: {name} must be at most {most} on the chunked path, which holds {blocks} blocks of {name} tokens at "
            f"{token_bytes} bytes a token for a row, got {value}"
        )


def check_heads(op: str, name: str, heads: int, kv_heads: int) -> None:
    """Fail unless each KV head serves as many of the query heads; `name` is that of their number."""
    if heads % kv_heads:
        raise ValueError(f"{op}: {name} must be a multiple of kv_heads={kv_heads}, got {heads}")


def check_scale(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{op}: {name} must be finite and above 0, got {value!r:.80}")
    if number > MOST_SCALE:
        raise ValueError(f"{op}: {name} must be at most {MOST_SCALE:g}, got {value!r:.80}")


def check_dtype(op: str, name: str, value: torch.dtype) -> None:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{op}: {name} must be a torch.dtype, got {value!r}")


def check_bool(op: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def verifies_places(checked: bool, row_pos: Tensor) -> bool:
    """Whether rows outside the keys are looked for. On a CPU nothing waits, and torch would fail at an index later."""
    return checked or row_pos.device.type == HOST


def verify_positions(op: str, row_pos: Tensor) -> None:
    """Every position is -1 (padding) or a position."""
    _fail_at(op, row_pos < -1, "row_pos must be -1 or more", row_pos=row_pos)


def verify_tokens(op: str, row_pos: Tensor, row_start: Tensor, num_tokens: int) -> None:
    """All tokens up to each row's own lie in `k`."""
    wrong = (row_pos >= 0) & ((row_start < 0) | (row_start.long() + row_pos >= num_tokens))
    _fail_at(
        op,
        wrong,
        f"row_start + row_pos must lie in k, which has {num_tokens} tokens",
        row_start=row_start,
        row_pos=row_pos,
    )


def verify_blocks(op: str, row_pos: Tensor, row_block_start: Tensor, num_blocks: int, ratio: int) -> None:
    """All complete blocks of each row lie in `k_blocks`."""
    blocks = complete_blocks(row_pos.long(), ratio)
    wrong = (blocks > 0) & ((row_block_start < 0) | (row_block_start.long() + blocks > num_blocks))
    _fail_at(
        op,
        wrong,
        f"row_block_start + (row_pos + 1) // {ratio} must not pass the end of k_blocks, which has {num_blocks} blocks",
        row_block_start=row_block_start,
        row_pos=row_pos,
    )


def verify_documents(op: str, row_pos: Tensor, row_start: Tensor, row_block_start: Tensor, ratio: int) -> None:
    """Rows that see a block say alike where its document begins, in k and in k_blocks."""
    blocks = complete_blocks(row_pos.long(), ratio)
    seeing = blocks > 0
    begins = torch.stack((row_block_start, row_start), dim=1)[seeing].long()
    documents, of_row = torch.unique(begins, dim=0, return_inverse=True)  # in the order of their first blocks
    ends = torch.zeros(len(documents), dtype=torch.long, device=blocks.device)
    ends.scatter_reduce_(0, of_row, begins[:, 0] + blocks[seeing], "amax")
    wrong = torch.zeros_like(seeing)
    if len(documents) > 1:
        overlaps = torch.zeros_like(ends, dtype=torch.bool)
        overlaps[1:] = documents[1:, 0] < ends.cummax(0).values[:-1]
        wrong[seeing] = overlaps[of_row]
    _fail_at(
        op,
        wrong,
        "rows that see a block must agree on row_start and row_block_start of its document",
        row_start=row_start,
        row_block_start=row_block_start,
    )


def verify_lse(op: str, lse: Tensor, supported: Tensor) -> None:
    """No head of a row that is `supported` (bool [T]) has a log-sum-exp of -inf, that of no keys at all."""
    _fail_at(op, supported & lse.isneginf().any(dim=1), "lse must not be -inf in a row that has blocks")


def verify_distinct(op: str, block_ids: Tensor, row_pos: Tensor, ratio: int) -> None:
    """No row names one of its complete blocks twice."""
    blocks = complete_blocks(row_pos, ratio)[:, None]
    ids = torch.where((block_ids >= 0) & (block_ids < blocks), block_ids, -1).sort(dim=1).values
    repeated = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    culprit = torch.where(repeated, ids[:, 1:], -1).amax(dim=1) if repeated.shape[1] else ids.new_full((len(ids),), -1)
    _fail_at(op, culprit >= 0, "block_ids must be distinct within a row", repeated_id=culprit)


def verify_not_nan(op: str, nan_rows: Tensor, what: str) -> None:
    """`nan_rows` bool [T] is false everywhere."""
    _fail_at(op, nan_rows, f"{what} must not be NaN")


def _fail_at(op: str, wrong: Tensor, rule: str, **values: Tensor) -> None:
    if not wrong.any():
        return
    row = int(wrong.int().argmax())
    shown = "".join(f", {name}={int(value[row])}" for name, value in values.items())
    raise ValueError(f"{op}: {rule}; {int(wrong.sum())} rows break it, the first is row {row}{shown}")
