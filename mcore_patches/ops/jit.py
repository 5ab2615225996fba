"""One place where TileLang kernels are built: once per key, under a lock, and never again for another sequence length.

Builders take every length that may change between calls as a dynamic symbol, so a key holds only what shapes the code:
widths, tile sizes, flags. What does not compile is remembered with its reason, so that an op can decline instead of
compiling and failing again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Key = tuple[Any, ...]

# Lines that TileLang adds to what the compiler says, and the compiler's own that say why.
_FRAME = ("Command:", "Source:", "Target:", "Output:")
_OBJECTION = re.compile(r"\b(error|fatal)\s*:")
_MOST_OBJECTIONS = 4

# TileLang 0.1.12 does not see that stores of parts go to slots of their own, and warns of races at length. The check is
# of the text alone; races are looked for on a GPU (gpu_ci/test_sanitizer.py).
_QUIET = {"tl.disable_data_race_check": True}

# Kernels compile side by side, but are traced into TileLang's intermediate form one at a time, of all ops.
TRACING = threading.Lock()


# Failures too are remembered: an import of tilelang that fails takes as long as one that does not.
@functools.cache
def import_fault() -> str:
    """Why TileLang cannot be imported, or nothing if it can."""
    try:
        importlib.import_module("tilelang")
    # OSError: a shared library that does not load.
    except (ImportError, OSError) as error:
        return f"tilelang cannot be imported: {error}"
    return ""


class KernelBuildError(RuntimeError):
    """A kernel did not compile. The text names it and carries the compiler's first errors."""


@dataclass
class BuildLog:
    """What a cache has built: seconds by key, and the reason of each key that did not compile."""

    seconds: dict[Key, float] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)


class KernelCache:
    """Compiled kernels by key, safe to share between threads.

    Two threads that ask for one key build it once; different keys may build at the same time.
    """

    def __init__(self) -> None:
        self._kernels: dict[Key, Any] = {}
        self._key_locks: dict[Key, threading.Lock] = {}
        self._lock = threading.Lock()
        self.log = BuildLog()

    @property
    def builds(self) -> int:
        """How many kernels this cache has compiled, failures included."""
        return len(self.log.seconds) + len(self.log.failures)

    def get(self, key: Key, build: Callable[[], Any]) -> Any:
        """The kernel for `key`, from `build()` on the first call.

        Raises:
            KernelBuildError: `build` failed, now or on an earlier call; it is not tried again.
        """
        kernel = self._kernels.get(key)
        if kernel is not None:
            return kernel
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            kernel = self._kernels.get(key)
            if kernel is not None:
                return kernel
            if key in self.log.failures:
                raise KernelBuildError(self.log.failures[key])
            started = time.perf_counter()
            try:
                kernel = build()
            except Exception as error:
                reason = f"{_spell(key)} does not compile: {_complaint(error)}"
                self.log.failures[key] = reason
                raise KernelBuildError(reason) from error
            self.log.seconds[key] = time.perf_counter() - started
            self._kernels[key] = kernel
            return kernel

    def failure(self, key: Key) -> str | None:
        """Why `key` did not compile, or None if it did or was never asked for."""
        return self.log.failures.get(key)

    def failure_of(self, *prefix: Any) -> str | None:
        """The first failure whose key begins with `prefix`, or None."""
        failed = (reason for key, reason in list(self.log.failures.items()) if key[: len(prefix)] == prefix)
        return next(failed, None)

    def clear(self) -> None:
        """Forget every kernel, failure and count."""
        with self._lock:
            self._kernels.clear()
            self._key_locks.clear()
            self.log = BuildLog()


def build_together(builds: Sequence[Callable[[], Any]]) -> float:
    """Call `builds`, each of which gets a kernel from a cache, in parallel threads; return the seconds it took.

    TileLang lowers a kernel under Python's lock but waits for nvcc without it. Kernels that are there already cost a
    look each.

    Raises:
        KernelBuildError: the first in the order of `builds` that failed, after all have ended.
    """
    started = time.perf_counter()
    with ThreadPoolExecutor(len(builds)) as threads:
        futures = [threads.submit(build) for build in builds]
    for future in futures:
        future.result()
    return time.perf_counter() - started


def _spell(key: Key) -> str:
    return "/".join(str(part) for part in key)


def _complaint(error: BaseException) -> str:
    """What the compiler objects to. TileLang puts the kernel's source before its output, and its command behind it."""
    _, heading, output = str(error).rpartition("Compilation error:")
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_FRAME)]
    objections = [line for line in lines if heading and _OBJECTION.search(line)]
    return "; ".join(objections[:_MOST_OBJECTIONS] or lines[-1:]) or type(error).__name__


def compile_kernel(key: Key, function: Any, *, arch: str, pass_configs: Mapping[Any, Any]) -> Any:
    """Compile a TileLang prim_func for one CUDA architecture ("sm_90a"), one process of a host at a time for each key.

    TileLang keeps compiled kernels on disk, so of several ranks on one host the first compiles and the others load.
    """
    import tilelang

    with host_lock(_spell(key)):
        kernel = tilelang.compile(
            function, out_idx=None, target={"kind": "cuda", "arch": arch}, pass_configs={**_QUIET, **pass_configs}
        )
    return Launcher(kernel)


class Launcher:
    """A compiled kernel that leaves the current CUDA device what it was: TileLang makes that of the tensors current.

    Its first argument is a tensor on the device that it runs on.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, *arguments: Any) -> None:
        device = arguments[0].device
        if device.index == torch.cuda.current_device():
            self.kernel(*arguments)
            return
        with torch.cuda.device(device):
            self.kernel(*arguments)


@contextlib.contextmanager
def host_lock(name: str) -> Iterator[None]:
    """Hold a lock shared by all processes of this user on this host, released even if its holder dies."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"mcore_patches-{os.getuid()}-{digest}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


CACHE = KernelCache()
