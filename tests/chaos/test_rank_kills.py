"""The kill tests for a learner of two ranks: SIGKILL to each rank at every point that is about ranks, and at some that
both pass. Each run ends as if nothing had happened.
"""

from collections.abc import Sequence

import pytest

from shared.run.failpoints import Fault
from tests.chaos.plans import split
from tests.chaos.pool import Pool
from tests.chaos.rounds import run_trials
from tests.chaos.trial import Result, check

BATCHES = 4
DEEP = (50, 97, 150)
BOTH = ("before learner steps", "after learner steps")
OWNERS_TELL = ("add gradients", "tell norms", "share parameters", "tell moments")


def test_an_undisturbed_run_of_two_ranks_is_sound(calm_ranks: Result, rank_points: list[str]) -> None:
    outcome = calm_ranks.outcome
    assert (outcome["status"], outcome["steps"], len(calm_ranks.starts)) == ("done", 5, 1)
    assert [count for _, count in outcome["groups"]] == [1] * 10 and outcome["unfinished"] == []
    assert {point.rpartition(" ")[2] for point in rank_points if "ranks" in point} == {"0", "1"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_any_rank_killed_at_every_point_ends_the_same(
    hosts: Pool, two_ranks: str, calm_ranks: Result, rank_points: list[str]
) -> None:
    kill_everywhere(hosts, "ranks", two_ranks, calm_ranks, rank_points)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_rank_with_a_part_of_the_base_killed_at_every_point_ends_the_same(
    hosts: Pool, divided: str, calm_divided: Result, calm_ranks: Result, divided_points: list[str]
) -> None:
    assert calm_divided.outcome == calm_ranks.outcome, "the bits of ranks with the whole base"
    gathers = [point for point in divided_points if "gather a weight" in point]
    assert {point.rpartition(" ")[2] for point in gathers} == {"0", "1"}
    # A pass gathers some dozens of weights.
    deep = [Fault(point=point, hit=hit, act="kill") for point in gathers for hit in DEEP]
    kill_everywhere(hosts, "divided", divided, calm_divided, divided_points, deep)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_rank_with_a_part_of_the_moments_killed_at_every_point_ends_the_same(
    hosts: Pool, owned: str, calm_owned: Result, calm_ranks: Result, owned_points: list[str]
) -> None:
    assert calm_owned.outcome == calm_ranks.outcome, "the bits of ranks with all moments"
    passed = {point.rpartition(" ")[0]: point for point in owned_points}
    assert {f"{when} ranks {what}" for when in ("before", "after") for what in OWNERS_TELL} <= passed.keys()
    kill_everywhere(hosts, "owned", owned, calm_owned, owned_points)


def kill_everywhere(
    hosts: Pool, name: str, run: str, calm: Result, of_ranks: list[str], more: Sequence[Fault] = ()
) -> None:
    points = [*of_ranks, *BOTH]
    first = [Fault(point=point, act="kill") for point in points]
    # A rank meets the others once.
    faults = first + [Fault(point=point, hit=2, act="kill") for point in points if "meet" not in point] + [*more]
    happened: list[str] = []
    for trial, result in run_trials(hosts, name, run, [*split(faults, BATCHES)]):
        check(result, calm)
        happened += [fault.point for fault in trial.happened(result)]
        for code, words in result.starts[:-1]:
            assert code == 1 and "learner" in words, words
    assert not {*points} - {*happened}, "never reached"
