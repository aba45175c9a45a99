"""All threads of a process on half of its cores while other processes compute.

With a busy process on each core, a process gets half of the machine. If each of its threads has half of a core, they
seldom run at the same time, and each product waits until every one of them has run. If two threads share each core of
one half instead, the scheduler moves most of the other processes to the other half, where there is less to do. Without
gathering, chance decides which of the two happens (benchmarks/busy_machine.py). The number of threads stays as it is,
and so do the bits.

Two threads on a core must not spin, since the one would spin for as long as the other has to work: spinning.py first.

    halves       the first and the last n // 2 of n cores
    chosen half  the half where the main thread ran last. Processes choose independently

A thread or a child process starts on the cores of the thread that starts it. Threads get all cores back at the end;
for a child process, call `give_all_cores` right after its start.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
CORES = frozenset(os.sched_getaffinity(0))
"""That this process may use, gathered or not."""
LAST_CORE = 36
"""Field of /proc/PID/stat after the name and its parenthesis, from 0: the core on which the thread ran last."""


class GatheredThreads:
    """Gathers the threads of this process, and gives them all cores back."""

    def __init__(self, cores: Iterable[int] = CORES) -> None:
        self.cores = sorted(cores)
        self.gathered = False

    def begin(self) -> None:
        """Gather them, if they are not."""
        if not self.gathered:
            place(half(self.cores, main_thread_core()))
            self.gathered = True

    def end(self) -> None:
        if self.gathered:
            place(self.cores)
            self.gathered = False


def half(cores: list[int], core: int) -> list[int]:
    """The last half if it has this core, otherwise the first."""
    count = max(1, len(cores) // 2)
    return cores[-count:] if core in cores[-count:] else cores[:count]


def main_thread_core() -> int:
    fields = (THREADS / str(os.getpid()) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[LAST_CORE])


def place(cores: Iterable[int]) -> None:
    """Every thread of this process, on these cores."""
    # Twice: a thread may start while the others are placed.
    for _ in range(2):
        for thread in THREADS.iterdir():
            # It may have ended, and these cores may have been taken away from us.
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)


def give_all_cores(pid: int) -> None:
    """To a child that was just started."""
    with suppress(OSError):
        os.sched_setaffinity(pid, CORES)
