"""Counts of fused and declined calls."""

from __future__ import annotations

import logging

import pytest

from mcore_patches.overlay.counters import Counters, human_bytes
from mcore_patches.overlay.errors import DeclinedError


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (128 << 30, "128.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_bytes_for_people(n, text):
    assert human_bytes(n) == text


def decline(counters, reason="float16", shape_class="small", size=1 << 30):
    counters.decline(reason, shape_class=shape_class, fallback="a dense softmax", fallback_bytes=size)


def test_calls_are_hits_and_declines(monkeypatch):
    monkeypatch.delenv("MCORE_PATCHES_ON_DECLINE", raising=False)
    counters = Counters("tenfold")
    counters.hit("kernel")
    counters.hit("padded")
    counters.hit("padded")
    decline(counters)
    decline(counters, size=1 << 20)
    decline(counters, "rows")
    assert counters.as_dict() == {
        "calls": 6,
        "hits": 3,
        "routes": {"kernel": 1, "padded": 2},
        "declines": {"float16": 2, "rows": 1},
        "largest_fallback_bytes": 1 << 30,
    }


def test_one_warning_for_a_reason_and_class(caplog, monkeypatch):
    monkeypatch.delenv("MCORE_PATCHES_ON_DECLINE", raising=False)
    counters = Counters("tenfold")
    with caplog.at_level(logging.WARNING, logger="mcore_patches"):
        for reason, shape_class in [("a", "x"), ("a", "x"), ("a", "y"), ("b", "x"), ("a", "y")]:
            decline(counters, reason, shape_class)
    assert [r.getMessage() for r in caplog.records] == [
        f"tenfold: fused call declined: {reason} ({shape_class}); a dense softmax runs instead and allocates 1.0 GiB"
        for reason, shape_class in [("a", "x"), ("a", "y"), ("b", "x")]
    ]


def test_raise_counts_and_raises_each_time(monkeypatch, caplog):
    monkeypatch.setenv("MCORE_PATCHES_ON_DECLINE", "raise")
    counters = Counters("tenfold")
    for n in (1, 2):
        with pytest.raises(DeclinedError, match=r"tenfold: .*allocates 1\.0 GiB; MCORE_PATCHES_ON_DECLINE=raise"):
            decline(counters)
        assert counters.as_dict()["declines"] == {"float16": n}
        assert counters.as_dict()["largest_fallback_bytes"] == 0, "nothing fell back"
    assert not caplog.records


def test_a_fallback_of_unknown_size(monkeypatch, caplog):
    monkeypatch.delenv("MCORE_PATCHES_ON_DECLINE", raising=False)
    counters = Counters("tenfold")
    with caplog.at_level(logging.WARNING, logger="mcore_patches"):
        decline(counters, size=None)
    assert caplog.messages == ["tenfold: fused call declined: float16 (small); a dense softmax runs instead"]
    assert counters.as_dict()["largest_fallback_bytes"] == 0
