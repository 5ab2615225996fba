"""Stand-ins, in plain torch, for the Transformer Engine modules that megatron-core's specs expect."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["DuplicatedLinear", "Norm", "hadamard_transform", "rotate_activation"]


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as ``config.normalization`` says.

    Megatron's own ``WrappedTorchNorm`` refuses sequence parallelism; this one marks its parameters as
    Transformer Engine's norm does, so that megatron sums their gradients over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization != "RMSNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds in full: ``TELinear(parallel_mode="duplicated")``.

    Megatron's ``ColumnParallelLinear`` is no substitute for it as MLA's down projection: with more than one
    tensor-parallel rank the gradient of the shared rotary key comes out up to 0.7 % off.

    Returns ``(output, bias)`` as megatron's linear layers do; ``bias`` is None unless ``skip_bias_add``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool = False,
        skip_bias_add: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.skip_bias_add:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Replicated over the tensor-parallel group, as Transformer Engine's."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, None, sharded_offsets)


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Walsh-Hadamard transform over the last dimension, with ``fast_hadamard_transform``'s contract.

    Args:
        x: any shape ``[..., n]``; ``n`` is zero-padded to a power of two and the result cut back to ``n``.
        scale: factor on the result.

    Returns:
        Same shape and dtype as ``x``; sums are taken in fp32 or wider.
    """
    n = x.shape[-1]
    padded = 1 << (n - 1).bit_length()
    y = F.pad(x, (0, padded - n)).to(torch.promote_types(x.dtype, torch.float32))
    half = 1
    while half < padded:
        pairs = y.reshape(*x.shape[:-1], padded // (2 * half), 2, half)
        low, high = pairs.unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2)
        half *= 2
    return (y.reshape(*x.shape[:-1], padded) * scale)[..., :n].to(x.dtype)


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """Megatron's orthonormal Hadamard rotation of the DSA index, for fp32 too: ``[..., n]`` to the same."""
    return hadamard_transform(x, scale=x.shape[-1] ** -0.5)
