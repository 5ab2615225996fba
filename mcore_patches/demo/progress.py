"""Progress of a demo: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR = 30
PLAIN_LINES = 4


class Progress:
    """Writes to stdout; with `as_json`, which keeps stdout for the result, to stderr, and there only on a terminal."""

    def __init__(self, as_json: bool = False) -> None:
        self._stream: TextIO = sys.stderr if as_json else sys.stdout
        self._terminal = self._stream.isatty()
        self._silent = as_json and not self._terminal
        self._label, self._total, self._done = "", 0, 0
        self._start = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(f"{text}\n")

    def begin(self, label: str, total: int) -> None:
        """Start counting to `total` steps of something."""
        self._label, self._total, self._done = label, total, 0
        self._start = time.perf_counter()

    def step(self, note: str = "") -> None:
        """One more is done; `note` says how it stands."""
        self._done += 1
        finished = self._done == self._total
        elapsed = f"{time.perf_counter() - self._start:.0f} s"
        count = f"{self._done:{len(str(self._total))}d}/{self._total}"
        if self._terminal:
            full = BAR * self._done // self._total
            bar = "#" * full + "-" * (BAR - full)
            # \x1b[K clears what a longer line left behind.
            self._write(f"\r{self._label} [{bar}] {count}  {note}  {elapsed}\x1b[K" + ("\n" if finished else ""))
        elif finished or self._done % -(-self._total // PLAIN_LINES) == 0:
            self._write(f"{self._label}  {count}  {note}  {elapsed}\n")

    def _write(self, text: str) -> None:
        if not self._silent:
            self._stream.write(text)
            self._stream.flush()
