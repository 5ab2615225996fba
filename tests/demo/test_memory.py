"""The memory meter against allocations of known size, and attention's share taken from its readings."""

import pytest
import torch

from mcore_patches.demo.memory import Reading, measured

MIB = 2**20
SLACK = 4096


def mib(n: float) -> torch.Tensor:
    return torch.zeros(int(n * MIB), dtype=torch.uint8)


def test_live_and_peak():
    with measured(torch.device("cpu")) as meter:
        meter.mark("begin")
        kept = mib(1)
        temporary = mib(3)
        del temporary
        meter.mark("after a temporary")
        meter.mark("nothing in between")
        del kept
        meter.mark("all freed")
    begin, temporary_freed, idle, freed = meter.readings()
    assert [r.label for r in (begin, temporary_freed, idle, freed)] == [
        "begin", "after a temporary", "nothing in between", "all freed",
    ]  # fmt: skip
    assert temporary_freed.live - begin.live == pytest.approx(1 * MIB, abs=SLACK)
    assert temporary_freed.peak - begin.live == pytest.approx(4 * MIB, abs=SLACK)
    assert idle.peak - begin.live == pytest.approx(1 * MIB, abs=SLACK)
    assert freed.live - begin.live == pytest.approx(0, abs=SLACK)
    assert freed.peak - begin.live == pytest.approx(1 * MIB, abs=SLACK)


def test_temporaries_inside_an_operator_and_in_backward_are_seen():
    x = torch.randn(512, 512, requires_grad=True)
    with measured(torch.device("cpu")) as meter:
        meter.mark("begin")
        y = x.exp()  # 1 MiB, saved for backward too
        meter.mark("forward")
        y.sum().backward()  # gradient of y is expanded, that of x 1 MiB
        meter.mark("backward")
    begin, forward, backward = meter.readings()
    assert forward.peak - begin.live == pytest.approx(1 * MIB, abs=SLACK)
    assert backward.peak - begin.live == pytest.approx(2 * MIB, abs=SLACK)


def test_peak_of_attention_counts_what_forward_kept():
    from mcore_patches.demo.sparse_mla_nope.attention import peak_bytes

    readings = [
        # Two layers: forward peaks at 50 and keeps 10, backward needs 70 beside that; the other stays below.
        Reading("0:forward begins", 100, 999),
        Reading("0:forward ends", 110, 150),
        Reading("1:forward begins", 200, 300),
        Reading("1:forward ends", 205, 290),
        Reading("1:backward begins", 250, 400),
        Reading("1:backward ends", 240, 270),
        Reading("0:backward begins", 500, 600),
        Reading("something in between", 560, 570),
        Reading("0:backward ends", 480, 565),
    ]
    assert peak_bytes(readings) == [10 + 70, 90]
