"""Where the unpacked wheels of the supported megatron-core releases are."""

import os
from pathlib import Path

RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2")
"""Oldest first."""

FOLDER_VARIABLE = "MCORE_PATCHES_RELEASES"


def folder() -> Path:
    """The folder of all releases: what ``MCORE_PATCHES_RELEASES`` says, else ``.releases`` in the checkout."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[1] / ".releases")


def path(version: str) -> Path:
    """The folder of one release, to be put in front of ``sys.path``.

    Raises:
        ValueError: not one of :data:`RELEASES`.
        FileNotFoundError: it is not unpacked there.
    """
    if version not in RELEASES:
        raise ValueError(f"version={version!r}: expected one of {', '.join(RELEASES)}")
    release = folder() / version
    if not (release / "megatron" / "core").is_dir():
        raise FileNotFoundError(
            f"megatron-core {version} is not in {release}: run `make releases`, "
            f"or set {FOLDER_VARIABLE} to the folder that holds the releases"
        )
    return release


def at_least(version: str, minimum: str) -> bool:
    """Whether a release is ``minimum`` or newer."""
    return RELEASES.index(version) >= RELEASES.index(minimum)
