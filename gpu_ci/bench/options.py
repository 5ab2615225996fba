"""Types of command-line options that several benches and probes take; argparse names the option and the value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole_numbers(least: int) -> Callable[[str], list[int]]:
    """A list of them, each at least `least`."""

    def parse(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        if not values or min(values) < least:
            raise argparse.ArgumentTypeError(f"must be whole numbers of at least {least}, by commas, got {text!r}")
        return values

    return parse


def any_of(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A list of some of `names`, or none."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",") if text else []
        if unknown := set(chosen) - set(names):
            raise argparse.ArgumentTypeError(f"must be any of {', '.join(names)}, got {', '.join(sorted(unknown))}")
        return chosen

    return parse


def positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value
