"""Multi-latent attention with the up-projections absorbed: all heads attend over one latent key.

With W_k and W_v the up-projections of a head, plain MLA scores q_nope . (W_k c) + q_pe . k_pe and sums values W_v c.
Here the query is q' = [W_k^T q_nope | q_pe], keys are [c | k_pe] for all heads, and W_v is applied to the attended
latents: the same function of the same parameters (DeepSeek-V2 report, section 2.1), with one KV head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mcore_patches.attention.dsa.absorbed_checkpoint import CheckpointLayout, load_any_layout, to_checkpoint_layout
from mcore_patches.attention.dsa.absorbed_checks import check_call, check_config, check_norms
from mcore_patches.attention.dsa.absorbed_latents import latents
from mcore_patches.attention.dsa.absorbed_layout import angles_of, token_layout
from mcore_patches.attention.dsa.absorbed_submodules import AbsorbedMLASelfAttentionSubmodules
from mcore_patches.attention.dsa.adapters import accepted, or_identity, rotate_pairs

__all__ = ["AbsorbedMLASelfAttention"]


class AbsorbedMLASelfAttention(MLASelfAttention):
    """`MLASelfAttention` whose core attention works on latents; parameters and checkpoints are the parent's.

    The core attention is built with `k_channels` R + P and `v_channels` R, and called as in megatron-core 0.19, with

        query [S, B, n, R + P], key [S, B, 1, R + P] (packed [T, n, R + P], [T, 1, R + P]), value=None, attention_mask,
        x: the hidden states as given, qr: the normed query latent [S / TP, B, q_lora_rank] (the hidden states where
        q_lora_rank is None), packed without B; up_v_weight: W_v [n, v_head_dim, R]; position_ids, packed_seq_params,
        attn_mask_type

    and returns attended latents [S, B, n * R] or [T, (1,) n * R]; values [..., n * v_head_dim] if its attribute
    `consumes_absorbed_v_up_projection` is true.

    The rotary embedding runs unfused, with `apply_rope_fusion` or without.

    Args:
        config: an `MLATransformerConfig`; see `absorbed_checks` for what is refused. `qk_pos_emb_head_dim` may be 0.
        submodules: with a combined up-projection of keys and values or with split ones.
        checkpoint_norms: how plain MLA's sharded checkpoints name the latents' norms: "apart" (`kv_layernorm.weight`)
            or "fused" into the up-projections (`linear_kv_up_proj.layer_norm_weight`), as up to megatron-core 0.18 on
            Transformer Engine. See `set_checkpoint_layout`.
        placement: `pp_layer_offset` and `name`, where the release has them.

    Raises:
        ValueError: a field or a submodule that is not supported, by name.
    """

    def __init__(
        self,
        config: Any,
        submodules: AbsorbedMLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        checkpoint_norms: str = "apart",
        **placement: Any,
    ) -> None:
        check_config(config)
        is_split = submodules.is_split
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        name = placement.pop("name", None)
        parts = dataclasses.replace(
            submodules,
            # The parent would build them in shapes of its own.
            core_attention=IdentityOp,
            linear_kv_up_proj=IdentityOp if is_split else submodules.linear_kv_up_proj,
            q_layernorm=or_identity(submodules.q_layernorm),
            kv_layernorm=or_identity(submodules.kv_layernorm),
        )
        super().__init__(
            config,
            parts,
            layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
            **placement,
            **accepted(MLASelfAttention, {"name": name}),
        )
        self.is_split = is_split
        self.checkpoint_layout = CheckpointLayout(norms=checkpoint_norms)
        if is_split:
            del self.linear_kv_up_proj
            self.linear_k_up_proj = self._up_projection(submodules.linear_k_up_proj, "k", config.qk_head_dim, name)
            self.linear_v_up_proj = self._up_projection(submodules.linear_v_up_proj, "v", config.v_head_dim, name)
        check_norms(self)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=self.softmax_scale,
            k_channels=config.kv_lora_rank + config.qk_pos_emb_head_dim,
            v_channels=config.kv_lora_rank,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        # Sizes of a cache for inference, of which there is none.
        self.key_hidden_size = self.val_hidden_size = None

    def _up_projection(self, spec: Any, which: str, channels: int, name: str | None) -> Any:
        label = f"linear_{which}_up_proj"
        return build_module(
            spec,
            self.config.kv_lora_rank,
            self.config.num_attention_heads * channels,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=f"{which}_up_proj",
            tp_group=self.pg_collection.tp,
            **accepted(spec, {"name": None if name is None else f"{name}.{label}"}),
        )

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_k [n, qk_head_dim, R] and W_v [n, v_head_dim, R], views of the parameters."""
        heads, latent = self.num_attention_heads_per_partition, self.config.kv_lora_rank
        if self.is_split:
            weights = (self.linear_k_up_proj.weight, self.linear_v_up_proj.weight)
            return tuple(weight.view(heads, -1, latent) for weight in weights)  # type: ignore[return-value]
        combined = self.linear_kv_up_proj.weight.view(heads, -1, latent)
        return combined[:, : self.config.qk_head_dim], combined[:, self.config.qk_head_dim :]

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Absorbed query, latent key and normed query latent, see the class. A collective under sequence parallelism.

        Raises:
            NotImplementedError, ValueError: as `forward`.
        """
        check_call(
            {"inference_context": inference_context, "inference_params": inference_params},
            {"key_value_states": key_value_states},
            packed_seq_params,
        )
        q_latent, kv_latent, k_rotary = latents(self, hidden_states, packed_seq_params is not None)
        angles = None
        if self.config.qk_pos_emb_head_dim:
            layout = token_layout(
                k_rotary.shape[0], k_rotary.shape[1], packed_seq_params, k_rotary.device, self.pg_collection.cp
            )
            angles = angles_of(self.rotary_pos_emb, layout, packed_seq_params)

        def absorb(q_latent: Tensor, kv_latent: Tensor, k_rotary: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
            project = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
            query = project(q_latent)[0].unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))
            q_nope, q_rotary = query.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
            q_absorbed = torch.einsum("...nd,ndr->...nr", q_nope, w_k)
            key, k_rotary = kv_latent.unsqueeze(-2), k_rotary.unsqueeze(-2)
            if angles is None:
                # A copy: the recomputation frees what this returns.
                return q_absorbed.contiguous(), key.clone(memory_format=torch.contiguous_format)
            q_rotary, k_rotary = rotate_pairs(q_rotary, *angles), rotate_pairs(k_rotary, *angles)
            return torch.cat((q_absorbed, q_rotary), dim=-1), torch.cat((key, k_rotary), dim=-1)

        w_k, _ = self.up_projections()
        inputs = (q_latent, kv_latent, k_rotary, w_k)
        if self.recompute_up_proj and torch.is_grad_enabled():
            # W_k goes in as an argument: used inside, the weight would get its gradient in two parts, and DDP counts
            # the first as the whole. None is how all releases spell that there is no fp8.
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
            query, key = self.qkv_up_checkpoint.checkpoint(absorb, *inputs)
        else:
            query, key = absorb(*inputs)
        return query, key, q_latent

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `MLASelfAttention.forward`, on hidden states [S / TP, B, hidden] or packed [T / TP, 1, hidden].

        Raises:
            NotImplementedError: inference.
            ValueError: an argument that MLA does not take, or documents in another format than 'thd'.
        """
        check_call(
            {
                "inference_context": inference_context,
                "inference_params": inference_params,
                "rotary_pos_cos": rotary_pos_cos,
                "rotary_pos_sin": rotary_pos_sin,
                "rotary_pos_cos_sin": rotary_pos_cos_sin,
                "sequence_len_offset": sequence_len_offset,
            },
            {
                "key_value_states": key_value_states,
                "rotary_pos_emb": rotary_pos_emb,
                "attention_bias": attention_bias,
            },
            packed_seq_params,
        )
        query, key, q_latent = self.get_query_key_value_tensors(
            hidden_states, packed_seq_params=packed_seq_params, inference_context=inference_context
        )
        _, w_v = self.up_projections()

        def attend(query: Tensor, key: Tensor, x: Tensor, qr: Tensor, up_v_weight: Tensor) -> Tensor:
            return self.core_attention(
                query,
                key,
                value=None,
                attention_mask=attention_mask,
                x=x,
                qr=qr,
                up_v_weight=up_v_weight,
                position_ids=position_ids,
                packed_seq_params=packed_seq_params,
                attn_mask_type=self.attn_mask_type,
            )

        inputs = (query, key, hidden_states, q_latent, w_v)
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(attend, False, *inputs)
        else:
            context = attend(*inputs)
        context = self._values(context, w_v)
        if packed_seq_params is not None and context.ndim == 2:
            context = context.unsqueeze(1)
        if self.qkv_up_checkpoint is not None:
            self.qkv_up_checkpoint.discard_output_and_register_recompute(context)
            self.qkv_up_checkpoint = None
        return self.linear_proj(context)

    def _values(self, context: Tensor, w_v: Tensor) -> Tensor:
        """Values [..., n * v_head_dim] of what the core attention returned."""
        heads = self.num_attention_heads_per_partition
        done = getattr(self.core_attention, "consumes_absorbed_v_up_projection", False)
        channels = self.config.v_head_dim if done else self.config.kv_lora_rank
        if context.shape[-1] != heads * channels:
            raise ValueError(
                f"{type(self.core_attention).__name__} returned {tuple(context.shape)}, with "
                f"consumes_absorbed_v_up_projection={done} the last dimension must be {heads} x {channels}"
            )
        if done:
            return context
        return torch.einsum("...nr,ndr->...nd", context.unflatten(-1, (heads, channels)), w_v).flatten(-2)

    def _backward_kv_proj(self) -> None:
        # The up-projection is never called as a layer, so it has no delayed weight gradient.
        self.linear_kv_down_proj.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """As the parent's, in the layout that `set_checkpoint_layout` chose: by default that of plain MLA."""
        return to_checkpoint_layout(
            self, super().sharded_state_dict(prefix, sharded_offsets, metadata), prefix, sharded_offsets
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        load_any_layout(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def clip_qk(self) -> None:
        """Refused, as a config with qk_clip is: attention over latents keeps no largest logits.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("clip_qk: absorbed MLA keeps no largest logits")
