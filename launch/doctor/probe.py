"""Looks at what may never answer, or take the process with it, at most for so long.

A look (`Look`) at a dead network file system, a resolver or a driver runs in a daemon thread, which is left behind when
its time is up and ends with the process. What may crash the process, or hold the interpreter, is a probe (`probes.py`):
a program that prints one JSON object a stage. It runs in a session of its own, so that all of it can be killed, and
writes to a file instead of a pipe, which a stray grandchild could hold open for ever. A probe that ends early has still
told the stages it finished; `trouble` says how it ended.
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
class Told:
    """What a probe said."""

    lines: tuple[bytes, ...]
    """One JSON object a finished stage."""
    trouble: str
    """How it went wrong; empty if it ended as it should."""


def ask(module: str, arguments: Sequence[str], limit_s: float, environment: Mapping[str, str] = os.environ) -> Told:
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
        return Told(lines=lines, trouble=trouble and with_last_words(trouble, read(err)))


def wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How it ended, in words; empty for well."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"no answer within {limit_s:g} s"
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}" if code else ""


def read(file: IO[bytes]) -> bytes:
    """From its start, within reason."""
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES)


def with_last_words(trouble: str, errors: bytes) -> str:
    """The last line on stderr, where a traceback says what it is about."""
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"{lines[-1].strip()[:300]} ({trouble})" if lines else trouble


class Look(Generic[T]):
    """A look under way."""

    def __init__(self, look: Callable[[], T], limit_s: float) -> None:
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.answers: queue.Queue[T | Missing] = queue.Queue(1)
        threading.Thread(target=self._run, args=(look,), daemon=True).start()

    def result(self) -> T | Missing:
        """What was seen, or why not, at the latest when the time is up."""
        try:
            return self.answers.get(timeout=max(self.deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return Missing(f"no answer within {self.limit_s:g} s")

    def _run(self, look: Callable[[], T]) -> None:
        try:
            answer: T | Missing = look()
        except Exception as error:
            # The edge of a look: whatever went wrong there must not take the other findings with it.
            answer = Missing(f"{type(error).__name__}: {error}")
        self.answers.put(answer)
