"""Self-attention over the blocks that the indexer selects, for training and evaluation."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mcore_patches.attention.common.finite import check_scores_finite
from mcore_patches.attention.common.layout import TokenLayout, batch_layout, check_causal_mask, packed_layout
from mcore_patches.attention.common.loss import AttachIndexerLoss, LossScale
from mcore_patches.attention.common.passes import is_first_pass, is_recomputation
from mcore_patches.attention.qsa import telemetry
from mcore_patches.attention.qsa.config import blocks_per_query, trains_indexer, validate
from mcore_patches.attention.qsa.freezing import check_frozen_before_checkpoint, check_stage
from mcore_patches.attention.qsa.indexer import QSAIndexer
from mcore_patches.attention.qsa.loss import track_loss, training_loss
from mcore_patches.attention.qsa.rope import Rotations, rotations
from mcore_patches.attention.qsa.routes import LayerRoutes
from mcore_patches.attention.qsa.support import Setup, refusal
from mcore_patches.ops import block_topk, indexer_kl, sparse_gqa


class BlockSparseCore(torch.nn.Module):
    """The attention proper, in the place of megatron's core attention. Has no parameters."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.block_size = config.qsa_indexer_compress_ratio

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, block_ids: Tensor | None, layout: TokenLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend the selected blocks, or with `block_ids` None densely. A collective under context parallelism.

        Args:
            query [T, Hq, D], key, value [T, Hkv, D], block_ids int32 [T, K]: rows of this rank.

        Returns:
            output [T, Hq, D], log-sum-exp [T, Hq], and the keys of the whole batch [n, Hkv, D].
        """
        if layout.source is None:
            keys, values = key, value
        else:
            keys, values = layout.gather(torch.cat((key, value), dim=1)).chunk(2, dim=1)
        arguments = (query, keys, values, block_ids, layout.rows.pos, layout.rows.start)
        settings: dict[str, Any] = {"scale": self.scale, "block_size": self.block_size}
        backend = telemetry.count("sparse_gqa", query, *sparse_gqa.supports(*arguments, **settings))
        out, lse = sparse_gqa.sparse_gqa(*arguments, **settings, backend=backend)
        return out, lse, keys


class QSASelfAttention(SelfAttention):
    """Megatron's self-attention with QSA: projections, norms, gate and output are the parent's.

    Interface and state dict are those of `SelfAttention`, and an `indexer` more. What a call does depends on
    `config.qsa_stage`, read at the call. A call in training mode raises unless that is the stage at construction, which
    decided whether the indexer's parameters require gradients; evaluation takes any:

    "frozen": attend selected blocks; the indexer gets no gradient.
    "warmup": attend everything, without gradients; the indexer learns the head-summed attention over all blocks.
    "sparse": attend selected blocks; the indexer learns the head-summed attention over those.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        validate(config)
        super().__init__(config, *args, **kwargs)
        if self.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"attn_mask_type={self.attn_mask_type}: QSA is causal, must be AttnMaskType.causal or "
                f"AttnMaskType.padding_causal among the params of the spec"
            )
        self.indexer = QSAIndexer(config, tp_group=self.pg_collection.tp)
        if not trains_indexer(config):
            # DDP waits for the gradient of every parameter that requires one.
            self.indexer.requires_grad_(False)
        self.routes = LayerRoutes()
        self.loss_scale = LossScale()
        # Set by freeze_backbone, which also lets gradients into checkpoints.
        self.backbone_is_frozen = False
        self.built_stage: str = config.qsa_stage
        self.global_layer_number: int = self.layer_number

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `SelfAttention.forward`; causal within each sequence or packed document.

        Args:
            hidden_states: [S, B, hidden], this rank's part under sequence and context parallelism.
            attention_mask: None or megatron's causal mask (see `check_causal_mask`). It changes nothing: batches have
                no padding, every token attends and counts. Padding and documents are told by `packed_seq_params`, with
                which the mask is not looked at.

        Raises:
            NotImplementedError: inference.
            ValueError: an argument or layout that QSA does not support.
            RuntimeError: an attention mask that is not causal, index queries or keys that are not finite (on CUDA these
                are device-side assertions); parameters that do not fit the stage; a recomputation without a first pass
                (`RouteError`).
        """
        self._check_call(
            {
                "inference_context": inference_context,
                "inference_params": inference_params,
                "rotary_pos_cos": rotary_pos_cos,
                "rotary_pos_sin": rotary_pos_sin,
                "rotary_pos_cos_sin": rotary_pos_cos_sin,
                "sequence_len_offset": sequence_len_offset,
            },
            {"key_value_states": key_value_states, "attention_bias": attention_bias},
            packed_seq_params,
        )
        warmup = self.config.qsa_stage == "warmup"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not warmup):
            projected = self.get_query_key_value_tensors(hidden_states, output_gate=self.config.attention_output_gate)
            query, key, value, gate = self._own_heads(*projected)
            layout = self._layout(query, attention_mask, packed_seq_params)
            table = self._rotary_table(rotary_pos_emb)
            rotation = None if table is None else rotations(table, layout, self._concentration)
            query, key = self._rotate(query, key, table, rotation, layout)
            value = layout.to_rows(value)

        learns = self.training and torch.is_grad_enabled() and trains_indexer(self.config)
        if learns or not warmup:
            with torch.set_grad_enabled(learns):
                q_idx, k_blocks = self._index(hidden_states, layout, rotation)
        block_ids, loss_scale = None, self.loss_scale
        known_by = query if warmup else q_idx
        if self.training and is_recomputation():
            first_pass = self.routes.replay(known_by, layout, self.global_layer_number)
            block_ids, loss_scale = first_pass.ids, first_pass.scale
        else:
            if not warmup:
                block_ids = self._route(q_idx, k_blocks, layout)
            if self.training and is_first_pass():
                check_frozen_before_checkpoint(self)
                self.routes.save(block_ids, loss_scale, known_by, layout, self.global_layer_number)

        with torch.set_grad_enabled(torch.is_grad_enabled() and not warmup):
            context, lse, keys = self._attend(query, key, value, block_ids, layout)
            context = layout.from_rows(context).flatten(2)
            if gate is not None:
                context = self._apply_output_gate(context, gate)
            output, bias = self.linear_proj(context)

        if learns:
            arguments = (q_idx, k_blocks, query.detach(), keys.detach(), lse, block_ids, *layout.rows)
            settings: dict[str, Any] = {
                "scale": self.core_attention.scale,
                "ratio": self.indexer.ratio,
                "reduction": "sum",
                "tp_group": self.pg_collection.tp,
            }
            backend = telemetry.count("indexer_kl", q_idx, *indexer_kl.supports(*arguments, **settings))
            kl_sum = indexer_kl.indexer_kl(*arguments, **settings, backend=backend)
            track_loss(kl_sum, layout.num_valid, self.config, self.global_layer_number, self.pg_collection.cp)
            loss = training_loss(kl_sum, layout.num_valid, self.config, self.pg_collection.cp.size())
            output = AttachIndexerLoss.apply(output, loss, loss_scale)
        return output, bias

    def _check_call(self, inference: dict[str, Any], unsupported: dict[str, Any], packed_seq_params: Any) -> None:
        for name, argument in inference.items():
            if argument is not None:
                raise NotImplementedError(
                    f"{name} is given: QSA layers train and evaluate only, static and dynamic inference are not built"
                )
        for name, argument in unsupported.items():
            if argument is not None:
                raise ValueError(f"{name} is given: QSA is causal self-attention without a bias on its scores")
        packed = packed_seq_params is not None
        if packed and packed_seq_params.qkv_format != "thd":
            raise ValueError(
                f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r}: QSA takes packed documents as 'thd'"
            )
        self.indexer.check_config()
        if refused := refusal(Setup(self.config, "thd" if packed else "bshd")):
            raise ValueError(refused)
        if self.training:
            check_stage(self)

    def _own_heads(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None) -> tuple[Any, ...]:
        # With more ranks than KV heads, 0.16 cuts the query to this rank's heads but leaves the gate whole.
        if gate is not None and gate.shape[2] != query.shape[2]:
            parts = gate.shape[2] // query.shape[2]
            gate = gate.chunk(parts, dim=2)[self.pg_collection.tp.rank() % parts]
        return query, key, value, gate

    def _layout(self, query: Tensor, attention_mask: Tensor | None, packed_seq_params: Any) -> TokenLayout:
        cp_group = self.pg_collection.cp
        if packed_seq_params is not None:
            if query.shape[1] != 1:
                raise ValueError(
                    f"hidden_states are a batch of {query.shape[1]} with packed_seq_params, "
                    f"must be [tokens, 1, hidden]: packed documents follow each other"
                )
            return packed_layout(packed_seq_params, query.shape[0], self.indexer.ratio, cp_group)
        layout = batch_layout(query.shape[0], query.shape[1], self.indexer.ratio, query.device, cp_group)
        if attention_mask is not None:
            check_causal_mask(attention_mask, layout)
        return layout

    @property
    def _concentration(self) -> float:
        return _yarn_get_concentration_factor_from_config(self.config)

    def _rotary_table(self, rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None) -> Tensor | None:
        if self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]:
            return None
        table = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        if table is not None and table.shape[-1] > self.indexer.channels:
            raise ValueError(
                f"the rotary embedding covers {table.shape[-1]} channels, index heads have "
                f"qsa_indexer_head_dim={self.indexer.channels}: lower rotary_percent or widen the index heads"
            )
        return table

    def _rotate(
        self, query: Tensor, key: Tensor, table: Tensor | None, rotation: Rotations | None, layout: TokenLayout
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key [S, B, heads, D]; returns rows [T, heads, D]."""
        if rotation is None or not self.config.apply_rope_fusion:
            query, key = layout.to_rows(query), layout.to_rows(key)
            return (query, key) if rotation is None else (rotation.rows.apply(query), rotation.rows.apply(key))
        options = {
            "config": self.config,
            "mscale": self._concentration,
            "cu_seqlens": layout.cu_seqlens if layout.packed else None,
            "cp_group": self.pg_collection.cp,
        }
        if layout.packed:
            return tuple(apply_rotary_pos_emb(x.squeeze(1), table, **options) for x in (query, key))  # type: ignore[return-value]
        return tuple(layout.to_rows(apply_rotary_pos_emb(x, table, **options)) for x in (query, key))  # type: ignore[return-value]

    def _index(self, hidden_states: Tensor, layout: TokenLayout, rotation: Rotations | None) -> tuple[Tensor, Tensor]:
        """Index queries [T, H, d] of this rank and index keys of all blocks. A collective under context parallelism."""
        if self.config.qsa_indexer_detach_input:
            hidden_states = hidden_states.detach()
        raw_queries, raw_keys = (layout.to_rows(x) for x in self.indexer.project(hidden_states))
        q_idx = self.indexer.queries(raw_queries, rotation and rotation.rows)
        raw_keys = layout.gather(raw_keys)
        k_blocks = self.indexer.block_keys(raw_keys, layout.block_tokens, rotation and rotation.blocks)
        check_scores_finite(q_idx, k_blocks, layout.block_tokens >= 0, layout, f"QSA layer {self.global_layer_number}")
        return q_idx, k_blocks

    def _route(self, q_idx: Tensor, k_blocks: Tensor, layout: TokenLayout) -> Tensor:
        """Block ids int32 [T, K]: given ones, else selected ones, which is a collective under tensor parallelism."""
        ids = self.routes.take_given(layout, self.indexer.ratio, self.global_layer_number)
        if ids is None:
            arguments = (q_idx.detach(), k_blocks.detach(), layout.rows.pos, layout.rows.block_start)
            settings: dict[str, Any] = {
                "ratio": self.indexer.ratio,
                "topk": max(1, min(blocks_per_query(self.config), layout.most_blocks)),
            }
            backend = telemetry.count("select_blocks", q_idx, *block_topk.supports(*arguments, **settings))
            ids = block_topk.select_blocks(*arguments, **settings, tp_group=self.pg_collection.tp, backend=backend)
        self.routes.note(ids, layout)
        return ids

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block_ids: Tensor | None, layout: TokenLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not (self.checkpoint_core_attention and self.training):
            return self.core_attention(query, key, value, block_ids, layout)
        first_pass: list[tuple[Tensor, Tensor]] = []

        def attend(query: Tensor, key: Tensor, value: Tensor, block_ids: Tensor | None) -> Tensor:
            out, lse, keys = self.core_attention(query, key, value, block_ids, layout)
            if not torch.is_grad_enabled():
                first_pass.append((lse, keys))
            return out

        out = tensor_parallel.checkpoint(attend, False, query, key, value, block_ids)
        return (out, *first_pass.pop())
