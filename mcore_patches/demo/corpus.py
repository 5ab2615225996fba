"""The text that the demos learn, byte by byte: American state papers in the public domain, plain ASCII."""

from __future__ import annotations

from importlib import resources

import torch

from mcore_patches.cpu.data import Batch

VOCABULARY = 128
HELD_OUT_BYTES = 3000


def tokens(*, held_out: bool = False) -> torch.Tensor:
    """The bytes of the text, int64: all but its last 3000, or with `held_out` those."""
    text = resources.files(__package__).joinpath("corpus.txt").read_bytes()
    text = text[-HELD_OUT_BYTES:] if held_out else text[:-HELD_OUT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: torch.Tensor, sequences: int, length: int, *, seed: int, device: torch.device) -> Batch:
    """Passages of `length` bytes from random places of `text`, each byte labelled with its successor."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (sequences, 1), generator=generator)
    passages = text[starts + torch.arange(length + 1)].to(device)
    return Batch(
        tokens=passages[:, :-1].contiguous(),
        labels=passages[:, 1:].contiguous(),
        positions=torch.arange(length, device=device).expand(sequences, length).contiguous(),
        loss_mask=torch.ones(sequences, length, device=device),
    )
