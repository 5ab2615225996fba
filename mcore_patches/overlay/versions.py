"""Which megatron-core release is installed, found without importing it, and ranges of releases.

Three things make the usual ways wrong. ``megatron.core.__version__`` carries the git hash of whatever repository
encloses the installation. ``importlib.metadata`` describes another installation than the imported one when a source
tree is on PYTHONPATH. And ``SpecifierSet`` misjudges pre- and post-releases, differently from one packaging release to
the next. So the numbers in ``megatron/core/package_info.py`` decide, metadata counts only where it owns that file, and
comparisons are between tuples of three integers.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from mcore_patches.overlay.errors import OverlayError
from mcore_patches.overlay.fingerprint import SourceError, parse_source, read_source
from mcore_patches.overlay.locate import Located, locate, module_dict

if TYPE_CHECKING:
    from importlib.metadata import Distribution

Release = tuple[int, int, int]


class VersionError(OverlayError, ValueError):
    """A version text that cannot be compared. text: the text."""

    def __init__(self, text: object, reason: str) -> None:
        super().__init__(
            f"version {text!r} {reason}. Allowed: PEP 440 versions without an epoch, such as 0.19.2, 0.20.0rc1, "
            f"0.19.2.post1, 0.20.0+abc1234"
        )
        self.text = text


@dataclass(frozen=True)
class Parsed:
    """A version text in parts.

    release: (major, minor, patch), the only part that is compared; missing numbers are 0, further ones are dropped.
    public: normalised text without the local part. local: what followed the ``+``, or None.
    prerelease: alpha, beta, release candidate or development release.
    """

    text: str
    release: Release
    public: str
    local: str | None
    prerelease: bool


def parse(text: str) -> Parsed:
    """Take a version apart, with the same result under every packaging release from 24.2 on.

    Raises VersionError for text that is not a PEP 440 version (``core_v0.15.0rc7``, ``0.20.0-dirty``, ``0.20.0.main``)
    or that has an epoch (``1!0.19.0``).
    """
    try:
        from packaging.version import Version
    except ImportError:
        raise VersionError(text, "cannot be read without the package packaging, which is not installed") from None
    if not isinstance(text, str):
        raise VersionError(text, f"is of type {type(text).__name__}")
    if not text.isascii():
        # packaging 24.2 ignores case, and so takes a long s or a Kelvin sign for a letter; 26.4 does not.
        raise VersionError(text, "is not a PEP 440 version")
    try:
        version = Version(text)
    except ValueError:  # InvalidVersion, or a number with more digits than int() takes
        raise VersionError(text, "is not a PEP 440 version") from None
    if version.epoch:
        raise VersionError(text, f"has the epoch {version.epoch}")
    major, minor, patch = (*version.release, 0, 0)[:3]
    return Parsed(text, (major, minor, patch), version.public, version.local, version.is_prerelease)


@dataclass(frozen=True)
class Releases:
    """The half-open range ``[start, stop)`` of releases; stop None leaves it open.

    A pre-release or post-release belongs where its numbers are: 0.19.0rc1 and 0.19.0.post1 are in [0.19.0, 0.20).
    Raises ValueError for bounds that are not tuples of integers >= 0, or an empty range.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name, bound in (("start", self.start), ("stop", self.stop)):
            if bound is None and name == "stop":
                continue
            if not isinstance(bound, tuple) or not bound or not all(type(n) is int and n >= 0 for n in bound):
                raise ValueError(
                    f"Releases.{name} is {bound!r}; allowed are tuples of integers >= 0 such as (0, 19, 0)"
                )
        if self.stop is not None and not _before(self.start, self.stop):
            raise ValueError(f"Releases: stop {self.stop} must be above start {self.start}; the range is empty")

    @classmethod
    def parse(cls, start: str, stop: str | None) -> Releases:
        """From dotted numbers: ``Releases.parse("0.19.0", "0.20")``. Raises ValueError for any other text."""
        return cls(_numbers("start", start), None if stop is None else _numbers("stop", stop))

    def __contains__(self, release: tuple[int, ...] | None) -> bool:
        """Whether `release` is in the range; an unknown release (None) is in none."""
        if release is None:
            return False
        return not _before(release, self.start) and (self.stop is None or _before(release, self.stop))

    def __str__(self) -> str:
        start = f">={'.'.join(map(str, self.start))}"
        return start if self.stop is None else f"{start}, <{'.'.join(map(str, self.stop))}"


def _before(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    width = max(len(left), len(right))
    return left + (0,) * (width - len(left)) < right + (0,) * (width - len(right))


def _numbers(name: str, text: str) -> tuple[int, ...]:
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})*", text):
        raise ValueError(f"Releases.parse: {name}={text!r}; allowed are dotted numbers such as '0.19.0'")
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True)
class Installed:
    """The installation that an import of the package would use, or has used.

    release: (major, minor, patch); None if neither package_info nor metadata that owns it gives one.
    text: the version without its local part, e.g. ``"0.19.2"``; ``"unknown"`` if there is none.
    local: the git hash that package_info appended when it was imported. It names the repository around the
        installation, often the user's own, so nothing compares it.
    source: whether release and text come from package_info.py or from metadata.
    metadata_text: the version in the distribution's metadata: of the distribution that owns the files if there is one,
        else of the one that importlib.metadata finds first; None without any.
    metadata_owns: whether that distribution owns the files.
    file: path of package_info.py, or None.
    warnings: everything that a person should know, one sentence each.
    prerelease: not known to be a final or a post-release.
    """

    release: Release | None
    text: str
    local: str | None
    source: Literal["package_info", "metadata"]
    metadata_text: str | None
    metadata_owns: bool
    file: str | None
    warnings: tuple[str, ...]
    prerelease: bool

    def __str__(self) -> str:
        return self.text if self.local is None else f"{self.text}+{self.local}"


def installed(distribution: str = "megatron-core", package: str = "megatron.core") -> Installed | None:
    """What is installed as `package`; None when an import would not find it. Imports and executes nothing of it.

    An imported ``package_info`` module is asked for its values; otherwise its file is read and only literal assignments
    are understood. Never raises for what it finds: whatever is odd is told in `Installed.warnings`.
    """
    home = locate(package)
    if not home.found:
        return None
    info = locate(f"{package}.package_info")
    warnings: list[str] = []
    described = _from_package_info(info, warnings)
    metadata = _metadata(distribution, package, info.file or home.file, warnings)
    source: Literal["package_info", "metadata"] = "package_info"
    if metadata is not None and metadata.text is not None:
        if metadata.owns and (described is None or described.release is None):
            described, source = _described({"__version__": metadata.text}, warnings), "metadata"
        elif described is not None and not _same_version(described.text, metadata.text):
            relation = "owns that file, which changed since" if metadata.owns else "does not own that file"
            warnings.append(
                f"{info.file or info.module} is version {described.text}, but the metadata in {metadata.folder} says "
                f"{distribution} {metadata.text}; it {relation}, and package_info decides"
            )
    if described is None:
        described = _Described(None, "unknown", None, True)
    return Installed(
        release=described.release,
        text=described.text,
        local=described.local,
        source=source,
        metadata_text=metadata.text if metadata is not None else None,
        metadata_owns=metadata is not None and metadata.owns,
        file=info.file,
        warnings=tuple(warnings),
        prerelease=described.prerelease,
    )


@dataclass(frozen=True)
class _Described:
    """A version as package_info describes it."""

    release: Release | None
    text: str
    local: str | None
    prerelease: bool


def _from_package_info(info: Located, warnings: list[str]) -> _Described | None:
    """The version that the package_info module gives, from its live values or from its text."""
    module = sys.modules.get(info.module)
    if module is not None:
        values = module_dict(module)
    elif info.file is None:
        warnings.append(f"the version cannot be read: {info.reason}")
        return None
    else:
        try:
            values = _literals(info.file)
        except SourceError as error:
            warnings.append(f"the version cannot be read: {error}")
            return None
    described = _described(values, warnings)
    if described is None:
        where = info.file or info.module
        warnings.append(f"{where} gives no version: neither VERSION, MAJOR to PATCH nor __version__ is usable")
    return described


def _described(values: Mapping[str, Any], warnings: list[str]) -> _Described | None:
    """The version from the names of a package_info module; the numbers there count more than its texts."""
    full = values.get("__version__")
    text, _, local = full.partition("+") if isinstance(full, str) else ("", "", "")
    numbers = (values.get("MAJOR"), values.get("MINOR"), values.get("PATCH"), values.get("PRE_RELEASE", ""))
    for parts in (values.get("VERSION"), numbers):
        if _is_version_tuple(parts):
            release = (parts[0], parts[1], parts[2])
            suffix, _, own_local = "".join(parts[3:]).partition("+")
            text = ".".join(map(str, release)) + suffix
            prerelease = bool(suffix) and _is_prerelease(text, warnings)
            return _Described(release, text, local or own_local or None, prerelease)
    short = values.get("__shortversion__")
    text = text or (short if isinstance(short, str) else "")
    if not text:
        return None
    try:
        parsed = parse(text)
    except VersionError as error:
        warnings.append(str(error))
        return _Described(None, text, local or None, True)
    return _Described(parsed.release, text, local or None, parsed.prerelease)


def _is_version_tuple(parts: object) -> TypeGuard[tuple[Any, ...]]:
    """(major, minor, patch, text, ...), as upstream's VERSION."""
    return (
        isinstance(parts, tuple)
        and len(parts) >= 3
        and all(type(number) is int and number >= 0 for number in parts[:3])
        and all(isinstance(suffix, str) for suffix in parts[3:])
    )


def _is_prerelease(text: str, warnings: list[str]) -> bool:
    try:
        return parse(text).prerelease
    except VersionError as error:
        warnings.append(f"{error}; only its numbers are compared")
        return True


def _literals(path: str) -> dict[str, Any]:
    """Names that a module's top level binds to literals, or to tuples of such names. Raises SourceError."""
    values: dict[str, Any] = {}
    for statement in parse_source(read_source(path), path).body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        assert statement.value is not None
        for target in targets:
            if isinstance(target, ast.Name):
                try:
                    values[target.id] = _literal(statement.value, values)
                except LookupError:  # a value that cannot be read must not leave the former one standing
                    values.pop(target.id, None)
    return values


def _literal(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of a constant, a known name, or a tuple of them. Raises LookupError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Tuple):
        return tuple(_literal(element, values) for element in node.elts)
    raise LookupError(f"{type(node).__name__} is not a literal")


def _same_version(left: str, right: str) -> bool:
    if left.partition("+")[0] == right.partition("+")[0]:
        return True
    try:
        return parse(left).public == parse(right).public
    except VersionError:
        return False


@dataclass(frozen=True)
class _Metadata:
    """What one installed distribution says. folder: where it is installed."""

    text: str | None
    folder: str
    owns: bool


def _metadata(distribution: str, package: str, file: str | None, warnings: list[str]) -> _Metadata | None:
    """The distribution that owns `file` if there is one, else the first that importlib.metadata finds, else None."""
    from importlib.metadata import distributions

    first: _Metadata | None = None
    try:
        for candidate in distributions(name=distribution):
            owns = file is not None and _owns(candidate, package, file)
            found = _Metadata(candidate.metadata.get("Version"), str(candidate.locate_file("")), owns)
            if owns:
                if first is not None and first.text != found.text:
                    warnings.append(
                        f"importlib.metadata.version({distribution!r}) answers {first.text}, from {first.folder}; "
                        f"the code is of the distribution {found.text} in {found.folder}"
                    )
                return found
            first = first or found
    except Exception as error:  # other projects' finders and files; the version is known without them
        warnings.append(f"the metadata of {distribution} cannot be read: {error!r}")
    return first


def _owns(distribution: Distribution, package: str, file: str) -> bool:
    """Whether `file` of `package` was installed by the distribution, or lies in the folder of its editable install."""
    target, name = os.path.realpath(file), os.path.basename(file)
    for entry in _recorded(distribution):
        if os.path.basename(entry) == name and os.path.realpath(str(distribution.locate_file(entry))) == target:
            return True
    root = _editable_root(distribution)
    relative = os.path.join(*package.split("."), name)
    return root is not None and any(
        os.path.realpath(os.path.join(root, top, relative)) == target for top in ("", "src")
    )


def _recorded(distribution: Distribution) -> Iterator[str]:
    record = distribution.read_text("RECORD")
    if record is not None:
        # Distribution.files would ask the file system about each of a thousand files, on every rank.
        import csv

        yield from (row[0] for row in csv.reader(record.splitlines()) if row)
    else:
        yield from (str(path) for path in distribution.files or ())


def _editable_root(distribution: Distribution) -> str | None:
    """The source folder of an editable install (PEP 610), whose RECORD does not list the modules."""
    import json
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "null")
        if not origin["dir_info"]["editable"]:
            return None
        url = urlsplit(origin["url"])
    except (ValueError, TypeError, LookupError):
        return None
    return unquote(url.path) if url.scheme == "file" else None
