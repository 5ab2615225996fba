"""Peak memory of a DSA layer's forward and backward pass on a CPU, by the number of tokens.

    PYTHONPATH=.releases/0.18.2 python -m tests.attention.dsa_memory 32768 65536     # about 10 minutes

Prints a line a length: tokens, MiB at the peak beyond what was there before, bytes a token.
"""

from __future__ import annotations

import sys

import torch

import mcore_patches
from mcore_patches.cpu import parallel
from tests.attention.dsa_tiny import SPARSE, dsa_config, dsa_spec
from tests.ops.memory import peak_extra_bytes

HEADS = 4
"""Of the attention."""


def peaks(lengths: list[int], **fields: object) -> dict[int, int]:
    """Peak bytes by tokens of one packed document, of a layer with 4 heads and 4 index heads of 16, 64 keys a query."""
    from megatron.core.transformer.spec_utils import build_module

    from mcore_patches.cpu.data import packed_batch
    from mcore_patches.cpu.parameters import seed_parameters

    found = {}
    with parallel.model_parallel(), mcore_patches.applied("dsa_parallel", strict=True):
        config = dsa_config({"num_layers": 1, "dsa_indexer_topk": 64, **SPARSE, **fields})
        layer = build_module(dsa_spec(config), config=config, layer_number=1)
        seed_parameters(layer)

        def step(tokens: int) -> None:
            packed = packed_batch([tokens]).packed
            hidden = torch.randn(tokens, 1, config.hidden_size, requires_grad=True)
            layer(hidden, None, packed_seq_params=packed)[0].sum().backward()
            layer.zero_grad()

        step(lengths[0])
        for tokens in lengths:
            found[tokens] = peak_extra_bytes(lambda: step(tokens))  # noqa: B023
    return found


def main(arguments: list[str]) -> int:
    for tokens, peak in peaks([int(argument) for argument in arguments]).items():
        print(f"{tokens} tokens: {peak / 2**20:.1f} MiB, {peak / tokens:.0f} bytes a token", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
