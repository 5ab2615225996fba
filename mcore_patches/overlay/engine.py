"""Decide for each patch what is to be done, do it as a whole or not at all, and say what became of it.

The order of a decision: switched off; target absent; our layer is there already; the text of the original is known;
a probe runs on text that is not known. The version number is only a hint in messages.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from mcore_patches.overlay import layers, settings
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.errors import NotAppliedError, NotRevertedError, OverlayError, SettingsError
from mcore_patches.overlay.layers import AnyChange, Change, Layer
from mcore_patches.overlay.patch import ERRORS, IN_PLACE, Patch, Probing, State
from mcore_patches.overlay.registry import Entry, Registry
from mcore_patches.overlay.report import Report, Row, TargetRow
from mcore_patches.overlay.sites import Site, import_finished, stray_change
from mcore_patches.overlay.versions import Installed, installed

log = logging.getLogger("mcore_patches")

_LEVELS = {
    State.TARGET_ABSENT: logging.INFO,
    State.OUT_OF_RANGE: logging.WARNING,
    State.UPSTREAM_FIXED: logging.WARNING,
    **dict.fromkeys(ERRORS, logging.ERROR),
}

_HOOK_WAIT_SECONDS = 5.0
"""How long an import waits for another thread's apply_patches(), which may itself be waiting for that import."""


@dataclass(frozen=True)
class Decision:
    """What is to become of a patch, and the sites that it was read from. APPLIED means: go ahead."""

    state: State
    reason: str
    sites: tuple[Site, ...] = ()
    forced: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a report says of a patch. decision: what apply_patches() would do, for a state that is NOT_APPLIED."""

    state: State
    reason: str
    sites: tuple[Site, ...] = ()
    decision: State | None = None


@dataclass
class _Pending:
    """A patch in place on the targets that are imported, waiting for the others."""

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
        self._hooked: set[str] = set()
        self._failed: dict[str, tuple[State, str]] = {}
        self._import_errors: dict[str, str] = {}
        self._counters: dict[str, Counters] = {}
        self._logged: set[tuple[str, str, str]] = set()
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
            raise SettingsError(f"strict is {strict!r}; allowed are True, False and None")
        if not isinstance(dry_run, bool):
            raise SettingsError(f"dry_run is {dry_run!r}; allowed are True and False")
        strict = settings.strict() if strict is None else strict
        prefixes = settings.prefixes()
        off = self._refusals(wanted, excluded)
        found = installed()
        self._import_what_probes_need(off, found)
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
                self._log(row)
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
        self._import_what_probes_need(off, found)
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
            raise SettingsError(f"patch_id is {patch_id!r}; allowed is one id")
        self._checked("patch_id", patch_id)
        settings.check(self.registry.entries)
        entry = self.registry.entries[patch_id]
        if patch_id in self._pending:
            found = installed()
            for name in [s.module_name for s in self._sites(entry.patch, found) if s.module_name]:
                try:
                    importlib.import_module(name)
                except Exception as exc:
                    raise NotAppliedError(f"{patch_id} is {State.IMPORT_FAILED}: {name} raised {_said(exc)}") from exc
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
            raise SettingsError(f"{argument} is {ids!r}; allowed is an id or several") from None
        for patch_id in given:
            if not isinstance(patch_id, str) or patch_id not in known:
                raise SettingsError(f"{argument} names {patch_id!r}; known ids are {', '.join(sorted(known))}")
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

    @staticmethod
    def _sites(patch: Patch | None, found: Installed | None) -> tuple[Site, ...]:
        """The targets that the installed release has according to the patch; all where the release is not known."""
        release = found.release if found else None
        targets = patch.targets if patch else ()
        return tuple(Site(t) for t in targets if t.releases is None or release is None or release in t.releases)

    # Deciding --------------------------------------------------------------------------------------------------------

    def _import_what_probes_need(self, off: dict[str, str | None], found: Installed | None) -> None:
        """Import targets whose text is not known. Outside the lock: an import in another thread may wait for us."""
        for entry in self.registry.entries.values():
            if entry.patch is None or entry.patch.probe is None or off[entry.id]:
                continue
            sites = self._sites(entry.patch, found)
            verdicts = {s.verdict for s in sites if not s.absent and not s.broken}
            if any(s.absent or s.broken for s in sites) or verdicts in ({"needs"}, {"fixed"}):
                continue
            for site in sites:
                if site.module is None and site.module_name:
                    try:
                        importlib.import_module(site.module_name)
                    except Exception as exc:
                        self._import_errors[site.module_name] = f"{site.module_name} raised {_said(exc)}"

    def _decide(
        self,
        patch: Patch,
        found: Installed | None,
        forced: bool,
        *,
        planned: AbstractSet[str] = frozenset(),
        in_time: bool = False,
    ) -> Decision:
        """planned: ids to be taken for being in place. in_time: the patch went on before any instance existed."""
        decision = self._decide_by_targets(patch, found, forced)
        if decision.state is not State.APPLIED:
            return decision
        return self._decide_by_surroundings(patch, decision, found, planned, in_time)

    def _decide_by_targets(self, patch: Patch, found: Installed | None, forced: bool) -> Decision:
        sites = self._sites(patch, found)
        release = str(found) if found else "not found"
        in_range = found is not None and found.release in patch.releases
        hint = "" if in_range or found is None else f"is for {patch.releases}, megatron-core is {release}: "
        if not sites:
            return Decision(State.OUT_OF_RANGE, f"is for {patch.releases}, megatron-core is {release}", sites)
        if broken := [s.broken for s in sites if s.broken]:
            return Decision(State.IMPORT_FAILED, "; ".join(broken), sites)
        if absent := [s.absent for s in sites if s.absent]:
            state = State.OUT_OF_RANGE if hint else State.TARGET_ABSENT
            return Decision(state, hint + "; ".join(dict.fromkeys(absent)), sites)
        if all(s.stack is not None and patch.id in s.stack.ids for s in sites):
            return Decision(State.ALREADY_APPLIED, _how_it_lies(patch, sites), sites)
        if missing := [m for m in (s.missing_live() for s in sites) if m]:
            return Decision(State.TARGET_ABSENT, "; ".join(missing), sites)
        if foreign := [f for f in (s.foreign() for s in sites) if f]:
            reason = "; ".join(foreign) + "; another tool has changed it, or the file was replaced after the import"
            return Decision(State.CONFLICT, reason, sites)
        return self._decide_by_text(patch, sites, forced, hint)

    def _decide_by_text(self, patch: Patch, sites: tuple[Site, ...], forced: bool, hint: str) -> Decision:
        verdicts = [s.verdict for s in sites]
        if all(v == "needs" for v in verdicts):
            return Decision(State.APPLIED, "", sites)
        if all(v == "fixed" for v in verdicts):
            reason = f"this release has it ({patch.upstream}); the patch can be deleted"
            return Decision(State.UPSTREAM_FIXED, reason, sites)
        parts = []
        for s, v in zip(sites, verdicts, strict=True):
            if v != "needs":
                mark = f"has the fingerprint {s.fingerprint[:12]}" if v == "unknown" and s.fingerprint else f"is {v}"
                parts.append(f"{s.target.qualname} ({s.where()[0]}) {mark}")
        text = f"{hint}text that is not known: " + "; ".join(parts)
        failed = [e for s in sites if s.module is None and (e := self._import_errors.get(s.module_name or ""))]
        if failed:
            return Decision(State.IMPORT_FAILED, "; ".join(failed), sites)
        if patch.probe is not None and all(s.module is not None for s in sites):
            try:
                finding = patch.probe(_probing(sites))
                detail, fixed = finding.detail, finding.fixed
            # A probe runs upstream's code on inputs that nobody promised to take: any failure means undecided.
            except Exception as exc:
                detail, fixed = f"it raised {_said(exc)}", False
            if fixed:
                reason = f"a probe found the fix in it: {detail}; the patch can be deleted ({patch.upstream})"
                return Decision(State.UPSTREAM_FIXED, reason, sites)
            text = f"{text}; probe: {detail}"
        if forced:
            return Decision(State.APPLIED, f"FORCED over {text}", sites, True)
        return Decision(State.DRIFTED, f"{text}; MCORE_PATCHES_FORCE={patch.id} applies it all the same", sites)

    def _decide_by_surroundings(
        self, patch: Patch, decision: Decision, found: Installed | None, planned: AbstractSet[str], in_time: bool
    ) -> Decision:
        def in_place(patch_id: str) -> bool:
            return patch_id in planned or self._holds(patch_id, found)

        if unmet := [i for i in patch.needs_patches if not in_place(i) and not self._is_upstream(i, found)]:
            reason = f"needs the patches {', '.join(unmet)}, which are not in place"
            return replace(decision, state=State.NEEDS_UNMET, reason=reason)
        if unmet := [p for p in patch.needs_packages if not _importable(p)]:
            reason = f"needs the packages {', '.join(unmet)}, which are not installed"
            return replace(decision, state=State.NEEDS_UNMET, reason=reason)
        against = {i for i, e in self.registry.entries.items() if e.patch and patch.id in e.patch.conflicts}
        if clash := sorted(i for i in against | set(patch.conflicts) if in_place(i)):
            reason = f"cannot be combined with {', '.join(clash)}, which is in place"
            return replace(decision, state=State.CONFLICT, reason=reason)
        if not patch.late_safe and not in_time and (live := _live_instances(patch.instances_of)):
            reason = f"{live} exists already; call apply_patches() before the model is built"
            return replace(decision, state=State.TOO_LATE, reason=reason)
        return decision

    def _holds(self, patch_id: str, found: Installed | None) -> bool:
        """Whether a patch is in place or waiting for an import."""
        if patch_id in self._pending:
            return True
        entry = self.registry.entries.get(patch_id)
        stacks = [s.stack for s in self._sites(entry.patch, found)] if entry else []
        return bool(stacks) and all(stack and patch_id in stack.ids for stack in stacks)

    def _held(self) -> frozenset[str]:
        found = installed()
        return frozenset(i for i in self.registry.entries if self._holds(i, found))

    def _is_upstream(self, patch_id: str, found: Installed | None) -> bool:
        """Whether the release has on its own what this patch would add."""
        entry = self.registry.entries.get(patch_id)
        if entry is None or entry.patch is None:
            return False
        return self._decide_by_targets(entry.patch, found, False).state is State.UPSTREAM_FIXED

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
        decision = self._decide(patch, found, forced)
        self._failed.pop(entry.id, None)
        if decision.state is State.ALREADY_APPLIED:
            lacks = _lacks(patch, decision.sites)
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
        lacks = _lacks(patch, decision.sites)
        return Outcome(State.INERT if lacks else State.APPLIED, lacks or decision.reason, decision.sites)

    def _put_on(
        self, patch: Patch, decision: Decision, prefixes: tuple[str, ...], changes: list[AnyChange]
    ) -> set[str]:
        """Put the patch's layers on every imported target, all or none, and hook the others' imports. Returns those."""
        note = decision.reason if decision.forced else ""

        def with_layer(site: Site) -> AnyChange | None:
            present = site.stack.layers if site.stack else ()
            if site.module is None or any(x.patch_id == patch.id for x in present):
                return None
            return site.change((*present, Layer(patch.id, site.target, self._counters[patch.id], note)))

        changes += _carry_out(lambda: [c for s in decision.sites if (c := with_layer(s))], prefixes)
        waiting = {s.module_name for s in decision.sites if s.module is None and s.module_name}
        if waiting:
            self._pending[patch.id] = _Pending(decision.forced, prefixes, waiting)
            for site in decision.sites:
                if site.module_name in waiting and not site.underway:
                    self._hook(site.module_name)
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
                    failures[patch_id] = str(exc) if isinstance(exc, OverlayError) else _said(exc)
                else:
                    self._failed.pop(patch_id, None)
        return failures

    def _take_off(self, patch: Patch, prefixes: tuple[str, ...]) -> None:
        self._pending.pop(patch.id, None)
        sites = [Site(t) for t in patch.targets]
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

    def _hook(self, module: str) -> None:
        if module in self._hooked:
            return
        import wrapt

        self._hooked.add(module)
        wrapt.register_post_import_hook(lambda _: self._imported(module), module)

    def _imported(self, name: str) -> None:
        """Post-import hook. It never raises: the exception would come out of the user's import statement.

        Where another thread's operation does not end in time, that thread sees to the module when it is over.
        """
        self._hooked.discard(name)
        self._arrived.append(name)
        with import_finished(name):
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
                    self._log(self._row(entry, self._standing(entry, found, None, frozenset())))
            except Exception as exc:
                self._failed[patch_id] = _failure(exc)
                log.error("%s: after the import of %s: %s", patch_id, name, _said(exc))

    def _continue(self, patch: Patch, found: Installed | None) -> None:
        """Go on with a pending patch after an import. Any outcome but going ahead takes the whole patch off again."""
        pending = self._pending[patch.id]
        changes: list[AnyChange] = []
        prefixes = pending.prefixes
        try:
            decision = self._decide(patch, found, pending.forced, in_time=True)
            if decision.state is State.APPLIED:
                self._put_on(patch, decision, prefixes, changes)
                _note_unreachable(changes)
                self._failed.pop(patch.id, None)
                return
            if decision.state is State.ALREADY_APPLIED:
                self._pending.pop(patch.id, None)
                return
            failure: tuple[State, str] = (decision.state, decision.reason)
        except Exception as exc:
            failure = _failure(exc)
        self._take_off(patch, prefixes)
        self._failed[patch.id] = failure

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
        decision = self._decide(patch, found, force, planned=planned, in_time=pending is not None)
        if decision.state is State.ALREADY_APPLIED:
            lacks = _lacks(patch, decision.sites)
            if lacks:
                return Outcome(State.INERT, lacks, decision.sites)
            gone = [i for i in patch.needs_patches if not self._holds(i, found) and not self._is_upstream(i, found)]
            reasons = [decision.reason, *(f"needs {i}, which is no longer in place" for i in gone)]
            return Outcome(State.APPLIED, "; ".join(filter(None, reasons)), decision.sites)
        placed = [s.target.qualname for s in decision.sites if s.stack and entry.id in s.stack.ids]
        partly = f"in place on {', '.join(placed)} only" if placed else ""
        if pending is not None and decision.state is State.APPLIED:
            waiting = sorted({s.module_name or "" for s in decision.sites if s.module is None})
            reason = f"waits for the import of {', '.join(waiting)}" if waiting else "apply_patches() goes on with it"
            if underway := sorted({s.module_name or "" for s in decision.sites if s.underway}):
                reason += f" ({', '.join(underway)} is under way; call apply_patches() again after it)"
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
        patch = entry.patch
        counters = self._counters[entry.id]
        targets = []
        for site in outcome.sites:
            before, after = site.where()
            stack = site.stack
            if stack and (layer := stack.layer(entry.id)):
                counters = layer.counters
            targets.append(
                TargetRow(
                    name=site.target.name,
                    module=site.module_name,
                    before=before,
                    after=after,
                    fingerprint=site.fingerprint,
                    verdict="absent" if site.absent else "unreadable" if site.broken else site.verdict,
                    layers=stack.ids if stack else (),
                    rebound=stack.rebound if stack else (),
                    unreachable=stack.unreachable if stack else (),
                )
            )
        return Row(
            id=entry.id,
            state=outcome.state,
            reason=outcome.reason,
            summary=patch.summary if patch else "",
            upstream=patch.upstream if patch else "",
            delete_when=patch.delete_when if patch else "",
            releases=str(patch.releases) if patch else "",
            decision=outcome.decision,
            targets=tuple(targets),
            counters=counters.as_dict(),
            source=entry.source,
        )

    def _report(self, outcomes: dict[str, Outcome], found: Installed | None) -> Report:
        megatron: dict[str, Any] = {"text": None, "release": None, "file": None}
        if found is not None:
            megatron = {
                "text": found.text,
                "release": ".".join(map(str, found.release)) if found.release else None,
                "local": found.local,
                "file": found.file,
                "source": found.source,
                "metadata": found.metadata_text,
            }
        missing = ("megatron-core was not found; install it, or put its folder on PYTHONPATH",)
        warnings = found.warnings if found else missing
        rows = tuple(self._row(e, outcomes[i]) for i, e in self.registry.entries.items())
        return Report(rows, megatron, platform.python_version(), self._overlay_version, warnings)

    def _log(self, row: Row) -> None:
        level = _LEVELS.get(row.state)
        if level is None and "FORCED" in row.reason:
            level = logging.WARNING
        if level is None or (key := (row.id, str(row.state), row.reason)) in self._logged:
            return
        self._logged.add(key)
        # Ranks of one node read the same files, so one of them speaks: rank 0 for the job, local rank 0 for errors.
        speaks = os.environ.get("LOCAL_RANK", "0") if level >= logging.ERROR else os.environ.get("RANK", "0")
        if speaks in ("0", ""):
            log.log(level, "%s: %s: %s", row.id, row.state, row.reason)


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
    return state, f"installing it raised {_said(exc)}; every target was left as it was"


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


def _how_it_lies(patch: Patch, sites: Iterable[Site]) -> str:
    """What is unusual about a patch in place: forced, or another tool's wrapper on top; usually nothing."""
    stacks = [s.stack for s in sites]
    notes = [layer.note for stack in stacks if stack and (layer := stack.layer(patch.id))]
    return "; ".join(dict.fromkeys(filter(None, [*notes, *(s.covered() for s in sites)])))


def _probing(sites: Iterable[Site]) -> Probing:
    live = [s for s in sites if s.module is not None]
    return Probing({s.target.name: s.module for s in live if s.module}, {s.target.name: s.original for s in live})


def _lacks(patch: Patch, sites: tuple[Site, ...]) -> str | None:
    """What the health check misses. It is a patch's own code, and must not escape from a status or an import hook."""
    if patch.health is None:
        return None
    try:
        return patch.health(_probing(sites))
    except Exception as exc:
        return f"its health check raised {_said(exc)}"


def _importable(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _said(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"


def _live_instances(classes: Iterable[str]) -> str | None:
    """Name a live instance of one of the classes ("module:Class"), found by a scan of what the collector tracks."""
    kinds: set[type] = set()
    pending: list[type] = []
    for dotted in classes:
        module_name, _, class_name = dotted.partition(":")
        cls = vars(sys.modules[module_name]).get(class_name) if module_name in sys.modules else None
        if isinstance(cls, type):
            pending.append(cls)
    while pending:
        cls = pending.pop()
        if cls not in kinds:
            kinds.add(cls)
            pending += type.__subclasses__(cls)
    # type(), not isinstance(): a proxy's __class__ would run its code.
    hits = [o for o in gc.get_objects() if type(o) in kinds] if kinds else []
    return f"{len(hits)} live instance(s) of {type(hits[0]).__qualname__}" if hits else None
