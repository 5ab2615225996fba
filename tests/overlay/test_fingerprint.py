from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import io
import json
import os
import random
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest

import mcore_patches
from mcore_patches.overlay import fingerprint
from mcore_patches.overlay.fingerprint import (
    SourceError,
    WheelError,
    combined,
    fingerprint_file,
    fingerprint_files,
    fingerprint_source,
    read_source,
    read_wheel,
    source_segment,
)
from tests.overlay.isolation import call


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


SOURCE = '''\
"""Docstring."""
import functools

LIMIT: int = 3
TABLE = {
    "a": 1,
}  # closing remark
first, (second, *rest) = 1, (2, 3)
bare: int
TABLE["b"] = 2
LIMIT += 1


@functools.cache
@functools.wraps(
    print
)
def decorated(x):
    # inside
    return x  # at the end
# below


@(
    functools.cache
)
def parenthesised(): return 1


async def waiting():
    def inner():
        pass
    return """
text at column 0
"""


class Outer(object):
    """Doc."""

    SIZE = 4

    @property
    def value(self):
        return 1

    @value.setter
    def value(self, new):
        pass

    class Inner:
        def method(self): return (
            2
        )

if LIMIT:
    def chosen(): return "if"
elif TABLE:
    def chosen(): return "elif"
else:
    def chosen(): return "else"

try:
    import torch
    def attempted(): return "try"
except ImportError:
    def attempted(): return "except"
finally:
    CLEANED = True

with open(__file__) as handle:
    for _ in range(1):
        while True:
            match LIMIT:
                case 3:
                    def buried(): return 5
            break
'''


@pytest.mark.parametrize(
    ("qualname", "first", "last"),
    [
        ("LIMIT", 4, 4),
        ("TABLE", 5, 7),
        ("first", 8, 8),
        ("rest", 8, 8),
        ("decorated", 14, 20),
        ("parenthesised", 24, 27),
        ("waiting", 30, 35),
        ("Outer", 38, 54),
        ("Outer.SIZE", 41, 41),
        ("Outer.value", 47, 49),
        ("Outer.Inner", 51, 54),
        ("Outer.Inner.method", 52, 54),
        ("chosen", 61, 61),
        ("attempted", 67, 67),
        ("CLEANED", 69, 69),
        ("buried", 76, 76),
    ],
)
def test_segments(qualname, first, last):
    lines = SOURCE.split("\n")[first - 1 : last]
    assert source_segment(SOURCE, qualname) == ("\n".join(lines), first, last)
    assert fingerprint_source(SOURCE, qualname) == sha("\n".join(lines))


@pytest.mark.parametrize(
    "qualname", ["missing", "Outer.missing", "Outer.Inner.value", "inner", "waiting.inner", "bare", "torch", "b"]
)
def test_names_without_a_definition(qualname):
    assert source_segment(SOURCE, qualname) is None
    assert fingerprint_source(SOURCE, qualname) is None
    assert combined(SOURCE, ["decorated", qualname]) is None


@pytest.mark.parametrize("qualname", ["", "a.", "f.<locals>.g", "a b", None, ("f",)])
def test_names_of_another_form(qualname):
    with pytest.raises(ValueError, match="allowed are names such as"):
        fingerprint_source(SOURCE, qualname)


def test_the_last_definition_counts():
    text = "@overload\ndef f(x: int): ...\n@overload\ndef f(x: str): ...\ndef f(x): return x\n"
    assert source_segment(text, "f") == ("def f(x): return x", 5, 5)


def test_an_assignment_does_not_hide_a_definition():
    text = (
        "def f(): return 1\nf = compiled(f)\ntry:\n    class A:\n        def m(self): pass\nexcept E:\n    A = None\n"
    )
    assert source_segment(text, "f") == ("def f(): return 1", 1, 1)
    assert source_segment(text, "A.m") == ("        def m(self): pass", 5, 5)


def test_members_come_from_the_last_class():
    text = "if X:\n  class A:\n    def old(self): pass\n    LEVEL = 1\nelse:\n  class A:\n    def new(self): pass\n"
    assert source_segment(text, "A.old") is None
    assert source_segment(text, "A.LEVEL") is None
    assert source_segment(text, "A.new") == ("    def new(self): pass", 7, 7)


def test_the_last_assignment_counts():
    assert source_segment("A = 1\nB = A = 2\n", "A") == ("B = A = 2", 2, 2)


def test_what_a_fingerprint_depends_on():
    reference = fingerprint_source("@deco\ndef f():\n    return 1\n", "f")
    assert fingerprint_source("import x\n\n\n@deco\ndef f():\n    return 1\n\n\ny = 2", "f") == reference
    for changed in (
        "@other\ndef f():\n    return 1\n",
        "@deco\ndef f():\n    return 1 \n",
        "@deco\ndef f():\n\n    return 1\n",
    ):
        assert fingerprint_source(changed, "f") not in (None, reference)


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_line_ends_do_not_matter(newline, tmp_path):
    path = tmp_path / "module.py"
    path.write_bytes(SOURCE.replace("\n", newline).encode())
    for qualname in ("decorated", "waiting", "Outer.Inner.method", "buried"):
        assert fingerprint_file(path, qualname) == fingerprint_source(SOURCE, qualname)
        assert source_segment(SOURCE.replace("\n", newline), qualname) == source_segment(SOURCE, qualname)


def test_a_byte_order_mark_does_not_matter(tmp_path):
    path = tmp_path / "module.py"
    path.write_bytes(b"\xef\xbb\xbf" + b"def f(): return 1\n")
    assert fingerprint_file(path, "f") == sha("def f(): return 1") == fingerprint_source("\ufeffdef f(): return 1", "f")


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_only_line_feeds_count_as_lines(character):
    text = f"TEXT = '''a{character}b'''\n\n\ndef f():\n    return 1\n"
    assert source_segment(text, "f") == ("def f():\n    return 1", 4, 5)
    assert source_segment(text, "TEXT") == (f"TEXT = '''a{character}b'''", 1, 1)


def test_a_page_break_between_definitions():
    assert source_segment("X = 1\n\x0c\ndef f():\n    pass\n", "f") == ("def f():\n    pass", 3, 4)


def test_inspect_getsource_differs_by_the_newline_only(tmp_path):
    path = tmp_path / "shown.py"
    path.write_text("import functools\n\n\n@functools.cache\ndef f(x):\n    return x\n\n\ny = 1\n")
    spec = importlib.util.spec_from_file_location("shown", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shown = inspect.getsource(module.f)
    assert shown.endswith("\n")
    assert fingerprint_file(path, "f") == sha(shown.removesuffix("\n")) != sha(shown)


def test_the_file_is_read_and_not_what_inspect_believes(tmp_path):
    path = tmp_path / "claimed.py"
    path.write_text("def f():\n    return 'on disk'\n")
    scope: dict = {}
    exec(compile("def f():\n    return 'in memory'\n", str(path), "exec"), scope)
    assert fingerprint_file(path, "f") == sha(inspect.getsource(scope["f"]).rstrip("\n"))
    path.write_text("def f():\n    return 'changed'\n")
    assert fingerprint_file(path, "f") == sha("def f():\n    return 'changed'")


def test_combined_of_one_is_the_fingerprint():
    assert combined(SOURCE, ["decorated"]) == fingerprint_source(SOURCE, "decorated")


def test_combined_covers_every_symbol_in_any_order():
    text = "def f(): return g() + LIMIT\ndef g(): return 1\nLIMIT = 2\n"
    names = ["f", "g", "LIMIT"]
    reference = combined(text, names)
    assert (
        reference == combined(text, tuple(reversed(names))) == combined(text.replace("\ndef g", "\n\n\ndef g"), names)
    )
    changed = {
        combined(text.replace(*change), names) for change in (("g()", "g( )"), ("return 1", "return 3"), ("= 2", "= 4"))
    }
    assert len(changed - {reference, None}) == 3
    assert combined(text, ["f", "g"]) != reference


def test_combined_knows_where_one_symbol_ends():
    assert combined("a = c\nif c:\n b = 1\n", ["a", "b"]) != combined("a = c \nb = 1\n", ["a", "b"])


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "at least one"), (["f", "f"], "each once"), ("f", "a sequence of names such as \\('f',\\)")],
    ids=["empty", "twice", "string"],
)
def test_combined_refuses_what_must_be_a_mistake(names, message):
    with pytest.raises(ValueError, match=message):
        combined("def f(): pass", names)


def test_symbols_of_several_files(tmp_path):
    (tmp_path / "one.py").write_text("def f(): return 1\n")
    (tmp_path / "two.py").write_text("def g(): return 2\r\n")
    symbols = [(tmp_path / "one.py", "f"), (str(tmp_path / "two.py"), "g")]
    assert fingerprint_files(symbols) == combined("def f(): return 1\ndef g(): return 2\n", ["f", "g"])
    assert fingerprint_files([*symbols, (tmp_path / "one.py", "g")]) is None
    with pytest.raises(ValueError, match="each once"):
        fingerprint_files([*symbols, (str(tmp_path / "one.py"), "f")])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x = '\xff'\n", "not UTF-8 text (byte 0xff at offset 5)"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe4'\n", "not UTF-8 text (byte 0xe4 at offset 31)"),
        (b"def f(:\n", "not valid Python: "),
        (b"def f():\n    pass\n  x = 1\n", "not valid Python: unindent does not match"),
        (b"x = 1\0\n", "not valid Python: source code"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "not valid Python: "),
        (b"x = " + b"-" * 200_000 + b"1", "not valid Python: "),
        (b"x = a" + b".b" * 200_000, "not valid Python: "),
    ],
    ids=["not-utf8", "latin-1", "syntax", "indentation", "nul", "parentheses", "operators", "attributes"],
)
def test_files_that_are_not_source(tmp_path, data, reason):
    path = tmp_path / "module.py"
    path.write_bytes(data)
    with pytest.raises(SourceError) as caught:
        fingerprint_file(path, "f")
    assert caught.value.path == str(path)
    assert caught.value.reason.startswith(reason)
    assert str(caught.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(SourceError, match="cannot be read: No such file or directory"):
        read_source(tmp_path / "missing.py")
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        read_source(tmp_path)
    with pytest.raises(SourceError, match="cannot be read: embedded null"):
        read_source("nul\0.py")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fingerprint, "open", refuse, raising=False)
    with pytest.raises(SourceError, match="cannot be read: Permission denied"):
        read_source(tmp_path / "module.py")


def test_text_without_a_file_is_named_so():
    with pytest.raises(SourceError, match="<source>: not valid Python"):
        fingerprint_source("def", "f")
    with pytest.raises(SourceError, match="<source>: not valid Python"):
        fingerprint_source("x = '\udc80'", "x")


@pytest.mark.filterwarnings("error")
def test_warnings_about_upstreams_text_are_not_the_callers():
    assert fingerprint_source("def f(): return '\\d'\n", "f") == sha("def f(): return '\\d'")


def test_a_thousand_branches():
    text = "if x == 0:\n    def f(): return 0\n" + "".join(
        f"elif x == {n}:\n    def f(): return {n}\n" for n in range(1, 200)
    )
    assert source_segment(text, "f") == ("    def f(): return 199", 400, 400)


def interpreters() -> list[str]:
    """The running interpreter and those of Python 3.10 to 3.13 that can be found."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for minor in range(10, 14):
        candidates = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        other = str(candidates[-1]) if candidates else shutil.which(f"python3.{minor}")
        if other is not None:
            found.setdefault(f"3.{minor}", other)
    return [pytest.param(python, id=f"python{version}") for version, python in found.items()]


@pytest.mark.parametrize("python", interpreters())
def test_the_same_on_every_python(fresh_python, releases, python):
    """All definitions of a file of constructs and of two real ones, digested by another interpreter and by this one."""
    real = releases / "0.19.2/megatron/core/transformer/experimental_attention_variant"
    texts = [SOURCE, read_source(real / "dsa.py"), read_source(real / "ops/tilelang_dsa.py")]
    # The package itself needs a newer Python than some of these; the module does not.
    code = """
import json, sys, types
root, texts = json.load(sys.stdin)
for name, folder in (("mcore_patches", "mcore_patches"), ("mcore_patches.overlay", "mcore_patches/overlay")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + "/" + folder]
from mcore_patches.overlay import fingerprint
digests = [{n: fingerprint.fingerprint_source(t, n) for n in fingerprint._definitions(t)} for t in texts]
print(json.dumps([[list(sys.version_info[:2]), fingerprint.__file__], digests]))
"""
    root = str(Path(fingerprint.__file__).parents[2])
    (version, file), there = fresh_python(code, python=python, text=json.dumps([root, texts]))
    assert (tuple(version) == sys.version_info[:2]) == (python == sys.executable)
    assert Path(file) == Path(fingerprint.__file__)
    here = [{name: fingerprint_source(text, name) for name in fingerprint._definitions(text)} for text in texts]
    assert [len(names) >= 17 for names in here] == [True, True, True]
    assert None not in [digest for names in here for digest in names.values()]
    assert there == here


# Wheels

METADATA = (
    "Metadata-Version: 2.4\nName: megatron-core\nVersion: 0.19.2\nSummary: a\n continued\n\nVersion: in the text\n"
)
INFO = "megatron_core-0.19.2.dist-info/METADATA"


def wheel_bytes(
    *members: tuple[str, bytes | str], metadata: str | None = METADATA, method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
        if metadata is not None:
            archive.writestr(INFO, metadata)
    return buffer.getvalue()


@pytest.fixture
def wheel_file(tmp_path):
    def write(data: bytes) -> Path:
        path = tmp_path / "megatron_core-0.19.2-py3-none-any.whl"
        path.write_bytes(data)
        return path

    return write


def test_a_wheel(wheel_file):
    members = [
        ("megatron/core/", b""),
        ("megatron/core/__init__.py", "raise RuntimeError('was executed')\n"),
        ("megatron/core/a.py", b"\xef\xbb\xbfdef f():\r\n    return 1\r\n"),
        ("megatron/core/both.py", ""),
        ("megatron/core/both/__init__.py", ""),
        ("megatron/core/other/__init__.py", ""),
        ("megatron/core/other.py", ""),
        ("megatron/core/lib.so", b"\x7fELF\xff"),
        ("megatron/core/not-a-name.py", ""),
        ("__init__.py", ""),
    ]
    path = wheel_file(wheel_bytes(*members))
    wheel = read_wheel(path)
    assert (wheel.name, wheel.version, wheel.path) == ("megatron-core", "0.19.2", str(path))
    assert set(wheel.members) == {INFO, *(name for name, _ in members if not name.endswith("/"))}
    assert wheel.modules() == {
        "megatron.core": "megatron/core/__init__.py",
        "megatron.core.a": "megatron/core/a.py",
        "megatron.core.both": "megatron/core/both/__init__.py",
        "megatron.core.other": "megatron/core/other/__init__.py",
    }
    assert wheel.text(wheel.member("megatron.core.a")) == "def f():\n    return 1\n"
    assert fingerprint_source(wheel.text("megatron/core/a.py"), "f") == sha("def f():\n    return 1")
    assert "Summary" in wheel.text(INFO)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2"])
def test_the_wheel_of_a_release(releases, wheel_file, release):
    """Its sources, packed again: the same modules, and the same fingerprints as from the files."""
    root = releases / release
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in (*root.glob("megatron/core/**/*.py"), *root.glob("*.dist-info/METADATA")):
            archive.write(file, file.relative_to(root).as_posix())
    wheel = read_wheel(wheel_file(buffer.getvalue()))
    assert wheel.version == release
    modules = wheel.modules()
    assert len(modules) > 250
    for module, name in (
        ("megatron.core.transformer.transformer_config", "TransformerConfig"),
        ("megatron.core.utils", "divide"),
    ):
        digest = fingerprint_source(wheel.text(modules[module]), name)
        assert digest is not None
        assert digest == fingerprint_file(root / modules[module], name)
    tilelang = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa"
    assert (tilelang in modules) == (release >= "0.19")


def patched_header(data: bytes, offset_in_entry: int, value: bytes) -> bytes:
    """The archive with some bytes of the first entry of its central directory replaced."""
    start = data.index(b"PK\x01\x02") + offset_in_entry
    return data[:start] + value + data[start + len(value) :]


PLAIN = ("megatron/core/a.py", "def f(): pass\n")

HOSTILE = {
    "empty": (b"", "not a readable zip archive"),
    "text": (b"Version: 0.19.2\n" * 50, "not a readable zip archive"),
    "truncated": (wheel_bytes(PLAIN)[:-30], "not a readable zip archive"),
    "no-metadata": (wheel_bytes(PLAIN, metadata=None), "0 members \\*.dist-info/METADATA"),
    "two-metadata": (wheel_bytes(("other-1.dist-info/METADATA", METADATA)), "2 members \\*.dist-info/METADATA"),
    "metadata-below": (wheel_bytes((f"deeper/{INFO}", METADATA), metadata=None), "0 members"),
    "no-version": (wheel_bytes(metadata="Name: megatron-core\n\nVersion: 0.19.2\n"), "has Version: \\[\\]"),
    "two-versions": (wheel_bytes(metadata=METADATA.replace("Summary", "Version")), "exactly one Version"),
    "empty-name": (wheel_bytes(metadata="Name: \nVersion: 0.19.2\n"), "has Name: \\[''\\]"),
    "other-project": (
        wheel_bytes(metadata=METADATA.replace("megatron-core", "megatron-fsdp")),
        "a wheel of 'megatron-fsdp'",
    ),
    "metadata-not-utf8": (wheel_bytes((INFO, b"Name: \xff\n"), metadata=None), "METADATA' is not UTF-8"),
    "parent-folder": (wheel_bytes(("../outside.py", "")), "member name '../outside.py'"),
    "inner-parent-folder": (wheel_bytes(("a/../../b.py", "")), "member name 'a/../../b.py'"),
    "absolute": (wheel_bytes(("/etc/passwd", "")), "member name '/etc/passwd'"),
    "drive": (wheel_bytes(("c:/a.py", "")), "member name 'c:/a.py'"),
    "backslash": (wheel_bytes(("a\\..\\b.py", "")), "member name"),
    "dot": (wheel_bytes(("./a.py", "")), "member name './a.py'"),
    "nul-in-name": (
        wheel_bytes(("a_py/b.py", "")).replace(b"a_py/b.py", b"a\0py/b.py"),
        "member name 'a\\\\x00py/b.py'",
    ),
    "file-and-folder": (wheel_bytes(("a", ""), ("a/", "")), "'a/' occurs twice"),
    "encrypted": (patched_header(wheel_bytes(PLAIN), 8, b"\x01\x00"), "is encrypted"),
    "declared-bomb": (
        patched_header(wheel_bytes(PLAIN), 24, struct.pack("<I", 1 << 31)),
        "unpacks to 2147483648 bytes",
    ),
    "bomb": (wheel_bytes(("a.bin", bytes(fingerprint.MAX_MEMBER_BYTES + 1))), "unpacks to 16777217 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_wheels(wheel_file, case):
    data, message = HOSTILE[case]
    path = wheel_file(data)
    with pytest.raises(WheelError, match=message) as caught:
        read_wheel(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "Allowed: " in str(caught.value)
    assert list(path.parent.iterdir()) == [path]


def test_duplicate_members(wheel_file):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = wheel_bytes(PLAIN, PLAIN)
    with pytest.raises(WheelError, match=r"'megatron/core/a.py' occurs twice"):
        read_wheel(wheel_file(data))


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_WHEEL_BYTES", 100, "a file of [0-9]+ bytes. Allowed: at most 100 bytes"),
        ("MAX_MEMBERS", 1, "2 members. Allowed: at most 1"),
        ("MAX_TOTAL_BYTES", 50, "its members unpack to [0-9]+ bytes. Allowed: at most 50 together"),
        ("MAX_MEMBER_BYTES", 100, "METADATA' unpacks to [0-9]+ bytes. Allowed: at most 100"),
        ("MAX_TEXT_BYTES", 100, "METADATA' has [0-9]+ bytes. Allowed: text of at most 100"),
    ],
)
def test_limits(wheel_file, monkeypatch, limit, value, message):
    path = wheel_file(wheel_bytes(PLAIN))
    read_wheel(path)
    monkeypatch.setattr(fingerprint, limit, value)
    with pytest.raises(WheelError, match=message):
        read_wheel(path)


def test_paths_that_are_no_wheels(tmp_path, monkeypatch):
    with pytest.raises(WheelError, match="cannot be read: No such file or directory"):
        read_wheel(tmp_path / "missing.whl")
    with pytest.raises(WheelError, match=f"{tmp_path}: a folder. Allowed: a wheel file"):
        read_wheel(tmp_path)
    os.mkfifo(tmp_path / "pipe.whl")
    with pytest.raises(WheelError, match="not a regular file"):
        read_wheel(tmp_path / "pipe.whl")
    path = tmp_path / "unreadable.whl"
    path.write_bytes(wheel_bytes(PLAIN))

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fingerprint, "open", refuse, raising=False)
    with pytest.raises(WheelError, match="cannot be read: Permission denied"):
        read_wheel(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = '\xff'\n", "member 'megatron/core/a.py' is not UTF-8 text \\(byte 0xff at offset 5\\)"),
        (b"def f(:\n", "member 'megatron/core/a.py' is not valid Python: "),
        (b"x = 1\0\n", "member 'megatron/core/a.py' is not valid Python: "),
    ],
    ids=["not-utf8", "syntax", "nul"],
)
def test_members_that_are_not_source(wheel_file, data, message):
    wheel = read_wheel(wheel_file(wheel_bytes(("megatron/core/a.py", data))))
    with pytest.raises(WheelError, match=message):
        wheel.text("megatron/core/a.py")


def test_members_that_are_damaged(wheel_file):
    data = wheel_bytes(PLAIN, method=zipfile.ZIP_STORED)
    wheel = read_wheel(wheel_file(data.replace(b"def f(): pass", b"def g(): pass")))
    with pytest.raises(WheelError, match="cannot be unpacked \\(Bad CRC-32"):
        wheel.text("megatron/core/a.py")
    shorter = patched_header(wheel_bytes(PLAIN), 24, struct.pack("<I", 5))
    with pytest.raises(WheelError, match="cannot be unpacked"):
        read_wheel(wheel_file(shorter)).text("megatron/core/a.py")
    method = patched_header(wheel_bytes(PLAIN), 10, struct.pack("<H", 99))
    with pytest.raises(WheelError, match="cannot be unpacked"):
        read_wheel(wheel_file(method)).text("megatron/core/a.py")


def test_members_that_are_absent(wheel_file):
    wheel = read_wheel(wheel_file(wheel_bytes(PLAIN)))
    with pytest.raises(WheelError, match=r"has no member 'megatron/core/b.py'"):
        wheel.text("megatron/core/b.py")
    with pytest.raises(WheelError, match=r"has no module 'megatron.core.b'"):
        wheel.member("megatron.core.b")


def test_random_damage_gives_wheel_errors_only(wheel_file):
    seed = random.SystemRandom().randrange(1 << 32)
    source = random.Random(seed)
    intact = wheel_bytes(PLAIN, ("megatron/core/b.py", "X = 1\n" * 50))
    outcomes = {"read": 0, "refused": 0}
    for _ in range(200):
        data = bytearray(intact)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        try:
            wheel = read_wheel(wheel_file(bytes(data[: source.choice([len(data), source.randrange(len(data))])])))
            for member in wheel.members:
                wheel.text(member)
            outcomes["read"] += 1
        except WheelError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert outcomes["refused"] > 50, (seed, outcomes)


def test_importing_it_imports_little(fresh_python):
    modules = fresh_python("import json, sys, mcore_patches.overlay.fingerprint; print(json.dumps(list(sys.modules)))")
    assert "mcore_patches.overlay.fingerprint" in modules
    assert {"torch", "megatron", "packaging", "wrapt", "importlib.metadata", "zipfile", "email"}.isdisjoint(modules)


def test_a_second_status_of_all_patches_parses_no_text_again():
    call(f"{__name__}:status_twice", {}, "before-0.19.2")


def status_twice():
    mcore_patches.status()
    parsed = []
    parse = ast.parse
    ast.parse = lambda text, *args, **options: parsed.append(text) or parse(text, *args, **options)
    mcore_patches.status()
    # The numbers of the release are read each time; that file is small.
    assert [text.splitlines()[:3] for text in parsed if "MAJOR" not in text] == []
