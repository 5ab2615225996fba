"""The launcher: results, failures, timeouts, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_patches.cpu import launch
from mcore_patches.cpu.launch import LaunchError, run

CASES = "tests.cpu.launch_cases"
ROOT = Path(__file__).parents[2]


def assert_gone(pid):
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")


def test_results_by_rank():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    results = run(f"{CASES}:environment", nprocs=3, args=(names,))
    assert results == [dict(zip(names, (str(rank), "3", str(rank), "3"))) for rank in range(3)]


def test_arguments():
    assert run(f"{CASES}:arguments", args=(1, {"a": (2,)}), kwargs={"b": None}) == [((1, {"a": (2,)}), {"b": None})]


def test_environment(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    names = ["MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "FROM_CALLER", launch.INIT_METHOD_VARIABLE]
    (result,) = run(f"{CASES}:environment", args=(names,), env={"OMP_NUM_THREADS": "3", "FROM_CALLER": "x"})
    assert result.pop(launch.INIT_METHOD_VARIABLE).startswith("file://")
    assert result == {"MASTER_ADDR": None, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "3", "FROM_CALLER": "x"}


def test_release_comes_first_on_the_path(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (result,) = run(f"{CASES}:path", release=tmp_path)
    assert result.index(str(tmp_path)) < min(i for i, entry in enumerate(result) if entry.endswith("site-packages"))


def test_path_of_the_caller_comes_after_the_release(tmp_path, monkeypatch):
    (tmp_path / "release" / "megatron" / "core").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    (result,) = run(f"{CASES}:path", release=tmp_path / "release", env={"PYTHONPATH": str(tmp_path / "given")})
    order = [result.index(str(tmp_path / name)) for name in ("release", "given", "mine")]
    assert order == sorted(order)


def test_named_cases():
    assert run(f"{CASES}:named", nprocs=2) == [{"first": 1, "second": [2]}] * 2


def test_case_named_twice():
    with pytest.raises(LaunchError, match="ValueError: named_twice yielded the case 'first' twice"):
        run(f"{CASES}:named_twice")


def test_failure_says_which_cases_were_done():
    with pytest.raises(LaunchError, match=r"ValueError: the third broke\n(.*\n)*.*cases done before: first, second"):
        run(f"{CASES}:fails_after_two")


def test_failing_rank_stops_the_others():
    start = time.monotonic()
    with pytest.raises(LaunchError, match="failed on rank 1 of 2") as caught:
        run(f"{CASES}:rank_fails", nprocs=2, args=(1, 600))
    assert time.monotonic() - start < 300
    assert caught.value.rank == 1
    message = str(caught.value)
    assert 'raise KeyError("what went wrong")' in message
    assert "output of rank 1" in message
    assert "output of rank 0" not in message


def test_timeout_shows_where_the_ranks_are():
    with pytest.raises(LaunchError, match=r"took longer than 3 s") as caught:
        run(f"{CASES}:hangs_somewhere", nprocs=2, args=(600,), timeout=3)
    assert caught.value.rank is None
    assert str(caught.value).count("in hangs_somewhere") == 2
    assert "before the sleep" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "args", "how"),
    [
        ("crashes", (1, 600), "was killed by SIGSEGV"),
        ("exits", (1, 3, 600), "exited with status 3"),
        ("exits", (1, 0, 600), "exited with status 0"),
    ],
    ids=["signal", "status", "silently"],
)
def test_rank_that_dies(target, args, how):
    with pytest.raises(LaunchError, match=f"rank 1 of 2 {how}") as caught:
        run(f"{CASES}:{target}", nprocs=2, args=args)
    assert caught.value.rank == 1


def test_result_that_does_not_pickle():
    with pytest.raises(LaunchError, match="pickle"):
        run(f"{CASES}:unpicklable")


@pytest.mark.parametrize(
    ("target", "error"),
    [("no_such_module:f", "No module named 'no_such_module'"), (f"{CASES}:no_such_function", "no_such_function")],
    ids=["module", "function"],
)
def test_target_that_does_not_exist(target, error):
    with pytest.raises(LaunchError, match=error) as caught:
        run(target)
    assert caught.value.rank is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "module.function"}, "target='module.function': expected 'module:function'"),
        ({"nprocs": 0}, "nprocs=0: expected at least 1"),
        ({"timeout": 0}, "timeout=0: expected seconds"),
        ({"release": "/nowhere"}, "release='/nowhere': no megatron/core in it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        run(**{"target": f"{CASES}:named", **options})


def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(launch.tempfile, "tempdir", None)
    run(f"{CASES}:starts_a_process", args=(str(tmp_path / "pid"),))
    assert_gone(int((tmp_path / "pid").read_text()))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_killed_caller_takes_the_ranks_along(tmp_path):
    pid_file = tmp_path / "pid"
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from mcore_patches.cpu.launch import run; run('{CASES}:writes_pid', args=({str(pid_file)!r},))",
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    for _ in range(300):
        if pid_file.exists() and pid_file.read_text():
            break
        time.sleep(0.1)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert_gone(int(pid_file.read_text()))


def command_line(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "mcore_patches.cpu.launch", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_command_line():
    done = command_line(f"{CASES}:arguments", "--nprocs", "2", "--args", "[1]", "--kwargs", '{"b": 2}')
    assert done.stdout.splitlines() == [f"rank {rank}: {json.dumps([[1], {'b': 2}])}" for rank in range(2)]
    assert done.returncode == 0


def test_command_line_failure():
    done = command_line(f"{CASES}:rank_fails", "--args", "[0, 0]")
    assert done.returncode == 1
    assert "what went wrong" in done.stderr


def test_under_torchrun():
    """Torchrun's variables are the ranks; the target runs in this process."""
    done = command_line(
        f"{CASES}:environment", "--args", '[["RANK"]]', TORCHELASTIC_RUN_ID="x", RANK="0", WORLD_SIZE="1"
    )
    assert json.loads(done.stdout) == {"RANK": "0"}
    silent = command_line(
        f"{CASES}:environment", "--args", '[["RANK"]]', TORCHELASTIC_RUN_ID="x", RANK="1", WORLD_SIZE="2"
    )
    assert silent.stdout == ""
    assert silent.returncode == 0
