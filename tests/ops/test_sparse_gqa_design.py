import dataclasses
from typing import Any

import pytest
import torch

from mcore_patches.ops.sparse_gqa.design import BLOCK_SIZES, DIMS, GROUPS, MASK_BITS, Design, sparse_gqa_design

KIB = 1024
REAL: dict[str, Any] = {
    "arch": "sm_90a",
    "shared_bytes": 227 * KIB,
    "dtype": torch.bfloat16,
    "dim": 256,
    "group": 12,
    "block_size": 4,
    "topk": 512,
}


def design(**change: Any) -> Design:
    result = sparse_gqa_design(**(REAL | change))
    assert isinstance(result, Design), result
    return result


def test_real_shape_by_hand() -> None:
    """Ten rows of twelve heads in 128 matrix rows; eight in 96 vectors; four in 48, the most below 64."""
    tiles = design()
    assert (tiles.forward.rows, tiles.backward.union.rows, tiles.backward.window_rows) == (10, 8, 4)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
def test_tiles_suit_the_matrix_unit(group: int, dim: int) -> None:
    tiles = design(group=group, dim=dim)
    forward, union, window = tiles.forward.rows, tiles.backward.union.rows, tiles.backward.window_rows
    assert 1 <= forward <= MASK_BITS and forward * group <= 128
    assert 1 <= union <= MASK_BITS and union * group <= 96 and union * group % 16 == 0
    assert window >= 1 and window * group <= 64 and window * group % 16 == 0
    # One row more would not fit, or would need another mask bit.
    assert forward == MASK_BITS or (forward + 1) * group > 128


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", [64, 2048, 4096])
def test_lists_hold_the_largest_union_that_is_shared(block_size: int, budget: int) -> None:
    topk = budget // block_size
    tiles = design(block_size=block_size, topk=topk)
    for union in (tiles.forward, tiles.backward.union):
        assert union.limit(topk) == 4 * (topk + 1)
        assert union.limit(topk) <= union.capacity(topk, block_size)
        assert union.capacity(topk, block_size) % (union.keys // block_size) == 0
        assert union.plan_shared_bytes(topk, block_size) <= 227 * KIB


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "q, k and v must be bfloat16, got float16"),
        ({"dim": 80}, "the head width must be one of 64, 128, 256, got 80"),
        ({"group": 5}, "query heads a KV head must be one of 1, 2, 3, 4, 6, 8, 12, 16, got 5"),
        ({"block_size": 32}, "block_size must be one of 1, 2, 4, 8, 16, got 32"),
        ({"block_size": 1, "topk": 16384}, "lists of 16384 blocks a row need .* bytes of shared memory"),
        ({"arch": "sm_80", "shared_bytes": 163 * KIB}, "written for sm_90a .*, this is sm_80 with 166912"),
        ({"arch": "sm_89", "shared_bytes": 99 * KIB}, "written for sm_90a .*, this is sm_89 with 101376"),
        (
            {"arch": "sm_90a", "shared_bytes": 163 * KIB},
            "written for sm_90a with 232448 .*, this is sm_90a with 166912",
        ),
        ({"arch": "sm_100a"}, "written for sm_90a .*, this is sm_100a"),
        ({"arch": "sm_103a"}, "written for sm_90a .*, this is sm_103a"),
        ({"arch": "sm_120a", "shared_bytes": 99 * KIB}, "written for sm_90a .*, this is sm_120a"),
    ],
)
def test_reason_names_what_does_not_fit(change: dict[str, Any], reason: str) -> None:
    result = sparse_gqa_design(**(REAL | change))
    assert isinstance(result, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(result)


def test_tiles_are_values() -> None:
    """Equal arguments give equal designs: kernels are kept by what they are built from."""
    assert design() == design()
    assert hash(design()) == hash(design())
    assert dataclasses.replace(design().forward, rows=3) != design().forward
