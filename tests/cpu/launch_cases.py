"""What the launcher's tests run: no torch, so that a launch takes a fraction of a second."""

import ctypes
import os
import subprocess
import sys
import time


def environment(names):
    return {name: os.environ.get(name) for name in names}


def arguments(*args, **kwargs):
    return args, kwargs


def path():
    return sys.path


def named():
    yield "first", 1
    yield "second", [2]


def named_twice():
    yield "first", 1
    yield "first", 2


def fails_after_two():
    yield "first", 1
    yield "second", 2
    raise ValueError("the third broke")


def rank_fails(failing, seconds):
    print(f"output of rank {os.environ['RANK']}")
    if int(os.environ["RANK"]) == failing:
        raise KeyError("what went wrong")
    time.sleep(seconds)


def hangs_somewhere(seconds):
    print("before the sleep")
    time.sleep(seconds)


def crashes(rank, seconds):
    if os.environ["RANK"] == str(rank):
        ctypes.string_at(0)
    time.sleep(seconds)


def exits(rank, status, seconds):
    if os.environ["RANK"] == str(rank):
        os._exit(status)
    time.sleep(seconds)


def unpicklable():
    return lambda: None


def starts_a_process(pid_file):
    """Leaves a child behind, as megatron's checkpoints do."""
    child = subprocess.Popen(["sleep", "600"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))


def writes_pid(pid_file):
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
