"""What runs under compute-sanitizer reaches the kernels of shared tiles, of single rows, and of other GPUs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_ci import sanitized
from gpu_ci.sanitized import LONG, MANY, RATIO, TOPK, Documents
from mcore_patches.ops import block_topk, indexer_kl, sparse_gqa, sparse_mla
from mcore_patches.ops.block_topk import select_blocks
from mcore_patches.ops.device import Device
from mcore_patches.ops.sparse_gqa.design import Design, Tiles, sparse_gqa_design


def tiles_that_share(documents: Documents, ids: Tensor, tiles: Tiles) -> list[bool]:
    """For every tile whether its union, incomplete blocks included, is within what the plan shares."""
    answers = []
    for begin in range(0, documents.tokens, tiles.rows):
        union = set()
        for row in range(begin, min(begin + tiles.rows, documents.tokens)):
            document, pos = int(documents.start[row]), int(documents.pos[row])
            complete = (pos + 1) // RATIO
            union |= {(document, block) for block in ids[row].tolist() if 0 <= block < complete}
            if (pos + 1) % RATIO:
                union.add((document, complete))
        answers.append(len(union) <= tiles.limit(ids.shape[1]))
    return answers


def test_both_kinds_of_tiles_are_run() -> None:
    torch.manual_seed(0)
    documents = Documents("cpu")
    # The heads that `run_sparse_gqa` takes: 8 on 2.
    design = sparse_gqa_design("sm_90a", 227 * 1024, torch.bfloat16, 64, 4, RATIO, TOPK)
    assert isinstance(design, Design)
    q_idx, k_blocks = documents.q_idx.detach(), documents.k_blocks.detach()
    similar = select_blocks(q_idx, k_blocks, documents.pos, documents.block_start, ratio=RATIO, topk=TOPK)
    for tiles in (design.forward, design.backward.union):
        assert all(tiles_that_share(documents, similar, tiles))
        for scattered, count in ((documents, 2), (Documents("cpu", LONG), MANY)):
            shared = tiles_that_share(scattered, scattered.scattered_ids(count), tiles)
            assert shared.count(False) > len(shared) // 2
        assert tiles.keys < MANY * RATIO


def test_every_op_takes_the_plain_kernels_of_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("sm_90a", 99 * 1024, 132)
    places: list[tuple[Any, str]] = [
        (op.tilelang_backend, "device_of")
        for op in (block_topk, indexer_kl, sparse_gqa)  # type: ignore[attr-defined]
    ]
    places.append((sparse_mla.tilelang_kernels, "_device"))  # type: ignore[attr-defined]
    for module, name in places:
        monkeypatch.setattr(module, name, None)  # to be put back
    sanitized.pretend(gpu)
    assert [getattr(module, name)("cuda") for module, name in places] == [gpu] * 4
