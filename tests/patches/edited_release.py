"""A copy of an unpacked release with edited texts, and what a patch becomes there."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
from pathlib import Path

import mcore_patches
from mcore_patches.overlay.patch import State
from mcore_patches.overlay.registry import Registry
from tests import releases
from tests.overlay.isolation import call


def state_in(folder: Path, patch_id: str, edits: list[tuple[str, str, str]], release: str = "0.19.2") -> State:
    """State, after an apply, of a patch on the release with `edits` made (module, old text, new text).

    Checks, in a process of its own, that an error or UPSTREAM_FIXED is logged and leaves megatron's objects alone.
    """
    # Files are shared with the original until they are replaced.
    shutil.copytree(
        releases.path(release) / "megatron",
        folder / "megatron",
        copy_function=os.link,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for module, old, new in edits:
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        text = path.read_text()
        assert text.count(old) == 1, f"{text.count(old)} times in {module}: {old}"
        path.unlink()
        path.write_text(text.replace(old, new))
    arguments = {"folder": str(folder), "patch_id": patch_id}
    return call(f"{__name__}:applied_in", arguments, f"before-{release}")


def applied_in(folder: str, patch_id: str) -> State:
    sys.path.insert(0, folder)
    levels: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: levels.append(record.levelname)  # type: ignore[method-assign]
    logging.getLogger("mcore_patches").addHandler(handler)
    patch = Registry.discover("mcore_patches.patches").entries[patch_id].patch
    assert patch is not None
    for target in patch.targets:
        assert importlib.import_module(target.modules[0]).__file__.startswith(folder)
    row = mcore_patches.apply_patches(patch_id)[patch_id]
    in_place = row.state is State.APPLIED
    for target in patch.targets:
        holder = sys.modules[target.modules[0]]
        for name in target.qualname.split("."):
            holder = vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)
        assert hasattr(getattr(holder, "__func__", holder), "__mcore_patches__") == in_place, target.qualname
    assert ("WARNING" in levels) == (row.state is State.UPSTREAM_FIXED)
    assert ("ERROR" in levels) == (row.state is State.DRIFTED)
    return row.state
