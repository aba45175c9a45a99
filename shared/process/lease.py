"""Who has the card (or, without one, the cores): a lease that one process at a time holds.

    with lease.hold("actor0", meanwhile=link.beat) as waited_s: ...

Contract: exclusive between processes and within one; freed by the kernel when the holder dies. `<lock>.json` says for
people who holds it and since when; it may be stale after a kill, the lock itself never is.
A wait polls, at most LONGEST_POLL_S late, and calls `meanwhile` each time, so that a waiting process keeps speaking to
its peers. It has no deadline: a holder that hangs is ended by its own watchdog, a stopped one by the launcher.
Left out on purpose: fairness (the protocol's own turn-taking gives it) and counting of the card's memory.

Whether the two processes take turns, and on what.

On a card they always do. On a CPU they do unless the threads of both fit its cores side by side: then neither waits,
and with `pipeline.max_lag` above zero sampling and learning overlap.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from shared.config.processes import ComputeConfig
from shared.run.file_lock import open_lock, try_lock
from shared.run.files import remove_unfinished, write_whole

FIRST_POLL_S = 0.0005
LONGEST_POLL_S = 0.01


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The note beside the lock."""

    role: str
    """Name of the process: `learner`, `actor0`."""
    pid: int
    """Its process id."""
    since: str
    """UTC time of taking, ISO 8601."""


def nothing() -> None:
    """For a wait that nobody notices."""


class Lease:
    """A lease named by the path of its lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note = path.with_name(f"{path.name}.json")

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[float]:
        """Hold it for the block; gives the seconds that were waited. meanwhile: called again and again in the wait."""
        start = time.monotonic()
        fd = open_lock(self.path)
        try:
            wait_for(fd, meanwhile)
            waited_s = time.monotonic() - start
            try:
                remove_unfinished(self.note)
                self.write_note(role)
                yield waited_s
            finally:
                self.note.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def write_note(self, role: str) -> None:
        """For people."""
        since = datetime.now(UTC).isoformat(timespec="milliseconds")
        write_whole(self.note, msgspec.json.encode(Holder(role=role, pid=os.getpid(), since=since)), durable=False)


def wait_for(fd: int, meanwhile: Callable[[], None]) -> None:
    """Try until the lock is ours, at first often."""
    pause = FIRST_POLL_S
    while not try_lock(fd):
        meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


class Turns(Protocol):
    """Held while computing."""

    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> AbstractContextManager[float]:
        """Wait for one's turn; gives the seconds that were waited. meanwhile: called again and again in the wait."""
        ...


class NoTurns:
    """There is room for both."""

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[float]:
        """Go ahead."""
        yield 0.0


def turns(compute: ComputeConfig, device: str, lease: Path) -> Turns:
    """A lease where the two would be in each other's way."""
    fits = compute.learner_threads + compute.actor_threads <= len(os.sched_getaffinity(0))
    return NoTurns() if device == "cpu" and fits else Lease(lease)
