"""Thousands of simulated runs with faults: the real protocol breaks no invariant, and a planted bug breaks its own."""

import pytest

from tests.simulation.build import REAL
from tests.simulation.campaign import Campaign, replay
from tests.simulation.planted import PLANTED
from tests.simulation.schedule import draw
from tests.simulation.world import simulate

SCHEDULES = 2500
PER_TEST = 250
"""Small enough that a slow machine stays within a test's time limit."""
SEARCH = 400
"""A planted bug must be found within so many schedules: seconds."""


@pytest.mark.parametrize("first", range(0, SCHEDULES, PER_TEST))
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    campaign = Campaign().run(range(first, first + PER_TEST))
    assert campaign.found == []
    assert campaign.schedules == PER_TEST


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_by_the_invariant_it_breaks(name: str) -> None:
    bug = PLANTED[name]
    campaign = Campaign().run(range(SEARCH), bug.build, stop_at_first=True)
    (found,) = campaign.found
    assert found.invariant in bug.breaks, found.sentence
    assert f"--seed {found.seed} --trace" in found.sentence
    assert Campaign().run([found.seed], REAL).found == []


def test_the_schedules_hold_every_kind_of_fault() -> None:
    counts = Campaign().run(range(PER_TEST)).counts
    more = ("actor: kill", "nonsense", "sampled again", "passed on")
    kinds = ("messages", "lost", "doubled", "late", "links cut", "learner: kill", "learner: power cut", "learner: stop")
    assert [kind for kind in (*kinds, *more) if counts[kind] < 10] == []


def test_a_seed_gives_the_same_run_each_time() -> None:
    seed = next(seed for seed in range(1000) if len(draw(seed).crashes) > 3 and draw(seed).line_faults.drop > 0)
    first, again = replay(seed)[1], replay(seed)[1]
    assert first == again
    assert len(first) > 50
    assert simulate(draw(seed)).trace == ()
