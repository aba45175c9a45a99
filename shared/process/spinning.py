"""OpenMP's threads spin less while other processes compute.

The threads that share a product wait for each other at its end. They spin at first, because waking a thread takes
longer than most products; determinism.py sets for how long. Beside busy processes, spinning does harm: a thread that
spins uses up its share of the core, and has to wait for the core when there is work. Then each of the thousand products
of a step may take as long as the scheduler lets another process run. A step of 135 million parameters took up to twenty
times as long as on a quiet machine.

    share = time ready / (time ready + time running)    of all threads since the last look, as Linux counts it

PyTorch's OpenMP library, libgomp, reads how long to spin once, when it is loaded. But it hardly spins at all while it
has made more threads than there are cores. So when the share is above BUSY, this module has libgomp make a few more
threads, which then sleep; when it is below QUIET, they end. Bits do not depend on it (benchmarks/busy_machine.py).

Left out: processes with fewer threads than cores, which seldom wait for a core, and systems without these counts.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

TASKS = Path("/proc/self/task")
NAME = "spinning"
LOOK_S = 0.5
LEAST_RUNNING = 10**8
"""Nanoseconds between two looks. A process that ran for less was waiting for its turn, and its share says nothing."""
BUSY, QUIET = 0.15, 0.05
"""On a quiet machine the share is 0.00 to 0.02, beside a busy process for each core 0.3 to 0.5."""
LARGE = 2**17
"""Elements that PyTorch divides among threads."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Nanoseconds of all threads of this process."""

    running: int
    """On a core."""
    ready: int
    """Waiting for one."""

    def share_since(self, before: "Times") -> float | None:
        """None if too little ran. Threads that have ended are missing in the sums."""
        ready, running = self.ready - before.ready, self.running - before.running
        return ready / (ready + running) if ready >= 0 and running >= LEAST_RUNNING else None


def read_times() -> Times:
    fields = [line.split() for line in schedule_lines()]
    return Times(running=sum(int(one[0]) for one in fields), ready=sum(int(one[1]) for one in fields))


def schedule_lines() -> Iterator[str]:
    """Of each thread that has not ended meanwhile."""
    for task in TASKS.iterdir():
        try:
            yield (task / "schedstat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue


class MoreThreads(Protocol):
    """Threads beyond those that compute."""

    def begin(self) -> None:
        """Nothing if they are there."""
        ...

    def end(self) -> None: ...


class SleepingThreads:
    """libgomp makes threads for each thread that computes, and keeps them as long as that one lives."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.owner: threading.Thread | None = None

    def begin(self) -> None:
        if self.owner is None:
            self.ended.clear()
            self.owner = threading.Thread(target=self.make_threads, daemon=True)
            self.owner.start()

    def make_threads(self) -> None:
        torch.zeros(LARGE).add_(1)
        self.ended.wait()

    def end(self) -> None:
        if self.owner is not None:
            self.ended.set()
            self.owner.join()
            self.owner = None


class Watch:
    """Decides from one look to the next."""

    def __init__(self, more: MoreThreads, times: Callable[[], Times] = read_times) -> None:
        self.more, self.times = more, times
        self.last = times()

    def look(self) -> None:
        now = self.times()
        share, self.last = now.share_since(self.last), now
        if share is None:
            return
        if share > BUSY:
            self.more.begin()
        elif share < QUIET:
            self.more.end()


def watch(look: Callable[[], None]) -> None:
    while True:
        time.sleep(LOOK_S)
        look()


def spin_less_beside_others(threads: int) -> None:
    """From now on, in a process that computes with so many threads. Call it after `pin_torch`; once is enough."""
    watched = any(thread.name == NAME for thread in threading.enumerate())
    if watched or threads < max(2, len(os.sched_getaffinity(0))):
        return
    threading.Thread(target=watch, args=(Watch(SleepingThreads()).look,), name=NAME, daemon=True).start()
