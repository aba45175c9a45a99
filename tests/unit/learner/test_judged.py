"""A group is judged once: what it came to is worked out in one place, and everything else reads the record."""

import ast
from collections import defaultdict
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from learner.objective.judged import StopOnOutcome, collected
from protocol.messages import FilledOrder, Outcome
from shared.config.data import VerifierConfig
from shared.config.tree import Config
from tests.support.fakes import tiny_group
from tests.support.steps import judge_of
from tests.support.wire_examples import timings

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("protocol", "shared", "actor", "learner", "launch")
JUDGING = {
    "total_reward": "learner/objective/judged.py",
    "reward_parts": "learner/objective/judged.py",
    "teaches": "learner/objective/judged.py",
    "length_reward": "learner/objective/rewards.py",
    "JudgedGroup": "learner/objective/judged.py",
    "Judge": "learner/orders/plan.py",
}
"""Function or class -> the files that may call it."""


@cache
def callers() -> dict[str, set[str]]:
    """The files in which each name is called."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in chain.from_iterable((ROOT / package).rglob("*.py") for package in PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found[node.func.id].add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("name", JUDGING)
def test_what_judges_a_group_is_called_from_one_place(name: str) -> None:
    assert callers()[name] == set(JUDGING[name].split())


def test_a_group_and_all_that_follows_from_it() -> None:
    outcomes = [Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.TIMEOUT]
    config = Config(verifier=VerifierConfig(on_truncated="mask", on_timeout="drop"))
    judged = judge_of(config)(tiny_group([1.0, 0.0, 0.0, 0.0], [2] * 4, outcomes=outcomes))
    assert judged.kept.tolist() == [True, True, True, False]
    assert judged.in_loss.tolist() == [True, True, False, False]
    assert judged.rewards.tolist() == [1.0, 0.0, 0.0, 0.0] and judged.parts == {}
    assert judged.teaches and (judged.right, judged.counted) == (1, 3)
    count = judged.pass_count(7)
    assert (count.task, count.right, count.counted) == (7, 1, 3)


def test_a_step_keeps_slot_order_over_its_orders() -> None:
    orders = [
        FilledOrder(
            order_id=f"train/000000/u{number:04d}",
            policy_version=0,
            adapter_sha256="a" * 64,
            groups=tuple(tiny_group([1.0, right], [1, 1], group_id=f"{number}/{right}") for right in (0.0, 1.0)),
            timings=timings(),
        )
        for number in range(2)
    ]
    judge = judge_of(Config())
    step = collected(orders[:1], judge) + collected(orders[1:], judge)
    assert [judged.group.group_id for judged in step.groups] == ["0/0.0", "0/1.0", "1/0.0", "1/1.0"]
    assert step.filled == tuple(orders) and step.teaching == 2
    assert [count.right for count in step.pass_counts([3, 1, 4, 5])] == [1, 2, 1, 2]


def test_an_outcome_that_stops_the_run_is_not_judged() -> None:
    """A journal of an earlier start may hold what the configuration now refuses."""
    group = tiny_group([1.0, 0.0], [2, 2], outcomes=[Outcome.CORRECT, Outcome.ERROR])
    with pytest.raises(StopOnOutcome):
        judge_of(Config())(group)
    assert np.all(judge_of(Config(verifier=VerifierConfig(on_error="train")))(group).kept)
