"""Every registered patch, through every order of import, apply, apply, revert, revert.

The orders are the paths of a tree. Each step of a path is made in a process forked from the one before, so the process
at the end of a path has exactly that history and no two paths share one, while what they have in common is done once.
`status()` is read after each step, which must change nothing: that puts it into every place of every order.

The patches for one release go through its tree together, as an import of megatron is the most of a step; every one of
them is checked after every step. By itself each patch goes through one order from before and one from after the import;
`make test-thorough` takes it through all.
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
from collections.abc import Mapping
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

WALKED = ("0.18.2", "0.19.2")
"""The releases that are the newest one for some patch."""

PATCHES = {
    entry.id: entry.patch for entry in Registry.discover("mcore_patches.patches").entries.values() if entry.patch
}


def needed(patch_id: str) -> list[str]:
    """The patch and, first, those that it needs."""
    ids = [i for other in PATCHES[patch_id].needs_patches for i in needed(other)]
    return [*dict.fromkeys(ids), patch_id]


@functools.cache
def patches_of(release: str) -> list[str]:
    """Ids of the patches for which this is the newest release on which apply_patches() would put them on."""
    numbers = tuple(map(int, release.split(".")))
    newer = releases.RELEASES[releases.RELEASES.index(release) + 1 :]
    taken = {patch_id for other in newer for patch_id in patches_of(other)}
    left = [i for i, patch in PATCHES.items() if numbers in patch.releases and i not in taken]
    return call(f"{__name__}:applicable", {"patch_ids": left, "release": release}) if left else []


def applicable(patch_ids: list[str], release: str) -> list[str]:
    sys.path.insert(0, str(releases.path(release)))
    reports = {i: mcore_patches.apply_patches(needed(i), dry_run=True)[i] for i in patch_ids}
    return [i for i, row in reports.items() if row.decision in (State.APPLIED, State.PENDING)]


class Walk:
    """What is true of the process after the steps so far, and whether it is, of some patches that go together."""

    def __init__(self, patch_ids: list[str]) -> None:
        self.ids = list(dict.fromkeys(i for patch_id in patch_ids for i in needed(patch_id)))
        self.patches = [Walked(patch_id) for patch_id in patch_ids]
        self.imported = self.wanted = False
        self.steps: list[str] = []

    def do(self, operation: str) -> None:
        self.steps.append(operation)
        again = self.wanted
        report: Mapping[str, Any] = {}
        if operation == "import_":
            self._import()
        elif operation == "apply":
            report = mcore_patches.apply_patches(self.ids, strict=True)
            self.wanted = True
        else:
            report = mcore_patches.revert(self.ids)
            self.wanted = False
        for patch in self.patches:
            if operation == "apply":
                expected = patch.on(self.imported, State.ALREADY_APPLIED if again else State.APPLIED)
            else:
                expected = State.NOT_APPLIED
            if report:
                row = report[patch.id]
                assert row.state is expected, f"{patch.id}: {row.reason}"
            patch.check(self.imported, self.wanted)
        report = mcore_patches.status()
        for patch in self.patches:
            patch.check(self.imported, self.wanted)
            row = report[patch.id]
            would = patch.on(self.imported, State.APPLIED)
            if self.wanted:
                assert row.state is would, f"{patch.id}: {row.reason}"
            else:
                assert (row.state, row.decision) == (State.NOT_APPLIED, would), f"{patch.id}: {row.reason}"

    def _import(self) -> None:
        names = {site.module_name for patch in self.patches for site in patch.sites}
        assert not names & set(sys.modules), "the order starts before the import"
        for patch in self.patches:
            patch.import_()
        self.imported = True


class Walked:
    """One patch of a walk: its targets, and what they were before."""

    def __init__(self, patch_id: str) -> None:
        self.id = patch_id
        self.sites: list[Any] = [site_of(t) for t in PATCHES[patch_id].targets]
        # A provided module is in place before anybody imports it.
        self.waits = not all(isinstance(site, ProvidedSite) for site in self.sites)
        self.originals: dict[Any, Any] = {}

    def on(self, imported: bool, done: State) -> State:
        """The state of the patch when it is wanted: `done`, unless it waits for the import."""
        return done if imported or not self.waits else State.PENDING

    def import_(self) -> None:
        for i, site in enumerate(self.sites):
            assert site.module_name is not None
            module = importlib.import_module(site.module_name)
            if "." not in site.target.qualname:
                # As a module of megatron's that does `from ... import f as alias`, and one of somebody else's.
                for name in self._aliases(i):
                    sys.modules[name] = types.ModuleType(name)
                    vars(sys.modules[name])["alias"] = vars(module)[site.target.qualname]

    def _aliases(self, i: int) -> tuple[str, str]:
        return f"megatron.alias_{self.id}_{i}", f"elsewhere_{self.id}_{i}"

    def check(self, imported: bool, wanted: bool) -> None:
        for i, site in enumerate(self.sites):
            if isinstance(site, ProvidedSite):
                self._check_provided(i, site, imported, wanted)
                continue
            if not imported:
                assert site.module is None
                continue
            stack = site.stack
            assert (stack is not None and self.id in stack.ids) == wanted
            if isinstance(site.target, FieldsTarget):
                self._check_fields(site, wanted)
                continue
            original = site.original
            assert self.originals.setdefault(i, original) is original, "upstream's own object, the same for ever"
            assert site.foreign() is None
            if not wanted:
                assert site.current is original or (stack is not None and stack.ids), "another patch may lie on it"
            else:
                assert stack is not None
                assert stack_on(site.current) is stack
                assert site.current.__qualname__ == site.target.qualname
            for name in self._aliases(i):
                if name in sys.modules:
                    alias = vars(sys.modules[name])["alias"]
                    # Outside megatron a name keeps upstream's object, if that is what was imported.
                    outside = name.startswith("elsewhere") and alias is original
                    assert outside or alias is site.current, name

    def _check_provided(self, i: int, site: ProvidedSite, imported: bool, wanted: bool) -> None:
        assert (site.stack is not None and self.id in site.stack.ids) == wanted
        if not imported:
            assert site.module_name not in sys.modules
            return
        live = vars(importlib.import_module(site.module_name))
        for name in site.target.names:
            from_us = live[name].__module__.startswith("mcore_patches.")
            assert from_us == wanted, name
            if not from_us:
                assert self.originals.setdefault((i, name), live[name]) is live[name], "upstream's own object"
        for alias in self._aliases(i):
            # Outside megatron a name keeps what was imported.
            assert alias.startswith("elsewhere") or vars(sys.modules[alias])["alias"] is live[site.target.qualname]

    def _check_fields(self, site: Site, wanted: bool) -> None:
        assert isinstance(site.target, FieldsTarget)
        cls = site.current
        names = {f.name for f in site.target.fields}
        assert names.issubset(f.name for f in fields.added(cls)) == wanted
        for each in (cls, *fields.subclasses(cls)):
            assert names.issubset(each.__dataclass_fields__) == wanted


def walk_all_orders(patch_ids: list[str]) -> tuple[list[list[str]], list[str]]:
    """In a process that has imported nothing of megatron: (orders walked to their end, failures)."""
    return _continue(start(patch_ids), OPERATIONS)


def start(patch_ids: list[str]) -> Walk:
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    gc.disable()  # a collection in each of a hundred forks would copy the memory of all
    # Its decorators parse upstream's kernels anew at every import, which takes longer than all the rest of megatron.
    sys.modules["tilelang"] = None  # type: ignore[assignment]
    for patch in PATCHES.values():
        for target in patch.targets:
            site_of(target)  # reads the text: what is found in it is remembered, for all forks
    return Walk(patch_ids)


def walk(patch_ids: list[str], operations: list[str]) -> None:
    walk = start(patch_ids)
    for operation in operations:
        try:
            walk.do(operation)
        except AssertionError as error:
            raise AssertionError(f"{walk.steps}") from error


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


@pytest.mark.parametrize("release", WALKED)
def test_every_order(release: str) -> None:
    go_through_every_order(patches_of(release), release)


@pytest.mark.thorough
@pytest.mark.parametrize("patch_id", PATCHES)
def test_every_order_of_a_patch_by_itself(patch_id: str) -> None:
    (release,) = (r for r in WALKED if patch_id in patches_of(r))
    go_through_every_order([patch_id], release)


def go_through_every_order(patch_ids: list[str], release: str) -> None:
    assert patch_ids
    done, failures = call(f"{__name__}:walk_all_orders", {"patch_ids": patch_ids}, f"before-{release}")
    assert not failures, "\n".join(failures)
    assert len({tuple(order) for order in done}) == ORDERS == len(done)


@pytest.mark.parametrize("first", ["import_", "apply"])
@pytest.mark.parametrize("patch_id", PATCHES)
def test_a_patch_by_itself(patch_id: str, first: str) -> None:
    (release,) = (r for r in WALKED if patch_id in patches_of(r))
    operations = {"import_": ["import_", "apply", "revert"], "apply": ["apply", "import_", "revert"]}[first]
    call(f"{__name__}:walk", {"patch_ids": [patch_id], "operations": operations}, f"before-{release}")


def test_every_registered_patch_is_covered() -> None:
    """Whatever the registry finds in the package of patches is a case of the tests above, also in future."""
    registered = {entry.id for entry in Registry.discover("mcore_patches.patches").entries.values() if entry.builtin}
    assert registered
    walked = [patch_id for release in WALKED for patch_id in patches_of(release)]
    assert len(walked) == len(set(walked))
    assert set(walked) == set(PATCHES) >= registered, "those that are missing would be applied on no release"


def test_a_patch_that_is_left_behind_would_be_found() -> None:
    """The checks of Walk are able to fail: a revert that does nothing is noticed."""
    arguments = {"patch_ids": patches_of("0.19.2")[:1]}
    with pytest.raises(AssertionError, match=r"revert[\s\S]*AssertionError"):
        call(f"{__name__}:walk_with_a_revert_that_does_nothing", arguments, "before-0.19.2")


def walk_with_a_revert_that_does_nothing(patch_ids: list[str]) -> None:
    from mcore_patches.overlay.engine import Engine

    Engine._take_off = lambda *_: None  # type: ignore[method-assign]
    walk(patch_ids, ["apply", "import_", "revert"])
