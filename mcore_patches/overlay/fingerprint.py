"""Fingerprints of upstream's source text, read from files and wheels without importing or executing anything.

A fingerprint is the sha256 of source lines as they stand in the file, with LF line ends: the text decides, because
``inspect.getsource`` believes whatever file name code claims to come from, and ``ast.dump`` and ``ast.unparse`` differ
between Python releases.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_patches.overlay.errors import OverlayError, SettingsError, shown

if TYPE_CHECKING:
    import zipfile

StrPath = str | os.PathLike[str]

# Above anything that a megatron-core wheel holds (0.16.1, the largest: 10 MB unpacked, 5.4 MB of it one library), and
# low enough to be read in memory.
MAX_WHEEL_BYTES = 32 << 20
MAX_MEMBER_BYTES = 16 << 20
MAX_TOTAL_BYTES = 256 << 20
MAX_MEMBERS = 20_000
# How many texts are remembered with what was found in them. All patches together read about 25 files of a release, one
# after the other at each status(): where fewer are kept, every one of them is parsed anew each time.
TEXTS = 64
# Of a member that is read as text; parsing takes some hundred times as much memory. The largest so far has 245 kB.
MAX_TEXT_BYTES = 2 << 20


class SourceError(OverlayError, ValueError):
    """Source text that cannot be read as Python: unreadable file, not UTF-8, or a syntax error.

    path: the file, or ``"<source>"`` for text from elsewhere. reason: what is wrong.
    """

    def __init__(self, path: StrPath, reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason


class WheelError(OverlayError, ValueError):
    """A file that is not a wheel this module is willing to read. path: the file."""

    def __init__(self, path: StrPath, problem: str, allowed: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}. Allowed: {allowed}")
        self.path = os.fspath(path)


def fingerprint_source(text: str, qualname: str) -> str | None:
    """sha256 (hex) of the lines that `source_segment` returns; None where `qualname` is not defined."""
    return combined(text, (qualname,))


def fingerprint_file(path: StrPath, qualname: str) -> str | None:
    """`fingerprint_source` of a file. Raises SourceError with the file's name."""
    return fingerprint_files([(path, qualname)])


def combined(text: str, qualnames: Sequence[str]) -> str | None:
    """One fingerprint of several symbols of one text, in whatever order they are named: a function and its helpers.

    Of a single symbol it equals `fingerprint_source`. None if any symbol is not defined.
    Raises ValueError for an empty sequence, a name given twice, or a string in place of the sequence.
    """
    if isinstance(qualnames, str):
        raise ValueError(
            f"qualnames={qualnames!r} is a string; allowed is a sequence of names such as ({qualnames!r},)"
        )
    _check_distinct(qualnames)
    return combined_texts([(text, qualname) for qualname in qualnames])


def combined_texts(symbols: Sequence[tuple[str, str]]) -> str | None:
    """`combined` for symbols (text, qualname) of one or several texts. None if any is not defined."""
    return _digest([_segment(text, qualname, "<source>") for text, qualname in symbols], [q for _, q in symbols])


def fingerprint_files(symbols: Sequence[tuple[StrPath, str]]) -> str | None:
    """`combined` for symbols (file, qualname) of one or several files. None if any is not defined.

    Raises SourceError naming the file that cannot be read; ValueError as `combined` does.
    """
    _check_distinct([(os.fspath(path), qualname) for path, qualname in symbols])
    segments = [_segment(read_source(path), qualname, os.fspath(path)) for path, qualname in symbols]
    return _digest(segments, [qualname for _, qualname in symbols])


def source_segment(text: str, qualname: str) -> tuple[str, int, int] | None:
    """The lines of one definition: (text with LF and no newline at the end, first line, last line), 1-based.

    qualname: ``"f"``, ``"Class"``, ``"Class.method"`` or ``"CONSTANT"``. Whole lines count: from the first decorator to
    the last line of the body, with a comment at the end of that line, without comments below it. Definitions inside the
    if, try, with, for, while and match blocks of the module (or class body) count, those inside functions do not.

    Where a name is defined several times, the last ``def`` or ``class`` in file order is taken: the ``except`` branch
    of a ``try``, the ``else`` of an ``if``, the implementation below its overloads, a property's last accessor. Members
    are looked up in the last ``class`` statement only. An assignment ``NAME = ...`` counts only where no ``def`` or
    ``class`` has the name, so that ``f = compiled(f)`` does not hide the text of f.

    None where nothing of that name is defined. Raises SourceError where the text does not parse, and ValueError for a
    qualname of another form.
    """
    return _segment(text, qualname, "<source>")


def read_source(path: StrPath) -> str:
    """The text of a Python source file: UTF-8, with LF line ends and without a byte order mark. Raises SourceError."""
    name = os.fspath(path)
    try:
        data = _source_bytes(name)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SourceError(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _decoded(data)
    except UnicodeDecodeError as error:
        raise SourceError(name, _not_utf8(error)) from None


def _source_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except NotADirectoryError:
        # A package on sys.path may be a zip archive, whose members have the archive's path in front of theirs.
        from zipimport import ZipImportError, zipimporter

        try:
            return zipimporter(os.path.dirname(path)).get_data(path)
        except ZipImportError as error:
            raise OSError(error) from None


def parse_source(text: str, path: StrPath) -> ast.Module:
    """The syntax tree of a text that came from `path`. Raises SourceError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in upstream's text is not our caller's concern
            return ast.parse(text)
    except SyntaxError as error:
        raise SourceError(path, f"not valid Python: {error.msg} (line {error.lineno})") from None
    except (ValueError, RecursionError, MemoryError) as error:  # NUL or surrogates; nested too deep
        raise SourceError(path, f"not valid Python: {error or type(error).__name__}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 text (byte {error.object[error.start]:#04x} at offset {error.start})"


def _decoded(data: bytes) -> str:
    return _shared(_normalised(data.decode("utf-8")))


@functools.lru_cache(maxsize=TEXTS)
def _shared(text: str) -> str:
    """One object for equal texts: caches by text then hold each text once, hash it once and compare by identity."""
    return text


def _normalised(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _check_distinct(names: Sequence[object]) -> None:
    if not names:
        raise ValueError("no symbol to fingerprint; allowed is at least one")
    if len(set(names)) != len(names):
        raise ValueError(f"a symbol is named twice in {list(names)}; allowed is each once")


def _digest(segments: Sequence[tuple[str, int, int] | None], qualnames: Sequence[str]) -> str | None:
    found = [(qualname, segment[0]) for qualname, segment in zip(qualnames, segments) if segment is not None]
    if len(found) != len(segments):
        return None
    # Source that parses has no NUL, so the joint between two texts cannot be imitated by a text.
    return hashlib.sha256("\0".join(text for _, text in sorted(found)).encode()).hexdigest()


def _segment(text: str, qualname: str, path: str) -> tuple[str, int, int] | None:
    if not isinstance(qualname, str) or not all(part.isidentifier() for part in qualname.split(".")):
        raise ValueError(f"qualname={qualname!r}: allowed are names such as 'f', 'Class.method' or 'CONSTANT'")
    text = _normalised(text)
    try:
        span = _definitions(text).get(qualname)
    except SourceError as error:
        raise SourceError(path, error.reason) from None
    if span is None:
        return None
    # Not splitlines(): Python's own line count knows no other separator than LF.
    return "\n".join(text.split("\n")[span[0] - 1 : span[1]]), *span


@functools.lru_cache(maxsize=TEXTS)
def _definitions(text: str) -> Mapping[str, tuple[int, int]]:
    """Qualified name -> (first line, last line) of every definition that `source_segment` knows."""
    tree = parse_source(text, "<source>")
    defined: dict[str, tuple[int, int]] = {}
    assigned: dict[str, tuple[int, int]] = {}
    _collect(tree.body, "", text.split("\n"), defined, assigned)
    return {**assigned, **defined}


def _collect(
    body: Sequence[ast.AST],
    prefix: str,
    lines: Sequence[str],
    defined: dict[str, tuple[int, int]],
    assigned: dict[str, tuple[int, int]],
) -> None:
    for node in _statements(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = prefix + node.name
            defined[name] = (_first_line(node, lines), _last_line(node))
            if isinstance(node, ast.ClassDef):
                for names in (defined, assigned):
                    for member in [member for member in names if member.startswith(f"{name}.")]:
                        del names[member]
                _collect(node.body, f"{name}.", lines, defined, assigned)
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        assigned[prefix + part.id] = (node.lineno, _last_line(node))


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Statements of one scope in file order, those in nested blocks included. No recursion: elif chains nest deeply."""
    pending = list(reversed(body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            blocks = ("body", "cases", "handlers", "orelse", "finalbody")
            nested = [child for block in blocks for child in getattr(node, block, ()) if isinstance(child, ast.AST)]
            pending.extend(reversed(nested))


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: Sequence[str]) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if node.decorator_list:
        # The expression of a decorator may start below its "@", inside parentheses.
        while first > 1 and not lines[first - 1].lstrip().startswith("@"):
            first -= 1
    return first


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "ast.parse sets it on every statement"
    return node.end_lineno


@dataclass(frozen=True)
class Wheel:
    """A wheel held in memory; nothing of it is unpacked to disk or imported.

    name, version: as its METADATA says. members: names of its files, in the archive's order.
    """

    path: str
    name: str
    version: str
    members: tuple[str, ...]
    _archive: zipfile.ZipFile = field(repr=False, compare=False)

    def text(self, member: str) -> str:
        """The text of a member: UTF-8, LF line ends, no byte order mark; of a ``.py`` member it is known to parse.

        Raises WheelError where there is no such member, it is damaged, not UTF-8, or does not parse.
        """
        if member not in self.members:
            raise WheelError(self.path, f"it has no member {member!r}", "a member of the wheel, see `modules()`")
        text = _member_text(self.path, self._archive, member)
        if member.endswith(".py"):
            try:
                _definitions(text)
            except SourceError as error:
                raise WheelError(self.path, f"member {member!r} is {error.reason}", "source that parses") from None
        return text

    def modules(self) -> dict[str, str]:
        """Dotted name of every module that the wheel installs as source -> its member."""
        found: dict[str, str] = {}
        for member in self.members:
            stem, extension = os.path.splitext(member)
            parts = stem.split("/")
            package = parts[-1] == "__init__"
            parts = parts[:-1] if package else parts
            name = ".".join(parts)
            # Of x.py and x/__init__.py an import takes the package.
            if extension == ".py" and parts and all(map(str.isidentifier, parts)) and (package or name not in found):
                found[name] = member
        return found

    def member(self, module: str) -> str:
        """The member that holds a module. Raises WheelError where the wheel has no such module."""
        member = self.modules().get(module)
        if member is None:
            raise WheelError(self.path, f"it has no module {module!r}", "a module of the wheel, see `modules()`")
        return member


def read_wheel(path: StrPath, distribution: str = "megatron-core") -> Wheel:
    """Open a wheel of `distribution` for reading, after checking that it is safe to read.

    Raises SettingsError for a `path` of another type, and WheelError, with the file's name and what is allowed, for

    - a file that is missing, a folder, unreadable, larger than MAX_WHEEL_BYTES, not a zip archive, or damaged;
    - more than MAX_MEMBERS members, a member that would unpack to more than MAX_MEMBER_BYTES, or all of them to more
      than MAX_TOTAL_BYTES; an encrypted member; a name that is absolute, leaves the folder or occurs twice;
    - METADATA that is missing, ambiguous, without a name or a version, or of another distribution.
    """
    import io
    import zipfile

    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str):
        raise SettingsError(f"path is {shown(path)}; allowed is the path of a wheel, a str or os.PathLike[str]")
    try:
        # An archive comes from outside, and what zipfile raises for bad ones is not a closed list.
        archive = zipfile.ZipFile(io.BytesIO(_wheel_bytes(path)))
    except OverlayError:
        raise
    except Exception as error:
        raise WheelError(
            path, f"not a readable zip archive ({error})", "a wheel (.whl), which is a zip archive"
        ) from None
    members = _checked_members(path, archive.infolist())
    name, version = _metadata(path, archive, members)
    if _canonical(name) != _canonical(distribution):
        raise WheelError(path, f"a wheel of {name!r}", f"a wheel of {distribution}")
    return Wheel(path, name, version, members, archive)


def _wheel_bytes(path: str) -> bytes:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise WheelError(path, kind, "a wheel file (.whl)")
        if status.st_size > MAX_WHEEL_BYTES:
            raise WheelError(path, f"a file of {status.st_size} bytes", f"at most {MAX_WHEEL_BYTES} bytes")
        with open(path, "rb") as file:
            return file.read(MAX_WHEEL_BYTES)
    except OSError as error:
        raise WheelError(path, f"cannot be read: {error.strerror or error}", "a readable wheel file (.whl)") from None


def _checked_members(path: str, infos: Sequence[zipfile.ZipInfo]) -> tuple[str, ...]:
    if len(infos) > MAX_MEMBERS:
        raise WheelError(path, f"{len(infos)} members", f"at most {MAX_MEMBERS}")
    names: dict[str, None] = {}
    total = 0
    for info in infos:
        name = info.orig_filename  # zipfile cuts `filename` at a NUL
        folder = name.endswith("/")
        parts = name.removesuffix("/").split("/")
        if not all(part not in ("", ".", "..") and not set(part) & set("\\:\0") for part in parts):
            raise WheelError(path, f"member name {name!r}", "relative names with '/' that stay inside the wheel")
        if name.removesuffix("/") in names:
            raise WheelError(path, f"member {name!r} occurs twice", "each name once")
        names[name.removesuffix("/")] = None
        if info.flag_bits & 0x1:
            raise WheelError(path, f"member {name!r} is encrypted", "members without encryption")
        if info.file_size > MAX_MEMBER_BYTES:
            raise WheelError(path, f"member {name!r} unpacks to {info.file_size} bytes", f"at most {MAX_MEMBER_BYTES}")
        total += info.file_size
        if folder:
            del names[name.removesuffix("/")]
    if total > MAX_TOTAL_BYTES:
        raise WheelError(path, f"its members unpack to {total} bytes", f"at most {MAX_TOTAL_BYTES} together")
    return tuple(names)


def _member_text(path: str, archive: zipfile.ZipFile, member: str) -> str:
    size = archive.getinfo(member).file_size
    if size > MAX_TEXT_BYTES:
        raise WheelError(path, f"member {member!r} has {size} bytes", f"text of at most {MAX_TEXT_BYTES}")
    try:
        # Unpacks no more than the declared size, which was checked; a false size fails the checksum.
        return _decoded(archive.read(member))
    except UnicodeDecodeError as error:
        raise WheelError(path, f"member {member!r} is {_not_utf8(error)}", "UTF-8 text") from None
    except Exception as error:  # see read_wheel
        raise WheelError(path, f"member {member!r} cannot be unpacked ({error})", "an intact wheel") from None


def _metadata(path: str, archive: zipfile.ZipFile, members: Sequence[str]) -> tuple[str, str]:
    from email.parser import HeaderParser

    found = [member for member in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", member)]
    if len(found) != 1:
        raise WheelError(path, f"{len(found)} members *.dist-info/METADATA", "exactly one, as every wheel has")
    headers = HeaderParser().parsestr(_member_text(path, archive, found[0]))
    values = []
    for header in ("Name", "Version"):
        given = [str(value).strip() for value in headers.get_all(header, [])]
        if len(given) != 1 or not given[0]:
            raise WheelError(path, f"{found[0]} has {header}: {given}", f"exactly one {header}, not empty")
        values.append(given[0])
    return values[0], values[1]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
