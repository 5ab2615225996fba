import multiprocessing
import threading
import time
from pathlib import Path

import pytest
import torch

from mcore_patches.ops.jit import KernelBuildError, KernelCache, Launcher, build_together, host_lock


def test_a_key_is_built_once() -> None:
    cache, built = KernelCache(), []
    kernels = [cache.get(("forward", 576), lambda: built.append(1) or object()) for _ in range(3)]
    assert len(built) == cache.builds == 1
    assert kernels[0] is kernels[1] is kernels[2]


def test_keys_do_not_share_kernels() -> None:
    cache = KernelCache()
    assert cache.get(("a",), lambda: "a") == "a"
    assert cache.get(("b",), lambda: "b") == "b"
    assert cache.builds == 2
    assert set(cache.log.seconds) == {("a",), ("b",)}


def test_threads_wait_for_one_build_of_a_key() -> None:
    cache, built = KernelCache(), []

    def build() -> object:
        time.sleep(0.05)
        built.append(1)
        return object()

    kernels: list[object] = []
    threads = [threading.Thread(target=lambda: kernels.append(cache.get(("k",), build))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1


def test_different_keys_build_at_the_same_time() -> None:
    cache = KernelCache()
    together = threading.Barrier(3, timeout=10)
    build_together([lambda n=n: cache.get((n,), together.wait) for n in range(3)])
    assert cache.builds == 3


def test_failure_is_remembered_with_its_last_line_and_not_tried_again() -> None:
    cache, tries = KernelCache(), []

    def build() -> None:
        tries.append(1)
        raise ValueError("first line\nptxas fatal: out of registers\n\n")

    for _ in range(2):
        with pytest.raises(KernelBuildError, match=r"forward/576 does not compile: ptxas fatal: out of registers"):
            cache.get(("forward", 576), build)
    assert len(tries) == cache.builds == 1
    assert cache.failure(("forward", 576)) == "forward/576 does not compile: ptxas fatal: out of registers"
    assert cache.failure(("forward", 512)) is None


NVCC = """kernel.cu(1): error: identifier "foo" is undefined
  void f() { foo(); }
             ^

ptxas /tmp/kernel.ptx, line 21; error   : Unknown modifier '.bogus'
ptxas fatal   : Ptx assembly aborted due to errors
1 error detected in the compilation of "kernel.cu".
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"// error: in a comment\nvoid f() {{ foo(); }}\n\nCompilation error:\n{NVCC}\nCommand: nvcc -O3\n",
            'kernel.cu(1): error: identifier "foo" is undefined; '
            "ptxas /tmp/kernel.ptx, line 21; error   : Unknown modifier '.bogus'; "
            "ptxas fatal   : Ptx assembly aborted due to errors",
        ),
        ("source\nCompilation error:\nnvcc: killed\nCommand: nvcc -O3\n", "nvcc: killed"),
        (
            "NVCC compilation timed out.\nCommand: nvcc\nSource: a.cu\nTarget: a.cubin\n",
            "NVCC compilation timed out.",
        ),
        ("", "RuntimeError"),
    ],
    ids=["nvcc", "no-error-line", "timeout", "nothing"],
)
def test_reason_is_what_the_compiler_says(text: str, reason: str) -> None:
    """As TileLang spells failures: source, output, command."""

    def build() -> None:
        raise RuntimeError(text)

    with pytest.raises(KernelBuildError) as caught:
        KernelCache().get(("forward",), build)
    assert str(caught.value) == f"forward does not compile: {reason}"


def test_failure_of_finds_by_prefix() -> None:
    cache = KernelCache()
    cache.get(("op", "sm_90a", 512, "forward"), object)
    with pytest.raises(KernelBuildError):
        cache.get(("op", "sm_90a", 576, "forward"), lambda: 1 // 0)
    assert (
        cache.failure_of("op", "sm_90a", 576)
        == "op/sm_90a/576/forward does not compile: integer division or modulo by zero"
    )
    assert cache.failure_of("op", "sm_90a", 512) is None
    assert cache.failure_of("op", "sm_80") is None


def test_build_together_waits_for_all_and_raises_the_first_failure() -> None:
    ended = []

    def slow() -> None:
        time.sleep(0.05)
        ended.append(1)

    def fail(text: str) -> None:
        raise KernelBuildError(text)

    with pytest.raises(KernelBuildError, match="one"):
        build_together([slow, lambda: fail("one"), lambda: fail("two"), slow])
    assert len(ended) == 2


def test_clear_forgets_kernels_and_failures() -> None:
    cache = KernelCache()
    cache.get(("a",), object)
    with pytest.raises(KernelBuildError):
        cache.get(("b",), lambda: 1 // 0)
    cache.clear()
    assert cache.builds == 0
    assert cache.failure(("b",)) is None
    assert cache.get(("b",), lambda: "built") == "built"


def _hold(name: str, log: str) -> None:
    with host_lock(name):
        with Path(log).open("a") as file:
            file.write("in\n")
        time.sleep(0.1)
        with Path(log).open("a") as file:
            file.write("out\n")


def test_host_lock_keeps_processes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    log = str(tmp_path / "log")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_hold, args=("sparse_mla/sm_90a/576", log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert Path(log).read_text().split() == ["in", "out"] * 3


class Machine:
    """Stands for torch.cuda with two devices; a launch makes that of its tensor current, as TileLang's does."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.launches: list[tuple[int, tuple[object, ...]]] = []
        self.fails = False

    def launch(self, tensor: "OnDevice", *others: object) -> None:
        self.launches.append((self.current, (tensor, *others)))
        self.current = tensor.device.index
        if self.fails:
            raise RuntimeError("launch failed")

    def device(self, device: torch.device) -> "Machine":
        self.before = self.current
        self.current = device.index
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.current = self.before


class OnDevice:
    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_a_launch_leaves_the_current_device(
    index: int, current: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "device", machine.device)
    launch, tensor, machine.fails = Launcher(machine.launch), OnDevice(index), fails
    if fails:
        with pytest.raises(RuntimeError, match="launch failed"):
            launch(tensor, 0.5)
    else:
        launch(tensor, 0.5)
    assert machine.launches == [(index, (tensor, 0.5))]
    assert machine.current == current
