"""What a curriculum is told of a group: who counts, and who was right."""

import math

from learner.objective.pass_counts import Observed, observed, pass_rate
from protocol.messages import Finish, Outcome
from shared.config.data import VerifierConfig
from shared.config.tree import Config
from tests.support.fakes import tiny_group

OUTCOMES = [Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.UNPARSABLE, Outcome.TIMEOUT, Outcome.CORRECT]
GROUP = tiny_group([1, 0, 1, 0, 0, 1], [2] * 6, outcomes=OUTCOMES, finishes=[Finish.STOP] * 6)


def test_right_is_what_is_correct_and_counts() -> None:
    assert observed([7], [GROUP], Config()) == [Observed(task=7, right=2, samples=5)]


def test_what_the_config_drops_does_not_count() -> None:
    config = Config(verifier=VerifierConfig(on_truncated="drop", on_unparsable="drop"))
    assert observed([7], [GROUP], config) == [Observed(task=7, right=2, samples=3)]


def test_tasks_and_groups_go_by_slot() -> None:
    groups = [tiny_group([1, 0], [1, 1]), tiny_group([1, 1], [1, 1])]
    assert [(seen.task, seen.right) for seen in observed([4, 2], groups, Config())] == [(4, 1), (2, 2)]


def test_the_pass_rate_weighs_answers_not_groups() -> None:
    assert pass_rate([Observed(task=0, right=1, samples=1), Observed(task=1, right=0, samples=3)]) == 0.25
    assert math.isnan(pass_rate([Observed(task=0, right=0, samples=0)]))
