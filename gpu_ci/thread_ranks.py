"""Threads as tensor-parallel ranks on one GPU: their kernels follow each other in one stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops import row_split


def run_ranks(size: int, work: Callable[[dist.ProcessGroup], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `work` returns on each of `size` ranks; the collectives of `row_split` meet, others would fail."""
    contributions: list[Any] = [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    meeting = threading.Barrier(size, timeout=120)

    def meet(x: Tensor, group: dist.ProcessGroup, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        contributions[group.rank()] = x
        meeting.wait()
        result = combine(contributions)
        meeting.wait()
        return result

    def reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        out.copy_(meet(x, group, sum).chunk(size)[group.rank()])

    def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        out.copy_(meet(x, group, torch.cat))

    def all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
        x.copy_(meet(x, group, sum))

    monkeypatch.setattr(row_split, "_reduce_scatter", reduce_scatter)
    monkeypatch.setattr(row_split, "_all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def rank(number: int) -> None:
        try:
            results[number] = work(dist.ProcessGroup(number, size))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
