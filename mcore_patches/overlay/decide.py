"""What is to become of a patch, read off the text on disk and the live objects.

In this order: target absent; our layer is there already; the text of the original is known; a probe runs on text that
is not known; what the patch needs, what it conflicts with, whether it comes too late. The version number is only a hint
in messages.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from mcore_patches.overlay.errors import said
from mcore_patches.overlay.locate import module_dict
from mcore_patches.overlay.patch import Patch, Probing, State
from mcore_patches.overlay.provided_sites import site_of
from mcore_patches.overlay.registry import Entry
from mcore_patches.overlay.sites import Site
from mcore_patches.overlay.versions import Installed


@dataclass(frozen=True)
class Decision:
    """What is to become of a patch, and the sites that it was read from. APPLIED means: go ahead.

    live: those whose live object was examined; the import of another may have ended meanwhile.
    """

    state: State
    reason: str
    sites: tuple[Site, ...] = ()
    forced: bool = False
    live: tuple[Site, ...] = ()


class Decider:
    """Decides on the patches of a registry. waiting: ids of those that wait for an import, as its owner keeps them."""

    def __init__(self, entries: Mapping[str, Entry], waiting: Collection[str]) -> None:
        self._entries = entries
        self._waiting = waiting
        self._import_errors: dict[str, str] = {}

    def import_what_probes_need(self, off: dict[str, str | None], found: Installed | None) -> None:
        """Import targets whose text is not known. Outside the lock: an import in another thread may wait for us."""
        for entry in self._entries.values():
            if entry.patch is None or entry.patch.probe is None or off[entry.id]:
                continue
            sites = sites_of(entry.patch, found)
            verdicts = {s.verdict for s in sites if not s.absent and not s.broken}
            if any(s.absent or s.broken for s in sites) or verdicts in ({"needs"}, {"fixed"}):
                continue
            for site in sites:
                if site.module is None and site.module_name:
                    try:
                        importlib.import_module(site.module_name)
                    except (Exception, SystemExit) as exc:
                        self._import_errors[site.module_name] = f"{site.module_name} raised {said(exc)}"

    def decide(
        self,
        patch: Patch,
        found: Installed | None,
        forced: bool,
        *,
        planned: AbstractSet[str] = frozenset(),
        in_time: bool = False,
    ) -> Decision:
        """planned: ids to be taken for being in place. in_time: the patch went on before any instance existed."""
        sites = sites_of(patch, found)
        live = tuple(s for s in sites if s.module is not None)
        decision = replace(self._decide_by_targets(patch, sites, found, forced), live=live)
        if decision.state is not State.APPLIED:
            return decision
        return self._decide_by_surroundings(patch, decision, found, planned, in_time)

    def _decide_by_targets(
        self, patch: Patch, sites: tuple[Site, ...], found: Installed | None, forced: bool
    ) -> Decision:
        release = str(found) if found else "not found"
        in_range = found is not None and found.release in patch.releases
        # A release that cannot be told is no reason to expect the target to be missing.
        unknown = found is None or found.release is None
        hint = "" if in_range or unknown else f"is for {patch.releases}, megatron-core is {release}: "
        if not sites:
            return Decision(State.OUT_OF_RANGE, f"is for {patch.releases}, megatron-core is {release}", sites)
        # Before the text: the file of a running process may be gone or unreadable by now.
        if all(s.stack is not None and patch.id in s.stack.ids for s in sites):
            return Decision(State.ALREADY_APPLIED, _how_it_lies(patch, sites), sites)
        if broken := [s.broken for s in sites if s.broken]:
            return Decision(State.IMPORT_FAILED, "; ".join(broken), sites)
        if absent := [s.absent for s in sites if s.absent]:
            state = State.OUT_OF_RANGE if hint else State.TARGET_ABSENT
            return Decision(state, hint + "; ".join(dict.fromkeys(absent)), sites)
        if missing := [m for m in (s.missing_live() for s in sites) if m]:
            return Decision(State.TARGET_ABSENT, "; ".join(missing), sites)
        if unfit := [u for u in (s.unfit() for s in sites) if u]:
            return Decision(State.DRIFTED, f"{hint}{'; '.join(unfit)}", sites)
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
                parts.append(s.unknown() if v == "unknown" else f"{s.target.qualname} ({s.where()[0]}) is {v}")
        text = f"{hint}text that is not known: " + "; ".join(parts)
        failed = [e for s in sites if s.module is None and (e := self._import_errors.get(s.module_name or ""))]
        if failed:
            return Decision(State.IMPORT_FAILED, "; ".join(failed), sites)
        if patch.probe is not None and (waiting := [s.module_name for s in sites if s.module is None]):
            text = f"{text}; no probe ran, for the import of {', '.join(map(str, waiting))} has not ended"
        elif patch.probe is not None:
            try:
                finding = patch.probe(probing(sites))
                detail, fixed = finding.detail, finding.fixed
            # A probe runs upstream's code on inputs that nobody promised to take: any failure means undecided.
            except Exception as exc:
                detail, fixed = f"it raised {said(exc)}", False
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
            return patch_id in planned or self.holds(patch_id, found)

        if unmet := [i for i in patch.needs_patches if not in_place(i) and not self.is_upstream(i, found)]:
            reason = f"needs the patches {', '.join(unmet)}, which are not in place"
            return replace(decision, state=State.NEEDS_UNMET, reason=reason)
        if unmet := [p for p in patch.needs_packages if not _importable(p)]:
            reason = f"needs the packages {', '.join(unmet)}, which are not installed"
            return replace(decision, state=State.NEEDS_UNMET, reason=reason)
        against = {i for i, e in self._entries.items() if e.patch and patch.id in e.patch.conflicts}
        if clash := sorted(i for i in against | set(patch.conflicts) if in_place(i)):
            reason = f"cannot be combined with {', '.join(clash)}, which is in place"
            return replace(decision, state=State.CONFLICT, reason=reason)
        if not patch.late_safe and not in_time and (live := _live_instances(patch.instances_of)):
            reason = f"{live} exists already; call apply_patches() before the model is built"
            return replace(decision, state=State.TOO_LATE, reason=reason)
        return decision

    def holds(self, patch_id: str, found: Installed | None) -> bool:
        """Whether a patch is in place or waiting for an import."""
        if patch_id in self._waiting:
            return True
        entry = self._entries.get(patch_id)
        stacks = [s.stack for s in sites_of(entry.patch, found)] if entry else []
        return bool(stacks) and all(stack and patch_id in stack.ids for stack in stacks)

    def is_upstream(self, patch_id: str, found: Installed | None) -> bool:
        """Whether the release has on its own what this patch would add."""
        entry = self._entries.get(patch_id)
        if entry is None or entry.patch is None:
            return False
        sites = sites_of(entry.patch, found)
        return self._decide_by_targets(entry.patch, sites, found, False).state is State.UPSTREAM_FIXED


def sites_of(patch: Patch | None, found: Installed | None) -> tuple[Site, ...]:
    """The targets that the installed release has according to the patch; all where the release is not known."""
    release = found.release if found else None
    targets = patch.targets if patch else ()
    return tuple(site_of(t) for t in targets if t.releases is None or release is None or release in t.releases)


def _how_it_lies(patch: Patch, sites: Iterable[Site]) -> str:
    """What is unusual about a patch in place: forced, or another tool's wrapper on top; usually nothing."""
    stacks = [s.stack for s in sites]
    notes = [layer.note for stack in stacks if stack and (layer := stack.layer(patch.id))]
    return "; ".join(dict.fromkeys(filter(None, [*notes, *(s.covered() for s in sites)])))


def probing(sites: Iterable[Site]) -> Probing:
    live = [s for s in sites if s.module is not None]
    return Probing({s.target.name: s.module for s in live if s.module}, {s.target.name: s.original for s in live})


def what_it_lacks(patch: Patch, sites: tuple[Site, ...]) -> str | None:
    """What the health check misses. It is a patch's own code, and must not escape from a status or an import hook."""
    if patch.health is None:
        return None
    try:
        return patch.health(probing(sites))
    except Exception as exc:
        return f"its health check raised {said(exc)}"


def _importable(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _live_instances(classes: Iterable[str]) -> str | None:
    """Name a live instance of one of the classes ("module:Class"), found by a scan of what the collector tracks."""
    kinds: set[type] = set()
    pending: list[type] = []
    for dotted in classes:
        module_name, _, class_name = dotted.partition(":")
        cls = module_dict(sys.modules.get(module_name)).get(class_name)
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
