"""Runtime patches for pinned megatron-core releases.

    import mcore_patches
    report = mcore_patches.apply_patches()   # in every worker process, before the model is built
    print(report)

Importing this package loads neither torch nor megatron and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_patches.overlay.engine import Engine
    from mcore_patches.overlay.preflight import Diagnosis
    from mcore_patches.overlay.report import Report, Row

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "applied",
    "apply_patches",
    "doctor",
    "ray_setup_hook",
    "require_applied",
    "revert",
    "status",
]

_engines: dict[str, Engine] = {}


def _engine() -> Engine:
    if "process" not in _engines:
        from mcore_patches.overlay.engine import Engine
        from mcore_patches.overlay.registry import Registry

        # setdefault is atomic; a lock would be inherited locked by a child forked at the wrong moment.
        _engines.setdefault("process", Engine(lambda: Registry.discover("mcore_patches.patches"), __version__))
    return _engines["process"]


def apply_patches(
    ids: Iterable[str] | str | None = None,
    *,
    exclude: Iterable[str] | str = (),
    strict: bool | None = None,
    dry_run: bool = False,
    force: Iterable[str] | str = (),
) -> Report:
    """Apply patches to the installed megatron-core. Call it in every worker process, before the model is built.

    Idempotent. Targets that are not imported yet are patched by a post-import hook (state PENDING); their text is
    checked at once. A patch goes in as a whole or not at all, and never over text that it does not know.

    Args:
        ids: patches to apply; None means every built-in one. Third-party patches are applied only when named.
        exclude: ids to leave out. `MCORE_PATCHES` in the environment can switch off more, never less.
        strict: raise when a patch ends in an error state (DRIFTED, IMPORT_FAILED, CONFLICT, TOO_LATE, NEEDS_UNMET,
            INERT); None reads MCORE_PATCHES_STRICT.
        dry_run: change nothing; rows say what would be done.
        force: ids that are applied over text that is not known, loudly.

    Returns:
        A `Report`: printable, `.to_json()`, `.digest` to compare between ranks, `report["id"].state`.

    Raises:
        SettingsError (a ValueError): an unknown id or a bad environment value; nothing was changed.
        NotAppliedError (a RuntimeError): strict, and a patch is in an error state. An INERT one is in place, the others
            left their targets untouched; patches that are in no error state are applied.
    """
    return _engine().apply(ids, exclude=exclude, strict=strict, dry_run=dry_run, force=force)


def status() -> Report:
    """What is in place now, read off the live objects, with the counters of each patch. Changes nothing.

    For a patch that is not in place: what `apply_patches()` would do. Imports a target whose text is not known and that
    a probe has to look at.
    """
    return _engine().status()


def revert(ids: Iterable[str] | str | None = None) -> Report:
    """Take patches off again; None means all. Restores the originals also in modules that imported a replacement.

    Raises NotRevertedError (a RuntimeError) for those that cannot be taken off, because another tool wrapped the
    patched function since; the others are off.
    """
    return _engine().revert(ids)


def applied(ids: Iterable[str] | str | None = None, **options: Any) -> AbstractContextManager[Report]:
    """Context manager: apply on entry (arguments of `apply_patches`), take off on exit what was not in place before."""
    return _engine().applied(ids, **options)


def require_applied(patch_id: str) -> Row:
    """For code that depends on a patch: return its row if the patch is in place or the release has the fix itself.

    Imports the target of a PENDING patch. Raises NotAppliedError with the state and the reason otherwise.
    """
    return _engine().require(patch_id)


def doctor() -> Diagnosis:
    """Examine the environment: versions, packages known to be bad, switches, whether the targets import."""
    from mcore_patches.overlay.preflight import diagnose

    return diagnose(_engine())


def ray_setup_hook() -> None:
    """For Ray's `runtime_env={"worker_process_setup_hook": "mcore_patches.ray_setup_hook"}`. Safe to call again.

    Ray workers do not inherit the driver's patches, so each of them has to apply its own.
    """
    apply_patches()
