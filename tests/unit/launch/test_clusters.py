"""Which answers mean the same: by spelling, by the verifier, and none is one meaning."""

import contextlib

from actor.scoring.pool import ScorePool
from launch.commands.in_process import clusters, comparison
from shared.config.data import VerifierConfig
from tests.support.fakes import ScriptedScorer


def never(first: str, answer: str) -> bool:
    return False


def test_equal_spellings_are_one_cluster_and_no_answer_is_one_too() -> None:
    assert clusters(["18", "7", "18", None, "18", None], never) == (3, 1, 2)
    assert clusters([None, None], never) == (2,)
    assert clusters([], never) == ()


def test_an_answer_joins_the_first_cluster_whose_first_member_it_equals() -> None:
    close = {("a", "b"), ("b", "c")}
    assert clusters(["a", "b", "c"], lambda first, answer: (first, answer) in close) == (2, 1)


def test_numbers_are_canonical_already_and_nobody_is_asked() -> None:
    def unasked(ids: list[int]) -> bool:
        raise AssertionError

    same = comparison("gsm8k", [["1", "2"]], ScriptedScorer(unasked))
    assert not same("1", "2")


def test_formulas_are_compared_by_the_verifier_itself() -> None:
    questions = [[r"\frac{1}{2}", "0.5", "0.25", None], ["x+1", "1+x", r"\undefined{3}"]]
    with contextlib.closing(ScorePool(VerifierConfig(kind="math"))) as pool:
        same = comparison("math", questions, pool)
    assert [clusters(answers, same) for answers in questions] == [(2, 1, 1), (2, 1)]
