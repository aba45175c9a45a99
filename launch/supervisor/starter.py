"""Starts the processes of a run: with a new Python interpreter, or as a fork of one that has imported everything.

    fresh    a new interpreter, for what loads other libraries than a learner or actor
    forked   a fork of the fork server (fork_server.py), which has loaded the libraries of learner and actor.
             Their 250 MB are in memory once instead of twice, with the tokenizer, and a dead actor is back in a
             fraction of a second

Either way the process has its own session, writes to its log file, and dies with the process that started it. Its group
is killed before it is reaped: after that, another process may get the same id.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from launch.supervisor.topology import Process, ProcessFailed
from shared.process.children import ASKS_TO_END, is_stopped
from shared.process.parent_death import PARENT_PID
from shared.run.files import open_log
from shared.run.growing_file import last_lines

MAX_MESSAGE_BYTES = 65_536
SHOWN_LINES = 15
CLEANUP_S = 15.0
"""Time for the fork server to end its strays. After that it is killed."""
LISTEN_S = 1.0


class Started(Protocol):
    """A started process."""

    @property
    def pid(self) -> int | None:
        """None before it has one."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        ...

    def send_signal(self, number: int) -> None:
        """Send it to the process only; does nothing if it has ended."""
        ...

    def kill_group(self) -> None:
        """SIGKILL to its process group, even if the process itself has ended. Returns when the process is gone."""
        ...


class Starter(Protocol):
    """Starts the processes of a run."""

    def start(self, process: Process, log: IO[bytes]) -> Started:
        """Start a process; does not wait until it runs."""
        ...

    def close(self) -> None: ...


class FreshStarter:
    """Starts a new interpreter for each process."""

    def start(self, process: Process, log: IO[bytes]) -> Started:
        return FreshProcess(process, log)

    def close(self) -> None:
        pass


class FreshProcess:
    """A child of the launcher."""

    def __init__(self, process: Process, log: IO[bytes]) -> None:
        self.popen = subprocess.Popen(
            process.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | process.environment | {PARENT_PID: str(os.getpid())},
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def exit_code(self) -> int | None:
        # WNOWAIT: look without reaping, so that the group can be killed first.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.popen.returncode is None and os.waitid(os.P_PID, self.pid, ended):
            self.kill_group()
        return self.popen.returncode

    def send_signal(self, number: int) -> None:
        if self.exit_code() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        # The group has the id of the process, which is valid until it is reaped.
        if self.popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait()


class ForkServerStarter:
    """Asks the fork server to fork."""

    def __init__(self, environment: dict[str, str], run: Path, log: Path, cleanup_s: float = CLEANUP_S) -> None:
        """run: its folder. cleanup_s: time for the fork server to end what it has started."""
        opened = open_log(log, "wb")
        self.log = log
        self.cleanup_s = cleanup_s
        # A packet socket: each packet is one message.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with opened as output, theirs, block_signals():
            self.popen = subprocess.Popen(
                (sys.executable, "-m", "launch.supervisor.fork_server", str(run), str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env=os.environ | environment | {PARENT_PID: str(os.getpid())},
            )
        self.children: list[ForkedProcess] = []

    def start(self, process: Process, log: IO[bytes]) -> Started:
        # It runs as soon as the fork server has finished its imports.
        child = ForkedProcess(self)
        self.children.append(child)
        program = {"argv": process.argv, "environment": process.environment, "log": str(process.log)}
        self.control.settimeout(self.cleanup_s)
        try:
            self.control.send(json.dumps({"child": len(self.children) - 1, **program}).encode())
        except OSError as error:
            raise self.failure() from error
        return child

    def listen(self, timeout_s: float) -> None:
        """Handle the fork server's messages; waits at most this long for the first. Raises if the fork server ended."""
        self.resume_if_stopped()
        try:
            self.control.settimeout(timeout_s)
            while packet := self.control.recv(MAX_MESSAGE_BYTES):
                message = json.loads(packet)
                self.children[message.pop("child")].handle(message)
                self.control.settimeout(0.0)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            # A reset: it ended before it had read all requests.
            pass
        raise self.failure()

    def resume_if_stopped(self) -> None:
        """A stopped fork server (SIGSTOP) cannot report how its children end, and there is no use in stopping it."""
        if is_stopped(self.popen.pid):
            self.popen.send_signal(signal.SIGCONT)

    def wait_for_end(self, child: "ForkedProcess") -> None:
        """Wait for the report that a killed child has ended. Without one, kill the fork server and all its children."""
        deadline = time.monotonic() + self.cleanup_s
        while child.code is None and time.monotonic() < deadline:
            self.listen(min(LISTEN_S, self.cleanup_s))
        if child.code is None:
            self.popen.kill()

    def failure(self) -> ProcessFailed:
        """The fork server ended, and with it everything it had started."""
        lines = "\n".join(f"  {line}" for line in last_lines(self.log, SHOWN_LINES)) or "  (it said nothing)"
        return ProcessFailed(f"The process that starts learner and actor ended; the end of {self.log}:\n{lines}")

    def close(self) -> None:
        """The fork server ends its children and what they left behind, then itself."""
        self.control.close()
        self.resume_if_stopped()
        if all(child.pid is None for child in self.children):
            # It has started nothing, and may still be importing.
            self.popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(self.cleanup_s)
        self.popen.kill()
        self.popen.wait()


class ForkedProcess:
    """A child of the fork server."""

    def __init__(self, starter: ForkServerStarter) -> None:
        self.starter = starter
        self.pid: int | None = None
        self.code: int | None = None
        self.early_signals: list[int] = []

    def handle(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            self.pid = message["pid"]
            for number in self.early_signals:
                self.send_signal(number)
        else:
            self.code = message["code"]

    def exit_code(self) -> int | None:
        if self.code is None:
            self.starter.listen(0.0)
        return self.code

    def send_signal(self, number: int) -> None:
        # Sent later to a process that has not been started yet.
        if self.pid is None:
            self.early_signals.append(number)
        elif self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        with suppress(ProcessFailed):
            self.starter.listen(0.0)
        # Without an id it has not been started, and never will be: only the end of a run kills such a process.
        # The fork server killed the group of a process that has ended.
        if self.pid is None or self.code is not None:
            return
        # The process too, since it may not have its own group yet.
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)
        with suppress(ProcessFailed):
            self.starter.wait_for_end(self)


@contextmanager
def block_signals() -> Iterator[None]:
    """A process that is started in this block has the signals of ASKS_TO_END blocked from its first moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
