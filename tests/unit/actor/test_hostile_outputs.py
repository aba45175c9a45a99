"""The table of hostile outputs, through the same killable workers as in a run."""

import contextlib

import pytest

from actor.scoring.pool import ScorePool
from actor.verifiers.final_answer import final_answers
from actor.verifiers.verdict import ScoreJob
from actor.verifiers.verifier import score_job
from shared.config.data import VerifierConfig, VerifierKind
from tests.support.hostile_outputs import HOSTILE

KINDS: tuple[VerifierKind, ...] = ("gsm8k", "exact", "math")


def job(completion: str, gold: str) -> ScoreJob:
    columns = {"answer": gold}
    return ScoreJob(prompt="", completion=completion, completion_ids=[], truncated=False, columns=columns)


def test_the_table_is_large_and_has_no_case_twice() -> None:
    cases = [(kind, completion, gold) for kind, completion, gold, _ in HOSTILE]
    assert len(set(cases)) == len(cases) >= 100


@pytest.mark.parametrize("kind", KINDS)
def test_each_gets_its_outcome_within_the_limit(kind: VerifierKind) -> None:
    """A completion that took longer would come back as timeout; one that broke its worker, as error."""
    cases = [case for case in HOSTILE if case[0] == kind]
    verifier = VerifierConfig(kind=kind, workers=2, limit_s=10.0)
    with contextlib.closing(ScorePool(verifier)) as pool:
        verdicts = pool.score([job(completion, gold) for _, completion, gold, _ in cases], lambda: None)
    found = [(completion, verdict.outcome) for (_, completion, _, _), verdict in zip(cases, verdicts, strict=True)]
    assert found == [(completion, outcome) for _, completion, _, outcome in cases]
    assert all(verdict.score == (verdict.outcome == "correct") for verdict in verdicts)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", [case for case in HOSTILE if len(case[1]) > 1000], ids=lambda case: case[1][:12])
def test_length_alone_costs_little(case: tuple[VerifierKind, str, str, str]) -> None:
    kind, completion, gold, _ = case
    score_job(kind, job(completion, gold), strict=False)


def test_no_wrong_output_becomes_right_by_demanding_the_strict_form() -> None:
    for kind, completion, gold, outcome in HOSTILE:
        if outcome != "correct" and len(completion) < 1000:
            assert score_job(kind, job(completion, gold), strict=True).outcome != "correct", completion


@pytest.mark.timeout(30)
def test_a_long_list_of_answers_is_read_in_linear_time() -> None:
    assert len(final_answers(", ".join(map(str, range(100_000))))) == 100_000
