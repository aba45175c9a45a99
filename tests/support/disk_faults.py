"""Disk faults without patching: the interpreter's profile hook sees each call into `os` just before it is made.

So a test can list the system calls in order, let the n-th of a kind fail with an errno, or SIGKILL a process before any
one of them. Left out on purpose: lost page cache; the order of fsync and rename is asserted instead.
"""

import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

CALLS = frozenset({"open", "write", "fsync", "rename", "link", "unlink", "rmdir", "mkdir", "ftruncate"})


@contextmanager
def before_each_call(react: Callable[[str], None]) -> Iterator[None]:
    """Call `react` with the name of every file call before it happens, here and in threads that start meanwhile."""

    def hook(_frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and getattr(arg, "__module__", "") == "posix" and arg.__name__ in CALLS:
            react(arg.__name__)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def list_calls(action: Callable[[], object]) -> list[str]:
    """The file calls that an action makes."""
    calls: list[str] = []
    with before_each_call(calls.append):
        action()
    return calls


@contextmanager
def failing(name: str, errno: int, *, nth: int = 1) -> Iterator[None]:
    """The n-th call of this name fails, and the hook is gone with it; all others are real."""
    seen = count(1)

    def react(call: str) -> None:
        if call == name and next(seen) == nth:
            raise OSError(errno, os.strerror(errno))

    with before_each_call(react):
        yield


def kill_before_every_call(
    prepare: Callable[[Path], object], act: Callable[[Path], object], folder: Path
) -> list[Path]:
    """Run `act` on a fresh copy of what `prepare` made, SIGKILLed before its 1st, 2nd, ... call, until it survives.

    Both are functions of one test module. Gives the copies, one a run, the survivor's last.
    """
    prepare(folder / "prepared")
    names = [act.__module__, act.__name__, str(folder)]
    subprocess.run([sys.executable, "-m", "tests.support.disk_faults", *names], check=True, timeout=60)
    return sorted(folder.glob("killed-*"))


def main(module: str, function: str, folder: Path) -> None:
    """A process of its own: one that has no threads may fork."""
    act = getattr(importlib.import_module(module), function)
    for nth in count(1):
        path = folder / f"killed-{nth:04d}"
        shutil.copytree(folder / "prepared", path)
        status = run_killed(partial(act, path), nth)
        if not os.WIFSIGNALED(status):
            assert status == 0, f"the act failed before call {nth}"
            return


def run_killed(act: Callable[[], object], nth: int) -> int:
    """The wait status of a child that dies before its nth call."""
    seen = count(1)

    def react(_call: str) -> None:
        if next(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with before_each_call(react):
                act()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    """Nothing can be opened: the soft limit of this process is lowered to what is open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
