"""The indexer's KL and its gradients in bounded memory: plain torch, a few rows (and, in Stage 1, blocks) at a time.

With m_b the teacher's mass of block b and I_b the student's score, a row's divergence needs four running scalars,
Z = sum m, A = sum m log m, C = sum m I and E = logsumexp I:

    KL = A / Z - log Z - C / Z + E,    dKL/dI_b = exp(I_b - E) - m_b / Z

Stage 2 has all of a row's selected blocks at hand and reads them once. Stage 1 streams the blocks twice, as the
gradient needs the finished scalars; neither [Tq, Nb] nor [Tq, Tk] exists.

The ranks of a tensor-parallel group share the rows of each chunk: a rank sums its heads' mass for all of them, and does
the student's work for its own (`row_split`). Chunks depend on shapes only, so all ranks issue the same collectives.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops.arguments import check_row_fits, verify_not_nan
from mcore_patches.ops.indexer_kl.student import Student
from mcore_patches.ops.indexer_kl.teacher import Teacher
from mcore_patches.ops.packing import complete_blocks
from mcore_patches.ops.row_split import RowSplit, split_rows
from mcore_patches.ops.sparse_gqa.chunked import KEY_TILE, finite_lse
from mcore_patches.ops.workspace import add_rows_, chunks, rows_per_chunk, workspace_bytes


class LossAndGradients(NamedTuple):
    """The loss, and the gradients that were asked for."""

    loss: Tensor
    q_idx: Tensor | None
    k_blocks: Tensor | None
    weights: Tensor | None


@torch.compiler.disable
@torch.no_grad()
def indexer_kl_chunked(
    q_idx: Tensor,
    k_blocks: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    row_block_start: Tensor,
    *,
    scale: float,
    index_scale: float,
    ratio: int,
    weights: Tensor | None,
    relu: bool,
    valid: Tensor | None,
    reduction: str,
    tp_group: dist.ProcessGroup | None,
    checked: bool = False,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    workspace: int | None = None,
) -> LossAndGradients:
    """Arguments as in `indexer_kl`; gradients are in the accumulation dtype.

    needs_grad: which of q_idx, k_blocks and weights get a gradient. workspace: bytes of temporaries of a chunk of rows.

    Raises:
        ValueError: ratio is so large that the blocks of a single row take gigabytes; NaN, when checked.
    """
    budget = workspace_bytes(q.device) if workspace is None else workspace
    counted = row_pos >= 0 if valid is None else (row_pos >= 0) & valid
    with torch.autocast(q.device.type, enabled=False):
        # A row without blocks adds nothing but to the mean, and may hold anything, like one that does not count.
        live = counted & (complete_blocks(row_pos, ratio) > 0)
        student = Student(q_idx, k_blocks, weights, live, index_scale, relu, needs_grad)
        teacher = Teacher(q, k, lse, row_pos, row_start, row_block_start, scale=scale, ratio=ratio)
        if block_ids is None:
            divergences = _over_all_blocks(student, teacher, budget, tp_group)
        else:
            divergences = _over_selected_blocks(student, teacher, block_ids, budget, tp_group)
        student.sum_block_gradients(tp_group)
        if checked:
            verify_not_nan("indexer_kl", divergences.isnan(), "scores of visible blocks, attention scores and lse")
        # In fp64 the sum of a long sequence does not drift.
        loss = divergences.sum(dtype=torch.float64)
        if reduction == "mean":
            number = counted.sum().clamp_(min=1)
            loss = loss / number
            student.divide_gradients(number)
        return LossAndGradients(loss.to(student.dtype), *student.gradients())


class _RowScalars:
    """Z, A, C and E of a chunk of rows, fed tile by tile; E as its largest term and the sum of all relative to it."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.z, self.a, self.c, self.relative = torch.zeros(4, num_rows, dtype=dtype, device=device)
        self.largest = torch.full((num_rows,), float("-inf"), dtype=dtype, device=device)

    def add(self, mass: Tensor, logits: Tensor, visible: Tensor) -> None:
        """`mass` [R, B] is 0 where not `visible`; `logits` may be anything there."""
        self.z += mass.sum(dim=1)
        self.a += torch.xlogy(mass, mass).sum(dim=1)
        self.c += (mass * logits.masked_fill(~visible, 0.0)).sum(dim=1)
        logits = logits.masked_fill(~visible, float("-inf"))
        largest = torch.maximum(self.largest, logits.amax(dim=1))
        reference = finite_lse(largest)
        self.relative *= (self.largest - reference.squeeze(-1)).exp()
        self.relative += (logits - reference).exp().sum(dim=1)
        self.largest = largest

    def divergences(self, counted: Tensor) -> Tensor:
        """KL of each row; 0 where the row does not count or its teacher has no mass."""
        z = self.z.masked_fill(self.z == 0, 1.0)
        kl = (self.a - self.c) / z - z.log() + self.largest + self.relative.log()
        return kl.masked_fill(~counted | (self.z == 0), 0.0)

    def dlogits(self, mass: Tensor, logits: Tensor, visible: Tensor, counted: Tensor) -> Tensor:
        """dKL/dI [R, B]; 0 where `divergences` is 0 by rule, and where not visible."""
        live = visible & (counted & (self.z != 0))[:, None]
        student = (logits - finite_lse(self.largest)).exp() / self.relative[:, None]
        return (student - mass / self.z[:, None]).masked_fill(~live, 0.0)


def _over_selected_blocks(
    student: Student, teacher: Teacher, block_ids: Tensor, budget: int, tp_group: dist.ProcessGroup | None
) -> Tensor:
    """Stage 2: KL of each row over the blocks that it names."""
    num_rows, num_selected = block_ids.shape
    width = (num_selected + 1) * teacher.ratio - 1
    token_bytes = (teacher.channels + 3 * teacher.group) * teacher.dtype.itemsize
    check_row_fits("indexer_kl", "ratio", teacher.ratio, num_selected + 1, token_bytes)
    row_bytes = width * token_bytes
    row_bytes += num_selected * (2 * student.channels + 4 * student.heads) * student.dtype.itemsize
    divergences = torch.zeros(num_rows, dtype=student.dtype, device=block_ids.device)
    for rows in chunks(num_rows, rows_per_chunk(row_bytes, budget)):
        split = split_rows(rows, tp_group)
        mass, visible, slots = teacher.selected(split, block_ids)
        mass = mass.to(student.dtype)
        slots = torch.where(visible, slots, student.num_blocks)
        keys = student.blocks.index_select(0, slots.flatten()).view(*slots.shape, student.channels)
        queries, head_weights = student.queries(split.own)
        activations = torch.bmm(queries, keys.mT)
        logits = student.logits(activations, head_weights)
        scalars = _RowScalars(len(slots), student.dtype, slots.device)
        scalars.add(mass, logits, visible)
        counted = student.counted[split.own]
        divergences[split.own] = scalars.divergences(counted)
        split.share_(divergences[rows])
        if not student.needs_grad:
            continue
        dlogits = scalars.dlogits(mass, logits, visible, counted)
        student.add_weight_gradients(split.own, dlogits, activations)
        grads = student.product_gradients(dlogits, activations, head_weights)
        student.add_query_gradients(split.own, torch.bmm(grads, keys))
        if student.block_sums is not None:
            add_rows_(student.block_sums, slots.flatten(), torch.bmm(grads.mT, queries).flatten(0, 1))
        student.share_gradients(split)
    return divergences


class _Tile(NamedTuple):
    """Teacher and student of some rows R and blocks B."""

    mass: Tensor
    visible: Tensor
    logits: Tensor
    activations: Tensor
    keys: Tensor


def _over_all_blocks(student: Student, teacher: Teacher, budget: int, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Stage 1: KL of each row over all its complete blocks."""
    num_rows = len(student.counted)
    tile_blocks = max(1, KEY_TILE // teacher.ratio)
    token_bytes = (teacher.channels + 3 * teacher.group) * teacher.dtype.itemsize
    if student.num_blocks:
        check_row_fits("indexer_kl", "ratio", teacher.ratio, tile_blocks, token_bytes)
    row_bytes = tile_blocks * teacher.ratio * 3 * teacher.group * teacher.dtype.itemsize
    row_bytes += tile_blocks * 4 * student.heads * student.dtype.itemsize
    teacher.prepare_tiles(student.num_blocks, budget)

    def tile_of(split: RowSplit, blocks: slice, queries: Tensor, head_weights: Tensor | None) -> _Tile:
        mass, visible = teacher.tile(split, blocks)
        # Blocks that none of the rows sees may hold anything.
        keys = student.blocks[blocks].masked_fill(~visible.any(dim=0)[:, None], 0.0)
        activations = (queries.flatten(0, 1) @ keys.mT).view(*queries.shape[:2], len(keys))
        logits = student.logits(activations, head_weights)
        return _Tile(mass.to(student.dtype), visible, logits, activations, keys)

    divergences = torch.zeros(num_rows, dtype=student.dtype, device=student.counted.device)
    for rows in chunks(num_rows, rows_per_chunk(row_bytes, budget)):
        split = split_rows(rows, tp_group)
        queries, head_weights = student.queries(split.own)
        counted = student.counted[split.own]
        scalars = _RowScalars(len(counted), student.dtype, counted.device)
        for blocks in chunks(student.num_blocks, tile_blocks):
            tile = tile_of(split, blocks, queries, head_weights)
            scalars.add(tile.mass, tile.logits, tile.visible)
        divergences[split.own] = scalars.divergences(counted)
        split.share_(divergences[rows])
        if not student.needs_grad:
            continue
        for blocks in chunks(student.num_blocks, tile_blocks):
            tile = tile_of(split, blocks, queries, head_weights)
            dlogits = scalars.dlogits(tile.mass, tile.logits, tile.visible, counted)
            student.add_weight_gradients(split.own, dlogits, tile.activations)
            grads = student.product_gradients(dlogits, tile.activations, head_weights).flatten(0, 1)
            student.add_query_gradients(split.own, (grads @ tile.keys).view_as(queries))
            if student.block_sums is not None:
                student.block_sums[blocks] += grads.mT @ queries.flatten(0, 1)
        student.share_gradients(split)
    return divergences
