"""Adam on fp32 copies of parameters, for a CPU: megatron's own mixed-precision optimizer runs on CUDA only."""

from __future__ import annotations

from typing import Any

import torch


class MasterWeightAdam:
    """What `schedule_step` asks of an optimizer. Takes `main_grad`, as megatron's does."""

    def __init__(self, chunks: list[Any], lr: float) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._adam = torch.optim.AdamW(self._masters, lr=lr, betas=(0.9, 0.999), weight_decay=0.0)

    def zero_grad(self) -> None:
        """DDP zeroes its buffers."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters):
            master.grad = parameter.main_grad.float()
        self._adam.step()
        for parameter, master in zip(self._parameters, self._masters):
            parameter.copy_(master)
