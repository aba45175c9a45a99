"""The lease: the right to compute, which one process has at a time. The time that a process has it is its turn.

    with lease.hold("actor0", meanwhile=link.beat) as turn: ...

Contract: exclusive between processes and within one. The kernel frees the lease when its holder dies. `<lock>.json`
tells people who holds it and since when; it may be out of date after a kill, the lock itself never is. Waiting
processes stand in a queue, so that each gets its turn. A place in the queue is a locked byte of the lock file, and so
is the lease itself, the first byte. A process leaves its place when it has the one before it. A process that gives the
lease back and wants it again goes to the end. The kernel also frees the places of the dead. A stopped process keeps its
place, as it keeps its turn. Waiting polls, at most LONGEST_POLL_S late, and calls `meanwhile` each time, so that a
waiting process keeps talking to its peers. There is no deadline: a holder that hangs is ended by its own watchdog, a
stopped one by the launcher.

    card    the lease is the card's, by its UUID, for all runs of this user. Processes on two cards wait for nobody
    CPU     the lease is the run's, unless the cores are enough for the threads of all processes: then nobody waits, and
            with `pipeline.max_lag` above zero sampling and learning overlap. On a cluster each has cores of its own

At the end of a turn, cached memory of a card goes back to its driver. Memory that was freed in the turn goes back to
the system (free_memory.py), while the result of the turn is being sent. A turn needs little memory in its first tenth
of a second, so it does not have to wait for that. glibc and PyTorch would keep both for the next turn, and the
processes together would need what each needs at its peak.
On a card a turn begins once the memory that it needs is free: the lock of a killed process is free a moment before its
memory is. That is what the plan says beyond what this process has kept, or the most that one of its turns gave back.
Another program may have taken it, so this wait ends with a warning.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from protocol.endpoint import make_private
from shared.config.model import ModelConfig, cache_root
from shared.config.processes import ComputeConfig
from shared.process.card import MIB, NO_MEMORY, CardFacts, CardMemory, Driver, card_facts, driver_of
from shared.process.free_memory import memory_returned
from shared.process.processor import cores_here
from shared.process.trace import NO_TRACE, Trace
from shared.run.file_lock import free_byte, open_lock, try_byte
from shared.run.files import make_folder, remove_unfinished, write_whole

if TYPE_CHECKING:
    import torch

FIRST_POLL_S = 0.0005
LONGEST_POLL_S = 0.01
LEASE_BYTE = 0
"""Of the lock file: locked by the process that has the lease. The places in the line follow."""
PLACES = 16
"""In the line. Beyond them, whoever asks first when one becomes free is the next."""
ROOM_S = 10.0
"""Longest wait for memory of a card."""
CACHE_VARIABLE = "XDG_CACHE_HOME"

log = logging.getLogger("lease")


class Holder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of `<lock>.json`."""

    role: str
    """Name of the process: `learner`, `actor0`."""
    pid: int
    """Its process id."""
    since: str
    """When it took the lease: UTC time, ISO 8601."""
    card_bytes: int = 0
    """The most that PyTorch reserved on the card in its turn before; left out in its first turn and on a CPU."""


@dataclass(kw_only=True)
class Turn:
    """What is known of a turn."""

    waited_s: float
    """For it, in seconds."""
    swap_s: float = 0.0
    """Of it, moving the base between card and host memory; known when the turn has ended."""
    peak: CardMemory = NO_MEMORY
    """Memory of the card; known when the turn has ended."""


def nothing() -> None:
    pass


class ComputeLease(Protocol):
    """What a process needs in order to compute."""

    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> AbstractContextManager[Turn]:
        """Wait for a turn, which lasts for the block. `meanwhile` is called while waiting."""
        ...


class Lease:
    """A lease named by the path of its lock file."""

    def __init__(self, path: Path, driver: Driver | None = None, trace: Trace = NO_TRACE, planned: int = 0) -> None:
        """driver: of the card. planned: bytes of the card that this process reserves at its peak; 0 if unknown."""
        self.path = path
        self.note = path.with_name(f"{path.name}.json")
        self.room = Room(driver, planned) if driver else None
        self.trace = trace
        self.peak = NO_MEMORY

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[Turn]:
        start = time.monotonic()
        fd = open_lock(self.path)
        try:
            with self.trace.phase("waiting"):
                stand_in_line(fd, meanwhile)
                if self.room:
                    self.room.wait(meanwhile)
            turn = Turn(waited_s=time.monotonic() - start)
            try:
                remove_unfinished(self.note)
                self.write_note(role)
                with memory_returned(), self.trace.phase("turn"):
                    yield turn
            finally:
                if self.room:
                    self.peak = turn.peak = self.room.give_back()
                self.note.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def write_note(self, role: str) -> None:
        since = datetime.now(UTC).isoformat(timespec="milliseconds")
        holder = Holder(role=role, pid=os.getpid(), since=since, card_bytes=self.peak.reserved)
        write_whole(self.note, msgspec.json.encode(holder), durable=False)


class Room:
    """The memory of a card that the turns of this process take and give back."""

    def __init__(self, driver: Driver, planned: int, limit_s: float = ROOM_S) -> None:
        """planned: as of a lease. limit_s: longest wait."""
        self.driver = driver
        self.planned = planned
        self.limit_s = limit_s
        self.kept = driver.peak().reserved
        self.given_back = 0
        self.is_short = False

    @property
    def needed(self) -> int:
        """Bytes for the next turn."""
        return max(self.planned - self.kept, self.given_back)

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Until it is free, within the limit. After a wait for nothing the next turns do not wait."""
        deadline = time.monotonic() + (0.0 if self.is_short else self.limit_s)
        poll(lambda: self.is_free() or time.monotonic() >= deadline, meanwhile)
        if (is_short := not self.is_free()) and not self.is_short:
            log.warning(
                "the card has %d MiB free after %.0f s, and this turn may need %d MiB: another program uses the rest",
                self.driver.free_bytes() // MIB,
                self.limit_s,
                self.needed // MIB,
            )
        self.is_short = is_short

    def is_free(self) -> bool:
        return self.driver.free_bytes() >= self.needed

    def give_back(self) -> CardMemory:
        """Of a turn; returns what it used at most."""
        peak, before = self.driver.peak(), self.driver.free_bytes()
        self.driver.release()
        self.given_back = max(self.given_back, self.driver.free_bytes() - before)
        self.kept = self.driver.peak().reserved
        return peak


class NoLease:
    """For processes that can compute at the same time: nobody waits."""

    def __init__(self, *, overlaps: bool = True) -> None:
        """overlaps: whether the processes do compute at the same time. With `pipeline.max_lag = 0` they do not: each
        needs what another has made, and gives its freed memory back meanwhile."""
        self.overlaps = overlaps

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[Turn]:
        with nullcontext() if self.overlaps else memory_returned():
            yield Turn(waited_s=0.0)


def stand_in_line(fd: int, meanwhile: Callable[[], None]) -> None:
    """From the last place to the first, then to the lease. Nobody overtakes, since no place is left before the next one
    is taken."""
    for place in range(PLACES, LEASE_BYTE - 1, -1):
        poll(partial(try_byte, fd, place), meanwhile)
        if place < PLACES:
            free_byte(fd, place + 1)


def poll(is_done: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Often at first."""
    pause = FIRST_POLL_S
    while not is_done():
        meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def lease_for(
    compute: ComputeConfig,
    device: "torch.device",
    path: Path | None,
    trace: Trace = NO_TRACE,
    planned: int = 0,
    *,
    overlaps: bool = True,
    find_driver: Callable[["torch.device"], Driver | None] = driver_of,
    facts: Callable[["torch.device"], CardFacts] = card_facts,
    find_cores: Callable[[], int] = cores_here,
) -> ComputeLease:
    """The card's lease; on a CPU one of the run, if the processes would compete for its cores. path: of the latter's
    lock file; None for a process with cores of its own. planned: as of a lease. overlaps: as of NoLease."""
    driver = find_driver(device)
    if driver:
        return Lease(card_lock(facts(device).uuid, cache_root(ModelConfig())), driver, trace, planned)
    if path is None or compute.threads <= find_cores():
        return NoLease(overlaps=overlaps)
    return Lease(path, trace=trace)


def card_lock(uuid: str, cache: Path) -> Path:
    """The same for all runs of this user, from any session and from containers that share the cache folder. In a folder
    of its own, in which nobody else can place a file."""
    make_folder(cache, place=CACHE_VARIABLE)
    folder = cache / "cards"
    make_private(folder, CACHE_VARIABLE)
    return folder / f"{uuid}.lock"
