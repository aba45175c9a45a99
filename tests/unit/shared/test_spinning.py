"""When threads spin less: by scripted times, and with OpenMP's own threads."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from shared.process.spinning import BUSY, QUIET, IdleTeam, Times, Watch, read_times
from tests.support.runs import wait_until

SECOND = 10**9


class ListedTeam:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")

    def end(self) -> None:
        self.told.append("end")


def looks(shares: Sequence[float]) -> list[str]:
    """What a team is told after looks that find these shares."""
    passed = [Times(running=0, ready=0)]
    for share in shares:
        ready = int(share * SECOND)
        passed.append(Times(running=passed[-1].running + SECOND - ready, ready=passed[-1].ready + ready))
    team, times = ListedTeam(), iter(passed)
    watch = Watch(team, lambda: next(times))
    for _ in shares:
        watch.look()
    return team.told


def test_threads_spin_less_while_they_have_to_wait_for_a_core() -> None:
    assert looks([0.0, BUSY + 0.01, 0.5]) == ["end", "begin", "begin"]
    assert looks([0.5, QUIET - 0.01]) == ["begin", "end"]
    assert looks([0.5, QUIET + 0.01, BUSY - 0.01]) == ["begin"], "between both limits all stays as it is"


@pytest.mark.parametrize(
    ("before", "after"),
    [((0, 0), (0, 0)), ((9, 5), (4, 2)), ((9, 1), (3, 5))],
    ids=["nothing ran", "threads have ended", "a thread that ran much has ended"],
)
def test_sums_that_say_nothing_are_no_share(before: tuple[int, int], after: tuple[int, int]) -> None:
    times = [Times(running=running, ready=ready) for running, ready in (before, after)]
    assert times[1].share_since(times[0]) == 0.0


def test_the_times_are_those_of_this_process() -> None:
    before = read_times()
    wait_until(lambda: sum(range(10**6)) > 0 and read_times().running > before.running + SECOND // 20)


SPINS_LESS = """
import os, sys, time
import torch
from shared.process.spinning import IdleTeam

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
a = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
first, before, team = a @ a, threads(), IdleTeam()
for _ in range(2):
    team.begin()
    team.begin()
    while threads() < before + 2:
        time.sleep(0.01)
    assert torch.equal(a @ a, first) and threads() == before + 2
    team.end()
    team.end()
    while threads() > before:
        time.sleep(0.01)
print("same bits")
"""


def test_a_team_of_openmp_comes_and_goes_and_changes_no_bit() -> None:
    done = subprocess.run([sys.executable, "-c", SPINS_LESS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "same bits\n", done.stderr


def test_a_team_ends_with_its_owner() -> None:
    team = IdleTeam()
    team.begin()
    assert team.owner is not None and team.owner.daemon
    owner = team.owner
    team.end()
    assert not owner.is_alive() and torch.get_num_threads() >= 1
