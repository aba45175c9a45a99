"""The lease: the right to compute, which one process has at a time. The time that a process has it is its turn.

    with lease.hold("actor0", meanwhile=link.beat) as waited_s: ...

Contract: exclusive between processes and within one. The kernel frees the lease when its holder dies. `<lock>.json`
tells people who holds it and since when; it may be out of date after a kill, the lock itself never is.
Waiting polls, at most LONGEST_POLL_S late, and calls `meanwhile` each time, so that a waiting process keeps talking to
its peers. There is no deadline: a holder that hangs is ended by its own watchdog, a stopped one by the launcher.

At the end of a turn, memory that was freed in it goes back to the system. glibc would keep it for the next turn, and
both processes together would need what each needs at its peak.

On a GPU the two processes always need the lease. On a CPU they need it unless the cores are enough for the threads of
both: then neither waits, and with `pipeline.max_lag` above zero sampling and learning overlap.
Left out on purpose: fairness (the protocol already makes the two alternate) and accounting of the GPU's memory.
"""

import ctypes
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

WORTH_RETURNING = 256 * 2**20
"""Bytes. To return a gigabyte and get it again takes a tenth of a second, too long for the step of a small model."""
FIRST_POLL_S = 0.0005
LONGEST_POLL_S = 0.01


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `<lock>.json`."""

    role: str
    """Name of the process: `learner`, `actor0`."""
    pid: int
    """Its process id."""
    since: str
    """When it took the lease: UTC time, ISO 8601."""


def nothing() -> None:
    pass


class ComputeLease(Protocol):
    """What a process needs in order to compute."""

    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> AbstractContextManager[float]:
        """Wait for a turn, which lasts for the block; gives the seconds waited. `meanwhile` is called while waiting."""
        ...


class Lease:
    """A lease named by the path of its lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note = path.with_name(f"{path.name}.json")

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[float]:
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
                return_freed_memory()
                self.note.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def write_note(self, role: str) -> None:
        since = datetime.now(UTC).isoformat(timespec="milliseconds")
        write_whole(self.note, msgspec.json.encode(Holder(role=role, pid=os.getpid(), since=since)), durable=False)


class HeapSizes(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which number FREE is that of freed memory in the heap."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


FREE = 8


def return_freed_memory() -> None:
    """To the system, if it is much."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = HeapSizes
    if libc.mallinfo2().sizes[FREE] > WORTH_RETURNING:
        libc.malloc_trim(0)


class NoLease:
    """For two processes that can compute at the same time: neither waits."""

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[float]:
        yield 0.0


def wait_for(fd: int, meanwhile: Callable[[], None]) -> None:
    """Poll until the lock is ours, often at first."""
    pause = FIRST_POLL_S
    while not try_lock(fd):
        meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def lease_for(compute: ComputeConfig, device: str, path: Path) -> ComputeLease:
    """A lease if both processes would compete for the same device."""
    fits = compute.learner_threads + compute.actor_threads <= len(os.sched_getaffinity(0))
    return NoLease() if device == "cpu" and fits else Lease(path)
