"""When threads spin less: by scripted times, and with OpenMP's own threads."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from shared.process.spinning import BUSY, LEAST_RUNNING, QUIET, SleepingThreads, Times, Watch, read_times
from tests.support.runs import wait_until

SECOND = 10**9


class Noted:
    """What was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")

    def end(self) -> None:
        self.told.append("end")


def looks(shares: Sequence[float]) -> list[str]:
    """What is told after looks that find these shares."""
    passed = [Times(running=0, ready=0)]
    for share in shares:
        ready = int(share * SECOND)
        passed.append(Times(running=passed[-1].running + SECOND - ready, ready=passed[-1].ready + ready))
    more, times = Noted(), iter(passed)
    watch = Watch(more, lambda: next(times))
    for _ in shares:
        watch.look()
    return more.told


def test_threads_spin_less_while_they_have_to_wait_for_a_core() -> None:
    assert looks([0.0, BUSY + 0.01, 0.5]) == ["end", "begin", "begin"]
    assert looks([0.5, QUIET - 0.01]) == ["begin", "end"]
    assert looks([0.5, QUIET + 0.01, BUSY - 0.01]) == ["begin"], "between both limits all stays as it is"


@pytest.mark.parametrize(
    ("running", "ready"),
    [(0, 0), (LEAST_RUNNING - 1, SECOND), (-SECOND, SECOND), (SECOND, -1)],
    ids=["nothing ran", "too little ran", "a thread that ran much has ended", "one that was ready has ended"],
)
def test_a_look_that_says_nothing_changes_nothing(running: int, ready: int) -> None:
    more, times = Noted(), iter([Times(running=0, ready=0), Times(running=running, ready=ready)])
    Watch(more, lambda: next(times)).look()
    assert more.told == []


def test_the_times_are_those_of_this_process() -> None:
    before = read_times()
    wait_until(lambda: sum(range(10**6)) > 0 and read_times().running > before.running + SECOND // 20)


SPINS_LESS = """
import os, sys, time
import torch
from shared.process.spinning import SleepingThreads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
a = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
first, before, more = a @ a, threads(), SleepingThreads()
for _ in range(2):
    more.begin()
    more.begin()
    while threads() < before + 2:
        time.sleep(0.01)
    assert torch.equal(a @ a, first) and threads() == before + 2
    more.end()
    more.end()
    while threads() > before:
        time.sleep(0.01)
print("same bits")
"""


def test_sleeping_threads_come_and_go_and_change_no_bit() -> None:
    done = subprocess.run([sys.executable, "-c", SPINS_LESS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "same bits\n", done.stderr


WATCHED = """
import os, sys, threading
from shared.process.spinning import NAME, spin_less_beside_others

cores = len(os.sched_getaffinity(0))

def watches():
    return sum(thread.name == NAME for thread in threading.enumerate())

for threads in (1, cores - 1):
    spin_less_beside_others(threads)
    assert watches() == 0, threads
for _ in range(2):
    spin_less_beside_others(cores)
    assert watches() == int(cores > 1)
print("watched")
"""


def test_a_process_with_a_thread_for_each_core_is_watched_once() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "watched\n", done.stderr


def test_the_thread_that_made_them_ends_with_them() -> None:
    more = SleepingThreads()
    more.begin()
    assert more.owner is not None and more.owner.daemon
    owner = more.owner
    more.end()
    assert not owner.is_alive() and torch.get_num_threads() >= 1
