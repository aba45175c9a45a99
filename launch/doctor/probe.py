"""Looks with a time limit, at things that may hang or crash.

A look (`Look`) at a dead network file system, a resolver or a driver runs in a daemon thread. When its time is up, the
thread is left alone; it ends with the process. What may crash the process, or block the interpreter, is a probe
(`probes.py`): a program that prints one JSON object for each stage it finishes. A probe runs in a session of its own,
so that it and its children can be killed together. It writes to a file instead of a pipe, because a child that
survives could keep a pipe open. If a probe ends early, the stages it finished still count; `trouble` says how it ended.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Generic, TypeVar

from launch.doctor.finding import Missing
from shared.process.parent_death import PARENT_PID

MAX_OUTPUT_BYTES = 2**20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProbeOutput:
    """What came back from a probe."""

    lines: tuple[bytes, ...]
    """One JSON object for each finished stage."""
    trouble: str
    """What went wrong; empty if the probe ended with exit code 0."""
    timed_out: bool = False
    """Whether that was its time limit."""


def run_probe(
    module: str, arguments: Sequence[str], limit_s: float, environment: Mapping[str, str] = os.environ
) -> ProbeOutput:
    """Run `python -m module arguments`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**environment, PARENT_PID: str(os.getpid())},
        )
        trouble = wait(process, limit_s)
        lines = tuple(line for line in read(out).splitlines() if line.startswith(b"{"))
        said = trouble and with_last_line(trouble, read(err))
        return ProbeOutput(lines=lines, trouble=said, timed_out=trouble == timed_out(limit_s))


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How it ended, in words; empty for exit code 0."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return timed_out(limit_s)
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}" if code else ""


def timed_out(limit_s: float) -> str:
    return f"not finished within {limit_s:g} s"


def read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES)


def with_last_line(trouble: str, errors: bytes) -> str:
    """Adds the last line of stderr, which names the error at the end of a traceback."""
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"{lines[-1].strip()[:300]} ({trouble})" if lines else trouble


class Look(Generic[T]):
    """A function that runs in a thread of its own, with a time limit."""

    def __init__(self, look: Callable[[], T], limit_s: float) -> None:
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.results: queue.Queue[T | Missing] = queue.Queue(1)
        threading.Thread(target=self._run, args=(look,), daemon=True).start()

    def result(self) -> T | Missing:
        """Waits until the function is done or its time is up."""
        try:
            return self.results.get(timeout=max(self.deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return Missing(timed_out(self.limit_s))

    def _run(self, look: Callable[[], T]) -> None:
        try:
            result: T | Missing = look()
        except Exception as error:
            # Any error of one look becomes its finding; the other looks go on.
            result = Missing(f"{type(error).__name__}: {error}")
        self.results.put(result)
