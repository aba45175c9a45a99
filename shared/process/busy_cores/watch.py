"""Notices that other processes compute, and that they have ended.

    share  = time waiting / (time waiting + time running)    of all threads of this process, for a core and on one
    idle   = idle time / time                                of all cores of this process
    others = 1 - idle - time running / time                  what other processes take of these cores

All since the last look, twice a second.

    not gathered    share > SHARE_HIGH, others > OTHERS_HIGH    threads spin less (spinning.py); once they do, they are
                                                                gathered (gathering.py)
                    share < SHARE_LOW                           they spin as before
    gathered        idle > IDLE_HIGH                            they get all cores back

While they are gathered the share says nothing: threads on one core wait for each other. It also says nothing while this
process hardly runs. `others` alone would not do: for an actor that waits for its turn, the learner is another process.

Left out: processes with fewer threads than cores, which seldom wait for a core, and with more, whose threads wait for
each other anyway. Cores are logical ones here, so where each has two hyperthreads, the default number of threads is not
watched: no such machine was there to measure. Also left out are processes that compute on a card.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shared.process.busy_cores.gathering import CORES, THREADS, GatheredThreads
from shared.process.busy_cores.spinning import SleepingThreads, num_openmp_libraries

STAT = Path("/proc/stat")
MOUNTS = Path("/proc/self/mountinfo")
MAPS = Path("/proc/self/maps")
NAME = "busy cores"
LOOK_S = 0.5
LEAST_RUNNING = 10**8
"""Nanoseconds between two looks. A process that ran for less was waiting for its turn, and its share says nothing."""
SHARE_HIGH, SHARE_LOW = 0.25, 0.15
"""On a quiet machine the share is 0.00 to 0.02, and 0.01 to 0.17 where actor and learner take turns within tenths of a
second. Beside one busy process or more it is 0.3 to 0.5."""
OTHERS_HIGH = 0.2
"""Beside a busy process for each core, others take half of the time."""
IDLE_HIGH = 0.3
"""When the other processes have ended, half of the cores are idle."""
IDLE_FIELDS = slice(4, 6)
"""Of a line of /proc/stat: idle, and idle while a disk works."""
TIME_FIELDS = slice(1, 9)
"""All but the time of virtual machines, which is counted twice."""
NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Nanoseconds since some start."""

    running: int
    """Of the threads, on a core."""
    waiting: int
    """Of the threads, for a core."""
    idle: int
    """Of the cores."""
    passed: int
    """On all cores together."""

    def share_since(self, before: "Times") -> float | None:
        """None if too little ran. Threads that have ended are missing in the sums."""
        waiting, running = self.waiting - before.waiting, self.running - before.running
        return waiting / (waiting + running) if waiting >= 0 and running >= LEAST_RUNNING else None

    def idle_since(self, before: "Times") -> float:
        return (self.idle - before.idle) / max(self.passed - before.passed, 1)

    def others_since(self, before: "Times") -> float:
        own = (self.running - before.running) / max(self.passed - before.passed, 1)
        return 1.0 - self.idle_since(before) - own


def read_times() -> Times:
    threads = [[int(count) for count in line.split()] for line in schedule_lines()]
    cores = list(core_times(STAT.read_text().splitlines(), CORES))
    return Times(
        running=sum(one[0] for one in threads),
        waiting=sum(one[1] for one in threads),
        idle=sum(idle for idle, _ in cores),
        passed=sum(total for _, total in cores),
    )


def schedule_lines() -> Iterator[str]:
    """Of each thread that has not ended meanwhile."""
    for thread in THREADS.iterdir():
        try:
            yield (thread / "schedstat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue


def core_times(lines: Iterable[str], cores: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Time idle and in total of each of these cores."""
    names = {f"cpu{core}" for core in cores}
    for fields in map(str.split, lines):
        if fields[0] in names:
            idle, total = (sum(map(int, fields[which])) for which in (IDLE_FIELDS, TIME_FIELDS))
            yield NS_PER_TICK * idle, NS_PER_TICK * total


class Sleeping(Protocol):
    """More threads, so that those that compute spin less."""

    def begin(self) -> None:
        """Nothing if they have begun. They take a moment."""
        ...

    def have_begun(self) -> bool: ...

    def end(self) -> None: ...


class Gathering(Protocol):
    """Keeps the threads on half of the cores."""

    gathered: bool

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Watch:
    """Gathers the threads or gives them all cores back, by the times since the last look."""

    def __init__(self, sleeping: Sleeping, gathering: Gathering, times: Callable[[], Times] = read_times) -> None:
        self.sleeping, self.gathering, self.times = sleeping, gathering, times
        self.last = times()

    def look(self) -> None:
        now = self.times()
        share, idle, others = now.share_since(self.last), now.idle_since(self.last), now.others_since(self.last)
        self.last = now
        if self.gathering.gathered:
            if idle > IDLE_HIGH:
                self.gathering.end()
        elif share is not None:
            self.react(share, others)

    def react(self, share: float, others: float) -> None:
        if share > SHARE_HIGH and others > OTHERS_HIGH:
            self.sleeping.begin()
            if self.sleeping.have_begun():
                self.gathering.begin()
        elif share < SHARE_LOW:
            self.sleeping.end()


def keep_looking(look: Callable[[], None], gathering: Gathering, pause_s: float = LOOK_S) -> None:
    """Until a look fails. Then the threads are on all cores."""
    try:
        while True:
            time.sleep(pause_s)
            look()
    finally:
        gathering.end()


def watch_cores(threads: int, device: torch.device) -> None:
    """From now on, in a process that computes with so many threads. Call it once everything is loaded; once is enough.
    A library that is loaded later would see half of the cores."""
    watched = any(thread.name == NAME for thread in threading.enumerate())
    if watched or device.type != "cpu" or threads < 2 or threads != len(CORES) or not can_watch():
        return
    gathering = GatheredThreads()
    look = Watch(SleepingThreads(), gathering).look
    threading.Thread(target=keep_looking, args=(look, gathering), name=NAME, daemon=True).start()


def can_watch() -> bool:
    """False where a container puts a file of its own in place of /proc/stat: it may count other cores, or differently.
    Also False with two OpenMP libraries: only the threads of PyTorch's can be made to spin less."""
    try:
        stat, mounts, maps = STAT.read_text(), MOUNTS.read_text(), MAPS.read_text()
    except OSError:
        return False
    has_all_cores = len(list(core_times(stat.splitlines(), CORES))) == len(CORES)
    return has_all_cores and f" {STAT} " not in mounts and num_openmp_libraries(maps) <= 1
