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

_ID = re.compile(r"[a-z][a-z0-9_]{0,63}")


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

    modules: candidates for the module's dotted name; the first that exists is used (layouts move between releases).
    known: fingerprint -> verdict. A fingerprint covers the target and `relies_on` (see `fingerprint.combined`).
    relies_on: further names in the same module whose text the replacement depends on.
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
    """A dataclass field added at run time. type: as an annotation would say it."""

    name: str
    type: Any
    default: Any


@dataclass(frozen=True, kw_only=True)
class FieldsTarget:
    """A dataclass that gains fields: usable as keyword arguments, by `dataclasses.replace`, deepcopy, pickle and subclasses.

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


AnyTarget = Target | FieldsTarget


@dataclass(frozen=True)
class Finding:
    """A probe's word on text that is not known: fixed or not, and what was found."""

    fixed: bool
    detail: str


@dataclass(frozen=True)
class Probing:
    """What a probe gets: live modules and upstream's own objects, by target name, with every layer of ours taken off."""

    modules: Mapping[str, ModuleType]
    originals: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One fix or feature.

    upstream: reference to the pull request or issue, e.g. "NVIDIA/Megatron-LM#7617".
    delete_when: how to tell that the patch can go.
    releases: the half-open range of megatron-core releases it is for; known text overrules it.
    probe: tells whether text that is not known has the fix. It may only ever say "fixed"; None leaves unknown text alone.
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

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"Patch.id is {self.id!r}; allowed are lower-case letters, digits and '_', a letter first")
        if not self.targets:
            raise ValueError(f"patch {self.id}: targets is empty; a patch changes at least one target")
        for target in self.targets:
            if not target.modules or not target.qualname:
                raise ValueError(f"patch {self.id}: a target needs at least one module and a qualname, got {target}")
            for verdict in getattr(target, "known", {}).values():
                if verdict not in ("needs", "fixed"):
                    raise ValueError(f"patch {self.id}: known verdict {verdict!r}; allowed are 'needs' and 'fixed'")
        if not self.late_safe and not self.instances_of:
            raise ValueError(f"patch {self.id}: late_safe is False, so instances_of must name the classes to look for")
