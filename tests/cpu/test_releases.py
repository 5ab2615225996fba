"""Where the tests find the releases."""

import pytest

from tests import releases


@pytest.mark.parametrize("version", releases.RELEASES)
def test_every_release_is_unpacked(version):
    assert (releases.path(version) / "megatron" / "core" / "package_info.py").is_file()


def test_missing_release_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv(releases.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"megatron-core 0\.19\.2 is not in .*make releases"):
        releases.path("0.19.2")


def test_folder_from_the_environment(monkeypatch, tmp_path):
    (tmp_path / "0.18.2" / "megatron" / "core").mkdir(parents=True)
    monkeypatch.setenv(releases.FOLDER_VARIABLE, str(tmp_path))
    assert releases.path("0.18.2") == tmp_path / "0.18.2"


def test_unknown_release():
    with pytest.raises(ValueError, match=r"version='0\.15\.0': expected one of 0\.16\.1, "):
        releases.path("0.15.0")


def test_order():
    assert [version for version in releases.RELEASES if releases.at_least(version, "0.18.2")] == [
        "0.18.2",
        "0.19.0",
        "0.19.2",
    ]
