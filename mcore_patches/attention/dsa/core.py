"""The core attention of DSA: attend the keys that the indexer selects, teach the indexer what the attention looks at.

It takes the place of a core attention under absorbed multi-latent attention, with the contract of megatron-core 0.19.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mcore_patches.attention.common.finite import check_scores_finite
from mcore_patches.attention.common.layout import TokenLayout, batch_layout, check_causal_mask, packed_layout
from mcore_patches.attention.common.loss import AttachIndexerLoss, LossScale, microbatch_loss, track_loss
from mcore_patches.attention.common.passes import PassQueue, is_first_pass, is_recomputation
from mcore_patches.attention.dsa import sharing, telemetry
from mcore_patches.attention.dsa.config import selects, trains_indexer
from mcore_patches.attention.dsa.indexer import DSAIndexer, IndexInputs
from mcore_patches.ops import block_topk, indexer_kl, sparse_mla


class DSAttention(MegatronModule):
    """DeepSeek sparse attention over latent keys (DeepSeek-V3.2 report, section 2.1).

    Constructed as megatron constructs a core attention; `submodules.indexer` is the spec of a `DSAIndexer`. Memory is
    linear in the number of tokens: neither scores of all pairs nor masks exist.
    """

    # What AbsorbedMLASelfAttention asks a core attention.
    consumes_absorbed_v_up_projection = True
    requires_dsa_inputs = True

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"attention_type={attention_type!r}: DSA is self-attention, must be 'self'")
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"attn_mask_type={attn_mask_type}: DSA is causal, must be AttnMaskType.causal or "
                f"AttnMaskType.padding_causal among the params of the spec"
            )
        if attention_dropout:
            raise ValueError(f"attention_dropout={attention_dropout}: the sparse attention has none, must be None or 0")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        if pg_collection.cp.size() > 1 and (cp_comm_type or "allgather").replace("_", "").lower() != "allgather":
            raise ValueError(
                f"cp_comm_type={cp_comm_type!r}: selected keys may lie on any rank, must be None or 'allgather'"
            )
        self.pg_collection = pg_collection
        self.layer_number = layer_number
        # Inside an MTP layer numbering starts again at 1; the patch counts on.
        self.global_layer_number = layer_number
        self.latent: int = config.kv_lora_rank
        width = self.latent + config.qk_pos_emb_head_dim if k_channels is None else k_channels
        self.softmax_scale: float = width**-0.5 if softmax_scale is None else softmax_scale
        self.topk: int = config.dsa_indexer_topk
        self.indexer: DSAIndexer | None = None
        if selects(layer_number, config):
            self.indexer = build_module(submodules.indexer, config=config, pg_collection=pg_collection)
            if not trains_indexer(config):
                # DDP waits for the gradient of every parameter that requires one.
                self.indexer.requires_grad_(False)
        self.built_to_train = trains_indexer(config)
        self.routes = PassQueue("DSA")
        self.loss_scale = LossScale()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:
        """Causal sparse attention within each sequence or packed document.

        Args:
            query: absorbed queries [S, B, n, L + R], or packed [T, n, L + R]: L latent, R rotated channels, n heads of
                this rank. S or T are this context-parallel rank's tokens, in the zigzag layout.
            key: latent and rotated key [S, B, 1, L + R], or packed [T, 1, L + R].
            value: must be None, values are the latents.
            attention_mask: None or megatron's causal mask (see `check_causal_mask`); it changes nothing, and is not
                looked at with `packed_seq_params`.
            x: the layer's normed input [S (/ TP with SP), B, hidden]. qr: the normed query latent
                [S (/ TP with SP), B, q_lora_rank], packed also without B. No gradient reaches them from here.
            position_ids: not looked at; the layout tells positions.
            up_v_weight: [n, value channels, L], the up-projection of values.

        Returns:
            [S, B, n * value channels], [T, 1, ...] for packed documents.

        Raises:
            ValueError: an argument or layout that is not supported.
            RuntimeError: a mask that is not causal, index queries or keys that are not finite (on CUDA these are
                device-side assertions); a recomputation without a first pass (`RouteError`); no earlier layer to share
                a selection with.
        """
        query, key = (t.unsqueeze(1) if t.dim() == 3 else t for t in (query, key))
        layout = self._layout(query, key, attention_mask, packed_seq_params)
        self._check_call(query, key, value, up_v_weight, attention_bias, attn_mask_type)
        assert up_v_weight is not None
        rows, keys = layout.to_rows(query), layout.gather(layout.to_rows(key))

        learns = self.training and torch.is_grad_enabled() and trains_indexer(self.config) and self.indexer is not None
        index, index_keys = None, None
        if self.indexer is not None:
            with torch.set_grad_enabled(learns):
                index, index_keys = self._index(x, qr, layout)
        ids, loss_scale = self._select(rows, index, index_keys, layout)
        context, lse = self._attend(rows, keys, ids, layout)
        output = torch.einsum("tnc,ndc->tnd", context, up_v_weight.to(context.dtype)).flatten(1)
        output = layout.from_rows(output)
        if learns:
            assert index is not None
            assert index_keys is not None
            loss = self._loss(index, index_keys, rows.detach(), keys.detach(), ids, lse, layout)
            output = AttachIndexerLoss.apply(output, loss, loss_scale)
        return output

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        up_v_weight: Tensor | None,
        attention_bias: Tensor | None,
        attn_mask_type: AttnMaskType | None,
    ) -> None:
        if value is not None or up_v_weight is None:
            raise ValueError(
                "value must be None and up_v_weight given: these layers attend latents, put DSAttention under "
                "AbsorbedMLASelfAttention"
            )
        width = self.latent + self.config.qk_pos_emb_head_dim
        if query.shape[-1] != width or key.shape[2:] != (1, width):
            raise ValueError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must be [S, B, heads, {width}] and "
                f"[S, B, 1, {width}], kv_lora_rank + qk_pos_emb_head_dim channels"
            )
        expected = (query.shape[2], up_v_weight.shape[1] if up_v_weight.dim() == 3 else -1, self.latent)
        if tuple(up_v_weight.shape) != expected:
            raise ValueError(
                f"up_v_weight {tuple(up_v_weight.shape)} must be [{query.shape[2]}, value channels, {self.latent}]"
            )
        if attention_bias is not None:
            raise ValueError("attention_bias is given: DSA adds no bias to its scores, must be None")
        if attn_mask_type not in (None, AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"attn_mask_type={attn_mask_type}: DSA is causal, must be AttnMaskType.causal")
        if self.indexer is not None:
            self.indexer.check_config()
        if self.training and trains_indexer(self.config) and not self.built_to_train:
            raise ValueError(
                f"dsa_indexer_loss_coeff={self.config.dsa_indexer_loss_coeff}, but the model was built without the "
                f"indexer's loss, so that its parameters require no gradients: build it again and load the weights"
            )

    def _layout(self, query: Tensor, key: Tensor, attention_mask: Tensor | None, packed_seq_params: Any) -> TokenLayout:
        cp_group = self.pg_collection.cp
        seq, batch = query.shape[:2]
        if key.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must hold the same tokens of this rank"
            )
        if packed_seq_params is None:
            layout = batch_layout(seq, batch, 1, query.device, cp_group)
            if attention_mask is not None:
                check_causal_mask(attention_mask, layout)
            return layout
        if packed_seq_params.qkv_format != "thd" or batch != 1:
            raise ValueError(
                f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r} with a batch of {batch}: DSA takes "
                f"packed documents as 'thd', one after the other in a batch of 1"
            )
        return packed_layout(packed_seq_params, seq, 1, cp_group)

    def _index(self, x: Tensor, qr: Tensor, layout: TokenLayout) -> tuple[IndexInputs, Tensor]:
        """Of this rank's rows, and the index keys of all tokens [n, d]. A collective under context parallelism."""
        assert self.indexer is not None
        index = self.indexer(x.detach(), qr.detach(), layout)
        keys = layout.gather(index.keys)
        name = f"DSA layer {self.global_layer_number}"
        check_scores_finite(index.queries, keys, layout.all_rows.pos >= 0, layout, name, index.weights)
        return index, keys

    def _select(
        self, rows: Tensor, index: IndexInputs | None, index_keys: Tensor | None, layout: TokenLayout
    ) -> tuple[Tensor, LossScale]:
        """Ids int32 [T, K] of keys within each row's document, and the scale of the loss.

        A recomputation takes what its first pass saved.
        """
        known_by = rows if index is None else index.queries
        if self.training and is_recomputation():
            first_pass = self.routes.replay(known_by, layout, self.global_layer_number)
            assert first_pass.ids is not None
            return first_pass.ids, first_pass.scale
        if index is None or index_keys is None:
            ids = sharing.take(self.layer_number, layout, self.config)
        else:
            ids = self._topk(index, index_keys, layout)
            sharing.leave(self.layer_number, ids, layout, self.config)
        if self.training and is_first_pass():
            self.routes.save(ids, self.loss_scale, known_by, layout, self.global_layer_number)
        return ids, self.loss_scale

    def _topk(self, index: IndexInputs, index_keys: Tensor, layout: TokenLayout) -> Tensor:
        arguments = (index.queries.detach(), index_keys.detach(), layout.rows.pos, layout.rows.start)
        settings: dict[str, Any] = {
            "ratio": 1,
            "topk": max(1, min(self.topk, layout.num_tokens // layout.batch)),
            "weights": index.weights.detach(),
            "relu": self.config.dsa_indexer_scoring_relu,
        }
        backend = telemetry.count("select_blocks", index.queries, *block_topk.supports(*arguments, **settings))
        # Every tensor-parallel rank has the same queries and keys: they share the rows.
        return block_topk.select_blocks(*arguments, **settings, tp_group=self.pg_collection.tp, backend=backend)

    def _attend(self, rows: Tensor, keys: Tensor, ids: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Latents [T, n, L] and the log-sum-exp [T, n]."""
        places = torch.where(ids >= 0, ids + layout.rows.start[:, None], -1)
        arguments = rows.unsqueeze(0), keys.unsqueeze(0), places.unsqueeze(0)
        backend = telemetry.count("sparse_mla", rows, *sparse_mla.supports(*arguments, v_channels=self.latent))
        out, lse = sparse_mla.sparse_mla(
            *arguments,
            scale=self.softmax_scale,
            v_channels=self.latent,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            backend=backend,
        )
        return out.squeeze(0), lse.squeeze(0)

    def _loss(
        self,
        index: IndexInputs,
        index_keys: Tensor,
        rows: Tensor,
        keys: Tensor,
        ids: Tensor,
        lse: Tensor,
        layout: TokenLayout,
    ) -> Tensor:
        """This rank's part of the indexer's loss, which is tracked too.

        The teacher is the attention summed over heads: with `dsa_indexer_use_sparse_loss` that over the selected keys,
        else a dense one.
        """
        config = self.config
        sparse = config.dsa_indexer_use_sparse_loss
        place = layout.rows
        arguments = (
            index.queries, index_keys, rows, keys, lse if sparse else None, ids if sparse else None,
            place.pos, place.start, place.start,
        )  # fmt: skip
        settings: dict[str, Any] = {
            "scale": self.softmax_scale,
            "index_scale": 1.0,
            "ratio": 1,
            "weights": index.weights,
            "relu": config.dsa_indexer_scoring_relu,
            "tp_group": self.pg_collection.tp,
        }
        backend = telemetry.count("indexer_kl", rows, *indexer_kl.supports(*arguments, **settings))
        kl_sum = indexer_kl.indexer_kl(*arguments, reduction="sum", **settings, backend=backend)
        coeff, per_token = config.dsa_indexer_loss_coeff, config.calculate_per_token_loss
        seen = coeff * kl_sum.detach()
        if not per_token:
            seen = seen / layout.num_valid.clamp(min=1)
        track_loss(seen, config, self.global_layer_number, self.pg_collection.cp)
        return microbatch_loss(
            kl_sum,
            layout.num_valid,
            coeff=coeff,
            mean=True,
            per_token=per_token,
            cp_size=self.pg_collection.cp.size(),
        )
