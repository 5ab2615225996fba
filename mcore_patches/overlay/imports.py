"""When the import of a module ends: of one that is under way, in whatever thread, or of the next one.

wrapt's post-import hook is called where a module's code has run, but only for imports that ask the finders after its
registration; for a module that is in `sys.modules` it is called at once, although some thread, perhaps this one, may be
in the middle of the module's code. Every import holds the module's own lock from before it asks the finders until it
has ended, so the release of that lock tells of the imports that the hook misses, and of those that fail.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import _bootstrap
from types import ModuleType
from typing import Any

from mcore_patches.overlay.locate import module_dict

_ran: dict[str, object] = {}
"""Module -> the __spec__ that it had when its code had run, which is before its import ends."""


def underway(name: str) -> bool:
    """Whether `sys.modules` has the module and its import has not ended, in whatever thread."""
    return bool(getattr(_spec(sys.modules.get(name)), "_initializing", False))


def running(name: str) -> bool:
    """Whether the module's code is still running, as far as imports tell: its names may come, change and go."""
    return underway(name) and _ran.get(name) is not _spec(sys.modules.get(name))


def _spec(module: object) -> object:
    return module_dict(module).get("__spec__")


def follow(name: str, then: Callable[[], None]) -> None:
    """Call `then` when the module's code has run, and again when its import has ended without an error.

    That is the import that is under way or else the next one; while imports fail, the one after. The importing thread
    calls it before its import statement returns, holding the module's import lock; where the import has ended already
    it is called at once. It may be called more often, and must not raise.
    """
    import wrapt

    # As long as somebody holds on to it, every import of the module takes this very lock. It looks up release() when it
    # is over: if it is not over by the time of a check below, it will find ours.
    lock: Any = _bootstrap._get_module_lock(name)  # type: ignore[attr-defined]  # there is no public name
    release = lock.release
    another = vars(lock).get("release")  # of another engine, or another copy of this package
    registering: int | None = threading.get_ident()
    registered = True

    def ran(module: ModuleType) -> None:
        nonlocal registered
        if registering == threading.get_ident():
            registered = False  # wrapt calls instead of registering
        else:
            _ran[name] = _spec(module)
            then()

    def unwatch() -> None:
        if another is None:
            vars(lock).pop("release", None)
        else:
            lock.release = another

    def released() -> None:
        try:
            # A thread that imports the module again in the middle of its import takes and releases the lock once more.
            if not underway(name):
                ended()
        finally:
            release()

    def ended() -> None:
        unwatch()
        if name in sys.modules:
            then()
        elif not registered:
            follow(name, then)

    lock.release = released
    wrapt.register_post_import_hook(ran, name)
    registering = None
    if not underway(name) and (name in sys.modules or not registered):
        ended()
    elif lock.owner is None and registered:
        unwatch()  # no import is under way, and the hook sees the next one
