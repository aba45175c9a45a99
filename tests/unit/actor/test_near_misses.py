"""The table of near misses: nothing in it is correct, strict or not, and what looks like one but is right is."""

import pytest

from actor.verifiers.verdict import ScoreJob
from actor.verifiers.verifier import score_job
from protocol.outcome import Outcome
from shared.config.data import VerifierKind
from tests.support.near_misses import FORMULAS, LAST_NUMBERS, NUMBERS, PROSE, RIGHT_FORMULAS, RIGHT_NUMBERS, TEXTS


def outcome(kind: VerifierKind, completion: str, gold: str, *, strict: bool) -> Outcome:
    columns = {"answer": gold}
    job = ScoreJob(prompt="", completion=completion, completion_ids=[], truncated=False, columns=columns)
    return score_job(kind, job, strict=strict).outcome


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["gsm8k", "exact"])
def test_a_number_that_is_changed_by_what_is_beside_it_is_not_that_number(kind: VerifierKind, strict: bool) -> None:
    texts = [f"#### {text}" for text in NUMBERS] + PROSE
    assert [text for text in texts if outcome(kind, text, "42", strict=strict) is Outcome.CORRECT] == []
    # Bare, `42 times 42` ends in 42 and in nothing else: the last number, by design. The strict forms want more.
    bare = NUMBERS if strict else LAST_NUMBERS
    assert [text for text in bare if outcome(kind, text, "42", strict=strict) is Outcome.CORRECT] == []


@pytest.mark.parametrize("strict", [False, True])
def test_a_formula_that_nearly_is_the_gold_answer_is_not(strict: bool) -> None:
    cases = [(f"\\boxed{{{text}}}", gold) for text, gold in FORMULAS] + TEXTS + [(text, "42") for text in PROSE]
    assert [case for case in cases if outcome("math", *case, strict=strict) is Outcome.CORRECT] == []


@pytest.mark.parametrize("kind", ["gsm8k", "exact", "math"])
def test_a_tick_makes_none_of_them_right(kind: VerifierKind) -> None:
    texts = [*LAST_NUMBERS, *(f"#### {text}" for text in NUMBERS), *PROSE, *(text for text, _ in TEXTS)]
    wrong = [text for text in texts if outcome(kind, text, "42", strict=False) is not Outcome.CORRECT]
    ticked = [f"{text}{tick}" for text in wrong for tick in (" \u2705", "\u2714\ufe0f", "\n\U0001f389")]
    assert [text for text in ticked if outcome(kind, text, "42", strict=False) is Outcome.CORRECT] == []


def test_what_only_looks_like_a_near_miss_is_correct() -> None:
    numbers = [
        case for case in RIGHT_NUMBERS if outcome("gsm8k", f"#### {case[0]}", case[1], strict=False) != "correct"
    ]
    formulas = [
        case for case in RIGHT_FORMULAS if outcome("math", f"\\boxed{{{case[0]}}}", case[1], strict=False) != "correct"
    ]
    assert (numbers, formulas) == ([], [])


def test_the_table_is_large() -> None:
    assert len({*NUMBERS, *PROSE}) + len({*FORMULAS, *TEXTS}) >= 200
