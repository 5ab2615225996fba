"""Run a test's body in a process of its own, at the price of a fork.

An overlay is about the state of a process, so almost every test needs a fresh one, and starting an interpreter with
torch and megatron takes seconds. A "zygote" is a process that has imported what a family of tests needs and then forks
one child a test. It has created no engine and applied no patch, so a child is as good as a fresh interpreter that has
made the same imports. What must hold in a real fresh interpreter (import costs, environment of a spawned worker) is
tested with one.

    @isolated()                     # nothing of megatron, no torch
    def test_something(tmp_path): ...

    @isolated("before-0.19.2")      # all that importing the patches' targets brings in beside megatron
    def test_more(release): ...

Fixtures are evaluated by pytest as usual; their values travel by pickle. Asserts work as usual; when one fails, the
child's traceback is the failure's message.

Between the zygote and the children of one test module is a process that has imported that module, as its children
would each have to. Nothing else happens in either: arguments are unpickled in the child, for that may import anything,
and a process that has megatron in `sys.modules` forks no child, for a child would not see the megatron that it writes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import releases

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 900
"""Only for a child that hangs: on a machine that does other work the longest take a multiple of their time."""


class ChildFailed(AssertionError):
    """A test's body failed in its process; the text is the traceback there."""


def isolated(preload: str = "plain", **environment: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run the test in a child of the zygote `preload`, with `environment` on top of a clean one."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            call(f"{test.__module__}:{test.__qualname__}", fixtures, preload, environment)

        run.body = test  # type: ignore[attr-defined]
        return run

    return decorate


def call(
    name: str, arguments: dict[str, Any], preload: str = "plain", environment: dict[str, str] | None = None
) -> Any:
    """Call "module:function" in a child and return its result. The body of an `isolated` test stands for the test."""
    family, _, release = preload.partition("-")
    pickled = pickle.dumps(arguments)
    # Where megatron is imported, tensors are pickled by a function of megatron's: unpickling one imports the installed
    # megatron, before the test has put a tree of its own in front of it.
    if b"_rebuild_tensor" in pickled:
        raise TypeError(f"{name} must not be given a tensor, but make it: unpickling one may import megatron")
    ok, value = zygote(family).ask((name, pickled, environment or {}, release))
    if not ok:
        raise ChildFailed(f"in a process of its own:\n{value}")
    return value


@functools.cache
def zygote(preload: str) -> Zygote:
    return Zygote(preload)


class Zygote:
    """The parent's side of a zygote process."""

    def __init__(self, preload: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MCORE_PATCHES", "COV_"))}
        if releases.FOLDER_VARIABLE in os.environ:
            environment[releases.FOLDER_VARIABLE] = os.environ[releases.FOLDER_VARIABLE]
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for rank in ("RANK", "LOCAL_RANK"):
            environment.pop(rank, None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.overlay.isolation import serve; serve({preload!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        atexit.register(self.close)

    def ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin.fileno(), request)
        return _receive(self._process.stdout.fileno())

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


# The zygote's side ----------------------------------------------------------------------------------------------------


def serve(preload: str) -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what tests print must not mix with the answers
    _preload(preload)
    parent: _ModuleProcess | None = None
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        *request, release = request
        serves = request[0].partition(":")[0], release
        if parent is None or parent.serves != serves:
            if parent is not None:
                parent.close()
            parent = _ModuleProcess(*serves)
        _send(answers, parent.ask(request))


class _ModuleProcess:
    """A fork of the zygote that has imported a test module and forks the children of its tests, for one release."""

    def __init__(self, module: str, release: str) -> None:
        self.serves = module, release
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._requests)
            os.close(self._answers)
            if release:
                sys.path.insert(0, str(releases.path(release)))
            with contextlib.suppress(Exception):  # each child imports it again, and its failure tells why that fails
                importlib.import_module(module)
            with contextlib.suppress(EOFError):
                while True:
                    _send(answers, _in_child(_receive(requests)))
            os._exit(0)
        os.close(requests)
        os.close(answers)

    def ask(self, request: Any) -> Any:
        try:
            _send(self._requests, request)
            return _receive(self._answers)
        except (BrokenPipeError, EOFError):
            return False, f"the process that imports {self.serves[0]} ended without an answer"

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._answers)
        os.waitpid(self._pid, 0)


def _rewrite_assertions() -> None:
    """As pytest does in its own process, so that a failed assertion shows its values."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _preload(preload: str) -> None:
    """Make the imports of a family of tests.

    plain: the overlay. torch: torch and what our ops import too. before-VERSION: all that the targets of the patches
    bring in, in the newest release, but nothing of megatron itself, which takes half a second then; one process serves
    all releases, and a child has that VERSION in front of its path.
    """
    _rewrite_assertions()
    for module in ("pytest", "wrapt", "packaging.version", "importlib.metadata", "mcore_patches.overlay.engine"):
        importlib.import_module(module)
    if preload == "plain":
        return
    import warnings

    warnings.simplefilter("ignore")
    for module in ("torch", "hypothesis", "mcore_patches.ops.sparse_mla"):
        importlib.import_module(module)
    if preload == "before":
        ok, names = _in_child((f"{__name__}:third_party_modules", pickle.dumps({"release": releases.RELEASES[-1]}), {}))
        if not ok:
            raise RuntimeError(names)
        for name in names:
            with contextlib.suppress(ImportError):  # made by their parents when these are imported
                importlib.import_module(name)


def import_targets() -> None:
    from mcore_patches.overlay.registry import Registry
    from mcore_patches.overlay.sites import Site

    for entry in Registry.discover("mcore_patches.patches").entries.values():
        for target in entry.patch.targets if entry.patch else ():
            if name := Site(target).module_name:
                importlib.import_module(name)


def third_party_modules(release: str) -> list[str]:
    """What an import of all targets of a release brings in beside megatron and the overlay."""
    sys.path.insert(0, str(releases.path(release)))
    before = set(sys.modules)
    import_targets()
    ours = ("megatron", "mcore_patches", "tests")
    return [name for name in sys.modules if name not in before and name.partition(".")[0] not in ours]


def _in_child(request: Any) -> Any:
    if loaded := {
        name: getattr(module, "__file__", None) for name, module in sys.modules.items() if _is_megatron(name)
    }:
        return False, f"the process that was to be forked for {request[0]} has imported megatron already: {loaded}"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setpgid(0, 0)
        try:
            answer = (True, _run(*request))
        except BaseException as error:
            answer = (False, _told(error))
        try:
            _send(writer, answer)
        except BaseException as error:
            _send(writer, (False, _told(error)))
        os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], TIMEOUT_SECONDS)[0]:
            return False, f"no answer within {TIMEOUT_SECONDS} s"
        return _receive(reader)
    except EOFError:
        return False, "the process ended without an answer"
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):  # the child, and whatever it has started
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _is_megatron(name: str) -> bool:
    return name.partition(".")[0] == "megatron"


def _run(name: str, arguments: bytes, environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    module_name, _, qualname = name.partition(":")
    function = getattr(importlib.import_module(module_name), qualname)
    return getattr(function, "body", function)(**pickle.loads(arguments))


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _send(descriptor: int, message: Any) -> None:
    data = pickle.dumps(message)
    data = struct.pack("<Q", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def _receive(descriptor: int) -> Any:
    return pickle.loads(_exactly(descriptor, struct.unpack("<Q", _exactly(descriptor, 8))[0]))


def _exactly(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
