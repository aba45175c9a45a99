"""What a scoring worker prints: drained all the time, so that a flood neither blocks it nor fills the disk.

Of each request's output the first 64 KiB go to the actor's log and the rest is dropped, which is said once. The last
lines are kept for the sentence that says how a worker ended.
"""

import contextlib
import os
import sys

from actor.verdict import one_line

READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
KEPT_BYTES = 2048


class WorkerOutput:
    """The reading end of the pipe behind a worker's standard output and errors."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.room = SHOWN_BYTES
        self.tail = b""
        self.hung_up = False
        os.set_blocking(descriptor, False)

    def next_request(self) -> None:
        """Room in the log for what is printed from now on."""
        self.room = SHOWN_BYTES
        self.tail = b""

    def drain(self) -> None:
        """Take what is there, but no more than a few reads: whoever prints without end must not hold the pool."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                printed = os.read(self.descriptor, READ_BYTES)
                if not printed:
                    self.hung_up = True
                    return
                self.show(printed)
                self.tail = (self.tail + printed)[-KEPT_BYTES:]

    def show(self, printed: bytes) -> None:
        """As much as there is room for."""
        if not self.room:
            return
        shown = printed[: self.room]
        self.room -= len(shown)
        notice = b"" if self.room else b"\n(the scoring worker prints more than is shown)\n"
        sys.stderr.buffer.write(shown + notice)
        sys.stderr.flush()

    def last_line(self) -> str:
        """The last line that is not blank, or nothing."""
        lines = [line for line in self.tail.decode(errors="replace").splitlines() if line.strip()]
        return one_line(lines[-1]) if lines else ""

    def close(self) -> None:
        """Whoever still prints gets SIGPIPE."""
        os.close(self.descriptor)
