"""Do for each patch what was decided, as a whole or not at all, and go on with it after imports.

What is switched off is not decided on. `decide.py` decides, `layers.py` changes the live objects, `outcomes.py` tells.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from mcore_patches.overlay import imports, layers, settings
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.decide import Decider, Decision, sites_of, what_it_lacks
from mcore_patches.overlay.errors import NotAppliedError, NotRevertedError, OverlayError, SettingsError, said, shown
from mcore_patches.overlay.layers import AnyChange, Change, Layer
from mcore_patches.overlay.outcomes import Outcome, Speaker, report_of, row_of
from mcore_patches.overlay.patch import IN_PLACE, Patch, State
from mcore_patches.overlay.provided_sites import site_of
from mcore_patches.overlay.registry import Entry, Registry
from mcore_patches.overlay.report import Report, Row
from mcore_patches.overlay.sites import Site, stray_change
from mcore_patches.overlay.versions import Installed, installed

log = logging.getLogger("mcore_patches")

_HOOK_WAIT_SECONDS = 5.0
"""How long an import waits for another thread's apply_patches(), which may itself be waiting for that import."""


@dataclass
class _Pending:
    """A patch in place on the targets whose modules have run, waiting for the imports of some to end."""

    forced: bool
    prefixes: tuple[str, ...]
    waiting: set[str]


class Engine:
    """One per process. `registry` is called on first use, so that importing the package stays cheap."""

    def __init__(self, registry: Callable[[], Registry], overlay_version: str) -> None:
        self._load_registry = registry
        self._registry: Registry | None = None
        self._overlay_version = overlay_version
        self._pending: dict[str, _Pending] = {}
        self._followed: set[str] = set()
        self._failed: dict[str, tuple[State, str]] = {}
        self._counters: dict[str, Counters] = {}
        self._speaker = Speaker()
        self._arrived: deque[str] = deque()
        self._reset_lock()
        # A thread of the parent may hold the lock at the moment of a fork; the child has no such thread to release it.
        os.register_at_fork(after_in_child=self._reset_lock)

    def _reset_lock(self) -> None:
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One operation at a time. Modules whose import ended meanwhile are seen to when it is over."""
        try:
            with self._lock:
                yield
        finally:
            self._see_to_arrivals()

    @property
    def registry(self) -> Registry:
        if self._registry is None:
            loaded = self._load_registry()  # imports modules, so not under the lock
            with self._lock:
                if self._registry is None:
                    self._counters = {i: Counters(i) for i in loaded.entries}
                    self._decider = Decider(loaded.entries, self._pending)
                    self._registry = loaded
        return self._registry

    # The public operations -------------------------------------------------------------------------------------------

    def apply(
        self,
        ids: Iterable[str] | str | None = None,
        *,
        exclude: Iterable[str] | str = (),
        strict: bool | None = None,
        dry_run: bool = False,
        force: Iterable[str] | str = (),
    ) -> Report:
        known = self.registry.entries
        settings.check(known)
        wanted = None if ids is None else self._checked("ids", ids)
        excluded = self._checked("exclude", exclude)
        forced = self._checked("force", force) | settings.force(known)
        if strict is not None and not isinstance(strict, bool):
            raise SettingsError(f"strict is {shown(strict)}; allowed are True, False and None")
        if not isinstance(dry_run, bool):
            raise SettingsError(f"dry_run is {shown(dry_run)}; allowed are True and False")
        strict = settings.strict() if strict is None else strict
        prefixes = settings.prefixes()
        off = self._refusals(wanted, excluded)
        found = installed()
        self._decider.import_what_probes_need(off, found)
        with self._exclusively():
            if dry_run:
                outcomes = self._look(found, off, forced)
            else:
                changes: list[AnyChange] = []
                outcomes = {}
                for entry in _needs_first(known):
                    if off[entry.id] or entry.patch is None:
                        outcomes[entry.id] = self._standing(entry, found, off[entry.id], forced)
                    else:
                        outcomes[entry.id] = self._apply_one(entry, found, entry.id in forced, prefixes, changes)
                _note_unreachable(changes)
            report = self._report(outcomes, found)
        if not dry_run:
            for row in report:
                self._speaker.log(row)
        bad = [row for row in report.errors if not off[row.id]]
        if strict and bad:
            text = "; ".join(f"{row.id} is {row.decision or row.state}: {row.reason}" for row in bad)
            rest = "nothing was changed (dry run)" if dry_run else "patches that are in no error state were applied"
            raise NotAppliedError(f"strict: {text}; {rest}")
        return report

    def status(self) -> Report:
        settings.check(self.registry.entries)
        off = self._refusals(None, frozenset())
        found = installed()
        self._decider.import_what_probes_need(off, found)
        with self._exclusively():
            return self._report(self._look(found, off, settings.force(self.registry.entries)), found)

    def revert(self, ids: Iterable[str] | str | None = None) -> Report:
        known = self.registry.entries
        settings.check(known)
        chosen = frozenset(known) if ids is None else self._checked("ids", ids)
        off, prefixes = self._refusals(None, frozenset()), settings.prefixes()
        found = installed()
        with self._exclusively():
            failures = self._revert(chosen, prefixes)
            report = self._report(self._look(found, off, settings.force(known)), found)
        _refuse_to_keep(failures)
        return report

    @contextlib.contextmanager
    def applied(self, ids: Iterable[str] | str | None = None, **options: Any) -> Iterator[Report]:
        settings.check(self.registry.entries)
        before, prefixes = self._held(), settings.prefixes()
        try:
            yield self.apply(ids, **options)
        finally:
            with self._exclusively():
                failures = self._revert(self._held() - before, prefixes)
            _refuse_to_keep(failures)

    def require(self, patch_id: str) -> Row:
        if not isinstance(patch_id, str):
            raise SettingsError(f"patch_id is {shown(patch_id)}; allowed is one id")
        self._checked("patch_id", patch_id)
        settings.check(self.registry.entries)
        entry = self.registry.entries[patch_id]
        if patch_id in self._pending:
            found = installed()
            for name in [s.module_name for s in sites_of(entry.patch, found) if s.module_name]:
                try:
                    importlib.import_module(name)
                except Exception as exc:
                    raise NotAppliedError(f"{patch_id} is {State.IMPORT_FAILED}: {name} raised {said(exc)}") from exc
        found = installed()
        with self._exclusively():
            if patch_id in self._pending and entry.patch is not None:
                self._continue(entry.patch, found)  # in case an import ended that no hook saw
            forced = settings.force(self.registry.entries)
            row = self._row(entry, self._standing(entry, found, None, forced))
        if row.state is State.INERT or row.state not in {*IN_PLACE, State.UPSTREAM_FIXED}:
            hint = ""
            if row.state is State.NOT_APPLIED:
                refusal = settings.selection(self.registry.entries).refuses(patch_id)
                hint = f"; {refusal or 'call apply_patches() first'}"
            raise NotAppliedError(f"{patch_id} is {row.state}: {row.reason}{hint}")
        return row

    # Choosing --------------------------------------------------------------------------------------------------------

    def _checked(self, argument: str, ids: Iterable[str] | str) -> frozenset[str]:
        known = self.registry.entries
        try:
            given = [ids] if isinstance(ids, str) else list(ids)
        except TypeError:
            raise SettingsError(f"{argument} is {shown(ids)}; allowed is an id or several") from None
        for patch_id in given:
            if not isinstance(patch_id, str) or patch_id not in known:
                raise SettingsError(f"{argument} names {shown(patch_id)}; known ids are {', '.join(sorted(known))}")
        return frozenset(given)

    def _refusals(self, wanted: frozenset[str] | None, excluded: frozenset[str]) -> dict[str, str | None]:
        """For each id why it is not to be applied, or None."""
        entries = self.registry.entries
        allowed = settings.selection(entries)
        return {i: self._refusal(e, wanted, excluded, allowed) for i, e in entries.items()}

    @staticmethod
    def _refusal(
        entry: Entry, wanted: frozenset[str] | None, excluded: frozenset[str], allowed: settings.Selection
    ) -> str | None:
        if entry.id in excluded:
            return "excluded by the caller"
        if wanted is not None and entry.id not in wanted:
            return "the caller named other patches"
        if not entry.builtin and entry.id not in (wanted or ()) and entry.id not in allowed.explicit:
            return f"from {entry.source}: third-party patches are applied only when they are named"
        return allowed.refuses(entry.id)

    # Doing -----------------------------------------------------------------------------------------------------------

    def _apply_one(
        self,
        entry: Entry,
        found: Installed | None,
        forced: bool,
        prefixes: tuple[str, ...],
        changes: list[AnyChange],
    ) -> Outcome:
        patch = entry.patch
        assert patch is not None
        if entry.id in self._pending:
            # Waiting already; look again, in case an import ended that no hook saw.
            self._continue(patch, found)
            return self._standing(entry, found, None, frozenset())
        decision = self._decider.decide(patch, found, forced)
        self._failed.pop(entry.id, None)
        if decision.state is State.ALREADY_APPLIED:
            lacks = what_it_lacks(patch, decision.sites)
            return Outcome(State.INERT if lacks else State.ALREADY_APPLIED, lacks or decision.reason, decision.sites)
        if decision.state is not State.APPLIED:
            return Outcome(decision.state, decision.reason, decision.sites)
        try:
            waiting = self._put_on(patch, decision, prefixes, changes)
        except Exception as exc:
            self._failed[entry.id] = _failure(exc)
            return Outcome(*self._failed[entry.id], decision.sites)
        if waiting:
            return self._standing(entry, found, None, frozenset())
        lacks = what_it_lacks(patch, decision.sites)
        return Outcome(State.INERT if lacks else State.APPLIED, lacks or decision.reason, decision.sites)

    def _put_on(
        self, patch: Patch, decision: Decision, prefixes: tuple[str, ...], changes: list[AnyChange]
    ) -> set[str]:
        """Put the patch's layers on every live target, all or none. Returns the modules whose imports it waits for."""
        note = decision.reason if decision.forced else ""

        def with_layer(site: Site) -> AnyChange | None:
            present = site.stack.layers if site.stack else ()
            if site.module is None or any(x.patch_id == patch.id for x in present):
                return None
            return site.change((*present, Layer(patch.id, site.target, self._counters[patch.id], note)))

        if len(decision.live) < len(decision.sites):
            importlib.import_module("wrapt")  # if it is missing, that must show before anything is changed
        changes += _carry_out(lambda: [c for s in decision.live if (c := with_layer(s))], prefixes)
        # While an import has not ended it may fail, also after the module's code, and be tried again.
        done = [s for s in decision.live if s.stack and patch.id in s.stack.ids and not s.underway]
        waiting = {s.module_name for s in decision.sites if s.module_name and s not in done}
        if waiting:
            self._pending[patch.id] = _Pending(decision.forced, prefixes, waiting)
            for name in waiting:
                self._follow(name)
        else:
            self._pending.pop(patch.id, None)
        return waiting

    def _revert(self, ids: AbstractSet[str], prefixes: tuple[str, ...]) -> dict[str, str]:
        """Take patches off, each as a whole. Returns id -> why not, for those that stay."""
        failures: dict[str, str] = {}
        for patch_id, entry in self.registry.entries.items():
            if patch_id in ids and entry.patch is not None:
                try:
                    self._take_off(entry.patch, prefixes)
                # A layer that stays is built anew, by a patch's own code.
                except Exception as exc:
                    failures[patch_id] = str(exc) if isinstance(exc, OverlayError) else said(exc)
                else:
                    self._failed.pop(patch_id, None)
        return failures

    def _take_off(self, patch: Patch, prefixes: tuple[str, ...]) -> None:
        self._pending.pop(patch.id, None)
        sites = [site_of(t) for t in patch.targets]
        live = [s.original for s in sites if s.module is not None and not s.missing_live()]
        forgotten = layers.strays(live)

        def without_layer() -> list[AnyChange]:
            found: list[AnyChange] = []
            for site in sites:
                stack = site.stack
                if stack and patch.id in stack.ids:
                    if covered := site.covered():
                        raise OverlayError(f"{covered}; undo that first")
                    found.append(site.change(tuple(x for x in stack.layers if x.patch_id != patch.id)))
                for stray in forgotten.get(site.key, ()):
                    if patch.id in stray.ids:
                        found.append(stray_change(stray, tuple(x for x in stray.layers if x.patch_id != patch.id)))
            return found

        _carry_out(without_layer, prefixes)

    # After imports ---------------------------------------------------------------------------------------------------

    def _follow(self, module: str) -> None:
        if module not in self._followed:
            self._followed.add(module)
            imports.follow(module, lambda: self._imported(module))

    def _imported(self, name: str) -> None:
        """Called by the importing thread. It never raises: the exception would come out of the user's import statement.

        Where another thread's operation does not end in time, that thread sees to the module when it is over.
        """
        self._followed.discard(name)
        self._arrived.append(name)
        self._see_to_arrivals(_HOOK_WAIT_SECONDS)

    def _see_to_arrivals(self, patience: float = 0.0) -> None:
        # Whoever fails to get the lock leaves its module to the holder, which looks here again after releasing it.
        while self._arrived and self._lock.acquire(timeout=patience):
            try:
                while self._arrived:
                    self._see_to(self._arrived.popleft())
            finally:
                self._lock.release()

    def _see_to(self, name: str) -> None:
        for patch_id in [i for i, pending in self._pending.items() if name in pending.waiting]:
            entry = self.registry.entries[patch_id]
            try:
                found = installed()
                assert entry.patch is not None
                self._continue(entry.patch, found)
                if patch_id not in self._pending:
                    self._speaker.log(self._row(entry, self._standing(entry, found, None, frozenset())))
            except Exception as exc:
                self._failed[patch_id] = _failure(exc)
                log.error("%s: after the import of %s: %s", patch_id, name, said(exc))

    def _continue(self, patch: Patch, found: Installed | None) -> None:
        """Go on with a pending patch after an import. Any outcome but going ahead takes the whole patch off again."""
        pending = self._pending[patch.id]
        changes: list[AnyChange] = []
        prefixes = pending.prefixes
        try:
            decision = self._decider.decide(patch, found, pending.forced, in_time=True)
            if decision.state in (State.APPLIED, State.ALREADY_APPLIED):
                self._put_on(patch, decision, prefixes, changes)
                _note_unreachable(changes)
                self._failed.pop(patch.id, None)
                return
            failure: tuple[State, str] = (decision.state, decision.reason)
        except Exception as exc:
            failure = _failure(exc)
        self._take_off(patch, prefixes)
        self._failed[patch.id] = failure

    def _held(self) -> frozenset[str]:
        """Ids of the patches that are in place or waiting for an import."""
        found = installed()
        return frozenset(i for i in self.registry.entries if self._decider.holds(i, found))

    # Saying ----------------------------------------------------------------------------------------------------------

    def _look(
        self, found: Installed | None, off: dict[str, str | None], forced: AbstractSet[str]
    ) -> dict[str, Outcome]:
        """How every patch stands, and what apply_patches() would make of it, with those applied that it would apply."""
        planned: set[str] = set()
        outcomes = {}
        for entry in _needs_first(self.registry.entries):
            outcome = self._standing(entry, found, off[entry.id], forced, planned)
            if outcome.decision in (State.APPLIED, State.PENDING):
                planned.add(entry.id)
            outcomes[entry.id] = outcome
        return outcomes

    def _standing(
        self,
        entry: Entry,
        found: Installed | None,
        refusal: str | None,
        forced: AbstractSet[str],
        planned: AbstractSet[str] = frozenset(),
    ) -> Outcome:
        """How one patch stands, read off the live objects. refusal: why it is not to be applied."""
        patch = entry.patch
        if patch is None:
            error = entry.error or ""
            if refusal:
                return Outcome(State.DISABLED, f"{refusal}; naming it would fail: {error}")
            return Outcome(State.IMPORT_FAILED, error)
        pending = self._pending.get(entry.id)
        force = entry.id in forced or (pending is not None and pending.forced)
        decision = self._decider.decide(patch, found, force, planned=planned, in_time=pending is not None)
        if decision.state is State.ALREADY_APPLIED:
            lacks = what_it_lacks(patch, decision.sites)
            if lacks:
                return Outcome(State.INERT, lacks, decision.sites)
            gone = [
                i
                for i in patch.needs_patches
                if not self._decider.holds(i, found) and not self._decider.is_upstream(i, found)
            ]
            reasons = [decision.reason, *(f"needs {i}, which is no longer in place" for i in gone)]
            return Outcome(State.APPLIED, "; ".join(filter(None, reasons)), decision.sites)
        placed = [s.target.qualname for s in decision.sites if s.stack and entry.id in s.stack.ids]
        partly = f"in place on {', '.join(placed)} only" if placed else ""
        if pending is not None and decision.state is State.APPLIED:
            waiting = {f"{s.module_name}{' (under way)' * s.underway}" for s in decision.sites if s.module is None}
            reason = f"waits for the import of {', '.join(sorted(waiting))}"
            if not waiting:
                reason = "apply_patches() goes on with it"
            return Outcome(State.PENDING, "; ".join(filter(None, (reason, partly, decision.reason))), decision.sites)
        if refusal:
            return Outcome(State.DISABLED, "; ".join(filter(None, (refusal, partly))), decision.sites)
        if entry.id in self._failed and decision.state is State.APPLIED:
            return Outcome(*self._failed[entry.id], decision.sites)
        if decision.state is State.APPLIED:
            would = State.APPLIED if all(s.module is not None for s in decision.sites) else State.PENDING
            reason = "; ".join(filter(None, (decision.reason or "lacks the fix", partly)))
            return Outcome(State.NOT_APPLIED, reason, decision.sites, would)
        return Outcome(decision.state, decision.reason, decision.sites)

    def _row(self, entry: Entry, outcome: Outcome) -> Row:
        return row_of(entry, outcome, self._counters[entry.id])

    def _report(self, outcomes: dict[str, Outcome], found: Installed | None) -> Report:
        rows = [self._row(e, outcomes[i]) for i, e in self.registry.entries.items()]
        return report_of(rows, found, self._overlay_version)


def _carry_out(plan: Callable[[], list[AnyChange]], prefixes: tuple[str, ...]) -> list[AnyChange]:
    """Build the planned changes, then put them in place, all or none."""
    for _ in range(3):
        changes = plan()
        for change in changes:
            change.build()
        # build() imports modules. One of those may be a target too, or apply or revert patches itself: then plan anew.
        same = [change.key for change in plan()] == [change.key for change in changes]
        if same and not any(change.stale for change in changes):
            layers.install(changes, prefixes)
            return changes
    raise OverlayError("building the replacement changes the target itself")


def _note_unreachable(changes: Sequence[AnyChange]) -> None:
    layers.note_unreachable([c for c in changes if isinstance(c, Change)])


def _refuse_to_keep(failures: dict[str, str]) -> None:
    if failures:
        raise NotRevertedError("; ".join(f"{i} stays in place: {text}" for i, text in failures.items()))


def _failure(exc: Exception) -> tuple[State, str]:
    state = State.IMPORT_FAILED if isinstance(exc, ImportError) else State.CONFLICT
    return state, f"installing it raised {said(exc)}; every target was left as it was"


def _needs_first(entries: dict[str, Entry]) -> list[Entry]:
    """The registry's order, but a patch after those it needs."""
    ordered: list[Entry] = []

    def add(entry: Entry, path: tuple[str, ...]) -> None:
        if entry in ordered or entry.id in path:
            return
        for needed in entry.patch.needs_patches if entry.patch else ():
            if needed in entries:
                add(entries[needed], (*path, entry.id))
        ordered.append(entry)

    for entry in entries.values():
        add(entry, ())
    return ordered
