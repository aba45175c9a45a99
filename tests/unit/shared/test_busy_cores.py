"""What a process does beside busy ones: by scripted times, and with its own threads and cores."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from shared.process.busy_cores.gathering import CORES, half
from shared.process.busy_cores.spinning import SleepingThreads, num_openmp_libraries
from shared.process.busy_cores.watch import (
    IDLE_HIGH,
    LEAST_RUNNING,
    OTHERS_HIGH,
    SHARE_HIGH,
    SHARE_LOW,
    Times,
    Watch,
    core_times,
    keep_looking,
    read_times,
)
from shared.process.determinism import cpu_environment
from tests.support.runs import wait_until

SECOND = 10**9


class NotedSleeping:
    """What was told to the threads that sleep, in order. slow: they are there from the second `begin` on."""

    def __init__(self, told: list[str], *, slow: bool) -> None:
        self.told, self.slow = told, slow

    def begin(self) -> None:
        self.told.append("sleep")

    def have_begun(self) -> bool:
        return not self.slow or self.told.count("sleep") > 1

    def end(self) -> None:
        self.told.append("spin")


class NotedGathering:
    """What was told to all threads."""

    def __init__(self, told: list[str]) -> None:
        self.told, self.gathered = told, False

    def begin(self) -> None:
        self.told.append("gather")
        self.gathered = True

    def end(self) -> None:
        self.told.append("spread")
        self.gathered = False


def told_after(found: Sequence[tuple[float, float, float]], *, slow: bool = False) -> list[str]:
    """What is told after looks that find these shares, idle cores and others."""
    passed = [Times(running=0, waiting=0, idle=0, passed=0)]
    for share, idle, others in found:
        last, running = passed[-1], int(SECOND * (1.0 - idle - others))
        passed.append(
            Times(
                running=last.running + running,
                waiting=last.waiting + round(running * share / (1.0 - share)),
                idle=last.idle + int(SECOND * idle),
                passed=last.passed + SECOND,
            )
        )
    told: list[str] = []
    times = iter(passed)
    watch = Watch(NotedSleeping(told, slow=slow), NotedGathering(told), lambda: next(times))
    for _ in found:
        watch.look()
    return told


OTHERS = (0.5, 0.0, 0.5)
"""Share, idle cores and others beside a busy process on each core."""


def test_threads_spin_less_and_gather_while_others_compute() -> None:
    quiet, between = (0.0, 0.0, 0.0), ((SHARE_LOW + 0.01, 0.0, 0.5), (SHARE_HIGH - 0.01, 0.0, 0.5))
    assert told_after([quiet, (SHARE_HIGH + 0.01, 0.0, OTHERS_HIGH + 0.01), OTHERS]) == ["spin", "sleep", "gather"]
    assert told_after(between) == [], "between both limits all stays as it is"


def test_actor_and_learner_that_take_turns_go_on_spinning() -> None:
    """Measured in a run of the embedded model, where no other process computed."""
    assert told_after([(0.173, 0.23, 0.56), (0.072, 0.32, 0.38), (0.088, 0.1, 0.42)]) == ["spin", "spin"]


def test_threads_that_wait_for_each_other_alone_stay_where_they_are() -> None:
    assert told_after([(0.5, 0.0, 0.0), (0.5, 0.0, OTHERS_HIGH - 0.01), (0.5, 0.5, 0.0)]) == []


def test_threads_that_still_spin_are_not_gathered() -> None:
    assert told_after([OTHERS], slow=True) == ["sleep"]
    assert told_after([OTHERS] * 2, slow=True) == ["sleep", "sleep", "gather"]


def test_gathered_threads_spread_when_others_ended_and_spin_when_they_wait_no_more() -> None:
    began = [OTHERS, (0.5, IDLE_HIGH - 0.01, 0.5)]
    assert told_after(began) == ["sleep", "gather"]
    assert told_after([*began, (0.0, 0.0, 0.5)]) == ["sleep", "gather"], "threads on one core wait for each other"
    assert told_after([*began, (0.5, IDLE_HIGH + 0.02, 0.2)]) == ["sleep", "gather", "spread"]
    assert told_after([*began, (0.5, 0.5, 0.0), (0.0, 0.0, 0.0)]) == ["sleep", "gather", "spread", "spin"]
    assert told_after([*began, (0.5, 0.5, 0.0), OTHERS]) == ["sleep", "gather", "spread", "sleep", "gather"]


def test_a_failed_look_leaves_the_threads_on_all_cores() -> None:
    told: list[str] = []
    looked = iter([None, None])

    def look() -> None:
        next(looked)
        told.append("look")

    with pytest.raises(StopIteration):
        keep_looking(look, NotedGathering(told), pause_s=0.0)
    assert told == ["look", "look", "spread"]


def test_each_openmp_library_counts_once() -> None:
    gomp, other, intel = "/venv/torch/lib/libgomp.so.1", "/venv/x.libs/libgomp-24e2ab19.so.1.0.0", "/opt/libiomp5.so"
    names = [gomp, "[heap]", gomp, "/lib/libgompers/x", "/venv/lib/libgo.so"]
    lines = [f"7f00-7f10 r-xp 0000 fe:00 12 {name}" for name in names]
    assert num_openmp_libraries("\n".join(lines)) == 1
    lines += [f"7f00-7f10 r-xp 0000 fe:00 12 {name}" for name in (other, intel)]
    assert num_openmp_libraries("\n".join(lines)) == 3


@pytest.mark.parametrize(
    ("running", "waiting"),
    [(0, 0), (LEAST_RUNNING - 1, SECOND), (-SECOND, SECOND), (SECOND, -1)],
    ids=["nothing ran", "too little ran", "a thread that ran much has ended", "one that waited much has ended"],
)
def test_a_look_that_says_nothing_changes_nothing(running: int, waiting: int) -> None:
    told: list[str] = []
    first = Times(running=0, waiting=0, idle=0, passed=0)
    times = iter([first, Times(running=running, waiting=waiting, idle=0, passed=2 * SECOND)])
    Watch(NotedSleeping(told, slow=False), NotedGathering(told), lambda: next(times)).look()
    assert told == []


def test_the_times_are_those_of_this_process_and_of_its_cores() -> None:
    before = read_times()
    wait_until(lambda: sum(range(10**6)) > 0 and read_times().running > before.running + SECOND // 20)
    wait_until(lambda: read_times().passed > before.passed)
    assert 0.0 <= read_times().idle_since(before) <= 1.0


def test_idle_time_is_read_for_the_cores_of_the_process() -> None:
    lines = [
        "cpu  9 9 9 9 9 9 9 9 9 9",
        "cpu0 1 2 3 40 5 6 7 8 90 10",
        "cpu1 1 1 1 1 1 1 1 1 1 1",
        "cpu10 0 0 0 7 0 0 0 0 0 0",
        "intr 5 6",
    ]
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    assert list(core_times(lines, {0, 10})) == [(45 * tick, 72 * tick), (7 * tick, 7 * tick)]


def test_the_half_is_the_one_with_the_main_thread() -> None:
    assert half([0, 1], 0) == [0] and half([0, 1], 1) == [1]
    assert half([0, 1, 2], 1) == [0] and half([0, 1, 2], 2) == [2]
    assert half([2, 3, 6, 7], 3) == [2, 3] and half([2, 3, 6, 7], 6) == [6, 7]
    assert half([4], 4) == [4]
    assert half([2, 3, 6, 7], 0) == [2, 3], "a core that was taken away meanwhile"


MAIN_THREAD = """
import os
from shared.process.busy_cores.gathering import CORES, GatheredThreads, main_thread_core

last = max(CORES)
os.sched_setaffinity(0, {last})
assert main_thread_core() == last
GatheredThreads().begin()
assert last in os.sched_getaffinity(0)
print("around it")
"""


def test_where_the_main_thread_ran_last_is_known() -> None:
    assert printed_by(MAIN_THREAD) == "around it\n"


def printed_by(code: str, argument: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """What a process with this code prints; fails with its stderr."""
    argv = [sys.executable, "-c", code, argument]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


GATHERED = """
import os, subprocess, sys, threading
from shared.process.busy_cores.gathering import CORES, THREADS, GatheredThreads, give_all_cores

def places():
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in THREADS.iterdir()}

over = threading.Event()
threading.Thread(target=over.wait, daemon=True).start()
threads = GatheredThreads()
threads.end()
for _ in range(2):
    threads.begin()
    threads.begin()
    assert [len(place) for place in places()] == [max(1, len(CORES) // 2)], places()
    threading.Thread(target=over.wait, daemon=True).start()
    child = subprocess.Popen(["sleep", "60"])
    assert os.sched_getaffinity(child.pid) == os.sched_getaffinity(0)
    give_all_cores(child.pid)
    assert os.sched_getaffinity(child.pid) == CORES
    child.kill()
    child.wait()
    give_all_cores(child.pid)
    threads.end()
    assert places() == {CORES}
over.set()
print("all cores back")
"""


def test_all_threads_gather_and_get_their_cores_back() -> None:
    assert printed_by(GATHERED) == "all cores back\n"


CHILDREN = """
import os
from pathlib import Path
from actor.scoring.fork_server_process import ForkServerProcess
from learner.orders.second_scores import SecondScores
from shared.config.data import VerifierConfig
from shared.process.busy_cores.gathering import CORES, GatheredThreads

GatheredThreads().begin()
fork_server = ForkServerProcess("actor.scoring.fork_server", VerifierConfig(), ())
second = SecondScores(Path("nowhere"), lambda: None).start()
print(os.sched_getaffinity(fork_server.pid) == CORES, os.sched_getaffinity(second.pid) == CORES)
fork_server.close()
second.kill()
second.wait()
"""


@pytest.mark.long
def test_processes_that_are_started_meanwhile_have_all_cores() -> None:
    assert printed_by(CHILDREN) == "True True\n"


BITS = """
import hashlib, sys
from shared.process.busy_cores.gathering import CORES, GatheredThreads

if sys.argv[1] == "gathered":
    GatheredThreads().begin()
import torch
from shared.process.determinism import pin_torch

pin_torch(len(CORES))
made, digest = torch.Generator().manual_seed(0), hashlib.sha256()
for rows in (1, 8, 33):
    inputs, weight = torch.randn(rows, 896, generator=made), torch.randn(2048, 896, generator=made)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.nn.functional.linear(inputs.to(dtype), weight.to(dtype)).float()
        for found in (logits, logits.log_softmax(-1), logits.sum(), logits @ weight):
            digest.update(found.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.long
def test_gathered_threads_compute_the_same_bits() -> None:
    environment = os.environ | cpu_environment(len(CORES), "fast")
    assert printed_by(BITS, "spread", environment) == printed_by(BITS, "gathered", environment)


SPINS_LESS = """
import os, sys, time
import torch
from shared.process.busy_cores.spinning import SleepingThreads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
a = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
first, before, more = a @ a, threads(), SleepingThreads()
for _ in range(2):
    assert not more.have_begun()
    more.begin()
    more.begin()
    while not more.have_begun():
        time.sleep(0.01)
    assert threads() == before + 2
    assert torch.equal(a @ a, first) and threads() == before + 2
    more.end()
    more.end()
    while threads() > before:
        time.sleep(0.01)
print("same bits")
"""


def test_sleeping_threads_come_and_go_and_change_no_bit() -> None:
    assert printed_by(SPINS_LESS) == "same bits\n"


BEGUN_IN_A_BAD_MOMENT = """
import time
import torch
from shared.process.busy_cores.spinning import SleepingThreads

torch.set_num_threads(1)
more = SleepingThreads()
more.begin()
more.owner.join(30)
assert not more.have_begun()
torch.set_num_threads(2)
more.begin()
while not more.have_begun():
    time.sleep(0.01)
more.end()
print("at the second look")
"""


def test_threads_that_could_not_be_made_are_made_at_the_next_look() -> None:
    assert printed_by(BEGUN_IN_A_BAD_MOMENT) == "at the second look\n"


WATCHED = """
import sys, threading
import torch
from shared.process.busy_cores.gathering import CORES
from shared.process.busy_cores.watch import NAME, can_watch, watch_cores

cores = len(CORES)

def watches():
    return sum(thread.name == NAME for thread in threading.enumerate())

for threads in (1, cores - 1, cores + 1):
    watch_cores(threads, torch.device("cpu"))
    assert watches() == 0, threads
watch_cores(cores, torch.device("cuda"))
assert watches() == 0
for _ in range(2):
    watch_cores(cores, torch.device("cpu"))
    assert watches() == int(cores > 1 and can_watch())
print("watched")
"""


def test_a_process_with_a_thread_for_each_core_is_watched_once() -> None:
    assert printed_by(WATCHED) == "watched\n"


def test_the_owner_of_the_sleeping_threads_ends_with_them() -> None:
    more = SleepingThreads()
    more.begin()
    assert more.owner is not None and more.owner.daemon
    owner = more.owner
    more.end()
    assert not owner.is_alive()
