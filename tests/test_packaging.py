"""The wheel and the sdist: what is in them, and the wheel's command in a virtual environment of its own.

That environment holds the installed wheel and, through a .pth file, the packages of the environment that runs the
tests: torch and its CUDA libraries take gigabytes and minutes to install, and are not what is tested. The folder of the
checkout is not on its path, so whatever the wheel lacks is missed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import mcore_patches

ROOT = Path(__file__).resolve().parents[1]


def run(command, **options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MCORE_PATCHES"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked_files():
    return run(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).split("\0")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), built from a copy of the checkout: a build leaves folders beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in filter(None, tracked_files()):
        file = ROOT / name
        if name.partition("/")[0] in ("tests", "gpu_ci") or not file.is_file():
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    out = tmp_path_factory.mktemp("dist")
    # The sdist first and the wheel from it, as for an upload. setuptools is in the environment of the tests.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)])
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """The folder of executables of a virtual environment with the wheel in it."""
    wheel, _ = built
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin" / "python")]
    run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)])
    ours = {Path(p).resolve() for p in sys.path if p.endswith("site-packages")}
    assert ours
    (packages / "environment_of_the_tests.pth").write_text("\n".join(map(str, ours)) + "\n")
    return home / "bin"


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    expected = {
        n for n in tracked_files() if n.startswith("mcore_patches/") and n.endswith((".py", ".txt", "py.typed"))
    }
    assert names == {n for n in expected if (ROOT / n).is_file()}
    assert "mcore_patches/py.typed" in names


def test_the_metadata(built):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
        (entry_points,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
        licences = [n for n in archive.namelist() if n.endswith("LICENSE")]
    assert (metadata["Name"], metadata["Version"]) == ("mcore-patches", mcore_patches.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert len(licences) == 1
    assert "mcore-patches = mcore_patches.cli:main" in entry_points
    required = {r.partition(";")[0].strip() for r in metadata.get_all("Requires-Dist") if "extra" not in r}
    assert {r.split(">")[0] for r in required} == {"packaging", "wrapt", "torch", "megatron-core"}


def test_the_sdist_builds_the_same_wheel(built):
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        members = {m.partition("/")[2] for m in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        modules = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert modules <= members
    assert {"LICENSE", "README.md", "pyproject.toml"} <= members


def test_the_installed_command(environment, tmp_path):
    command = str(environment / "mcore-patches")
    assert run([command, "--version"], cwd=tmp_path).strip() == f"mcore-patches {mcore_patches.__version__}"
    report = json.loads(run([command, "status", "--json"], cwd=tmp_path))
    assert {"sparse_mla_nope"} <= {row["id"] for row in report["rows"]}
    assert report["overlay"] == mcore_patches.__version__


def test_the_installed_package_is_not_the_checkout_s(environment, tmp_path):
    code = "import mcore_patches, importlib.metadata as m; print(mcore_patches.__file__, m.version('mcore-patches'))"
    file, version = run([str(environment / "python"), "-c", code], cwd=tmp_path).split()
    assert Path(file).is_relative_to(environment.parent)
    assert version == mcore_patches.__version__
