from __future__ import annotations

import importlib
import json
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mcore_patches.overlay.versions import Installed, Releases, VersionError, installed, parse

VALID = [
    # text, release, public, local, prerelease
    ("0.19.2", (0, 19, 2), "0.19.2", None, False),
    ("0.20.0+abc1234", (0, 20, 0), "0.20.0", "abc1234", False),
    ("0.19.0rc1+abc", (0, 19, 0), "0.19.0rc1", "abc", True),
    ("0.19.0rc1", (0, 19, 0), "0.19.0rc1", None, True),
    ("0.19.0.rc1", (0, 19, 0), "0.19.0rc1", None, True),
    ("0.19.0-rc-1", (0, 19, 0), "0.19.0rc1", None, True),
    ("0.20.0a0", (0, 20, 0), "0.20.0a0", None, True),
    ("0.20.0.dev20260822", (0, 20, 0), "0.20.0.dev20260822", None, True),
    ("0.19.2.post1", (0, 19, 2), "0.19.2.post1", None, False),
    ("0.19.2-1", (0, 19, 2), "0.19.2.post1", None, False),
    ("0.19.2.post1.dev3", (0, 19, 2), "0.19.2.post1.dev3", None, True),
    ("v0.19.2", (0, 19, 2), "0.19.2", None, False),
    (" 0.19.2\n", (0, 19, 2), "0.19.2", None, False),
    ("0.19", (0, 19, 0), "0.19", None, False),
    ("1", (1, 0, 0), "1", None, False),
    ("0.19.2.1", (0, 19, 2), "0.19.2.1", None, False),
    ("00.019.2", (0, 19, 2), "0.19.2", None, False),
    ("0.20.0+ABC-1_x", (0, 20, 0), "0.20.0", "abc.1.x", False),
    ("0.20.0+7e3a901.dirty", (0, 20, 0), "0.20.0", "7e3a901.dirty", False),
]
PROSE = "is not a PEP 440 version"
INVALID = [
    ("core_v0.15.0rc7", PROSE),
    ("0.20.0-dirty", PROSE),
    ("0.20.0.main", PROSE),
    ("0.20.0+", PROSE),
    ("0.20.0+abc+def", PROSE),
    ("", PROSE),
    ("unknown", PROSE),
    ("0.19.x", PROSE),
    ("0.19.2 final", PROSE),
    ("-1.2", PROSE),
    ("٠.١٩.٢", PROSE),
    ("0.20.0+\u017f", PROSE),
    ("0.20.0+\u212a", PROSE),
    ("0." + "9" * 5000, PROSE),
    ("1!0.19.0", "has the epoch 1"),
    (None, "is of type NoneType"),
    (0.19, "is of type float"),
    ((0, 19, 2), "is of type tuple"),
]


@pytest.mark.parametrize(("text", "release", "public", "local", "prerelease"), VALID, ids=[row[0] for row in VALID])
def test_parse(text, release, public, local, prerelease):
    parsed = parse(text)
    assert (parsed.text, parsed.release, parsed.public) == (text, release, public)
    assert (parsed.local, parsed.prerelease) == (local, prerelease)


@pytest.mark.parametrize(("text", "reason"), INVALID, ids=[repr(row[0])[:20] for row in INVALID])
def test_parse_says_what_is_wrong(text, reason):
    with pytest.raises(VersionError) as caught:
        parse(text)
    assert caught.value.text == text
    assert str(caught.value).startswith(f"version {text!r} {reason}. Allowed: PEP 440 versions without an epoch")


PARSE_ALL = """
import json, sys, packaging
from mcore_patches.overlay.versions import VersionError, parse
def outcome(text):
    try:
        parsed = parse(text)
    except VersionError as error:
        return str(error)
    return [parsed.text, parsed.release, parsed.public, parsed.local, parsed.prerelease]
print(json.dumps([packaging.__version__, [outcome(text) for text in json.load(sys.stdin)]]))
"""


def random_versions(seed: int) -> list[str]:
    source = random.Random(seed)
    pieces = [
        "0",
        "19",
        "2",
        ".",
        ".",
        "-",
        "_",
        "+",
        "rc",
        "a",
        "b",
        "post",
        "dev",
        "alpha",
        "preview",
        "r",
        "v",
        "!",
        " ",
    ]
    noise = [
        "main",
        "dirty",
        "abc1234",
        "\u0661",
        "\x00",
        "\x1c",
        "\x0b",
        "\xa0",
        "\u017f",
        "\u212a",
        "é",
        "00",
        "C",
        "RC",
    ]
    texts = []
    for _ in range(1500):
        body = [source.choice(pieces if source.random() < 0.9 else noise) for _ in range(source.randint(0, 5))]
        texts.append(source.choice(["0.19.2", "0.20.0", "1!2", ""]) + "".join(body))
    return texts


def test_old_and_new_packaging_agree(fresh_python, packaging_24_2):
    """The table and a thousand random texts, under packaging 24.2 and under the one that is installed."""
    seed = random.SystemRandom().randrange(1 << 32)
    texts = [row[0] for row in VALID + INVALID if row[0] is None or isinstance(row[0], str)] + random_versions(seed)
    old_version, old = fresh_python(PARSE_ALL, path=[packaging_24_2], text=json.dumps(texts))
    new_version, new = fresh_python(PARSE_ALL, text=json.dumps(texts))
    assert old_version == "24.2" != new_version
    differing = [(text, a, b) for text, a, b in zip(texts, old, new, strict=True) if a != b]
    assert differing == [], f"seed {seed}"
    table = [[text, list(release), public, local, pre] for text, release, public, local, pre in VALID]
    assert old[: len(VALID)] == table
    assert {type(outcome) for outcome in old[len(VALID) : len(VALID) + 12]} == {str}
    assert 100 < sum(isinstance(outcome, list) for outcome in old) < len(texts) - 100, (
        f"seed {seed}: texts of one kind only"
    )


# Ranges


@pytest.mark.parametrize(
    ("release", "inside"),
    [
        ((0, 18, 2), False),
        ((0, 18, 99), False),
        ((0, 19, 0), True),
        ((0, 19), True),
        ((0, 19, 2), True),
        ((0, 19, 99), True),
        ((0, 20, 0), False),
        ((0, 20), False),
        ((1,), False),
        (None, False),
    ],
)
def test_ranges_are_half_open(release, inside):
    for bounds in (Releases((0, 19, 0), (0, 20)), Releases((0, 19), (0, 20, 0)), Releases.parse("0.19.0", "0.20")):
        assert (release in bounds) is inside


@pytest.mark.parametrize("text", ["0.19.0rc1", "0.19.0.dev1", "0.19.2.post1", "0.19.2+abc"])
def test_ranges_take_pre_and_post_releases_by_their_numbers(text):
    assert parse(text).release in Releases.parse("0.19.0", "0.20")
    assert parse(text).release not in Releases.parse("0.16.1", "0.19")


def test_open_ranges():
    bounds = Releases.parse("0.19.0", None)
    assert bounds == Releases((0, 19, 0), None)
    assert (99, 0, 0) in bounds
    assert (0, 18, 9) not in bounds
    assert None not in bounds


def test_ranges_as_text():
    assert str(Releases.parse("0.19.0", "0.20")) == ">=0.19.0, <0.20"
    assert str(Releases.parse("0.19.0", None)) == ">=0.19.0"


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        ((), None, "Releases.start is \\(\\)"),
        ("0.19", None, "Releases.start is '0.19'"),
        (None, (0, 20), "Releases.start is None"),
        ([0, 19], None, "Releases.start is \\[0, 19\\]"),
        ((0, -1), None, "Releases.start is \\(0, -1\\)"),
        ((0, True), None, "Releases.start is \\(0, True\\)"),
        ((0, 19), (0, "20"), "Releases.stop is \\(0, '20'\\)"),
        ((0, 19), (0, 19, 0), "stop \\(0, 19, 0\\) must be above start \\(0, 19\\)"),
        ((0, 20), (0, 19), "must be above"),
    ],
)
def test_bad_ranges(start, stop, message):
    with pytest.raises(ValueError, match=message):
        Releases(start, stop)


@pytest.mark.parametrize("text", ["", "0.19.0rc1", "0.19.", "v0.19", "0.19.*", "٠.١٩", " 0.19", None, 0.19])
def test_bad_texts_of_ranges(text):
    with pytest.raises(ValueError, match=r"Releases\.parse: start="):
        Releases.parse(text, None)


# Installations. Most use a small package of their own name, so that nothing depends on what is installed or imported.


class Site:
    """A folder of sys.path with a package `stub.core`, and distributions that may or may not own it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def info(self) -> Path:
        return self.folder / "stub/core/package_info.py"

    def package(self, text: str | None, folder: str = "") -> None:
        core = self.folder / folder / "stub/core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_text("raise RuntimeError('was executed')")
        if text is not None:
            (core / "package_info.py").write_text(text)
        importlib.invalidate_caches()

    def distribution(self, version: str | None, *, record: str | None, url: object = None, folder: str = "") -> None:
        info = self.folder / folder / f"stub_core-{version or 'x'}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: stub-core\n" + (f"Version: {version}\n" if version else ""))
        if record is not None:
            (info / "RECORD").write_text(record)
        if url is not None:
            (info / "direct_url.json").write_text(url if isinstance(url, str) else json.dumps(url))

    def installed(self) -> Installed:
        found = installed("stub-core", "stub.core")
        assert found is not None
        return found


@pytest.fixture
def site(tmp_path, monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    assert not [
        name for name in set(sys.modules) - before if name.split(".")[0] == "stub" and name != "stub.core.package_info"
    ]


RECORD = "stub/core/__init__.py,sha256=x,1\nstub/core/package_info.py,sha256=x,1\n"


def upstream(version: str = "(0, 19, 2, '')", extra: str = "") -> str:
    """A package_info like upstream's: numbers first, then texts that only an import could compute."""
    major, minor, patch, pre = json.loads(version.replace("(", "[").replace(")", "]").replace("'", '"'))
    return (
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = {pre!r}\n"
        "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
        "__shortversion__ = '.'.join(map(str, VERSION[:3]))\n"
        "__version__ = __shortversion__ + ''.join(VERSION[3:])\n" + extra
    )


def test_absent(site):
    assert installed("stub-core", "stub.core") is None
    site.distribution("0.19.2", record=RECORD)
    assert installed("stub-core", "stub.core") is None


def test_package_and_metadata_of_one_installation(site):
    site.package(upstream())
    site.distribution("0.19.2", record=RECORD)
    found = site.installed()
    assert found == Installed(
        release=(0, 19, 2),
        text="0.19.2",
        local=None,
        source="package_info",
        metadata_text="0.19.2",
        metadata_owns=True,
        file=str(site.info),
        warnings=(),
        prerelease=False,
    )
    assert str(found) == "0.19.2"


def test_nothing_of_package_info_is_executed(site):
    site.package(upstream(extra="raise RuntimeError('was executed')"))
    assert site.installed().release == (0, 19, 2)


def test_without_metadata(site):
    site.package(upstream())
    found = site.installed()
    assert (found.release, found.metadata_text, found.metadata_owns, found.warnings) == ((0, 19, 2), None, False, ())


def test_metadata_of_another_installation_does_not_count(site, monkeypatch):
    site.package(upstream("(0, 18, 2, '')"), folder="source")
    site.package(upstream("(0, 19, 2, '')"))
    site.distribution("0.19.2", record=RECORD)
    monkeypatch.syspath_prepend(str(site.folder / "source"))
    found = site.installed()
    assert (found.release, found.text, found.source) == ((0, 18, 2), "0.18.2", "package_info")
    assert (found.metadata_text, found.metadata_owns) == ("0.19.2", False)
    info = site.folder / "source/stub/core/package_info.py"
    assert found.warnings == (
        f"{info} is version 0.18.2, but the metadata in {site.folder} says stub-core 0.19.2; "
        "it does not own that file, and package_info decides",
    )


def test_metadata_of_another_installation_of_the_same_version(site, monkeypatch):
    site.package(upstream(), folder="source")
    site.distribution("0.19.2", record=RECORD)
    monkeypatch.syspath_prepend(str(site.folder / "source"))
    found = site.installed()
    assert (found.metadata_text, found.metadata_owns, found.warnings) == ("0.19.2", False, ())


def test_the_owning_distribution_is_preferred(site, monkeypatch):
    site.package(upstream())
    site.distribution("0.19.2", record=RECORD)
    site.distribution("0.17.0", record="", folder="earlier")
    monkeypatch.syspath_prepend(str(site.folder / "earlier"))
    found = site.installed()
    assert (found.text, found.metadata_text, found.metadata_owns) == ("0.19.2", "0.19.2", True)
    assert found.warnings == (
        f"importlib.metadata.version('stub-core') answers 0.17.0, from {site.folder / 'earlier'}; "
        f"the code is of the distribution 0.19.2 in {site.folder}",
    )


def test_ownership_through_a_link(site, monkeypatch):
    site.package(upstream(), folder="real")
    site.distribution("0.19.2", record=RECORD, folder="real")
    (site.folder / "linked").symlink_to(site.folder / "real")
    monkeypatch.syspath_prepend(str(site.folder / "real"))
    monkeypatch.syspath_prepend(str(site.folder / "linked"))
    assert site.installed().metadata_owns


def test_a_source_that_changed_after_its_installation(site):
    site.package(upstream("(0, 20, 0, '')"))
    site.distribution("0.19.2", record=RECORD)
    found = site.installed()
    assert (found.text, found.source, found.metadata_owns) == ("0.20.0", "package_info", True)
    assert len(found.warnings) == 1
    assert "it owns that file, which changed since, and package_info decides" in found.warnings[0]


@pytest.mark.parametrize("layout", ["checkout", "checkout/src"])
def test_an_editable_install_owns_its_checkout(site, monkeypatch, layout):
    site.package(upstream(), folder=layout)
    url = {"url": f"file://{site.folder}/checkout", "dir_info": {"editable": True}}
    site.distribution("0.19.2", record="__editable__.stub_core.pth,,\n", url=url)
    monkeypatch.syspath_prepend(str(site.folder / layout))
    found = site.installed()
    assert (found.text, found.metadata_text, found.metadata_owns, found.warnings) == ("0.19.2", "0.19.2", True, ())


def test_an_editable_install_with_an_escaped_path(site, monkeypatch):
    site.package(upstream(), folder="check out")
    url = {"url": f"file://{site.folder}/check%20out", "dir_info": {"editable": True}}
    site.distribution("0.19.2", record="", url=url)
    monkeypatch.syspath_prepend(str(site.folder / "check out"))
    assert site.installed().metadata_owns


def test_an_editable_install_does_not_own_other_trees_in_its_checkout(site, monkeypatch):
    site.package(upstream(), folder="checkout")
    site.package(upstream("(0, 18, 2, '')"), folder="checkout/unpacked")
    url = {"url": f"file://{site.folder}/checkout", "dir_info": {"editable": True}}
    site.distribution("0.19.2", record="", url=url)
    monkeypatch.syspath_prepend(str(site.folder / "checkout/unpacked"))
    found = site.installed()
    assert (found.text, found.metadata_text, found.metadata_owns) == ("0.18.2", "0.19.2", False)


@pytest.mark.parametrize(
    "url",
    [
        {"url": "file://FOLDER", "dir_info": {}},
        {"url": "file://FOLDER", "dir_info": {"editable": False}},
        {"url": "https://example.org/FOLDER", "dir_info": {"editable": True}},
        {"url": "https://example.org/x.whl", "archive_info": {}},
        "{not json",
        "[]",
        "null",
    ],
    ids=["local", "not-editable", "remote", "archive", "broken", "list", "null"],
)
def test_other_direct_urls_own_only_what_is_recorded(site, url):
    if isinstance(url, dict):
        url["url"] = url["url"].replace("FOLDER", str(site.folder))
    site.package(upstream())
    site.distribution("0.19.2", record="", url=url)
    found = site.installed()
    assert (found.metadata_text, found.metadata_owns, found.warnings) == ("0.19.2", False, ())


def test_an_egg_info_of_a_checkout(site):
    site.package(upstream())
    egg = site.folder / "stub_core.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: stub-core\nVersion: 0.19.2\n")
    (egg / "SOURCES.txt").write_text("setup.py\nstub/core/package_info.py\n")
    found = site.installed()
    assert (found.metadata_text, found.metadata_owns, found.warnings) == ("0.19.2", True, ())


@pytest.mark.parametrize(
    ("text", "release", "shown", "local", "prerelease", "warning"),
    [
        (upstream("(0, 20, 0, 'rc1')"), (0, 20, 0), "0.20.0rc1", None, True, None),
        (upstream("(0, 19, 2, '.post1')"), (0, 19, 2), "0.19.2.post1", None, False, None),
        (upstream("(0, 20, 0, '+nv24.1')"), (0, 20, 0), "0.20.0", "nv24.1", False, None),
        (upstream("(0, 20, 0, '-dirty')"), (0, 20, 0), "0.20.0-dirty", None, True, "only its numbers are compared"),
        (upstream("(0, 20, 0, '.main')"), (0, 20, 0), "0.20.0.main", None, True, "only its numbers are compared"),
        ("MAJOR: int = 0\nMINOR = 20\nPATCH = 1\n", (0, 20, 1), "0.20.1", None, False, None),
        ("VERSION = (0, 20, 2)\n", (0, 20, 2), "0.20.2", None, False, None),
        (
            "VERSION = '0.21'\nMAJOR, MINOR, PATCH = 0, 20, 3\n__version__ = '0.20.3'\n",
            (0, 20, 3),
            "0.20.3",
            None,
            False,
            None,
        ),
        ("__version__ = '0.20.4rc2+abc1234'\n", (0, 20, 4), "0.20.4rc2", "abc1234", True, None),
        ("__shortversion__ = '0.20.5'\n", (0, 20, 5), "0.20.5", None, False, None),
        ("__version__ = '0.20.0.main'\n", None, "0.20.0.main", None, True, "is not a PEP 440 version"),
        ("__version__ = 'core_v0.15.0rc7'\n", None, "core_v0.15.0rc7", None, True, "is not a PEP 440 version"),
        ("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPATCH = int('7')\n", None, "unknown", None, True, "gives no version"),
        ("MAJOR = '0'\nMINOR = 20\nPATCH = 0\n", None, "unknown", None, True, "gives no version"),
        ("", None, "unknown", None, True, "gives no version"),
        ("VERSION = (0, 20\n", None, "unknown", None, True, "the version cannot be read: "),
        (
            None,
            None,
            "unknown",
            None,
            True,
            "the version cannot be read: no module stub.core.package_info below stub.core",
        ),
    ],
)
def test_forms_of_package_info(site, text, release, shown, local, prerelease, warning):
    site.package(text)
    found = site.installed()
    assert (found.release, found.text, found.local, found.prerelease) == (release, shown, local, prerelease)
    assert found.source == "package_info"
    assert len(found.warnings) == (warning is not None)
    assert all(warning in given for given in found.warnings)
    assert found.file == (None if text is None else str(site.info))


def test_package_info_that_is_not_text(site):
    site.package("")
    site.info.write_bytes(b"VERSION = '\xff'")
    found = site.installed()
    assert (found.release, found.text) == (None, "unknown")
    assert found.warnings == (f"the version cannot be read: {site.info}: not UTF-8 text (byte 0xff at offset 11)",)


@pytest.mark.parametrize("text", ["", "VERSION = (0, 20\n", "__version__ = '0.20.0.main'\n", None])
def test_owning_metadata_stands_in(site, text):
    site.package(text)
    site.distribution("0.19.2rc1+abc", record=RECORD)
    found = site.installed()
    assert (found.release, found.text, found.local) == ((0, 19, 2), "0.19.2rc1", "abc")
    assert (found.source, found.metadata_owns, found.prerelease) == ("metadata", True, True)
    assert len(found.warnings) == 1


def test_other_metadata_does_not_stand_in(site):
    site.package("")
    site.distribution("0.19.2", record="")
    found = site.installed()
    assert (found.release, found.text, found.metadata_text) == (None, "unknown", "0.19.2")


@pytest.mark.parametrize(
    ("info", "metadata"),
    [("(0, 20, 0, 'rc1')", "0.20.0.rc1"), ("(0, 20, 0, '')", "0.20.0+local"), ("(0, 20, 0, '-dirty')", "0.20.0-dirty")],
)
def test_spellings_of_one_version_are_not_reported_as_different(site, info, metadata):
    site.package(upstream(info))
    site.distribution(metadata, record=RECORD)
    assert not [text for text in site.installed().warnings if "metadata" in text]


def test_metadata_without_a_version(site):
    site.package(upstream())
    site.distribution(None, record=RECORD)
    found = site.installed()
    assert (found.release, found.metadata_text, found.metadata_owns) == ((0, 19, 2), None, True)


def test_a_finder_of_metadata_that_raises(site, monkeypatch):
    class Finder:
        def find_spec(self, fullname, path=None, target=None):
            return None

        def find_distributions(self, context):
            raise OSError("stale handle")

    site.package(upstream())
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    found = site.installed()
    assert (found.release, found.metadata_text) == ((0, 19, 2), None)
    assert found.warnings == ("the metadata of stub-core cannot be read: OSError('stale handle')",)


def test_an_imported_package_info_is_asked(site, monkeypatch):
    site.package(upstream())
    live = types.ModuleType("stub.core.package_info")
    live.__dict__.update(
        MAJOR=0, MINOR=20, PATCH=0, PRE_RELEASE="", VERSION=(0, 20, 0, ""), __version__="0.20.0+abc1234"
    )
    live.__file__ = str(site.info)
    monkeypatch.setitem(sys.modules, "stub.core.package_info", live)
    found = site.installed()
    assert (found.release, found.text, found.local, found.source) == ((0, 20, 0), "0.20.0", "abc1234", "package_info")
    assert found.file == str(site.info)
    assert str(found) == "0.20.0+abc1234"


def test_the_usual_case_needs_no_packaging(fresh_python, releases):
    code = """
import json, sys
from mcore_patches.overlay.versions import installed
found = installed()
print(json.dumps([found.text, [m for m in ("packaging", "megatron", "torch") if m in sys.modules]]))
"""
    assert fresh_python(code, path=[releases / "0.19.2"]) == ["0.19.2", []]


ASK = """
import dataclasses, json, sys
from mcore_patches.overlay.versions import installed
found = dataclasses.asdict(installed())
found["imported"] = [name for name in sys.modules if name.split(".")[0] in ("megatron", "torch")]
print(json.dumps(found))
"""


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2"])
def test_real_releases(fresh_python, releases, release):
    """Unpacked wheels, each before whatever else is installed."""
    assert fresh_python(ASK, path=[releases / release]) == {
        "release": [int(number) for number in release.split(".")],
        "text": release,
        "local": None,
        "source": "package_info",
        "metadata_text": release,
        "metadata_owns": True,
        "file": str(releases / release / "megatron/core/package_info.py"),
        "warnings": [],
        "prerelease": False,
        "imported": [],
    }


def test_a_real_source_tree_beside_the_metadata_of_another_release(fresh_python, releases, tmp_path):
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    for name in ("__init__.py", "package_info.py"):
        shutil.copy(releases / "0.18.2/megatron/core" / name, core)
    found = fresh_python(ASK, path=[tmp_path, releases / "0.19.0"])
    assert (found["release"], found["text"], found["imported"]) == ([0, 18, 2], "0.18.2", [])
    assert (found["metadata_text"], found["metadata_owns"]) == ("0.19.0", False)
    assert len(found["warnings"]) == 1
    assert "does not own that file" in found["warnings"][0]


def test_a_source_tree_inside_another_repository(fresh_python, tmp_path):
    """The hash of the enclosing repository shows once the package is imported, and changes nothing but `local`."""
    core = tmp_path / "third_party/megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    git_hash = (
        "import os, subprocess\n"
        "git = ['git', '-C', os.path.dirname(__file__), 'rev-parse', '--short', 'HEAD']\n"
        "__version__ += '+' + subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()\n"
    )
    (core / "package_info.py").write_text(upstream("(0, 20, 0, '')", extra=git_hash))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "mine"], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    path = [tmp_path / "third_party"]
    static = fresh_python(ASK, path=path)
    live = fresh_python("import megatron.core.package_info" + ASK, path=path)
    assert static["local"] is None
    assert live["local"] == head
    assert static["release"] == live["release"] == [0, 20, 0]
    differing = {key for key in static if static[key] != live[key]}
    assert differing == {"local", "imported"}


def test_importing_it_imports_little(fresh_python):
    modules = fresh_python("import json, sys, mcore_patches.overlay.versions; print(json.dumps(list(sys.modules)))")
    assert "mcore_patches.overlay.versions" in modules
    assert {"torch", "megatron", "packaging", "wrapt", "importlib.metadata"}.isdisjoint(modules)
