"""What the settings of DSA mean, against the installed 0.19."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa

from mcore_patches.attention.common.finite import check_scores_finite
from mcore_patches.attention.dsa import sharing
from mcore_patches.attention.dsa.config import FIELDS, selects, source_layer, uses_dsa, validate


@pytest.mark.parametrize("freq", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_who_selects_and_for_whom(freq: int, offset: int) -> None:
    config = SimpleNamespace(dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset)
    for layer in range(1, 13):
        assert selects(layer, config) is not dsa.is_dsa_skip_topk_layer(layer, offset, freq)
        assert source_layer(layer, config) == dsa.source_dsa_compute_layer(layer, offset, freq)


def test_other_variants_and_configs_pass() -> None:
    for config in (SimpleNamespace(), SimpleNamespace(experimental_attention_variant="gated_delta_net")):
        assert not uses_dsa(config)
        validate(config)
    # The variant of a release without the fields, before the patch adds them.
    assert not uses_dsa(SimpleNamespace(experimental_attention_variant="dsa"))
    assert {field.name for field in FIELDS} >= {"dsa_kernel_backend", "dsa_indexer_topk_freq"}


class _Config(SimpleNamespace):
    __hash__ = None  # type: ignore[assignment]  # as of a dataclass that compares by value


def test_a_selection_is_taken_by_the_layers_behind_it() -> None:
    config = _Config(dsa_indexer_topk_freq=3, dsa_indexer_skip_topk_offset=0, num_layers=5)
    layout = SimpleNamespace(cu_seqlens=torch.tensor([0, 4]), tokens=torch.arange(4))
    ids = torch.zeros(4, 2, dtype=torch.int32)
    sharing.leave(1, ids, layout, config)  # type: ignore[arg-type]
    assert sharing.take(2, layout, config) is ids  # type: ignore[arg-type]
    assert sharing.take(3, layout, config) is ids  # type: ignore[arg-type]
    # The last of the group has let it go.
    with pytest.raises(RuntimeError, match="DSA layer 3 attends what layer 1 selected, which did not run before it"):
        sharing.take(3, layout, config)  # type: ignore[arg-type]
    sharing.leave(4, ids, layout, config)  # type: ignore[arg-type]
    other = SimpleNamespace(cu_seqlens=torch.tensor([0, 3]), tokens=torch.arange(3))
    with pytest.raises(RuntimeError, match="did not run before it"):
        sharing.take(5, other, config)  # type: ignore[arg-type]
    assert sharing.take(5, layout, config) is ids  # type: ignore[arg-type]
    key = id(config)
    sharing.leave(4, ids, layout, config)  # type: ignore[arg-type]
    assert key in sharing._latest
    del config
    assert key not in sharing._latest


@pytest.mark.parametrize("where", ["queries", "keys", "weights"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_scores_that_are_not_finite(where: str, value: float) -> None:
    layout = SimpleNamespace(rows=SimpleNamespace(pos=torch.tensor([0, 1, -1], dtype=torch.int32)))
    real = torch.tensor([True, True, False])
    x = {"queries": torch.full((3, 2, 4), 1e5), "keys": torch.full((3, 4), 1e5), "weights": torch.full((3, 2), 1e5)}

    def check() -> None:
        check_scores_finite(x["queries"], x["keys"], real, layout, "layer 7", x["weights"])  # type: ignore[arg-type]

    check()
    x[where][2] = value  # padding, which nobody looks at
    check()
    x[where][1].view(-1)[-1] = value
    with pytest.raises(RuntimeError, match="layer 7: index queries or keys are not finite"):
        check()
