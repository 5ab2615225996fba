"""What runs under compute-sanitizer reaches the kernels of tiles that share blocks and those of single rows."""

import torch
from torch import Tensor

from gpu_ci.sanitized import RATIO, TOPK, Documents
from mcore_patches.ops.block_topk import select_blocks
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
        scattered = tiles_that_share(documents, documents.scattered_ids(), tiles)
        assert scattered.count(False) > len(scattered) // 2
