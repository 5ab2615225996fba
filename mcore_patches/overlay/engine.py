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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from mcore_patches.overlay import settings
from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.errors import NotAppliedError, SettingsError
from mcore_patches.overlay.patch import ERRORS, IN_PLACE, Patch, Probing, State
from mcore_patches.overlay.registry import Entry, Registry
from mcore_patches.overlay.report import Report, Row, TargetRow
from mcore_patches.overlay.sites import Layer, Site
from mcore_patches.overlay.versions import Installed, installed

log = logging.getLogger("mcore_patches")

_LEVELS = {
    State.TARGET_ABSENT: logging.INFO,
    State.OUT_OF_RANGE: logging.WARNING,
    State.UPSTREAM_FIXED: logging.WARNING,
    **dict.fromkeys(ERRORS, logging.ERROR),
}


@dataclass(frozen=True)
class Decision:
    """What is to become of a patch, and the sites that it was read from. APPLIED means: go ahead."""

    state: State
    reason: str
    sites: tuple[Site, ...] = ()
    forced: bool = False


@dataclass
class _Pending:
    """A patch in place on the targets that are imported, waiting for the others."""

    forced: bool
    waiting: set[str] = field(default_factory=set)


class Engine:
    """One per process. `registry` is called on first use, so that importing the package stays cheap."""

    def __init__(self, registry: Callable[[], Registry], overlay_version: str) -> None:
        self._load_registry = registry
        self._registry: Registry | None = None
        self._overlay_version = overlay_version
        self._lock = threading.RLock()
        self._pending: dict[str, _Pending] = {}
        self._hooked: set[str] = set()
        self._failed: dict[str, tuple[State, str]] = {}
        self._import_errors: dict[str, str] = {}
        self._counters: dict[str, Counters] = {}
        self._logged: set[tuple[str, str, str]] = set()
        # A thread of the parent may hold the lock at the moment of a fork; the child has no such thread to release it.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    @property
    def registry(self) -> Registry:
        if self._registry is None:
            self._registry = self._load_registry()
            self._counters = {i: self._counters.get(i) or Counters(i) for i in self._registry.entries}
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
        strict = settings.strict() if strict is None else strict
        found = installed()
        allowed = settings.selection(known)
        off = {i: self._refusal(e, wanted, excluded, allowed) for i, e in known.items()}
        self._import_what_probes_need([e.patch for i, e in known.items() if e.patch and not off[i]], found)
        with self._lock:
            rows: dict[str, Row] = {}
            for entry in _needs_first(known):
                refusal = off[entry.id]
                if refusal:
                    row = self._status_row(entry, found)
                    in_place = row.state in IN_PLACE or row.state is State.PENDING
                    if not in_place:
                        row = replace(row, state=State.DISABLED, decision=None, reason=refusal)
                elif dry_run or entry.patch is None:
                    row = self._status_row(entry, found, entry.id in forced)
                else:
                    row = self._apply_one(entry, found, entry.id in forced)
                rows[entry.id] = row
            report = self._report([rows[i] for i in known], found)
        if not dry_run:
            for row in report:
                self._log(row)
        if strict and (bad := [r for r in report.errors if not off[r.id]]):
            text = "; ".join(f"{r.id} is {r.decision or r.state}: {r.reason}" for r in bad)
            raise NotAppliedError(f"strict: {text}. The other patches were applied; targets of these are untouched")
        return report

    def status(self) -> Report:
        settings.check(self.registry.entries)
        found = installed()
        self._import_what_probes_need([e.patch for e in self.registry.entries.values() if e.patch and e.builtin], found)
        with self._lock:
            return self._report([self._status_row(e, found) for e in self.registry.entries.values()], found)

    def revert(self, ids: Iterable[str] | str | None = None) -> Report:
        chosen = frozenset(self.registry.entries) if ids is None else self._checked("ids", ids)
        found = installed()
        with self._lock:
            for patch_id in self.registry.entries:
                patch = self.registry.entries[patch_id].patch
                if patch_id in chosen and patch is not None:
                    self._take_off(patch)
                    self._failed.pop(patch_id, None)
            return self._report([self._status_row(e, found) for e in self.registry.entries.values()], found)

    @contextlib.contextmanager
    def applied(self, ids: Iterable[str] | str | None = None, **options: Any) -> Iterator[Report]:
        before = {r.id for r in self.status() if r.state in IN_PLACE or r.state is State.PENDING}
        try:
            yield self.apply(ids, **options)
        finally:
            after = {r.id for r in self.status() if r.state in IN_PLACE or r.state is State.PENDING}
            if after - before:
                self.revert(after - before)

    def require(self, patch_id: str) -> Row:
        (patch_id,) = self._checked("patch_id", patch_id)
        entry = self.registry.entries[patch_id]
        row = self._one_row(entry)
        if row.state is State.PENDING:
            for module in [m for m in (Site(t).module_name for t in self._targets(entry, installed())) if m]:
                try:
                    importlib.import_module(module)
                except Exception as exc:
                    raise NotAppliedError(f"{patch_id} is {State.IMPORT_FAILED}: {module} raised {_said(exc)}") from exc
            row = self._one_row(entry)
        if row.state is State.INERT or row.state not in {*IN_PLACE, State.UPSTREAM_FIXED}:
            raise NotAppliedError(f"{patch_id} is {row.state}: {row.reason or 'call apply_patches() first'}")
        return row

    def _one_row(self, entry: Entry) -> Row:
        found = installed()
        with self._lock:
            return self._status_row(entry, found)

    # Choosing --------------------------------------------------------------------------------------------------------

    def _checked(self, argument: str, ids: Iterable[str] | str) -> frozenset[str]:
        given = [ids] if isinstance(ids, str) else list(ids)
        for patch_id in given:
            if patch_id not in self.registry.entries:
                known = ", ".join(sorted(self.registry.entries))
                raise SettingsError(f"{argument} names {patch_id!r}; known ids are {known}")
        return frozenset(given)

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
    def _targets(entry_or_patch: Entry | Patch, found: Installed | None) -> list[Any]:
        patch = entry_or_patch.patch if isinstance(entry_or_patch, Entry) else entry_or_patch
        release = found.release if found else None
        return [
            t
            for t in (patch.targets if patch else ())
            if t.releases is None or release is None or release in t.releases
        ]

    # Deciding --------------------------------------------------------------------------------------------------------

    def _import_what_probes_need(self, patches: Iterable[Patch], found: Installed | None) -> None:
        """Import targets whose text is not known, outside the lock: an import in another thread may be waiting for us."""
        for patch in patches:
            sites = [Site(t) for t in self._targets(patch, found)]
            if (
                patch.probe is None
                or any(s.absent or s.broken for s in sites)
                or {s.verdict for s in sites} <= {"needs"}
            ):
                continue
            if all(s.verdict == "fixed" for s in sites):
                continue
            for site in sites:
                if site.module is None and site.module_name:
                    try:
                        importlib.import_module(site.module_name)
                        self._import_errors.pop(site.module_name, None)
                    except Exception as exc:
                        self._import_errors[site.module_name] = f"{site.module_name} raised {_said(exc)}"

    def _decide(self, patch: Patch, found: Installed | None, forced: bool) -> Decision:
        sites = tuple(Site(t) for t in self._targets(patch, found))
        in_range = found is not None and found.release is not None and found.release in patch.releases
        release = found.text if found else "not found"
        if not sites:
            return Decision(State.OUT_OF_RANGE, f"is for {patch.releases}; megatron-core is {release}", sites)
        if broken := [s.broken for s in sites if s.broken]:
            return Decision(State.IMPORT_FAILED, "; ".join(broken), sites)
        if absent := [s.absent for s in sites if s.absent]:
            state = State.TARGET_ABSENT if in_range or found is None else State.OUT_OF_RANGE
            hint = "" if state is State.TARGET_ABSENT else f"is for {patch.releases}, megatron-core is {release}: "
            return Decision(state, hint + "; ".join(dict.fromkeys(absent)), sites)
        if all(s.stack is not None and patch.id in s.stack.ids for s in sites):
            return Decision(State.ALREADY_APPLIED, "in place on the live objects", sites)
        if missing := [m for m in (s.missing_live() for s in sites) if m]:
            return Decision(State.TARGET_ABSENT, "; ".join(missing), sites)
        if foreign := [f for f in (s.foreign() for s in sites) if f]:
            return Decision(
                State.CONFLICT, "; ".join(foreign) + "; another tool has changed it, or the file was replaced", sites
            )
        decision = self._decide_by_text(patch, sites, forced)
        return decision if decision.state is not State.APPLIED else self._decide_by_surroundings(patch, decision)

    def _decide_by_text(self, patch: Patch, sites: tuple[Site, ...], forced: bool) -> Decision:
        verdicts = [s.verdict for s in sites]
        if all(v == "needs" for v in verdicts):
            return Decision(State.APPLIED, "", sites)
        if all(v == "fixed" for v in verdicts):
            return Decision(
                State.UPSTREAM_FIXED, f"this release has it ({patch.upstream}); the patch can be deleted", sites
            )
        parts = []
        for s, v in zip(sites, verdicts, strict=True):
            if v != "needs":
                mark = f"has the fingerprint {s.fingerprint[:12]}" if v == "unknown" and s.fingerprint else f"is {v}"
                parts.append(f"{s.target.qualname} ({s.file}:{s.line}) {mark}")
        text = "text that is not known: " + "; ".join(parts)
        failed = [
            self._import_errors[s.module_name]
            for s in sites
            if s.module_name in self._import_errors and s.module is None
        ]
        if failed:
            return Decision(State.IMPORT_FAILED, "; ".join(failed), sites)
        if patch.probe is not None and all(s.module is not None for s in sites):
            try:
                finding = patch.probe(_probing(sites))
                detail, fixed = finding.detail, finding.fixed
            # A probe runs upstream's code on inputs that nobody promised to take: any failure means undecided.
            except Exception as exc:
                detail, fixed = f"the probe raised {_said(exc)}", False
            if fixed:
                reason = f"a probe found the fix in it: {detail}; the patch can be deleted ({patch.upstream})"
                return Decision(State.UPSTREAM_FIXED, reason, sites)
            text = f"{text}; probe: {detail}"
        if forced:
            return Decision(State.APPLIED, f"FORCED over {text}", sites, True)
        return Decision(State.DRIFTED, f"{text}; MCORE_PATCHES_FORCE={patch.id} applies it all the same", sites)

    def _decide_by_surroundings(self, patch: Patch, decision: Decision) -> Decision:
        in_place = self._ids_in_place()
        if unmet := [i for i in patch.needs_patches if i not in in_place and not self._is_upstream(i)]:
            return replace(
                decision,
                state=State.NEEDS_UNMET,
                reason=f"needs the patches {', '.join(unmet)}, which are not in place",
            )
        if unmet := [p for p in patch.needs_packages if p not in sys.modules and importlib.util.find_spec(p) is None]:
            return replace(
                decision,
                state=State.NEEDS_UNMET,
                reason=f"needs the packages {', '.join(unmet)}, which are not installed",
            )
        clash = [i for i in in_place if i in patch.conflicts]
        clash += [
            i for i in in_place if (p := self.registry.entries[i].patch) and patch.id in p.conflicts and i not in clash
        ]
        if clash:
            return replace(
                decision, state=State.CONFLICT, reason=f"cannot be combined with {', '.join(clash)}, which is in place"
            )
        if not patch.late_safe and (live := _live_instances(patch.instances_of)):
            reason = f"{live} exists already; call apply_patches() before the model is built"
            return replace(decision, state=State.TOO_LATE, reason=reason)
        return decision

    def _ids_in_place(self) -> list[str]:
        found = installed()
        result = []
        for entry in self.registry.entries.values():
            sites = [Site(t) for t in self._targets(entry, found)]
            if entry.id in self._pending or (sites and all(s.stack and entry.id in s.stack.ids for s in sites)):
                result.append(entry.id)
        return result

    def _is_upstream(self, patch_id: str) -> bool:
        """Whether the release has on its own what this patch would add."""
        entry = self.registry.entries.get(patch_id)
        if entry is None or entry.patch is None:
            return False
        return self._decide(entry.patch, installed(), False).state is State.UPSTREAM_FIXED

    # Doing -----------------------------------------------------------------------------------------------------------

    def _apply_one(self, entry: Entry, found: Installed | None, forced: bool) -> Row:
        patch = entry.patch
        assert patch is not None
        if entry.id in self._pending:
            # Waiting already; look again, in case an import happened that no hook saw.
            self._continue(patch, found)
            return self._status_row(entry, found)
        decision = self._decide(patch, found, forced)
        if decision.state is not State.APPLIED:
            if decision.state is State.ALREADY_APPLIED:
                return self._row(entry, decision, State.ALREADY_APPLIED, decision.reason)
            self._failed.pop(entry.id, None)
            return self._row(entry, decision, decision.state, decision.reason)
        try:
            waiting = self._put_on(patch, decision)
        except Exception as exc:
            state = State.IMPORT_FAILED if isinstance(exc, ImportError) else State.CONFLICT
            reason = f"installing it raised {_said(exc)}; every target was left as it was"
            self._failed[entry.id] = (state, reason)
            return self._row(entry, decision, state, reason)
        self._failed.pop(entry.id, None)
        if waiting:
            return self._status_row(entry, found)
        reason = self._inert(patch, decision.sites)
        if reason:
            return self._row(entry, decision, State.INERT, reason)
        return self._row(entry, decision, State.APPLIED, decision.reason)

    def _put_on(self, patch: Patch, decision: Decision) -> set[str]:
        """Put the patch's layers on every imported target, all or none; hook the imports of the others. Returns those."""
        done: list[tuple[Site, tuple[Layer, ...]]] = []
        try:
            for site in decision.sites:
                if site.module is None:
                    continue
                before = site.stack.layers if site.stack else ()
                if patch.id not in {x.patch_id for x in before}:
                    done.append((site, before))
                    site.set_layers((*before, Layer(patch.id, site.target)), self._counters, settings.prefixes())
        except BaseException:
            for site, layers in reversed(done):
                site.set_layers(layers, self._counters, settings.prefixes())
            raise
        waiting = {s.module_name for s in decision.sites if s.module is None and s.module_name}
        if waiting:
            self._pending[patch.id] = _Pending(decision.forced, waiting)
            for module in waiting:
                self._hook(module)
        else:
            self._pending.pop(patch.id, None)
        return waiting

    def _take_off(self, patch: Patch) -> None:
        self._pending.pop(patch.id, None)
        for target in patch.targets:
            site = Site(target)
            stack = site.stack
            if stack is not None and patch.id in stack.ids:
                site.set_layers(
                    tuple(x for x in stack.layers if x.patch_id != patch.id), self._counters, settings.prefixes()
                )

    def _hook(self, module: str) -> None:
        if module in self._hooked:
            return
        import wrapt

        self._hooked.add(module)
        wrapt.register_post_import_hook(self._imported, module)

    def _imported(self, module: ModuleType) -> None:
        """Post-import hook. It never raises: the exception would come out of the user's import statement."""
        name = module.__name__
        found = installed()
        with self._lock:
            self._hooked.discard(name)
            for patch_id, pending in list(self._pending.items()):
                entry = self.registry.entries[patch_id]
                if name in pending.waiting and entry.patch is not None:
                    self._continue(entry.patch, found)
                    if patch_id not in self._pending:
                        self._log(self._status_row(entry, found))

    def _continue(self, patch: Patch, found: Installed | None) -> None:
        """Go on with a pending patch after an import. Any outcome but going ahead takes the whole patch off again."""
        pending = self._pending[patch.id]
        try:
            decision = self._decide(patch, found, pending.forced)
            if decision.state is State.APPLIED:
                self._put_on(patch, decision)
                self._failed.pop(patch.id, None)
                return
            if decision.state is State.ALREADY_APPLIED:
                self._pending.pop(patch.id, None)
                return
            state, reason = decision.state, decision.reason
        except Exception as exc:
            state, reason = State.CONFLICT, f"installing it after the import raised {_said(exc)}"
        self._take_off(patch)
        self._failed[patch.id] = (state, reason)

    # Saying ----------------------------------------------------------------------------------------------------------

    def _status_row(self, entry: Entry, found: Installed | None, forced: bool = False) -> Row:
        if entry.patch is None:
            return self._row(
                entry, Decision(State.IMPORT_FAILED, entry.error or ""), State.IMPORT_FAILED, entry.error or ""
            )
        forced = forced or entry.id in settings.force(self.registry.entries)
        decision = self._decide(entry.patch, found, forced)
        if decision.state is State.ALREADY_APPLIED:
            reason = self._inert(entry.patch, decision.sites)
            return self._row(entry, decision, State.INERT if reason else State.APPLIED, reason or "")
        if entry.id in self._pending and decision.state in (State.APPLIED, State.TOO_LATE):
            waiting = sorted(self._pending[entry.id].waiting)
            placed = [s.target.qualname for s in decision.sites if s.stack and entry.id in s.stack.ids]
            reason = f"waits for the import of {', '.join(waiting)}" + (
                f"; in place on {', '.join(placed)}" if placed else ""
            )
            return self._row(entry, decision, State.PENDING, "; ".join(filter(None, (reason, decision.reason))))
        if entry.id in self._failed and decision.state is State.APPLIED:
            state, reason = self._failed[entry.id]
            return self._row(entry, decision, state, reason)
        if decision.state is State.APPLIED:
            would = State.APPLIED if all(s.module is not None for s in decision.sites) else State.PENDING
            return self._row(entry, decision, State.NOT_APPLIED, decision.reason or "lacks the fix", would)
        return self._row(entry, decision, decision.state, decision.reason)

    def _row(self, entry: Entry, decision: Decision, state: State, reason: str, would: State | None = None) -> Row:
        patch = entry.patch
        targets = []
        for site in decision.sites:
            before, after = site.where()
            stack = site.stack
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
            state=state,
            reason=reason,
            summary=patch.summary if patch else "",
            upstream=patch.upstream if patch else "",
            delete_when=patch.delete_when if patch else "",
            releases=str(patch.releases) if patch else "",
            decision=would,
            targets=tuple(targets),
            counters=self._counters[entry.id].as_dict(),
            source=entry.source,
        )

    def _report(self, rows: list[Row], found: Installed | None) -> Report:
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
        warnings = (
            found.warnings if found else ("megatron-core was not found; install it, or put its folder on PYTHONPATH",)
        )
        return Report(tuple(rows), megatron, platform.python_version(), self._overlay_version, warnings)

    @staticmethod
    def _inert(patch: Patch, sites: tuple[Site, ...]) -> str | None:
        return patch.health(_probing(sites)) if patch.health else None

    def _log(self, row: Row) -> None:
        level = _LEVELS.get(row.state)
        if row.state in IN_PLACE and row.reason.startswith("FORCED"):
            level = logging.WARNING
        if level is None or (key := (row.id, str(row.state), row.reason)) in self._logged:
            return
        self._logged.add(key)
        # Ranks of one node read the same files, so one of them speaks: rank 0 for the job, local rank 0 for errors.
        speaks = os.environ.get("LOCAL_RANK", "0") if level >= logging.ERROR else os.environ.get("RANK", "0")
        if speaks in ("0", ""):
            log.log(level, "%s: %s: %s", row.id, row.state, row.reason)


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


def _probing(sites: Iterable[Site]) -> Probing:
    live = [s for s in sites if s.module is not None]
    return Probing({s.target.name: s.module for s in live if s.module}, {s.target.name: s.original for s in live})


def _said(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"


def _live_instances(classes: Iterable[str]) -> str | None:
    """Name a live instance of one of the classes ("module:Class"), found by a scan of what the collector tracks."""
    found = []
    for dotted in classes:
        module_name, _, class_name = dotted.partition(":")
        cls = vars(sys.modules[module_name]).get(class_name) if module_name in sys.modules else None
        if isinstance(cls, type):
            found.append(cls)
    if not found:
        return None
    wanted = tuple(found)
    # type(), not isinstance(): a proxy's __class__ would run its code.
    hits = [o for o in gc.get_objects() if issubclass(type(o), wanted)]
    return f"{len(hits)} live instance(s) of {type(hits[0]).__qualname__}" if hits else None
