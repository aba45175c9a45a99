"""How a process of a run comes to be: as a new Python, or forked off one that has imported everything already.

    fresh    a new interpreter; works everywhere
    forked   Linux: off the zygote (zygote.py), which holds the libraries that learner and actor share. Their 250 MB of
             memory are there once instead of twice, and an actor that died is back in a fraction of a second

Either way the process has its own session, its output in its log file, and dies with whoever started it. Its group is
ended before it is collected: from then on its process id may be somebody else's.
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

from launch.supervisor.growing_file import last_lines
from launch.supervisor.topology import Process, ProcessFailed
from shared.process.children import ASKS_TO_END, is_stopped
from shared.process.parent_death import PARENT_PID
from shared.run.files import open_log

MAX_MESSAGE_BYTES = 65_536
SHOWN_LINES = 15
CLEARING_S = 15.0
"""The zygote needs a moment if it has strays to end; one that needs longer is killed."""
LISTEN_S = 1.0


class Started(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int | None:
        """None until it has one."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        ...

    def send_signal(self, number: int) -> None:
        """To the process alone."""
        ...

    def kill_group(self) -> None:
        """SIGKILL to all of its process group, also after the process itself is gone; returns when it is."""
        ...


class Starter(Protocol):
    """Starts processes."""

    def start(self, process: Process, log: IO[bytes]) -> Started:
        """Begin; does not wait until it runs."""
        ...

    def close(self) -> None:
        """Nothing is started any more."""
        ...


class FreshStarter:
    """A new interpreter for each."""

    def start(self, process: Process, log: IO[bytes]) -> Started:
        """Fork and exec."""
        return FreshProcess(process, log)

    def close(self) -> None:
        """Nothing is held."""


class FreshProcess:
    """A child of this process."""

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
        """Of the child."""
        return self.popen.pid

    def exit_code(self) -> int | None:
        """Collects it once it has ended, after its group."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.popen.returncode is None and os.waitid(os.P_PID, self.pid, ended):
            self.kill_group()
        return self.popen.returncode

    def send_signal(self, number: int) -> None:
        """Nothing, if it has ended."""
        if self.exit_code() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """The group has the process's id. Nothing, if it was collected."""
        if self.popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait()


class ZygoteStarter:
    """Asks the zygote to fork."""

    def __init__(self, environment: dict[str, str], log: Path, clearing_s: float = CLEARING_S) -> None:
        """clearing_s: how long it may take to end what it started."""
        opened = open_log(log, "wb")
        self.log = log
        self.clearing_s = clearing_s
        # One message is one packet.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with opened as output, theirs, blocked_signals():
            self.popen = subprocess.Popen(
                (sys.executable, "-m", "launch.supervisor.fork_server", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env=os.environ | environment | {PARENT_PID: str(os.getpid())},
            )
        self.children: list[ForkedProcess] = []

    def start(self, process: Process, log: IO[bytes]) -> Started:
        """It runs as soon as the zygote has its imports behind it."""
        child = ForkedProcess(self)
        self.children.append(child)
        words = {"argv": process.argv, "environment": process.environment, "log": str(process.log)}
        self.control.settimeout(self.clearing_s)
        try:
            self.control.send(json.dumps({"child": len(self.children) - 1, **words}).encode())
        except OSError as error:
            raise self.failure() from error
        return child

    def listen(self, timeout_s: float) -> None:
        """Take in what the zygote has told, waiting at most this long for the first news; raises if it is no more."""
        self.go_on()
        try:
            self.control.settimeout(timeout_s)
            while packet := self.control.recv(MAX_MESSAGE_BYTES):
                told = json.loads(packet)
                self.children[told.pop("child")].told(told)
                self.control.settimeout(0.0)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            # It ended before it had read all requests: the kernel calls that a reset.
            pass
        raise self.failure()

    def go_on(self) -> None:
        """A stopped zygote (SIGSTOP) cannot tell how its children end, and there is nothing else to stop it for."""
        if is_stopped(self.popen.pid):
            self.popen.send_signal(signal.SIGCONT)

    def wait_for_end(self, child: "ForkedProcess") -> None:
        """Until it tells that a killed child has ended. If it does not, it is killed, and its children die with it."""
        deadline = time.monotonic() + self.clearing_s
        while child.code is None and time.monotonic() < deadline:
            self.listen(min(LISTEN_S, self.clearing_s))
        if child.code is None:
            self.popen.kill()

    def failure(self) -> ProcessFailed:
        """The zygote ended, and with it everything it had started."""
        lines = "\n".join(f"  {line}" for line in last_lines(self.log, SHOWN_LINES)) or "  (it said nothing)"
        return ProcessFailed(f"The process that starts learner and actor ended; the end of {self.log}:\n{lines}")

    def close(self) -> None:
        """It ends its children, if any are left, and what they left behind."""
        self.control.close()
        self.go_on()
        if all(child.pid is None for child in self.children):
            # It may still be importing, and has started nothing.
            self.popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(self.clearing_s)
        self.popen.kill()
        self.popen.wait()


class ForkedProcess:
    """A child of the zygote."""

    def __init__(self, zygote: ZygoteStarter) -> None:
        self.zygote = zygote
        self.pid: int | None = None
        self.code: int | None = None
        self.early_signals: list[int] = []

    def told(self, news: dict[str, Any]) -> None:
        """It was born, or it ended."""
        if "pid" in news:
            self.pid = news["pid"]
            for number in self.early_signals:
                self.send_signal(number)
        else:
            self.code = news["code"]

    def exit_code(self) -> int | None:
        """As the zygote collected it."""
        if self.code is None:
            self.zygote.listen(0.0)
        return self.code

    def send_signal(self, number: int) -> None:
        """Kept for a process that is still to be born."""
        if self.pid is None:
            self.early_signals.append(number)
        elif self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """One that is still to be born never will be, since only the end of a run kills such a one. The group of one
        that has ended was ended by the zygote."""
        with suppress(ProcessFailed):
            self.zygote.listen(0.0)
        if self.pid is None or self.code is not None:
            return
        # It may not have its own group yet.
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)
        with suppress(ProcessFailed):
            self.zygote.wait_for_end(self)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """A process that is started meanwhile is deaf to what asks it to end, from its first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
