"""One child process of a run and its log; starter.py says how it comes to be.

Its own session keeps the terminal's Ctrl-C away from it: only the launcher is interrupted, and decides. Its process
group is also how whatever it started itself (verifier workers) is stopped with it. The child ties its life to the one
that started it (`shared/process/parent_death.py`), which holds even if the launcher is killed without a chance to clean
up.

Whether a process has been stopped (SIGSTOP): it lives, and does nothing.

Where the processes of a run stand, written down before any of them is killed.

A process answers SIGUSR1 with its stacks (shared/process/watchdog.py). Read the files of both side by side: a stall has
two
ends.
"""

import signal
import time
from pathlib import Path

from launch.supervisor.growing_file import GrowingFile
from launch.supervisor.starter import Starter
from launch.supervisor.topology import Process
from shared.process.children import is_stopped
from shared.process.watchdog import ASK, FIRED
from shared.run.files import open_log

WRITING_S = 2.0
"""At most this long is waited for stacks."""
LOOK_EVERY_S = 0.05


class Stacks:
    """The stacks of one process, in its present life."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = self.size()

    def size(self) -> int:
        """Bytes in the file, those of earlier lives included."""
        return self.path.stat().st_size if self.path.exists() else 0

    def is_open(self) -> bool:
        """Whether the process is ready to be asked."""
        return self.size() > self.start

    def hold_a_stall(self) -> bool:
        """Whether the process ended itself because it made no progress."""
        if not self.is_open():
            return False
        with self.path.open("rb") as file:
            file.seek(self.start)
            return any(line.startswith(FIRED.encode()) for line in file)

    def wait_for_more(self, before: int) -> None:
        """Until stacks have been written: the file has grown and grows no more. Not for ever."""
        deadline = time.monotonic() + WRITING_S
        sizes = [before]
        while time.monotonic() < deadline and not (sizes[-1] > before and sizes[-1] == sizes[-2]):
            time.sleep(LOOK_EVERY_S)
            sizes.append(self.size())


class Child:
    """A started process."""

    def __init__(self, process: Process, starter: Starter) -> None:
        self.process = process
        with open_log(process.log, "ab") as log:
            # Earlier lives of this process wrote here too; only what this one says is ours.
            self.output_start = log.tell()
            self.output = GrowingFile(process.log, self.output_start)
            self.stacks = Stacks(process.stacks)
            self.started = starter.start(process, log)
        self.stopped_at: float | None = None
        self.given_up = ""

    @property
    def name(self) -> str:
        """`learner` or `actor0`."""
        return self.process.name

    @property
    def pid(self) -> int | None:
        """Process id; None before it has one."""
        return self.started.pid

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        return self.started.exit_code()

    def stopped_s(self) -> float | None:
        """For how long it has been seen to be stopped (SIGSTOP); None if it is not."""
        if self.pid is None or not is_stopped(self.pid):
            self.stopped_at = None
            return None
        self.stopped_at = self.stopped_at or time.monotonic()
        return time.monotonic() - self.stopped_at

    def write_stacks(self) -> None:
        """Have it say where it stands, if it still can; a stopped process can once it is continued."""
        # A process that is still loading would die of the signal: its own line is not in the file yet.
        if self.exit_code() is None and self.stacks.is_open():
            before = self.stacks.size()
            self.started.send_signal(ASK)
            self.started.send_signal(signal.SIGCONT)
            self.stacks.wait_for_more(before)

    def ask_to_stop(self) -> None:
        """SIGTERM to the process alone: it may still need what it started in order to finish."""
        self.started.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group, also after the process itself is gone."""
        self.started.kill_group()
