"""Every registered patch, through every order of import, apply, apply, revert, revert.

The orders are the paths of a tree. Each step of a path is made in a process forked from the one before, so the process
at the end of a path has exactly that history and no two paths share one, while what they have in common is done once.
`status()` is read after each step, which must change nothing: that puts it into every place of every order.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import sys
import traceback
import types
from collections import Counter
from typing import Any

import pytest

import mcore_patches
from mcore_patches.overlay import fields
from mcore_patches.overlay.layers import stack_on
from mcore_patches.overlay.patch import FieldsTarget, State
from mcore_patches.overlay.provided_sites import ProvidedSite, site_of
from mcore_patches.overlay.registry import Registry
from mcore_patches.overlay.sites import Site
from tests import releases
from tests.overlay.isolation import call

OPERATIONS = Counter(import_=1, apply=2, revert=2)
ORDERS = 30
"""5! / 2! / 2!: how many orders there are, status() aside."""

PATCHES = {
    entry.id: entry.patch for entry in Registry.discover("mcore_patches.patches").entries.values() if entry.patch
}


def needed(patch_id: str) -> list[str]:
    """The patch and, first, those that it needs."""
    ids = [i for other in PATCHES[patch_id].needs_patches for i in needed(other)]
    return [*dict.fromkeys(ids), patch_id]


@functools.cache
def release_for(patch_id: str) -> str:
    """The newest release on which apply_patches() would put the patch on."""
    for release in reversed(releases.RELEASES):
        numbers = tuple(map(int, release.split(".")))
        arguments = {"patch_id": patch_id, "release": release}
        if numbers in PATCHES[patch_id].releases and call(f"{__name__}:would_apply", arguments):
            return release
    pytest.fail(f"{patch_id} would be applied on none of {', '.join(releases.RELEASES)}")


def would_apply(patch_id: str, release: str) -> bool:
    sys.path.insert(0, str(releases.path(release)))
    row = mcore_patches.apply_patches(needed(patch_id), dry_run=True)[patch_id]
    return row.decision in (State.APPLIED, State.PENDING)


class Walk:
    """What is true of the process after the steps so far, and whether it is."""

    def __init__(self, patch_id: str) -> None:
        self.patch_id = patch_id
        self.sites: list[Any] = [site_of(t) for t in PATCHES[patch_id].targets]
        # A provided module is in place before anybody imports it.
        self.waits = not all(isinstance(site, ProvidedSite) for site in self.sites)
        self.imported = self.wanted = False
        self.originals: dict[Any, Any] = {}
        self.steps: list[str] = []

    def do(self, operation: str) -> None:
        self.steps.append(operation)
        if operation == "import_":
            self._import()
        elif operation == "apply":
            again = self.wanted
            row = mcore_patches.apply_patches(needed(self.patch_id), strict=True)[self.patch_id]
            self.wanted = True
            done = State.ALREADY_APPLIED if again else State.APPLIED
            assert row.state is (done if self.imported or not self.waits else State.PENDING), row.reason
        else:
            row = mcore_patches.revert(needed(self.patch_id))[self.patch_id]
            self.wanted = False
            assert row.state is State.NOT_APPLIED, row.reason
        self.check()
        row = mcore_patches.status()[self.patch_id]
        self.check()
        would = State.APPLIED if self.imported or not self.waits else State.PENDING
        if self.wanted:
            assert row.state is would, row.reason
        else:
            assert (row.state, row.decision) == (State.NOT_APPLIED, would), row.reason

    def _import(self) -> None:
        assert not any(site.module_name in sys.modules for site in self.sites), "the order starts before the import"
        for i, site in enumerate(self.sites):
            assert site.module_name is not None
            module = importlib.import_module(site.module_name)
            if "." not in site.target.qualname:
                # As a module of megatron's that does `from ... import f as alias`, and one of somebody else's.
                for name in (f"megatron.alias_{i}", f"elsewhere_{i}"):
                    sys.modules[name] = types.ModuleType(name)
                    vars(sys.modules[name])["alias"] = vars(module)[site.target.qualname]
        self.imported = True

    def check(self) -> None:
        for i, site in enumerate(self.sites):
            if isinstance(site, ProvidedSite):
                self._check_provided(i, site)
                continue
            if not self.imported:
                assert site.module is None
                continue
            stack = site.stack
            assert (stack is not None and self.patch_id in stack.ids) == self.wanted
            if isinstance(site.target, FieldsTarget):
                self._check_fields(site)
                continue
            original = site.original
            assert self.originals.setdefault(i, original) is original, "upstream's own object, the same for ever"
            assert site.foreign() is None
            if not self.wanted:
                assert site.current is original or (stack is not None and stack.ids), "another patch may lie on it"
            else:
                assert stack is not None
                assert stack_on(site.current) is stack
                assert site.current.__qualname__ == site.target.qualname
            for name in (f"megatron.alias_{i}", f"elsewhere_{i}"):
                if name in sys.modules:
                    alias = vars(sys.modules[name])["alias"]
                    # Outside megatron a name keeps upstream's object, if that is what was imported.
                    outside = name.startswith("elsewhere") and alias is original
                    assert outside or alias is site.current, name

    def _check_provided(self, i: int, site: ProvidedSite) -> None:
        assert (site.stack is not None and self.patch_id in site.stack.ids) == self.wanted
        if not self.imported:
            assert site.module_name not in sys.modules
            return
        live = vars(importlib.import_module(site.module_name))
        for name in site.target.names:
            from_us = live[name].__module__.startswith("mcore_patches.")
            assert from_us == self.wanted, name
            if not from_us:
                assert self.originals.setdefault((i, name), live[name]) is live[name], "upstream's own object"
        for alias in (f"megatron.alias_{i}", f"elsewhere_{i}"):
            # Outside megatron a name keeps what was imported.
            assert alias.startswith("elsewhere") or vars(sys.modules[alias])["alias"] is live[site.target.qualname]

    def _check_fields(self, site: Site) -> None:
        assert isinstance(site.target, FieldsTarget)
        cls = site.current
        names = {f.name for f in site.target.fields}
        assert names.issubset(f.name for f in fields.added(cls)) == self.wanted
        for each in (cls, *fields.subclasses(cls)):
            assert names.issubset(each.__dataclass_fields__) == self.wanted


def walk_all_orders(patch_id: str) -> tuple[list[list[str]], list[str]]:
    """In a process that has imported nothing of megatron: (orders walked to their end, failures)."""
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    gc.disable()  # a collection in each of a hundred forks would copy the memory of all
    return _continue(Walk(patch_id), OPERATIONS)


def _continue(walk: Walk, left: Counter) -> tuple[list[list[str]], list[str]]:
    if not left:
        return [walk.steps], []
    done: list[list[str]] = []
    failures: list[str] = []
    for operation in left:
        orders, failed = _in_a_fork(walk, operation, left - Counter([operation]))
        done += orders
        failures += failed
    return done, failures


def _in_a_fork(walk: Walk, operation: str, left: Counter) -> tuple[list[list[str]], list[str]]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            walk.do(operation)
            answer = _continue(walk, left)
        except BaseException:
            answer = [], [f"{' '.join(walk.steps)}\n{traceback.format_exc()}"]
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data) if data else ([], [f"{' '.join([*walk.steps, operation])}: the process died"])


@pytest.mark.parametrize("patch_id", PATCHES)
def test_every_order(patch_id: str) -> None:
    release = release_for(patch_id)
    done, failures = call(f"{__name__}:walk_all_orders", {"patch_id": patch_id}, f"before-{release}")
    assert not failures, "\n".join(failures)
    assert len({tuple(order) for order in done}) == ORDERS == len(done)


def test_every_registered_patch_is_covered(request: pytest.FixtureRequest) -> None:
    """Whatever the registry finds in the package of patches is a case of the test above, also in future."""
    registered = {entry.id for entry in Registry.discover("mcore_patches.patches").entries.values() if entry.builtin}
    assert registered
    assert set(PATCHES) >= registered
    (mark,) = test_every_order.pytestmark
    assert set(mark.args[1]) >= registered


def test_a_patch_that_is_left_behind_would_be_found() -> None:
    """The checks of Walk are able to fail: a revert that does nothing is noticed."""
    with pytest.raises(AssertionError, match=r"revert[\s\S]*AssertionError"):
        call(f"{__name__}:walk_with_a_revert_that_does_nothing", {"patch_id": next(iter(PATCHES))}, "before-0.19.2")


def walk_with_a_revert_that_does_nothing(patch_id: str) -> None:
    from mcore_patches.overlay.engine import Engine

    Engine._take_off = lambda *_: None  # type: ignore[method-assign]
    walk = Walk(patch_id)
    for operation in ("apply", "import_", "revert"):
        try:
            walk.do(operation)
        except AssertionError as error:
            raise AssertionError(f"{walk.steps}") from error
