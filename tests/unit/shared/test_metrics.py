"""The keys of metrics.jsonl are a contract."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.messages import Outcome
from shared.run.files import LineLog
from shared.run.metrics import MetricsLog, StepMetrics
from tests.support.disk_faults import list_calls
from tests.support.run_files import COLUMNS


def metrics(step: int, *, shaped: bool = False, on_card: bool = False, **changes: float) -> StepMetrics:
    """A row in which every figure has a value of its own."""
    maps = ("outcomes", "rewards", "logged", "card_mb", "evaluated", "actors", "limited", "energy")
    fields = [field.name for field in msgspec.structs.fields(StepMetrics) if field.name not in maps]
    values: dict[str, Any] = {name: place + 0.5 for place, name in enumerate(fields)} | changes
    values |= {"step": step, "groups_idle": 3, "groups_total": 16, "policy_version": step}
    rewards = {"score": 0.875, "brevity": math.nan} if shaped else {}
    logged = {"found": 0.375} if shaped else {}
    card_mb = {"actor_allocated": 4096.5, "learner_driver": 6000.25} if on_card else {}
    outcomes = {Outcome.CORRECT: 0.75, Outcome.WRONG: 0.25}
    return StepMetrics(**values, rewards=rewards, logged=logged, outcomes=outcomes, card_mb=card_mb)


def test_row_has_exactly_the_contract_in_its_order() -> None:
    assert list(metrics(1).to_row()) == COLUMNS.split()


def test_each_key_has_its_own_field() -> None:
    row = metrics(7, mismatch_p99=0.125, learner_mb=512.0).to_row()
    assert row["step"] == row["policy/version"] == 7
    assert (row["mismatch/p99"], row["mem/learner_mb"], row["groups/idle"]) == (0.125, 512.0, 3)
    figures = [value for key, value in row.items() if isinstance(value, float) and not key.startswith("outcome/")]
    assert len(figures) == len(set(figures)), "no field feeds two keys"


def test_named_rewards_stand_behind_the_mean() -> None:
    row = metrics(1, shaped=True).to_row()
    assert list(row)[2:6] == ["reward/mean", "reward/score", "reward/brevity", "logged/found"]
    assert (row["reward/score"], row["reward/brevity"], row["logged/found"]) == (0.875, None, 0.375)


def test_memory_of_cards_stands_behind_that_of_the_processes_where_there_are_cards() -> None:
    row = metrics(1, on_card=True).to_row()
    names = list(row)
    place = names.index("mem/learner_mb")
    assert names[place + 1 : place + 3] == ["mem/actor_allocated", "mem/learner_driver"]
    assert (row["mem/actor_allocated"], row["mem/learner_driver"]) == (4096.5, 6000.25)


def test_an_evaluation_stands_in_the_row_that_follows_it() -> None:
    evaluated = msgspec.structs.replace(metrics(9), evaluated={"step": 8, "greedy": 0.5, "maj_at_4": 0.625})
    added = {key: value for key, value in evaluated.to_row().items() if key.startswith("eval/")}
    assert added == {"eval/step": 8, "eval/greedy": 0.5, "eval/maj_at_4": 0.625}
    assert not any(key.startswith("eval/") for key in metrics(9).to_row())


def test_what_several_actors_did_stands_at_the_end_under_their_names() -> None:
    actors, limited = {"actor0/waiting": 0.25, "gpu-box/faults": 2.0}, {"rollout.prompts": 0.5}
    row = msgspec.structs.replace(metrics(9), actors=actors, limited=limited).to_row()
    assert list(row.items())[-3:] == [
        ("actors/actor0/waiting", 0.25),
        ("actors/gpu-box/faults", 2.0),
        ("limited/rollout.prompts", 0.5),
    ]


def test_energy_is_in_a_row_where_it_was_counted() -> None:
    counted = msgspec.structs.replace(metrics(9), energy={"card": 812.5, "cpu": math.nan}).to_row()
    assert list(counted.items())[-2:] == [("energy/card_j", 812.5), ("energy/cpu_j", None)]
    assert not any(key.startswith("energy/") for key in metrics(9).to_row())


def test_outcomes_not_named_are_zero() -> None:
    row = metrics(1).to_row()
    shares = {key: value for key, value in row.items() if key.startswith("outcome/")}
    assert len(shares) == len(Outcome)
    assert {key: value for key, value in shares.items() if value} == {"outcome/correct": 0.75, "outcome/wrong": 0.25}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    row = MetricsLog(LineLog(tmp_path / "m")).log(metrics(1, kl=value))
    assert row["kl"] is None
    assert json.loads((tmp_path / "m").read_text())["kl"] is None


def test_resume_leaves_one_row_a_step(tmp_path: Path) -> None:
    for first in (1, 3):
        log = MetricsLog(LineLog(tmp_path / "m"))
        log.resume_at(first)
        for step in range(first, 6):
            log.log(metrics(step, kl=float(first)))
    rows = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [(row["step"], row["kl"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0)]


def test_rows_are_written_at_once_and_synced_when_asked(tmp_path: Path) -> None:
    log = MetricsLog(LineLog(tmp_path / "m"))
    assert list_calls(lambda: log.log(metrics(1))) == ["write"]
    assert list_calls(log.sync) == ["fsync"]
