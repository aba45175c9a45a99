"""One child process: its own session, its output in its log file, and no way to outlive the launcher.

The own session keeps the terminal's Ctrl-C away from it: only the launcher is interrupted, and decides. Its process
group is also how whatever it started itself (verifier workers) is stopped with it. The child learns the launcher's
process id from TANDEM_PARENT_PID and ties its life to it (`shared/lifeline.py`), which holds even if the launcher
is killed without a chance to clean up.
"""

import contextlib
import os
import signal
import subprocess

from launch.growing_file import GrowingFile
from launch.topology import Process
from shared.lifeline import PARENT_PID


class Child:
    """A started process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("ab") as log:
            # Earlier lives of this process wrote here too; only what this one says is ours.
            self.output_start = log.tell()
            self.output = GrowingFile(process.log, self.output_start)
            self.popen = subprocess.Popen(
                process.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | process.environment | {PARENT_PID: str(os.getpid())},
            )

    @property
    def name(self) -> str:
        """`learner` or `actor0`."""
        return self.process.name

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        return self.popen.poll()

    def ask_to_stop(self) -> None:
        """SIGTERM to the process alone: it may still need what it started in order to finish."""
        self.popen.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole process group, also after the process itself is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def wait(self, seconds: float) -> None:
        """Until it ends, or the time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)
