"""SIGKILL to real processes at every named point and at random instants: each run ends as if nothing had happened.

Equal afterwards: status, steps, adapter, every group once in the journal, every step once in metrics.jsonl with equal
figures, rollouts.jsonl, the newest checkpoint and which is the best. Nothing is left over: no process, no lock, no
half-written checkpoint.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.chaos.plans import TROUBLE, kill_faults, random_kills, split
from tests.chaos.pool import Pool
from tests.chaos.rounds import run_trials
from tests.chaos.trial import Result, Trial, check

ROOT = Path(__file__).resolve().parents[2]
BATCHES, BATCHES_BEFORE = 14, 4
RARE_BATCHES = 5
"""A kill behind a repair keeps the same repair from being killed again."""
TRIALS, KILLS = 4, 15
KILLS_THAT_HIT = 30
"""How many of a trial do depends on how fast the machine is: a run that has ended cannot be killed."""


def test_an_undisturbed_run_is_sound(undisturbed: Result) -> None:
    outcome = undisturbed.outcome
    assert (outcome["status"], outcome["steps"]) == ("done", 5)
    assert [count for _, count in outcome["groups"]] == [1] * 10
    assert [row["step"] for row in outcome["metrics"]] == [1, 2, 3, 4, 5]
    assert outcome["unfinished"] == []
    assert len(undisturbed.starts) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_before_everything_that_it_writes_or_sends_a_run_ends_the_same(
    hosts: Pool, prepared: str, undisturbed: Result, points: list[str]
) -> None:
    """Half of the next test: a kill after one point mostly leaves what a kill before the next one leaves."""
    before = [point for point in points if point.startswith("before ")]
    batches = [*split([fault for fault in kill_faults(before, seed=1) if fault.hit == 1], BATCHES_BEFORE)]
    happened: list[str] = []
    for trial, result in run_trials(hosts, "before", prepared, batches):
        check(result, undisturbed)
        happened += [fault.point for fault in trial.happened(result)]
    assert len(happened) >= 40 and not {*before} - {*happened}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_every_point_a_run_ends_the_same(
    hosts: Pool, prepared: str, undisturbed: Result, points: list[str], rare_points: list[str]
) -> None:
    rare = ((*TROUBLE, *batch) for batch in split(kill_faults(rare_points, seed=2), RARE_BATCHES))
    batches = [*split(kill_faults(points, seed=1), BATCHES), *rare]
    happened: list[str] = []
    for trial, result in run_trials(hosts, "kills", prepared, batches):
        check(result, undisturbed)
        happened += [fault.point for fault in trial.happened(result)]
    assert len(happened) >= 200
    unreached = sorted({*points, *rare_points} - {*happened})
    assert not unreached, f"never reached: {unreached}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_instants_a_run_ends_the_same(hosts: Pool, prepared: str, undisturbed: Result) -> None:
    hits = trials = 0
    while hits < KILLS_THAT_HIT:
        assert trials < 4 * TRIALS, f"{hits} kills hit: runs end before they are killed"
        numbers = range(trials, trials := trials + TRIALS)
        for result in hosts.run(
            [Trial(name=f"random-{n}", run=prepared, kills=random_kills(KILLS, seed=n)) for n in numbers]
        ):
            check(result, undisturbed)
            hits += result.kills


@pytest.mark.long
def test_every_point_named_in_the_code_is_one_that_plans_are_made_from(
    points: list[str],
    rare_points: list[str],
    rank_points: list[str],
    divided_points: list[str],
    owned_points: list[str],
) -> None:
    named = set(
        names_in([*(ROOT / "actor").rglob("*.py"), *(ROOT / "learner").rglob("*.py"), ROOT / "shared/run/disk.py"])
    )
    assert len(named) > 20
    planned = [*points, *rare_points, *rank_points, *divided_points, *owned_points]
    passed = {name for name in named if any(point == name or point.startswith(f"{name} ") for point in planned)}
    assert named == passed, f"never passed: {sorted(named - passed)}"


def names_in(paths: Iterable[Path]) -> Iterator[str]:
    """First arguments of `reach`."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reach":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: a point has a name of its own"
                yield str(node.args[0].value)
