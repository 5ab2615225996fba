"""What a patch is: data plus plain functions. Nothing here acts; `engine.py` does.

A patch module holds one module-level `PATCH`. Importing it must import neither torch nor megatron: `build`, `probe`
and `health` import what they need when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from mcore_patches.overlay.counters import Counters
from mcore_patches.overlay.versions import Releases

Verdict = Literal["needs", "fixed"]
"""What a known text means: "needs" lacks the fix, "fixed" contains it."""

RESERVED = frozenset({"all", "off"})
"""Words of MCORE_PATCHES, which are therefore no ids."""

_ID = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_RELIED = re.compile(rf"(\.?{_DOTTED.pattern}:)?{_DOTTED.pattern}")
_CLASS = re.compile(rf"{_DOTTED.pattern}:[^\W\d]\w*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class State(StrEnum):
    """What became of a patch. `ERRORS` are the states that make strict mode raise."""

    APPLIED = "APPLIED"
    ALREADY_APPLIED = "ALREADY_APPLIED"
    NOT_APPLIED = "NOT_APPLIED"
    UPSTREAM_FIXED = "UPSTREAM_FIXED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    DRIFTED = "DRIFTED"
    TARGET_ABSENT = "TARGET_ABSENT"
    IMPORT_FAILED = "IMPORT_FAILED"
    NEEDS_UNMET = "NEEDS_UNMET"
    CONFLICT = "CONFLICT"
    DISABLED = "DISABLED"
    INERT = "INERT"
    TOO_LATE = "TOO_LATE"
    PENDING = "PENDING"


ERRORS = frozenset({State.DRIFTED, State.IMPORT_FAILED, State.CONFLICT, State.TOO_LATE, State.NEEDS_UNMET, State.INERT})
IN_PLACE = frozenset({State.APPLIED, State.ALREADY_APPLIED, State.INERT})


@dataclass(frozen=True)
class Below:
    """What a layer is built on.

    call: the object one layer down: the original, or the next patch's replacement.
    original: upstream's own object.
    module: the live module that holds the target.
    counters: this patch's counters; `status()` shows them.
    """

    call: Any
    original: Any
    module: ModuleType
    counters: Counters


@dataclass(frozen=True, kw_only=True)
class Target:
    """A function, or a method written `Class.method`, that a patch replaces.

    modules: candidates for the module's dotted name; the first that defines the target is used. Layouts move between
        releases, and may leave a module behind that only passes on to the new place.
    known: fingerprint -> verdict. A fingerprint covers the target and `relies_on` (see `fingerprint.combined`).
    relies_on: what else the replacement depends on, whose text counts too: names in the same module, or in others,
        "package.module:name", or ".module:name" for a module beside the target's, wherever that is. Of a class the text
        of its body counts, not that of what it calls. A release without one of them is DRIFTED.
    level: order of layers on a shared target; a higher level sees the call first. Equal levels go by patch id.
    releases: only these releases have this target; None means all that the patch is for.
    """

    modules: tuple[str, ...]
    qualname: str
    build: Callable[[Below], Callable[..., Any]]
    known: Mapping[str, Verdict] = field(default_factory=lambda: MappingProxyType({}))
    relies_on: tuple[str, ...] = ()
    level: int = 0
    releases: Releases | None = None

    @property
    def name(self) -> str:
        return f"{self.modules[0]}:{self.qualname}"


@dataclass(frozen=True)
class ConfigField:
    """A dataclass field added at run time. type: as an annotation would say it. default: not a mutable object."""

    name: str
    type: Any
    default: Any

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"ConfigField.name is {self.name!r}; allowed is an identifier")
        if type(self.default).__hash__ is None:
            raise ValueError(
                f"ConfigField {self.name}: the default {self.default!r} is mutable, and instances share it"
            )


@dataclass(frozen=True, kw_only=True)
class FieldsTarget:
    """A dataclass that gains fields: keyword arguments that `dataclasses.replace`, deepcopy and pickle know too.

    qualname: the class. Its dataclass subclasses, also those defined later, accept the fields too.
    A field that the class has on its own is upstream's; the patch's probe decides what that means.
    """

    modules: tuple[str, ...]
    qualname: str
    fields: tuple[ConfigField, ...]
    releases: Releases | None = None

    @property
    def name(self) -> str:
        return f"{self.modules[0]}:{self.qualname}+fields"


@dataclass(frozen=True, kw_only=True)
class ModuleTarget:
    """A module of upstream's that gets names of a patch's own; a release may lack the module.

    modules: its dotted name, one. Its package must be there.
    provider: the module that has the objects, imported when somebody imports the target.
    names: what it provides: classes, functions, constants. The target's text that counts are their definitions.
    known: as of `Target`. A release without the module needs it.
    """

    modules: tuple[str, ...]
    provider: str
    names: tuple[str, ...]
    known: Mapping[str, Verdict] = field(default_factory=lambda: MappingProxyType({}))
    releases: Releases | None = None

    @property
    def qualname(self) -> str:
        return self.names[0]

    @property
    def relies_on(self) -> tuple[str, ...]:
        return self.names[1:]

    @property
    def name(self) -> str:
        return f"{self.modules[0]}:{', '.join(self.names)}+module"


AnyTarget = Target | FieldsTarget | ModuleTarget


def covers(target: AnyTarget, module: str) -> tuple[tuple[str, str], ...]:
    """(module, name) of all that the target's fingerprint covers, itself first. module: where the target was found."""
    symbols = [(module, target.qualname)]
    for entry in () if isinstance(target, FieldsTarget) else target.relies_on:
        other, _, qualname = entry.rpartition(":")
        if other.startswith("."):
            other = f"{module.rpartition('.')[0]}{other}".removeprefix(".")
        symbols.append((other or module, qualname))
    return tuple(symbols)


@dataclass(frozen=True)
class Finding:
    """A probe's word on text that is not known: fixed or not, and what was found."""

    fixed: bool
    detail: str


@dataclass(frozen=True)
class Probing:
    """What a probe gets by target name: live modules, and upstream's own functions without any layer, or the class."""

    modules: Mapping[str, ModuleType]
    originals: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One fix or feature.

    upstream: reference to the pull request or issue, e.g. "NVIDIA/Megatron-LM#7617".
    delete_when: how to tell that the patch can go.
    note: what a reader of the report has to know while the patch is in place, e.g. that something must be opted in to.
    releases: the half-open range of megatron-core releases it is for; known text overrules it.
    probe: tells whether text that is not known has the fix; it may only ever say "fixed". None: unknown text stays.
    needs_patches, needs_packages: ids, and importable top-level names, without which the patch is useless.
    conflicts: ids that cannot be in place together with this one.
    late_safe: whether applying it after a model was built reaches that model.
    instances_of: "module:Class" whose live instances make a patch that is not late-safe TOO_LATE.
    health: called once in place; a text says what its CUDA path lacks (state INERT), None that nothing is missing.
    """

    id: str
    summary: str
    upstream: str
    delete_when: str
    releases: Releases
    targets: tuple[AnyTarget, ...]
    probe: Callable[[Probing], Finding] | None = None
    needs_patches: tuple[str, ...] = ()
    needs_packages: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    late_safe: bool = False
    instances_of: tuple[str, ...] = ()
    health: Callable[[Probing], str | None] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id) or self.id in RESERVED:
            allowed = f"lower-case letters, digits and '_', a letter first, other than {' and '.join(sorted(RESERVED))}"
            raise ValueError(f"Patch.id is {self.id!r}; allowed are {allowed}")
        for name in ("needs_patches", "needs_packages", "conflicts", "instances_of", "targets"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"patch {self.id}: {name} is {getattr(self, name)!r}; allowed is a tuple")
        if not isinstance(self.releases, Releases):
            raise ValueError(f"patch {self.id}: releases is {self.releases!r}; allowed is a Releases")
        if not self.targets:
            raise ValueError(f"patch {self.id}: targets is empty; a patch changes at least one target")
        for target in self.targets:
            _check_target(self.id, target)
        names = [t.name for t in self.targets]
        if twice := {n for n in names if names.count(n) > 1}:
            raise ValueError(f"patch {self.id}: the target {twice.pop()} is there twice; allowed is each once")
        for cls in self.instances_of:
            if not _CLASS.fullmatch(cls):
                raise ValueError(f"patch {self.id}: instances_of holds {cls!r}; allowed is 'module:Class'")
        if not self.late_safe and not self.instances_of:
            raise ValueError(f"patch {self.id}: late_safe is False, so instances_of must name the classes to look for")


def _check_target(patch_id: str, target: AnyTarget) -> None:
    if isinstance(target, ModuleTarget):
        _check_provided(patch_id, target)
    where = f"patch {patch_id}, target {getattr(target, 'qualname', target)!r}"
    if not isinstance(target, AnyTarget):
        allowed = "Target, FieldsTarget and ModuleTarget"
        raise ValueError(f"{where} is of type {type(target).__name__}; allowed are {allowed}")
    relies_on = target.relies_on if isinstance(target, Target) else ()
    if not isinstance(target.modules, tuple) or not target.modules or not isinstance(relies_on, tuple):
        raise ValueError(
            f"{where}: modules is {target.modules!r}, relies_on {relies_on!r}; allowed are tuples of names"
        )
    for name in (*target.modules, target.qualname):
        if not isinstance(name, str) or not _DOTTED.fullmatch(name):
            raise ValueError(f"{where}: {name!r} is no dotted name")
    for name in relies_on:
        if not isinstance(name, str) or not _RELIED.fullmatch(name):
            raise ValueError(
                f"{where}: relies_on holds {name!r}; allowed are 'name', 'package.module:name' and '.module:name'"
            )
    for module in target.modules:
        symbols = covers(target, module)
        if len(set(symbols)) != len(symbols):
            raise ValueError(
                f"{where}: relies_on is {relies_on!r}; allowed is each name once, without the target's own"
            )
    if isinstance(target, FieldsTarget):
        if not target.fields or not all(isinstance(f, ConfigField) for f in target.fields):
            raise ValueError(f"{where}: fields is {target.fields!r}; allowed is a tuple of at least one ConfigField")
        return
    if isinstance(target, Target) and not callable(target.build):
        raise ValueError(f"{where}: build is {target.build!r}; allowed is a function")
    for fingerprint, verdict in target.known.items():
        if verdict not in ("needs", "fixed"):
            raise ValueError(f"{where}: known verdict {verdict!r}; allowed are 'needs' and 'fixed'")
        if not _SHA256.fullmatch(fingerprint):
            raise ValueError(f"{where}: known fingerprint {fingerprint!r}; allowed are 64 hexadecimal digits")


def _check_provided(patch_id: str, target: ModuleTarget) -> None:
    where = f"patch {patch_id}, target {target.modules!r}"
    if not isinstance(target.modules, tuple) or len(target.modules) != 1:
        raise ValueError(f"{where}: modules is {target.modules!r}; allowed is a tuple of one name")
    if not isinstance(target.names, tuple) or not target.names or len(set(target.names)) != len(target.names):
        raise ValueError(f"{where}: names is {target.names!r}; allowed is a tuple of names, each once")
    for name in target.names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{where}: names holds {name!r}; allowed are identifiers")
    if not isinstance(target.provider, str) or not _DOTTED.fullmatch(target.provider):
        raise ValueError(f"{where}: provider is {target.provider!r}; allowed is a dotted name")
