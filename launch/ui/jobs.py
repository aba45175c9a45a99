"""Processes that the page starts, each a command in a session of its own, so that no Ctrl-C in the terminal reaches it.

    plan, eval, chat    end with the page, however it ends; their button kills them and all that they have started
    run                 goes on without the page; its button asks it to stop like Ctrl-C, and the second time at once

What they print goes into a file without a name: no pipe breaks if the page is killed, a reload reads it from the
beginning, and its disk is free again when page and process have both ended. A run has its own logs too.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.errors import UserError
from shared.process.children import how_it_ended
from shared.process.parent_death import PARENT_PID

Kind = Literal["plan", "eval", "chat", "run"]
MOST_RUNNING = 8
MOST_ENDED = 12
"""That are still known."""
MOST_BYTES = 256 * 1024
"""Of what a process has said, in one answer."""
LAUNCHER_ENDS_S = 10.0
"""Longest wait for the launcher of a run that has stopped."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is to be started."""

    kind: Kind
    run: str
    """Name of the run that it is about; empty for a plan."""
    shown: str
    """As a person would type it."""
    module: Sequence[str]
    """Module of Python and its arguments."""


class Job:
    """A process that was started."""

    def __init__(self, number: int, command: Command, here: Path) -> None:
        self.number = number
        self.command = command
        self.output = tempfile.TemporaryFile()  # noqa: SIM115, closed by `forget`
        self.started = time.monotonic()
        self.ended: float | None = None
        self.end_was_requested = False
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command.module],
            cwd=here,
            stdin=subprocess.PIPE if command.kind == "chat" else subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | ({} if command.kind == "run" else {PARENT_PID: str(os.getpid())}),
        )
        self.waiting = threading.Thread(target=self.wait, daemon=True)
        self.waiting.start()

    def wait(self) -> None:
        self.process.wait()
        if self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.ended = time.monotonic()

    def say(self, line: str) -> None:
        """One line to its input."""
        try:
            if self.process.stdin is None:
                raise UserError("That process reads no input.")
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # it has ended, or its input was closed after that
            raise UserError("That process has ended; start it again.") from error

    def end(self) -> None:
        """As its button does."""
        if self.ended is None:
            self.end_was_requested = True
            with suppress(ProcessLookupError):
                if self.command.kind == "run":
                    os.kill(self.process.pid, signal.SIGTERM)
                else:
                    os.killpg(self.process.pid, signal.SIGKILL)

    def state(self) -> dict[str, Any]:
        return {
            "job": self.number,
            "kind": self.command.kind,
            "run": self.command.run,
            "command": self.command.shown,
            "running": self.ended is None,
            "code": None if self.ended is None else self.process.returncode,
            "cause": self.cause(),
            "seconds": (self.ended or time.monotonic()) - self.started,
        }

    def cause(self) -> str:
        """Which signal ended it, and what to do; empty if none did, or if the page was asked to end it."""
        if self.ended is None or self.end_was_requested:
            return ""
        return signal_sentence(self.process.returncode, self.command.kind)

    def told(self, first: int) -> dict[str, Any]:
        """With what it has said. first: how many bytes of that are known already. It counts as running until all of
        it has been told."""
        state = self.state()
        text = self.said(first, to_the_end=not state["running"])
        more = first + len(text) < os.fstat(self.output.fileno()).st_size
        found = {"text": text.decode(errors="replace"), "next": first + len(text)}
        return state | found | {"running": state["running"] or more}

    def said(self, first: int, *, to_the_end: bool) -> bytes:
        """Whole lines, so that no character is cut; the rest of a process that has ended too."""
        data = os.pread(self.output.fileno(), MOST_BYTES, first)
        lines = data[: data.rfind(b"\n") + 1]
        if len(data) == MOST_BYTES:
            return lines or data
        return data if to_the_end else lines


def signal_sentence(code: int, kind: Kind) -> str:
    """Which signal ended a process, and what to do; empty if none did."""
    if code >= 0:
        return ""
    reason = ", probably because memory ran out: end other programs, then " if code == -signal.SIGKILL else "; "
    return f"The process {how_it_ended(code)}{reason}{'resume the run' if kind == 'run' else 'start it again'}."


class Jobs:
    """All of one page."""

    def __init__(self, here: Path) -> None:
        """here: the folder in which they run."""
        self.here = here
        self.numbers = itertools.count(1)
        self.known: dict[int, Job] = {}
        self.lock = threading.Lock()
        # The kernel ends a process with the thread that started it, and a thread that answers requests ends early.
        self.starter = ThreadPoolExecutor(max_workers=1)

    def start(self, command: Command) -> Job:
        with self.lock:
            running = [job.command for job in self.known.values() if job.ended is None]
            if len(running) >= MOST_RUNNING:
                raise UserError(f"{MOST_RUNNING} processes of this page are running; end one of them first.")
            if command.kind == "run" and ("run", command.run) in {(one.kind, one.run) for one in running}:
                raise UserError(f"{command.run} has been started already; wait for it, or end it first.")
            self.forget()
            job = self.starter.submit(Job, next(self.numbers), command, self.here).result()
            self.known[job.number] = job
            return job

    def wait_for_launcher(self, run: str) -> None:
        """Of a run that has stopped: it writes the report then, so it ends a moment later."""
        for job in list(self.known.values()):
            if (job.command.kind, job.command.run) == ("run", run):
                job.waiting.join(LAUNCHER_ENDS_S)

    def forget(self) -> None:
        """The oldest ended ones."""
        for job in [job for job in self.known.values() if job.ended is not None][:-MOST_ENDED]:
            del self.known[job.number]
            job.output.close()

    def find(self, number: int) -> Job:
        job = self.known.get(number)
        if job is None:
            raise UserError(f"There is no process {number} of this page; start it again.")
        return job

    def end(self) -> list[str]:
        """With the page. Returns the names of the runs that go on."""
        running = [job for job in self.known.values() if job.ended is None]
        for job in running:
            if job.command.kind != "run":
                job.end()
        return [job.command.run for job in running if job.command.kind == "run"]
