"""`supports` of every op names an argument that is no tensor; what it declines is tested with each op's kernels."""

from typing import Any

import pytest
import torch

from mcore_patches.ops import block_topk, indexer_kl, sparse_gqa, sparse_mla

ROWS = {name: torch.zeros(5, dtype=torch.int32) for name in ("row_pos", "row_start", "row_block_start")}
IDS = torch.zeros(5, 2, dtype=torch.int32)
INDEX = {"q_idx": torch.zeros(5, 4, 64), "k_blocks": torch.zeros(3, 64), "weights": torch.zeros(5, 4)}
HEADS = {"q": torch.zeros(5, 4, 64), "k": torch.zeros(5, 2, 64)}
ABSORBED = {"q": torch.zeros(1, 5, 4, 512), "kv": torch.zeros(1, 5, 1, 512), "indices": IDS[None]}
FOR_BLOCKS = {name: ROWS[name] for name in ("row_pos", "row_block_start")}
FOR_TOKENS = {name: ROWS[name] for name in ("row_pos", "row_start")}
CALLS: dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, Any]]] = {
    "select_blocks": (block_topk, INDEX | FOR_BLOCKS, {"ratio": 4, "topk": 2}),
    "indexer_kl": (
        indexer_kl,
        INDEX | HEADS | ROWS | {"lse": torch.zeros(5, 4), "block_ids": IDS, "valid": torch.ones(5, dtype=torch.bool)},
        {"scale": 1.0, "ratio": 4},
    ),
    "sparse_gqa": (
        sparse_gqa,
        HEADS | FOR_TOKENS | {"v": HEADS["k"], "block_ids": IDS},
        {"scale": 1.0, "block_size": 4},
    ),
    "sparse_mla": (sparse_mla, ABSORBED, {}),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, (_, tensors, _) in CALLS.items() for name in tensors])
def test_what_is_no_tensor_is_named(op: str, name: str) -> None:
    module, tensors, settings = CALLS[op]
    supported, reason = module.supports(**tensors, **settings)
    assert not supported and "is on cpu" in reason
    with pytest.raises(TypeError, match=f"^{op}: {name} must be a tensor, got ndarray$"):
        module.supports(**(tensors | {name: tensors[name].numpy()}), **settings)
