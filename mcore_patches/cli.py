"""The command mcore-patches. Exit status: 0 fine, 1 an error state, 2 bad input, or no way to write."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import mcore_patches
from mcore_patches.overlay.errors import OverlayError, printable
from mcore_patches.overlay.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    if sys.stdout is None:
        return _complain("stdout is closed")
    status = 0
    try:
        status = _run(argv)
        sys.stdout.flush()
    except OverlayError as exc:
        return _complain(str(exc))
    except BrokenPipeError:
        _discard_output()  # whoever reads has gone (`| head`)
    except OSError as exc:
        _discard_output()
        return _complain(str(exc))
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(argv)
    except SystemExit as exc:  # argparse has printed help, the version or what is wrong
        return int(exc.code or 0)
    return int(options.run(options))


def _complain(text: str) -> int:
    print(f"mcore-patches: {printable(text)}", file=sys.stderr)
    return 2


def _discard_output() -> None:
    """The interpreter writes once more when it exits: what is left goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-patches",
        description="Runtime patches for pinned megatron-core releases.",
        epilog="exit status: 0 fine; 1 a patch or a check is in an error state; 2 bad input, or no way to write",
    )
    parser.add_argument("--version", action="version", version=f"mcore-patches {mcore_patches.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=run)
        return sub

    command("status", "say for each patch what apply_patches() would do on the installed release", _status)
    sub = command(
        "apply", "what apply_patches() would do; patches live in a process, so only --dry-run makes sense here", _apply
    )
    sub.add_argument("--dry-run", action="store_true", required=True, help="change nothing (required)")
    sub.add_argument("--force", action="append", default=[], metavar="ID", help="as apply_patches(force=...)")
    sub.add_argument("--exclude", action="append", default=[], metavar="ID", help="as apply_patches(exclude=...)")
    sub.add_argument("ids", nargs="*", metavar="ID", help="patches; all when none is named")
    command("doctor", "examine the environment", _doctor)
    sub = command(
        "fingerprint", "fingerprints of every target in a megatron-core wheel, without importing it", _fingerprint
    )
    sub.add_argument("wheel", metavar="WHEEL", help="path of a megatron_core-*.whl file")
    sub = command("demo", "train a tiny model on whatever device there is, without and with a patch", _demo)
    sub.add_argument("name", nargs="?", metavar="NAME", help="which demo; all of them when none is named")
    sub.add_argument("--out", default="demo-output", metavar="DIR", help="where the PNG goes; default %(default)s")
    sub.add_argument("--steps", type=int, default=None, metavar="N", help="training steps; each demo has its default")
    return parser


def _show(options: argparse.Namespace, report: Report) -> int:
    print(report.to_json() if options.json else report)
    return 1 if report.errors else 0


def _status(options: argparse.Namespace) -> int:
    return _show(options, mcore_patches.status())


def _apply(options: argparse.Namespace) -> int:
    report = mcore_patches.apply_patches(
        options.ids or None, exclude=options.exclude, strict=False, dry_run=True, force=options.force
    )
    return _show(options, report)


def _doctor(options: argparse.Namespace) -> int:
    diagnosis = mcore_patches.doctor()
    print(diagnosis.to_json() if options.json else diagnosis)
    return 0 if diagnosis.ok else 1


def _fingerprint(options: argparse.Namespace) -> int:
    from mcore_patches.overlay.wheels import wheel_fingerprints

    rows = wheel_fingerprints(options.wheel, mcore_patches._engine().registry)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print(printable(f"megatron-core {rows['version']}"))
        for row in rows["targets"]:
            text = f"{row['patch']}  {row['target']}  {row['verdict']}  {row['fingerprint'] or row['reason']}"
            print(printable(text))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from mcore_patches import demo

    return demo.run(options.name, out=options.out, steps=options.steps, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
