"""Who has the card (or, without one, the cores): a lease that one process at a time holds.

    with lease.hold("actor0", num_bytes=held) as waited_s: ...

Contract: exclusive between processes and within one; freed by the kernel when the holder dies. `<lock>.json` says for
people who holds it, since when, and with how many bytes; it may be stale after a kill, the lock itself never is.
A wait without a deadline sleeps in the kernel. One with a deadline polls, a few milliseconds late at most.
Left out on purpose: fairness (the protocol's own turn-taking gives it) and counting of the card's memory.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from shared.file_lock import open_lock, try_lock, wait_lock
from shared.files import remove_unfinished, write_whole

FIRST_POLL_S = 0.0005
LONGEST_POLL_S = 0.01


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the lock."""

    role: str
    """Name of the process: `learner`, `actor0`."""
    pid: int
    """Its process id."""
    since: str
    """UTC time of taking, ISO 8601."""
    num_bytes: int
    """Bytes of the card it means to hold."""


class Lease:
    """A lease named by the path of its lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note = path.with_name(f"{path.name}.json")

    @contextmanager
    def hold(self, role: str, *, num_bytes: int = 0, deadline_s: float | None = None) -> Iterator[float]:
        """Hold it for the block; gives the seconds that were waited. TimeoutError names who has it."""
        start = time.monotonic()
        fd = open_lock(self.path)
        try:
            self._take(fd, role, deadline_s)
            waited_s = time.monotonic() - start
            try:
                remove_unfinished(self.note)
                self._write_note(role, num_bytes)
                yield waited_s
            finally:
                self.note.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def holder(self) -> Holder | None:
        """The note of whoever took it last and has not given it back."""
        try:
            return msgspec.json.decode(self.note.read_bytes(), type=Holder)
        except FileNotFoundError:
            return None

    def _take(self, fd: int, role: str, deadline_s: float | None) -> None:
        if deadline_s is None:
            wait_lock(fd)
        elif not poll(fd, deadline_s):
            holder = self.holder()
            who = f"{holder.role} (process {holder.pid}, since {holder.since})" if holder else "another process"
            raise TimeoutError(f"{role} waited {deadline_s:.1f} s for the lease {self.path}, which {who} holds.")

    def _write_note(self, role: str, num_bytes: int) -> None:
        since = datetime.now(UTC).isoformat(timespec="milliseconds")
        holder = Holder(role=role, pid=os.getpid(), since=since, num_bytes=num_bytes)
        write_whole(self.note, msgspec.json.encode(holder), durable=False)


def poll(fd: int, deadline_s: float) -> bool:
    """Try until the deadline, at first often."""
    end, pause = time.monotonic() + deadline_s, FIRST_POLL_S
    while not try_lock(fd):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)
    return True
