"""The kill tests for a warm start: SIGKILL at every point that it passes and at random instants, and the same end.

It has no actor here, and its journal is written by the learner's own orders.
"""

import json
import random
from pathlib import Path

import pytest

from launch.commands.run import make_run
from launch.presets.load import load_config
from shared.config.tree import warm_start
from tests.chaos.plans import TROUBLE, kill_faults, kinds, split
from tests.chaos.pool import Pool
from tests.chaos.prepared import CHAOS
from tests.chaos.rounds import run_trials
from tests.chaos.start import Kill, Victim
from tests.chaos.trial import Result, Trial, check

BATCHES = 6
TRIALS, KILLS, LONGEST_S = 4, 10, 0.35
"""A start is short: no actor loads, and a step is only an update."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A warm start that has not begun."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in (CHAOS | {"rollout.max_new_tokens": 48}).items()]
    path: Path = tmp_path_factory.mktemp("chaos") / "warm"
    return str(make_run(path, warm_start(load_config("embedded", overrides))).path)


@pytest.fixture(scope="module")
def calm(hosts: Pool, warm: str) -> Result:
    """Undisturbed."""
    return hosts.run_one(Trial(name="warm", run=warm, trace=True))


def test_an_undisturbed_warm_start_is_sound(calm: Result) -> None:
    assert not calm.error, calm.error
    outcome = calm.outcome
    assert (outcome["status"], outcome["steps"], len(calm.starts)) == ("done", 5, 1)
    assert [count for _, count in outcome["groups"]] == [1] * 10
    assert [row["step"] for row in outcome["metrics"]] == [1, 2, 3, 4, 5] and outcome["unfinished"] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.long
def test_killed_at_every_point_a_warm_start_ends_the_same(hosts: Pool, warm: str, calm: Result) -> None:
    points = [point for point in kinds(calm.passed) if "actor" not in point]
    batches = [*split(kill_faults(points, seed=1), BATCHES), (*TROUBLE,)]
    happened: list[str] = []
    for trial, result in run_trials(hosts, "warm-kills", warm, batches):
        check(result, calm)
        happened += [fault.point for fault in trial.happened(result)]
    assert len(happened) >= 50 and not {*points} - {*happened}, "never reached"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_instants_a_warm_start_ends_the_same(hosts: Pool, warm: str, calm: Result) -> None:
    trials = [Trial(name=f"warm-{n}", run=warm, kills=random_kills(seed=n)) for n in range(TRIALS)]
    hits = 0
    for result in hosts.run(trials):
        check(result, calm)
        hits += result.kills
    assert hits >= TRIALS


def random_kills(seed: int) -> tuple[Kill, ...]:
    rng = random.Random(seed)
    victims: tuple[Victim, ...] = ("learner", "launcher", "all")
    return tuple(Kill(victim=rng.choice(victims), after_s=rng.uniform(0.05, LONGEST_S)) for _ in range(KILLS))
