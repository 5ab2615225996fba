"""The indexer: index queries of every token and one pooled index key for every block."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mcore_patches.attention.common.rope import Rotation


class ZeroCentredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, computed in fp32, in the dtype of x; weights start at 0."""

    def __init__(self, channels: int, eps: float, *, dtype: torch.dtype, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(channels, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1.0 + _at_least_fp32(self.weight), self.eps)


class QKNorm(torch.nn.Module):
    """RMS norm of an attention head's queries or keys, for backends whose norm knows no zero-centred weight.

    With `config.layernorm_zero_centered_gamma` the weight is an offset from 1 and starts at 0, else it starts at 1.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype, device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.offset + _at_least_fp32(self.weight), self.eps)


def rms_norm(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """x / rms(x) * factor over the last dimension, computed in fp32 (fp64 for fp64), in the dtype of x."""
    wide = _at_least_fp32(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * factor).to(x.dtype)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Projection(torch.nn.Module):
    """A linear layer without bias. Holds only the weight: under sequence parallelism its gradient needs a factor."""

    def __init__(self, config: Any, inputs: int, outputs: int, device: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            config.init_method(self.weight)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class QSAIndexer(MegatronModule):
    """Projection, norms and rotation of index queries and keys (arXiv 2608.30320, Eq. 12-13).

    Every tensor-parallel rank holds all of it; `average_gradients_across_tp_domain` on its parameters makes megatron
    average their gradients. Names are those of transformers: index_qk_proj, q_layernorm, k_layernorm.
    """

    def __init__(self, config: Any, *, tp_group: dist.ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.heads, self.channels = config.qsa_indexer_n_heads, config.qsa_indexer_head_dim
        self.ratio = config.qsa_indexer_compress_ratio
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.index_qk_proj = _Projection(config, config.hidden_size, (self.heads + 1) * self.channels, device)
        norm = {"eps": config.layernorm_epsilon, "dtype": config.params_dtype, "device": device}
        self.q_layernorm = ZeroCentredRMSNorm(self.channels, **norm)
        self.k_layernorm = ZeroCentredRMSNorm(self.channels, **norm)
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def check_config(self) -> None:
        """Raise ValueError if the config now describes another indexer, which would come about in part."""
        for field, built in (("n_heads", self.heads), ("head_dim", self.channels), ("compress_ratio", self.ratio)):
            value = getattr(self.config, f"qsa_indexer_{field}")
            if value != built:
                raise ValueError(f"qsa_indexer_{field}={value}, but the model was built with {built}: build it again")

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Raw index queries [S, B, H, d] and index keys [S, B, d] from hidden states [S (/ TP with SP), B, hidden]."""
        weight = self.index_qk_proj.weight
        parallel = self.config.sequence_parallel and self.tp_group.size() > 1
        if parallel:
            # Each rank projects its own tokens, a fraction of the work and of the traffic. Its weight gradient is then
            # a part of the sum, which the average over ranks must not divide.
            weight = _ScaleGradient.apply(weight, self.tp_group.size())
        raw = F.linear(hidden, weight)
        if parallel:
            # All ranks go on with the same tokens and get the same gradient: backward takes its own part, unsummed.
            raw = gather_from_sequence_parallel_region(raw, tensor_parallel_output_grad=False, group=self.tp_group)
        queries, keys = raw.split((self.heads * self.channels, self.channels), dim=-1)
        return queries.unflatten(-1, (self.heads, self.channels)), keys

    def queries(self, raw: Tensor, rotation: Rotation | None) -> Tensor:
        """Index queries [T, H, d] from raw ones."""
        normed = self.q_layernorm(raw)
        return normed if rotation is None else rotation.apply(normed)

    def block_keys(self, raw: Tensor, block_tokens: Tensor, rotation: Rotation | None) -> Tensor:
        """Index keys of blocks [N, d]: the mean of the block's raw keys, normed, rotated at the block's first position.

        Args:
            raw: [n, d], of all tokens in document order.
            block_tokens: int32 [N], the first token of each block; -1 gives some key that no row looks at.
            rotation: of the blocks' first tokens; None is no rotary embedding.
        """
        tokens = block_tokens.clamp(min=0)[:, None] + torch.arange(
            self.ratio, device=raw.device, dtype=block_tokens.dtype
        )
        members = raw.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        normed = self.k_layernorm(_at_least_fp32(members).mean(dim=1).to(raw.dtype))
        return normed if rotation is None else rotation.apply(normed)
