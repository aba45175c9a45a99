"""Where the processes of a run stand, written down before any of them is killed.

A process answers SIGUSR1 with its stacks (shared/process/watchdog.py). Read the files of both side by side: a stall has
two
ends.
"""

import time
from pathlib import Path

from shared.process.watchdog import FIRED

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
