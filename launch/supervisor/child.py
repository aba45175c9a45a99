"""One child process of a run, with its log and its stacks; starter.py starts it.

The child has its own session, so that the terminal's Ctrl-C reaches only the launcher, which decides what to do. With
its process group, what the child has started (verifier workers) is killed too. The child is tied to the process that
started it (`shared/process/parent_death.py`), so it also ends if the launcher is killed and cannot clean up.

A process writes its stacks on SIGUSR1 (shared/process/watchdog.py). The launcher asks for them before it kills a
process that is stuck. Compare the files of learner and actor: a stall has two sides.
"""

import signal
import time
from pathlib import Path

from launch.supervisor.starter import Starter
from launch.supervisor.topology import Process
from shared.process.children import is_stopped
from shared.process.watchdog import ASK, FIRED
from shared.run.files import open_log
from shared.run.growing_file import GrowingFile

WRITING_S = 2.0
"""Longest wait for stacks."""
CONTINUED_S = 0.5
"""Longest wait for the stacks that the watchdog of a process may write as soon as the process is continued."""
LOOK_EVERY_S = 0.05


class Stacks:
    """The file with the stacks of one process since its last start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = self.size()

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def is_open(self) -> bool:
        """Whether the process can be asked for its stacks."""
        return self.size() > self.start

    def show_no_progress(self) -> bool:
        """Whether the watchdog ended the process because it made no progress."""
        if not self.is_open():
            return False
        with self.path.open("rb") as file:
            file.seek(self.start)
            return any(line.startswith(FIRED.encode()) for line in file)

    def wait_for_more(self, before: int, seconds: float) -> bool:
        """Wait until the file has grown and stops growing, but no longer than this. Returns whether it has grown."""
        deadline = time.monotonic() + seconds
        sizes = [before]
        while time.monotonic() < deadline and not (sizes[-1] > before and sizes[-1] == sizes[-2]):
            time.sleep(LOOK_EVERY_S)
            sizes.append(self.size())
        return sizes[-1] > before


class Child:
    """A started process, with what the supervisor knows about it."""

    def __init__(self, process: Process, starter: Starter) -> None:
        self.process = process
        with open_log(process.log, "ab") as log:
            # The log may start with the output of earlier starts, which does not count.
            self.output_start = log.tell()
            self.output = GrowingFile(process.log, self.output_start)
            self.stacks = Stacks(process.stacks)
            self.started = starter.start(process, log)
        self.stopped_at: float | None = None
        self.given_up = ""

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def pid(self) -> int | None:
        """None before it has one."""
        return self.started.pid

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        return self.started.exit_code()

    def stopped_s(self) -> float | None:
        """Seconds since it was first seen stopped (SIGSTOP); None if it is not stopped."""
        if self.pid is None or not is_stopped(self.pid):
            self.stopped_at = None
            return None
        self.stopped_at = self.stopped_at or time.monotonic()
        return time.monotonic() - self.stopped_at

    def write_stacks(self) -> None:
        """Ask it for its stacks. A stopped process is continued, since it could not write them otherwise."""
        # The signal would kill a process that is still loading. Then its first line is not in the file yet.
        if self.pid is None or self.exit_code() is not None or not self.stacks.is_open():
            return
        before = self.stacks.size()
        if is_stopped(self.pid):
            self.started.send_signal(signal.SIGCONT)
            # Its watchdog may fire at once. If it wrote at the same time as the process, their lines would be mixed up.
            if self.stacks.wait_for_more(before, CONTINUED_S):
                return
        self.started.send_signal(ASK)
        self.stacks.wait_for_more(before, WRITING_S)

    def ask_to_stop(self) -> None:
        """SIGTERM to the process only: it may need what it has started in order to finish."""
        self.started.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group, even if the process itself has ended."""
        self.started.kill_group()
