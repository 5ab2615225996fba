"""Routes beside the dense teacher's top blocks, against loops over every query."""

import pytest
import torch

from mcore_patches.demo.qsa.routing import routing


@pytest.mark.parametrize(("sequences", "length", "ratio", "blocks"), [(1, 24, 4, 2), (3, 30, 3, 4), (2, 16, 2, 8)])
def test_against_loops(sequences, length, ratio, blocks):
    generator = torch.Generator().manual_seed(length)
    heads, kv_heads, channels = 4, 2, 8
    query = torch.randn(sequences * length, heads, channels, generator=generator)
    key = torch.randn(sequences * length, kv_heads, channels, generator=generator)
    ids = torch.full((sequences * length, blocks), -1, dtype=torch.int32)
    for row in range(sequences * length):
        complete = (row % length + 1) // ratio
        chosen = torch.randperm(complete, generator=generator)[:blocks].sort().values
        ids[row, : len(chosen)] = chosen.int()
    found = routing(query, key, ids, sequences, 0.3, ratio)

    hits = rated = 0
    chances = []
    for sequence in range(sequences):
        for position in range(length):
            row, start = sequence * length + position, sequence * length
            mass = torch.zeros(position + 1)
            for head in range(heads):
                keys = key[start : row + 1, head // (heads // kv_heads)]
                mass += torch.softmax(0.3 * keys @ query[row, head], dim=0)
            complete = (position + 1) // ratio
            by_block = [float(mass[b * ratio : (b + 1) * ratio].max()) for b in range(complete)]
            top = set(sorted(range(complete), key=lambda b: -by_block[b])[:blocks])
            selected = {int(b) for b in ids[row] if b >= 0}
            assert set(found.top[sequence, position].nonzero().flatten().tolist()) == top
            assert set(found.selected[sequence, position].nonzero().flatten().tolist()) == selected
            assert bool(found.free[sequence, position]) == (complete > blocks)
            if complete > blocks:
                hits += len(top & selected)
                rated += len(top)
                chances.append(blocks / complete)
    if rated:
        assert found.overlap == pytest.approx(hits / rated)
        assert found.chance == pytest.approx(sum(chances) / len(chances))
