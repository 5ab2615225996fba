"""The progress of a demo on a terminal, in a file, and beside JSON."""

import io

import pytest

from mcore_patches.demo.progress import Progress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def train(progress: Progress, steps: int = 10) -> None:
    progress.say("begins")
    progress.begin("training", steps)
    for step in range(steps):
        progress.step(f"loss {step}")


def test_lines_in_a_file(monkeypatch):
    out = Stream(terminal=False)
    monkeypatch.setattr("sys.stdout", out)
    train(Progress())
    assert out.getvalue().splitlines() == [
        "begins",
        "training   3/10  loss 2  0 s",
        "training   6/10  loss 5  0 s",
        "training   9/10  loss 8  0 s",
        "training  10/10  loss 9  0 s",
    ]


@pytest.mark.parametrize("steps", [1, 2, 7, 101])
def test_the_last_step_always_has_a_line(steps, monkeypatch):
    out = Stream(terminal=False)
    monkeypatch.setattr("sys.stdout", out)
    train(Progress(), steps)
    assert f" {steps}/{steps}  loss {steps - 1}" in out.getvalue().splitlines()[-1]
    assert len(out.getvalue().splitlines()) <= 6


def test_bar_on_a_terminal(monkeypatch):
    out = Stream(terminal=True)
    monkeypatch.setattr("sys.stdout", out)
    train(Progress(), 3)
    text = out.getvalue()
    bars = text.split("\r")[1:]
    assert len(bars) == 3
    assert "[##########--------------------] 1/3  loss 0" in bars[0]
    assert "[##############################] 3/3  loss 2" in bars[2]
    assert text.count("\n") == 2  # after what was said, and after the finished bar


def test_beside_json(monkeypatch):
    out, err = Stream(terminal=True), Stream(terminal=True)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    train(Progress(as_json=True))
    assert out.getvalue() == ""
    assert "10/10" in err.getvalue()


def test_beside_json_in_a_file(monkeypatch):
    out, err = Stream(terminal=False), Stream(terminal=False)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    train(Progress(as_json=True))
    assert out.getvalue() == err.getvalue() == ""
