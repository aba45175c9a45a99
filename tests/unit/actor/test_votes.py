"""Which final answers mean the same, and how wrong ones are counted for maj@k."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from actor.scoring.pool import ScorePool
from actor.scoring.scores import score_all
from actor.scoring.votes import casting, clusters, comparison
from actor.verifiers.verdict import ScoreJob
from shared.config.data import VerifierConfig, VerifierKind
from tests.support.fakes import ScriptedScorer, toy_tasks

TASK = toy_tasks(1)[0]


def votes(kind: VerifierKind, gold: str, texts: Sequence[str]) -> tuple[int, ...] | None:
    """Which wrong final answer each text votes for."""
    columns = TASK.columns | {"answer": gold}
    with contextlib.closing(ScorePool(VerifierConfig(kind=kind))) as pool:
        jobs = [
            ScoreJob(prompt="", completion=text, completion_ids=[place], truncated=False, columns=columns)
            for place, text in enumerate(texts)
        ]
        (found,) = casting(kind, pool)([score_all(pool, jobs)], lambda: None)
    return found


def test_one_wrong_value_in_four_spellings_is_one_candidate() -> None:
    spellings = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{1/2}"]
    texts = [*[r"\boxed{3}"] * 3, *spellings, r"\boxed{7}", "I do not know"]
    assert votes("math", "3", texts) == (0, 0, 0, 1, 1, 1, 1, 2, 0)


def test_numbers_are_one_by_value_and_several_are_no_vote() -> None:
    assert votes("gsm8k", "3", ["#### 7", "#### 7.0", "#### 1,000", "#### 3", "#### 7 or 8"]) == (1, 1, 2, 0, 0)


@pytest.mark.parametrize(("kind", "long"), [("gsm8k", "1" * 80), ("math", "x+" * 60 + "x"), ("gsm8k", "1" * 600)])
def test_long_final_answers_are_not_one_because_they_begin_alike(kind: VerifierKind, long: str) -> None:
    form = r"\boxed{%s}" if kind == "math" else "#### %s"
    texts = [form % f"{long}{end}" for end in ("2", "3", "2")]
    assert votes(kind, "5", texts) == (1, 2, 1)


# --- the same meaning


def never(first: str, answer: str) -> bool:
    return False


def test_equal_spellings_are_one_cluster_and_no_final_answer_is_one_too() -> None:
    assert clusters(["18", "7", "18", None, "18", None], never) == (3, 1, 2)
    assert clusters([None, None], never) == (2,)
    assert clusters([], never) == ()


def test_a_final_answer_joins_the_first_cluster_whose_first_member_it_equals() -> None:
    close = {("a", "b"), ("b", "c")}
    assert clusters(["a", "b", "c"], lambda first, answer: (first, answer) in close) == (2, 1)


def test_numbers_are_canonical_already_and_nobody_is_asked() -> None:
    def unasked(ids: list[int]) -> bool:
        raise AssertionError

    same = comparison("gsm8k", [["1", "2"]], ScriptedScorer(unasked))
    assert not same("1", "2")


def test_a_users_own_function_reads_no_final_answers() -> None:
    assert casting("callable", ScriptedScorer())([[], []], lambda: None) == [None, None]


def test_a_comparison_asks_no_reward_function(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def by_level(level, **_):\n    return [float(one) for one in level]\n")
    with contextlib.closing(ScorePool(VerifierConfig(kind="math", rewards={f"{file}:by_level": 1.0}))) as pool:
        assert clusters(["1/2", "0.5"], comparison("math", [["1/2", "0.5"]], pool)) == (2,)


def test_formulas_are_compared_by_the_verifier_itself() -> None:
    questions = [[r"\frac{1}{2}", "0.5", "0.25", None], ["x+1", "1+x", r"\undefined{3}"]]
    with contextlib.closing(ScorePool(VerifierConfig(kind="math"))) as pool:
        same = comparison("math", questions, pool)
    assert [clusters(answers, same) for answers in questions] == [(2, 1, 1), (2, 1)]
