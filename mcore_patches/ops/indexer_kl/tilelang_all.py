"""The KL over all visible blocks (Stage 1) by chunks of rows: what its kernels hand each other.

teacher          the attention's mass on every block, as for selected blocks
score            the student's scores, by the kernel of `select_blocks`
rows             a row's KL and its gradient with respect to the scores
query_gradient   what flows back to the queries and their weights
key_gradient     what flows back to the index keys, chunk after chunk

Mass and scores of a chunk of rows are kept, so that the teacher runs once; memory is bounded by the chunk. The ranks of
a tensor-parallel group run the teacher for all rows of a chunk, each with its own heads, and the others for the rows
that are theirs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops.block_topk import design as score_design
from mcore_patches.ops.block_topk.tilelang_backend import score_kernel
from mcore_patches.ops.device import Device
from mcore_patches.ops.indexer_kl import tilelang_selected
from mcore_patches.ops.indexer_kl.design import (
    KEY_GRADIENT_ROWS,
    QUERY_GRADIENT_ROWS,
    TILE_ROWS,
    Shape,
    rows_of_all_blocks,
    splits_of_a_tile,
)
from mcore_patches.ops.indexer_kl.tilelang_kernels import kernels
from mcore_patches.ops.indexer_kl.tilelang_selected import Rows, Sums, new_sums
from mcore_patches.ops.row_split import split_rows, sum_over_ranks_
from mcore_patches.ops.workspace import chunks

WIDTH = 128  # blocks that rows of scores are padded to


def over_all_blocks(
    device: Device,
    shape: Shape,
    rows: Rows,
    k_blocks: Tensor,
    k: Tensor,
    first_tokens: Tensor,
    *,
    scale: float,
    index_scale: float,
    tp_group: dist.ProcessGroup | None = None,
    row_chunk: int | None = None,
) -> Sums:
    """KL of each row and all gradients; `first_tokens [Nb]` int32 of blocks. `row_chunk` rows at once, a multiple of
    128, or as many as memory allows."""
    num_rows, num_blocks = len(rows.q), len(k_blocks)
    run = kernels(device, shape)
    tiles, score = scoring(device, shape)
    new = functools.partial(tilelang_selected.new_empty, device=k.device)
    sums = new_sums(rows, k_blocks, new)
    width = -(-num_blocks // WIDTH) * WIDTH
    at_once = rows_of_all_blocks(num_rows, width, shape.masses_of_a_block) if row_chunk is None else row_chunk
    all_mass = new(at_once // TILE_ROWS, width * shape.masses_of_a_block, TILE_ROWS, dtype=torch.float32)
    most = split_rows(slice(0, at_once), tp_group, multiple=QUERY_GRADIENT_ROWS).each
    all_keys = new(most, width, dtype=torch.int32)
    all_maxima = new(most, width // score_design.GROUP, dtype=torch.int32)
    all_gradients = new(most, width, dtype=torch.bfloat16)
    no_weights = new(1, shape.heads, dtype=torch.float32)
    for chunk in chunks(num_rows, at_once):
        here = rows[chunk]
        mass = all_mass[: -(-len(here.q) // TILE_ROWS)]
        begin, end = seen_by_tiles(here, TILE_ROWS)
        count = (end - begin).clamp_(min=0)
        run["teacher"](
            here.q, k, here.lse, begin, count, first_tokens, mass, scale,
            splits_of_a_tile(len(begin), device.multiprocessors),
        )  # fmt: skip
        split = split_rows(chunk, tp_group, multiple=QUERY_GRADIENT_ROWS)
        own_tiles = split_rows(slice(0, len(mass)), tp_group, multiple=QUERY_GRADIENT_ROWS // TILE_ROWS)
        if shape.ranks:
            mass = own_tiles.reduce_scatter(mass).unflatten(1, (width, shape.ratio)).amax(dim=2)
        if len(mass):
            here, number = rows[split.own], split.own.stop - split.own.start
            weights = no_weights if here.weights is None else here.weights
            keys = all_keys[:number]
            score(
                here.q_idx,
                k_blocks,
                weights,
                here.first,
                here.count,
                keys.view(number, -1, tiles.blocks),
                all_maxima[:number].view(number, -1, tiles.blocks // score_design.GROUP),
                0,
                score_design.splits_of_a_tile(number, tiles, width, device.multiprocessors),
            )
            gradients = all_gradients[:number].zero_()
            run["rows"](
                mass, keys, begin[own_tiles.own], count[own_tiles.own], here.first, here.count, here.weight,
                sums.kl[split.own], gradients, index_scale,
            )  # fmt: skip
            index = here.q_idx, k_blocks, weights, here.count
            results = sums.q_idx[split.own], no_weights if sums.weights is None else sums.weights[split.own]
            run["query_gradient"](*index, *seen_by_tiles(here, shape.query_gradient_rows), gradients, *results)
            run["key_gradient"](*index, *seen_by_tiles(here, KEY_GRADIENT_ROWS), gradients, sums.k_blocks)
        sums.share_(split)
    sum_over_ranks_(sums.k_blocks, tp_group)
    return sums


def scoring(device: Device, shape: Shape) -> tuple[score_design.ScoreTiles, Any]:
    """Tiles of the scoring kernel, and the kernel, built on the first call.

    Raises:
        KernelBuildError: it does not compile.
    """
    tiles = score_design.score_tiles(
        device.arch, device.shared_bytes, torch.bfloat16, shape.heads, shape.channels, topk=1
    )
    assert isinstance(tiles, score_design.ScoreTiles)
    arguments = device.arch, torch.bfloat16, shape.heads, shape.channels
    return tiles, score_kernel(*arguments, tiles, shape.weighted, shape.relu)


def seen_by_tiles(rows: Rows, size: int) -> tuple[Tensor, Tensor]:
    """First block [tiles] that some of `size` neighbouring rows sees, and the last + 1; 2**31 - 1 and 0 for none."""
    none = 2**31 - 1
    begin = torch.where(rows.count > 0, rows.first, none)
    end = torch.where(rows.count > 0, rows.first + rows.count, 0)
    missing = -len(begin) % size
    begin = torch.nn.functional.pad(begin, (0, missing), value=none).view(-1, size).amin(dim=1)
    return begin, torch.nn.functional.pad(end, (0, missing)).view(-1, size).amax(dim=1)
