"""Exact top-k over streamed scores: plain torch, no [Tq, Nb] tensor, the same bits whatever the chunk sizes.

Why the result cannot depend on chunk sizes or on the run:

- Scores come from matrix products of one fixed shape, [H * ROW_TILE, d] x [d, BLOCK_TILE], whose tiles start at
  multiples of the tile sizes from row 0 and block 0; the ends are padded with zeros. A library that picks its summation
  order by shape therefore sums each dot product in the same order every time.
- Heads are added one by one, head 0 first, each weight multiplied and rounded before its addition.
- A score and its block id make one integer that orders by (score descending, id ascending). No two candidates of a row
  are equal, so the k largest are one set, and the k largest of (k largest so far, next chunk) are the k largest of all.

With float32 matrix products lowered to TF32 (`torch.backends.cuda.matmul.allow_tf32`) float32 inputs are ranked by TF32
products; bfloat16 and float16 inputs are not affected.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_patches.ops.arguments import verify_not_nan
from mcore_patches.ops.packing import complete_blocks
from mcore_patches.ops.workspace import accumulation_dtype, chunks

# One tile's products take H * 256 KiB in fp32: in a CPU's second-level cache for the usual 4 heads, enough for a GPU's
# GEMM.
ROW_TILE = 128
BLOCK_TILE = 512
# Multiples of the tiles. The packed keys of a chunk take 8 MiB.
ROW_CHUNK = 512
BLOCK_CHUNK = 2048

_ID_BITS = 31
_ID_MAX = 2**_ID_BITS - 1


@torch.compiler.disable
def select_blocks_chunked(
    q_idx: Tensor,
    k_blocks: Tensor,
    row_pos: Tensor,
    row_block_start: Tensor,
    *,
    ratio: int,
    topk: int,
    weights: Tensor | None,
    relu: bool,
    checked: bool = False,
    row_chunk: int = ROW_CHUNK,
    block_chunk: int = BLOCK_CHUNK,
) -> Tensor:
    """Arguments and result as in `select_blocks`; `row_chunk` and `block_chunk` are multiples of the tiles above."""
    if row_chunk < 1 or row_chunk % ROW_TILE or block_chunk < 1 or block_chunk % BLOCK_TILE:
        raise ValueError(
            f"select_blocks: row_chunk and block_chunk must be multiples of {ROW_TILE} and {BLOCK_TILE}, "
            f"got {row_chunk} and {block_chunk}"
        )
    num_rows, num_blocks = q_idx.shape[0], k_blocks.shape[0]
    kept = min(topk, num_blocks)
    ids = torch.full((num_rows, topk), -1, dtype=torch.int32, device=q_idx.device)
    nan_rows = torch.zeros(num_rows, dtype=torch.bool, device=q_idx.device)
    block_counts = complete_blocks(row_pos, ratio)
    best_type = _BestWide if q_idx.dtype == torch.float64 else _BestPacked
    with torch.autocast(q_idx.device.type, enabled=False):
        for rows in chunks(num_rows, row_chunk):
            best = best_type(rows.stop - rows.start, kept, q_idx.device)
            for blocks in chunks(num_blocks, block_chunk):
                scores = _scores(q_idx[rows], k_blocks[blocks], None if weights is None else weights[rows], relu)
                local = torch.arange(blocks.start, blocks.stop, device=q_idx.device) - row_block_start[rows, None]
                visible = (local >= 0) & (local < block_counts[rows, None])
                if checked:
                    nan_rows[rows] |= (scores.isnan() & visible).any(dim=1)
                best.add(scores, local, visible)
            ids[rows, :kept] = best.ids()
    if checked:
        verify_not_nan("select_blocks", nan_rows, "scores of visible blocks (from q_idx, k_blocks, weights)")
    return ids


def _scores(q_idx: Tensor, k_blocks: Tensor, weights: Tensor | None, relu: bool) -> Tensor:
    """Unscaled scores [R, C] from whole tiles."""
    (num_rows, heads, channels), num_blocks = q_idx.shape, k_blocks.shape[0]
    dtype = accumulation_dtype(q_idx.dtype)
    row_tail, block_tail = -num_rows % ROW_TILE, -num_blocks % BLOCK_TILE
    queries = pad(q_idx.to(dtype), (0, 0, 0, 0, 0, row_tail)).transpose(0, 1)
    keys = pad(k_blocks.to(dtype), (0, 0, 0, block_tail))
    head_weights = None if weights is None else pad(weights.to(dtype), (0, 0, 0, row_tail))
    scores = queries.new_empty(num_rows + row_tail, num_blocks + block_tail)
    for rows in chunks(scores.shape[0], ROW_TILE):
        tile_queries = queries[:, rows].reshape(heads * ROW_TILE, channels)
        for blocks in chunks(scores.shape[1], BLOCK_TILE):
            products = torch.mm(tile_queries, keys[blocks].T).view(heads, ROW_TILE, BLOCK_TILE)
            if relu:
                products.relu_()
            if head_weights is not None:
                products.mul_(head_weights[rows].T[:, :, None])
            total = products[0]
            for head in range(1, heads):
                total.add_(products[head])
            scores[rows, blocks] = total
    return scores[:num_rows, :num_blocks]


class _BestPacked:
    """The best blocks so far of each row, one int64 each: 32 bits of score, then 31 bits of reversed id. -1 is none."""

    def __init__(self, num_rows: int, kept: int, device: torch.device) -> None:
        self.kept = kept
        self.keys = torch.empty(num_rows, 0, dtype=torch.int64, device=device)

    def add(self, scores: Tensor, local: Tensor, visible: Tensor) -> None:
        score_bits = _sortable_bits(scores, torch.int32).long() + 2**31
        keys = torch.where(visible, (score_bits << _ID_BITS) | (_ID_MAX - local), -1)
        keys = torch.cat((self.keys, keys), dim=1)
        self.keys = keys.topk(min(self.kept, keys.shape[1]), dim=1, sorted=False).values

    def ids(self) -> Tensor:
        return _ascending(torch.where(self.keys >= 0, _ID_MAX - (self.keys & _ID_MAX), -1), self.kept)


class _BestWide:
    """The same for float64, whose 64 bits leave no room for an id: a stable sort keeps equal scores in id order."""

    # Below the bits of every number; only a NaN with all its bits set falls together with it.
    NONE = -(2**63)

    def __init__(self, num_rows: int, kept: int, device: torch.device) -> None:
        self.kept = kept
        self.keys = torch.empty(num_rows, 0, dtype=torch.int64, device=device)
        self.local = torch.empty_like(self.keys)

    def add(self, scores: Tensor, local: Tensor, visible: Tensor) -> None:
        # Blocks arrive in ascending order, so what is already kept comes before its equals.
        keys = torch.cat((self.keys, torch.where(visible, _sortable_bits(scores, torch.int64), self.NONE)), dim=1)
        local = torch.cat((self.local, torch.where(visible, local, -1)), dim=1)
        order = keys.sort(dim=1, descending=True, stable=True)
        self.keys = order.values[:, : self.kept]
        self.local = local.gather(1, order.indices[:, : self.kept])

    def ids(self) -> Tensor:
        return _ascending(self.local, self.kept)


def _sortable_bits(scores: Tensor, integer: torch.dtype) -> Tensor:
    """Signed integers in the order of the floats, equal for 0.0 and -0.0.

    The bits of floats >= 0 ascend as integers, those of negative floats descend: all but the sign bit of the latter are
    flipped. (As unsigned numbers: flip all bits if negative, else the sign bit.)
    """
    bits = torch.where(scores == 0, 0.0, scores).view(integer)
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)


def _ascending(ids: Tensor, width: int) -> Tensor:
    """Ids in ascending order with -1 moved to the end, [R, width] int32."""
    ids = torch.where(ids >= 0, ids, _ID_MAX).sort(dim=1).values
    ids = torch.where(ids < _ID_MAX, ids, -1).to(torch.int32)
    return pad(ids, (0, width - ids.shape[1]), value=-1)
