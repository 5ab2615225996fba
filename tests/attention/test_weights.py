"""Names and layouts of weights, to transformers and back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mcore_patches.attention.qsa import attention_weights_from_hf, attention_weights_to_hf
from mcore_patches.cpu.models import gpt_config
from tests.attention.tiny import Reference, qsa_config, qsa_layer

pytestmark = pytest.mark.usefixtures("megatron")


def _state(config: Any) -> dict[str, torch.Tensor]:
    reference = Reference(qsa_layer(config), config)
    return {name: torch.randn_like(p) for name, p in reference.attention.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_there_and_back(kv_heads: int, tp: int) -> None:
    config = qsa_config(num_query_groups=kv_heads)
    state = _state(config)
    shards = [attention_weights_from_hf(state, config, tp_rank=rank, tp_size=tp) for rank in range(tp)]
    back = attention_weights_to_hf(shards, config)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_names_are_those_of_the_module() -> None:
    config = qsa_config()
    layer = qsa_layer(config)
    assert set(attention_weights_from_hf(_state(config), config)) == {name for name, _ in layer.named_parameters()}


def test_rows_of_groups_follow_each_other() -> None:
    """linear_qkv: queries of group 0, gates of group 0, key 0, value 0, then group 1; each head 16 rows."""
    config = qsa_config()
    state = _state(config)
    heads = state["q_proj.weight"].view(4, 2, 16, 64)
    qkv = attention_weights_from_hf(state, config)["linear_qkv.weight"].view(2, 6, 16, 64)
    for group in range(2):
        for place in range(2):
            assert torch.equal(qkv[group, place], heads[2 * group + place, 0])
            assert torch.equal(qkv[group, 2 + place], heads[2 * group + place, 1])
        assert torch.equal(qkv[group, 4], state["k_proj.weight"].view(2, 16, 64)[group])
        assert torch.equal(qkv[group, 5], state["v_proj.weight"].view(2, 16, 64)[group])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("k_norm.weight"), "state lacks k_norm.weight"),
        (lambda s: s.update(bias=torch.zeros(1)), "state holds bias, which a QSA attention layer does not have"),
        (
            lambda s: s.update({"o_proj.weight": torch.zeros(64, 3)}),
            r"o_proj.weight is (64, 3), the config says (64, 64)",
        ),
    ],
    ids=["missing", "surplus", "shape"],
)
def test_states_that_do_not_fit(change: Any, message: str) -> None:
    config = qsa_config()
    state = _state(config)
    change(state)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_weights_from_hf(state, config)


def test_configs_and_ranks_that_do_not_fit() -> None:
    config = qsa_config()
    state = _state(config)
    for field, value in (("attention_output_gate", False), ("qk_layernorm", False), ("add_qkv_bias", True)):
        with pytest.raises(ValueError, match=f"config.{field}={value}"):
            attention_weights_from_hf(state, qsa_config(**{field: value}))
    dense = gpt_config(qk_layernorm=True, attention_output_gate=True, layernorm_zero_centered_gamma=True)
    with pytest.raises(ValueError, match=r"config\.qsa_indexer_n_heads=None: .* has no indexer"):
        attention_weights_from_hf(state, dense)
    with pytest.raises(ValueError, match="3 tensor-parallel ranks: must divide num_attention_heads=4"):
        attention_weights_from_hf(state, config, tp_size=3)
    with pytest.raises(ValueError, match="tp_rank=2: must be 0 to 1"):
        attention_weights_from_hf(state, config, tp_rank=2, tp_size=2)
    shards = [attention_weights_from_hf(state, config, tp_rank=rank, tp_size=2) for rank in range(2)]
    shards[1]["indexer.k_layernorm.weight"] += 1
    with pytest.raises(ValueError, match=r"shards\[1\]: indexer.k_layernorm.weight differs from that of shards\[0\]"):
        attention_weights_to_hf(shards, config)
