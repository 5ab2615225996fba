"""The lightning indexer of DSA with the numerics of megatron-core 0.19.

They differ from those of 0.16 to 0.18: rotated channels come first and pair with the other half of them, and the query
latent that it reads is the normed one. Weights trained there give another selection here.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mcore_patches.attention.common.layout import TokenLayout
from mcore_patches.attention.common.rope import Rotation, rotation

_STOCK = "megatron.core.transformer.experimental_attention_variant.dsa"


class IndexInputs(NamedTuple):
    """What scores come from, rows of this rank.

    queries: [T, H, d]. keys: [T, d]. weights: [T, H] fp32 (fp64 for fp64 activations), all factors of a score included.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor


class DSAIndexer(MegatronModule):
    """Index queries, keys and head weights (DeepSeek-V3.2 report, section 2.1).

    Every tensor-parallel rank holds all of it and computes the same; `average_gradients_across_tp_domain` on its
    parameters makes megatron average their gradients. Names of parameters are megatron's.

    Args:
        submodules: megatron's `DSAIndexerSubmodules`.
    """

    def __init__(self, config: Any, submodules: Any, *, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.tp_group: dist.ProcessGroup = pg_collection.tp
        self.heads: int = config.dsa_indexer_n_heads
        self.channels: int = config.dsa_indexer_head_dim
        self.rotated: int = config.qk_pos_emb_head_dim
        self.rotary_pos_emb = _rotary_embedding(config, pg_collection.cp) if self.rotated else None
        latent = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        self.linear_wq_b = self._linear(submodules.linear_wq_b, latent, self.heads * self.channels)
        self.linear_wk = self._linear(submodules.linear_wk, config.hidden_size, self.channels)
        norm_config = copy.copy(config)
        norm_config.normalization = "LayerNorm"
        eps = config.dsa_indexer_k_norm_epsilon
        self.k_norm = build_module(
            submodules.k_norm,
            config=norm_config,
            hidden_size=self.channels,
            eps=config.layernorm_epsilon if eps is None else eps,
        )
        self.linear_weights_proj = self._linear(submodules.linear_weights_proj, config.hidden_size, self.heads)
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def _linear(self, spec: Any, inputs: int, outputs: int) -> torch.nn.Module:
        return build_module(
            spec,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
            parallel_mode="duplicated",
        )

    def check_config(self) -> None:
        """Raise ValueError if the config now describes another indexer, which would come about in part."""
        for field, built in (("n_heads", self.heads), ("head_dim", self.channels)):
            value = getattr(self.config, f"dsa_indexer_{field}")
            if value != built:
                raise ValueError(f"dsa_indexer_{field}={value}, but the model was built with {built}: build it again")

    def forward(self, x: Tensor, qr: Tensor, layout: TokenLayout) -> IndexInputs:
        """Project, norm and rotate.

        Args:
            x: hidden states [S (/ TP with SP), B, hidden], the layer's normed input.
            qr: query latent [S (/ TP with SP), B, q_lora_rank], normed; packed also [T (/ TP), q_lora_rank].
                Without a query latent the hidden states.
        """
        qr = qr.unsqueeze(1) if qr.dim() == x.dim() - 1 else qr
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
            qr = gather_from_sequence_parallel_region(qr, group=self.tp_group)
        rotate = self._rotation(layout)
        queries = layout.to_rows(self.linear_wq_b(qr)[0]).unflatten(-1, (self.heads, self.channels))
        keys = layout.to_rows(self.linear_wk(x)[0])
        if self.config.dsa_indexer_k_norm_fp32:
            keys = self.k_norm(keys.float()).to(keys.dtype)
        else:
            keys = self.k_norm(keys)
        queries, keys = self._rotate(queries, rotate), self._rotate(keys, rotate)
        if self.config.dsa_indexer_rotate_activation:
            # Looked up at the call: a process without the package may have a stand-in there.
            hadamard = importlib.import_module(_STOCK).rotate_activation
            queries, keys = hadamard(queries), hadamard(keys)
        weights = layout.to_rows(self.linear_weights_proj(x)[0])
        # Factors one by one, as 0.19 rounds them.
        weights = weights * self.heads**-0.5 * self.channels**-0.5
        return IndexInputs(queries, keys, weights.to(torch.promote_types(weights.dtype, torch.float32)))

    def _rotation(self, layout: TokenLayout) -> Rotation | None:
        """Of this rank's rows, by their positions in their documents; that of padding is never seen."""
        if self.rotary_pos_emb is None:
            return None
        # The embedding would cut a table for a batch to this rank's part, one for packed documents not.
        table = self.rotary_pos_emb(layout.num_tokens // layout.batch, packed_seq=True)
        angles, concentration = table if isinstance(table, tuple) else (table, 1.0)
        return rotation(angles[:, 0, 0].index_select(0, layout.rows.pos.clamp(min=0)), concentration)

    def _rotate(self, x: Tensor, rotate: Rotation | None) -> Tensor:
        if rotate is None:
            return x
        if self.config.dsa_indexer_rope_interleaved:
            # Under rotary_percent the table is narrower than qk_pos_emb_head_dim; the rest keeps its place.
            width = rotate.cos.shape[-1]
            rotated, rest = x[..., :width], x[..., width:]
            # Neighbours become halves and stay so: queries and keys agree on the order.
            x = torch.cat((rotated[..., 0::2], rotated[..., 1::2], rest), dim=-1)
        return rotate.apply(x)


def _rotary_embedding(config: Any, cp_group: dist.ProcessGroup) -> torch.nn.Module:
    if config.rope_type == "rope":
        return RotaryEmbedding(
            config.qk_pos_emb_head_dim,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            cp_group=cp_group,
        )
    if config.rope_type == "yarn":
        return YarnRotaryEmbedding(
            config.qk_pos_emb_head_dim,
            rotary_base=config.rotary_base,
            scaling_factor=config.rotary_scaling_factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            mscale=config.mscale,
            mscale_all_dim=config.mscale_all_dim,
            cp_group=cp_group,
        )
    raise ValueError(f"rope_type={config.rope_type!r}: must be 'rope' or 'yarn'")
