"""Megatron's sharded checkpoints on a CPU: saved in one parallel layout, loaded in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(model: torch.nn.Module | Sequence[torch.nn.Module], folder: Path | str) -> None:
    """Save the parameters of this rank's model or pipeline chunks with ``dist_checkpointing``. A collective.

    Args:
        model: wrapped or not.
        folder: shared by all ranks; made when missing.
    """
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(_chunks(model)), str(folder))


def load_checkpoint(model: torch.nn.Module | Sequence[torch.nn.Module], folder: Path | str) -> None:
    """Load what :func:`save_checkpoint` saved, whatever the layout then. A collective.

    Raises:
        Whatever megatron raises for a parameter that the checkpoint lacks or holds in another shape.
    """
    chunks = _chunks(model)
    state = dist_checkpointing.load(_sharded_state(chunks), str(folder))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{index}"])


def _chunks(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[Any]:
    return [unwrap_model(chunk) for chunk in ([model] if isinstance(model, torch.nn.Module) else model)]


def _sharded_state(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}
