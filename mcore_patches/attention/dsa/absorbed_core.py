"""Dense causal attention of all heads over one latent key, in bounded memory: the core of absorbed MLA without DSA."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mcore_patches.attention.common.layout import check_causal_mask
from mcore_patches.attention.dsa.absorbed_layout import token_layout
from mcore_patches.ops.sparse_gqa import sparse_gqa

__all__ = ["LatentAttention"]

_ALL_GATHER = (None, "all_gather", "allgather")


class LatentAttention(torch.nn.Module):
    """Softmax attention over [latent | rotary part], whose leading `v_channels` are the values. Has no parameters.

    Takes the place of megatron's core attention and is called as megatron-core 0.19 calls the core attention of
    absorbed MLA. Under context parallelism the keys of all ranks are gathered (all-gather, zigzag layout).

    Args:
        config: a `TransformerConfig`.
        attn_mask_type: `causal` or `padding_causal`.
        softmax_scale: factor of the scores; `k_channels` ** -0.5 for None.
        k_channels, v_channels: R + P and R.
        cp_comm_type: None or "all_gather".

    Raises:
        ValueError: a mask type, dropout, sliding window, sink or kind of context parallelism that is not supported.
    """

    consumes_absorbed_v_up_projection = False

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        _check(config, attn_mask_type, attention_type, attention_dropout, cp_comm_type)
        if k_channels is None or v_channels is None or not 0 < v_channels <= k_channels:
            raise ValueError(
                f"k_channels={k_channels}, v_channels={v_channels}: values are the leading channels of the keys; "
                "v_channels must be from 1 to k_channels"
            )
        self.layer_number = layer_number
        self.v_channels = v_channels
        self.softmax_scale = k_channels**-0.5 if softmax_scale is None else softmax_scale
        groups = ProcessGroupCollection.use_mpu_process_groups(["cp"]) if pg_collection is None else pg_collection
        self.cp_group = groups.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        attn_mask_type: Any = None,
        **for_sparse: Any,
    ) -> Tensor:
        """Attend. A collective under context parallelism.

        Args:
            query: [S, B, n, R + P], or packed [T, n, R + P].
            key: [S, B, 1, R + P], or packed [T, 1, R + P].
            value: None, the values are in the keys.
            attention_mask: None or megatron's causal mask; not looked at with packed documents.
            attn_mask_type: None or that of construction.
            for_sparse: what sparse core attentions need: `x`, `qr`, `up_v_weight`, `position_ids`.

        Returns:
            [S, B, n * v_channels], or packed [T, n * v_channels].

        Raises:
            ValueError: a value, a mask type that is not causal, an attention mask of another shape.
            RuntimeError: an attention mask with other values than the causal one's.
        """
        del for_sparse
        if value is not None:
            raise ValueError(f"value={tuple(value.shape)}: the values are the leading channels of key; must be None")
        if attn_mask_type is not None:
            _check_mask_type(attn_mask_type)
        layout = token_layout(query.shape[0], query.shape[1], packed_seq_params, query.device, self.cp_group)
        if not layout.packed:
            if attention_mask is not None:
                check_causal_mask(attention_mask, layout)
            query, key = layout.to_rows(query), layout.to_rows(key)
        keys = layout.gather(key)
        # One tensor is both keys and values: the op wants equal widths, and what is no value is cut off again.
        context, _ = sparse_gqa(
            query, keys, keys, None, layout.rows.pos, layout.rows.start, scale=self.softmax_scale, block_size=1
        )
        context = context[..., : self.v_channels]
        return context.flatten(1) if layout.packed else layout.from_rows(context).flatten(2)


def _check(config: Any, attn_mask_type: Any, attention_type: str, dropout: float | None, cp_comm_type: Any) -> None:
    _check_mask_type(attn_mask_type)
    if attention_type != "self":
        raise ValueError(f"attention_type={attention_type!r}: absorbed MLA is self-attention; must be 'self'")
    variant = getattr(config, "experimental_attention_variant", None)
    if variant == "dsa":
        # A layer of sparse attention would turn dense, and lose its indexer, without a word.
        raise ValueError(
            f"experimental_attention_variant={variant!r}: the attention over latents is dense; must be None, or put "
            "get_dsa_module_spec_for_backend(config, backend) into the spec"
        )
    dropout = config.attention_dropout if dropout is None else dropout
    if dropout:
        raise ValueError(f"attention_dropout={dropout}: the attention over latents has none; must be 0")
    if config.window_size is not None:
        raise ValueError(f"window_size={config.window_size}: the attention over latents has none; must be None")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise ValueError(f"softmax_type={config.softmax_type!r}: the softmax has no sink; must be 'vanilla'")
    if config.context_parallel_size > 1 and cp_comm_type not in _ALL_GATHER:
        raise ValueError(
            f"cp_comm_type={cp_comm_type!r}: the latents of all context-parallel ranks are gathered; must be None or "
            "'all_gather'"
        )


def _check_mask_type(attn_mask_type: Any) -> None:
    if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ValueError(
            f"attn_mask_type={attn_mask_type}: absorbed MLA is causal; must be AttnMaskType.causal or "
            "AttnMaskType.padding_causal among the params of the spec"
        )
