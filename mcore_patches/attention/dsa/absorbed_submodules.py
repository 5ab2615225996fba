"""What an absorbed MLA layer is built of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["AbsorbedMLASelfAttentionSubmodules"]


@dataclass
class AbsorbedMLASelfAttentionSubmodules:
    """Classes (or `ModuleSpec`s) of the parts of `AbsorbedMLASelfAttention`.

    Field names are those of megatron-core 0.19, and `linear_k_up_proj` with `linear_v_up_proj`, those of 0.17 and 0.18:
    give either the combined up-projection of keys and values or these two.
    """

    linear_q_proj: Any = None
    linear_q_down_proj: Any = None
    linear_q_up_proj: Any = None
    linear_kv_down_proj: Any = None
    linear_kv_up_proj: Any = None
    linear_k_up_proj: Any = None
    linear_v_up_proj: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    kv_layernorm: Any = None

    @property
    def is_split(self) -> bool:
        """Whether keys and values have up-projections of their own.

        Raises:
            ValueError: neither the combined up-projection nor both of the split ones, or all three.
        """
        parts = (self.linear_k_up_proj, self.linear_v_up_proj)
        if self.linear_kv_up_proj is not None and parts == (None, None):
            return False
        if self.linear_kv_up_proj is None and None not in parts:
            return True
        raise ValueError(
            f"linear_kv_up_proj={self.linear_kv_up_proj}, linear_k_up_proj={parts[0]}, linear_v_up_proj={parts[1]}: "
            "absorbed MLA takes either linear_kv_up_proj or both linear_k_up_proj and linear_v_up_proj"
        )
