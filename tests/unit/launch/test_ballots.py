"""How wrong answers are counted for maj@k: by what they mean, as the verifier reads them."""

import contextlib
from collections.abc import Sequence

import pytest

from actor.scoring.pool import ScorePool
from actor.scoring.scores import score_all
from actor.verifiers.verdict import ScoreJob
from launch.commands.in_process import Ballots
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig, VerifierKind
from tests.support.fakes import toy_tasks

TASK = toy_tasks(1)[0]


def counted(kind: VerifierKind, gold: str, texts: Sequence[str]) -> tuple[tuple[int, ...], int]:
    """The wrong answers among these: how many of each value, and how many without one."""
    columns = TASK.columns | {"answer": gold}
    with contextlib.closing(ScorePool(VerifierConfig(kind=kind))) as pool:
        ballots = Ballots(pool, kind)
        jobs = [
            ScoreJob(prompt="", completion=text, completion_ids=[place], truncated=False, columns=columns)
            for place, text in enumerate(texts)
        ]
        verdicts = score_all(ballots, jobs)
        wrong = [[place] for place, verdict in enumerate(verdicts) if verdict.outcome is not Outcome.CORRECT]
        (found,) = ballots.count([TASK], [wrong])
    return found


def test_one_wrong_value_in_four_spellings_is_one_candidate() -> None:
    spellings = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{1/2}"]
    texts = [*[r"\boxed{3}"] * 3, *spellings, r"\boxed{7}", "I do not know"]
    assert counted("math", "3", texts) == ((4, 1), 1)


def test_numbers_are_one_by_value_and_several_are_no_vote() -> None:
    assert counted("gsm8k", "3", ["#### 7", "#### 7.0", "#### 1,000", "#### 3", "#### 7 or 8"]) == ((2, 1), 1)


@pytest.mark.parametrize(("kind", "long"), [("gsm8k", "1" * 80), ("math", "x+" * 60 + "x"), ("gsm8k", "1" * 600)])
def test_long_answers_are_not_one_because_they_begin_alike(kind: VerifierKind, long: str) -> None:
    form = r"\boxed{%s}" if kind == "math" else "#### %s"
    texts = [form % f"{long}{end}" for end in ("2", "3", "2")]
    assert counted(kind, "5", texts) == ((2, 1), 0)
