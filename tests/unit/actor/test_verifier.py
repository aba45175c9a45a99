"""The built-in verifiers against a table of what models write."""

import json
from pathlib import Path

import pytest

from actor.verifiers.final_answer import final_answers, marked_number
from actor.verifiers.number_answer import whole_text
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.verifiers.verifier import MAX_CHARS, score_job, score_number
from protocol.messages import Outcome
from shared.config.data import VerifierKind

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"

CORRECT, WRONG, UNPARSABLE, ERROR = Outcome.CORRECT, Outcome.WRONG, Outcome.UNPARSABLE, Outcome.ERROR

GSM8K_TABLE = [
    # plain
    ("12 + 6 = 18\n#### 18", "18", CORRECT),
    ("#### 18", "18", CORRECT),
    ("####18", "18", CORRECT),
    ("####    18   ", "18", CORRECT),
    ("####\t18\r\n", "18", CORRECT),
    ("####\u00a018", "18", CORRECT),
    ("##### 18", "18", CORRECT),
    ("#### 0", "0", CORRECT),
    ("#### -0", "0", CORRECT),
    ("#### 018", "18", CORRECT),
    ("#### 19", "18", WRONG),
    ("#### 180", "18", WRONG),
    ("#### 8", "18", WRONG),
    ("#### -18", "18", WRONG),
    # grouping, currency, points
    ("#### 1,234", "1234", CORRECT),
    ("#### 1234", "1,234", CORRECT),
    ("#### 1,234,567", "1234567", CORRECT),
    ("#### 12,34", "1234", WRONG),
    ("#### 1,2345", "12345", WRONG),
    ("#### 1,2341234", "1234", WRONG),
    ("#### 1234,567", "1234567", WRONG),
    ("#### 1 234", "1234", WRONG),
    ("#### $18", "18", CORRECT),
    ("#### \\$18", "18", CORRECT),
    ("#### $ 18", "18", CORRECT),
    ("#### \u20ac18", "18", CORRECT),
    ("#### 18.", "18", CORRECT),
    ("#### 18.0", "18", CORRECT),
    ("#### 18.00", "18.0", CORRECT),
    ("#### $1,234.00.", "1234", CORRECT),
    ("#### 18.5", "18", WRONG),
    ("#### 1.8", "18", WRONG),
    ("#### 18.0.0", "18", WRONG),
    ("#### .18", "18", UNPARSABLE),
    # signs
    ("#### -3", "-3", CORRECT),
    ("#### \u22123", "-3", CORRECT),
    ("#### -$3", "-3", CORRECT),
    ("#### $-3", "-3", CORRECT),
    ("#### -3.0", "-3", CORRECT),
    ("#### +3", "3", CORRECT),
    ("#### 3", "-3", WRONG),
    ("#### - 3", "3", UNPARSABLE),
    # what follows on the line
    ("#### 18 apples", "18", CORRECT),
    ("#### 18 dollars.", "18", CORRECT),
    ("#### 18%", "18", CORRECT),
    ("#### **18**", "18", CORRECT),
    ("#### 18 (eighteen)", "18", CORRECT),
    ("#### 18 = 18.0", "18", CORRECT),
    ("#### 18 or 19", "18", WRONG),
    ("#### 18 19", "18", WRONG),
    ("#### 18, 19", "18", WRONG),
    ("#### 18/2", "18", WRONG),
    ("#### 18-5", "18", WRONG),
    ("#### 18e2", "18", WRONG),
    ("#### 18 m2", "18", WRONG),
    ("#### 41 = 42", "42", WRONG),
    ("#### 18\nActually 19", "18", WRONG),
    ("#### 18\nThat is 9 + 9.", "18", CORRECT),
    # what comes before the number
    ("#### The answer is 18", "18", UNPARSABLE),
    ("#### not 18", "18", UNPARSABLE),
    ("#### x18", "18", UNPARSABLE),
    ("#### eighteen", "18", UNPARSABLE),
    ("####\n18", "18", UNPARSABLE),
    ("####", "18", UNPARSABLE),
    ("#### #### 18", "18", CORRECT),
    # no marker, several markers
    ("The answer is 18", "18", UNPARSABLE),
    ("### 18", "18", UNPARSABLE),
    ("# # # # 18", "18", UNPARSABLE),
    ("", "18", UNPARSABLE),
    ("#### 18\n#### 19", "18", WRONG),
    ("#### 19\n#### 18", "18", CORRECT),
    ("#### 18 #### 18", "18", CORRECT),
    ("#### 18\n####", "18", UNPARSABLE),
    # a tick behind it
    ("#### 18 \u2705", "18", CORRECT),
    ("#### 18 \u274c", "18", WRONG),
    ("#### 18 million \u2705", "18", WRONG),
    # digits of other scripts are not ours to read
    ("#### \u0661\u0668", "18", UNPARSABLE),
    ("#### \uff11\uff18", "18", UNPARSABLE),
    ("#### 18\u00b2", "18", WRONG),
    # gold answers
    ("#### 18", "She has 9 + 9 = <<9+9=18>>18.\n#### 18", CORRECT),
    ("#### 1234", "So 1,234.\n#### 1,234", CORRECT),
    ("#### 9", "She has 9 + 9 = 18.\n#### 18", WRONG),
    ("#### 18", " 18 ", CORRECT),
    ("#### 18", "18 apples", CORRECT),
    ("#### 18", "eighteen", ERROR),
    ("#### 18", "", ERROR),
    ("#### 18", "####", ERROR),
    ("#### 18", "18 or 19", ERROR),
    ("no answer", "eighteen", ERROR),
]

EXACT_TABLE = [
    ("18", "18", CORRECT),
    ("The answer is 18.", "18", CORRECT),
    ("9 + 9 = 18", "18", CORRECT),
    ("20-2", "2", CORRECT),
    ("x-5", "5", CORRECT),
    ("The answer is -3.", "-3", CORRECT),
    ("It is \u22123", "-3", CORRECT),
    ("That makes $1,234.00", "1234", CORRECT),
    ("#### 18", "#### 18", CORRECT),
    ("18 of the 20", "18", WRONG),
    ("18.5", "18", WRONG),
    ("It is 42. Actually 7", "42", WRONG),
    ("no number", "18", UNPARSABLE),
    ("", "18", UNPARSABLE),
    ("18", "none", ERROR),
]


STRICT_EXACT_TABLE = [
    ("18", "18", CORRECT),
    (" $18.00.\n", "18", CORRECT),
    ("**18**", "18", CORRECT),
    ("-3", "-3", CORRECT),
    ("19", "18", WRONG),
    ("It is 18", "18", UNPARSABLE),
    ("18 apples", "18", UNPARSABLE),
    ("9 + 9 = 18", "18", UNPARSABLE),
    ("#### 18", "18", UNPARSABLE),
    ("18\n18", "18", UNPARSABLE),
    ("", "18", UNPARSABLE),
]

LENIENT_TABLE = [
    # where the final answer is, in the order of trust
    ("#### 18", "18", CORRECT),
    ("#### 18\n\\boxed{19}", "18", CORRECT),
    ("\\boxed{19}\n#### 18", "18", CORRECT),
    ("#### The answer is 18", "18", CORRECT),
    ("####\n18", "18", CORRECT),
    ("#### Conclusion\n\\boxed{18}, out of 20.", "18", CORRECT),
    ("\\boxed{18} of the 20", "18", CORRECT),
    ("\\boxed{17}. No: \\boxed{18}", "18", CORRECT),
    ("A: 18", "18", CORRECT),
    ("Answer: 18 of the eggs, sold at 2 dollars", "18", WRONG),
    ("The answer is 18 eggs. ", "18", CORRECT),
    ("the answer is: **$1,234.00**", "1234", CORRECT),
    ("9 + 9 = 18, so he has $18.00 left", "18", CORRECT),
    ("20 - 2 leaves 18.", "18", CORRECT),
    ("18 of the 20", "18", WRONG),
    # as people write
    ("#### 1/2", "0.5", CORRECT),
    ("#### \\frac12", "0.5", CORRECT),
    ("\\boxed{\\frac{36}{2}}", "18", CORRECT),
    ("\\boxed{1,\\!234}", "1234", CORRECT),
    ("\\boxed{18\\text{ apples}}", "18", CORRECT),
    ("\\boxed{\\$18}", "18", CORRECT),
    ("#### 9 + 9 = 18", "18", CORRECT),
    ("The answer is x = 18", "18", CORRECT),
    ("#### \u22123", "-3", CORRECT),
    ("#### 18%", "18", CORRECT),
    ("#### .5", "0.5", CORRECT),
    ("The answer is 18!", "18", CORRECT),
    ("#### 3 \\times 10^4", "30000", CORRECT),
    ("#### 18~\\text{km}", "18", CORRECT),
    ("It is $18~\\mathrm{km}$.", "18", CORRECT),
    ("\\boxed{\\sqrt[3]{-8}}", "-2", CORRECT),
    # rates
    ("#### $18/hour", "18", CORRECT),
    ("She earns $18/hour.", "18", CORRECT),
    ("\\boxed{\\$18/\\text{hour}}", "18", CORRECT),
    ("\\boxed{18 \\text{ km}/\\text{h}}", "18", CORRECT),
    ("#### 18/hr", "18", CORRECT),
    ("60km/h", "60", CORRECT),
    # other languages: pupils, peaches, apples, and behind a colon or in a box
    ("The total is 18 \u00e9l\u00e8ves.", "18", CORRECT),
    ("18 p\u00eaches", "18", CORRECT),
    ("18 \u00c4pfel", "18", CORRECT),
    ("La r\u00e9ponse est 18", "18", CORRECT),
    ("\u7b54\u6848\uff1a18", "18", CORRECT),
    ("\u7b54\u6848\u662f\\boxed{18}\u3002", "18", CORRECT),
    # and what only looks like it
    ("17 ou 18 \u00e9l\u00e8ves", "18", WRONG),
    ("17 oder 18", "18", WRONG),
    ("Es sind nicht 18", "18", WRONG),
    ("#### 18 Millionen", "18", WRONG),
    ("#### 18 milh\u00f5es", "18", WRONG),
    ("#### 18 m\u00e1s", "18", WRONG),
    ("\\boxed{18\\text{ v\u1ea1n}}", "18", WRONG),
    ("#### 18\u00e9l\u00e8ves", "18", WRONG),
    # before letters of other scripts: apples, million, and behind `the answer is`
    ("#### 18 \u044f\u0431\u043b\u043e\u043a", "18", WRONG),
    ("#### 18 \u043c\u043b\u043d", "18", WRONG),
    ("\u7b54\u6848\u662f18\u3002", "18", WRONG),
    # products and quotients
    ("#### 18/theta", "18", WRONG),
    ("#### 18/min(x)", "18", WRONG),
    ("#### 9 + 8 = 18", "18", WRONG),
    ("#### 18 = 19", "18", WRONG),
    ("#### 18/18", "18", WRONG),
    ("#### 18-18", "18", WRONG),
    ("#### 18 000", "18000", WRONG),
    ("\\boxed{18^{18}}", "18", WRONG),
    ("\\boxed{\\sqrt{18}}", "18", WRONG),
    ("\\boxed{18_{18}}", "18", WRONG),
    ("\\boxed{17} or \\boxed{18}", "18", WRONG),
    ("The answer is 17 or 18", "18", WRONG),
    ("The answer is 18. Actually 7", "18", WRONG),
    ("17 or 18", "18", WRONG),
    ("#### 0.3333333333333333333333333333333333333333", "1/3", ERROR),
    ("no number", "18", UNPARSABLE),
]


def score_gsm8k(text: str, answer: str) -> Verdict:
    """The strict form."""
    return score_number(text, answer, marked_number)


def score_exact(text: str, answer: str) -> Verdict:
    """In any place."""
    return score_number(text, answer, final_answers)


def job(text: str, *, truncated: bool = False, **columns: str) -> ScoreJob:
    return ScoreJob(prompt="", completion=text, completion_ids=[], truncated=truncated, columns=columns)


@pytest.mark.parametrize(("text", "answer", "outcome"), GSM8K_TABLE)
def test_gsm8k(text: str, answer: str, outcome: Outcome) -> None:
    verdict = score_gsm8k(text, answer)
    assert verdict.outcome is outcome
    assert verdict.score == (outcome is CORRECT)


@pytest.mark.parametrize(("text", "answer", "outcome"), EXACT_TABLE)
def test_exact(text: str, answer: str, outcome: Outcome) -> None:
    verdict = score_exact(text, answer)
    assert verdict.outcome is outcome
    assert verdict.score == (outcome is CORRECT)


@pytest.mark.parametrize(("text", "answer", "outcome"), STRICT_EXACT_TABLE)
def test_strict_exact(text: str, answer: str, outcome: Outcome) -> None:
    assert score_number(text, answer, whole_text).outcome is outcome


@pytest.mark.parametrize("kind", ["gsm8k", "exact"])
@pytest.mark.parametrize(("text", "answer", "outcome"), LENIENT_TABLE)
def test_a_number_in_any_place(kind: VerifierKind, text: str, answer: str, outcome: Outcome) -> None:
    verdict = score_job(kind, job(text, answer=answer), strict=False)
    assert verdict.outcome is outcome, verdict
    assert verdict.score == (outcome is CORRECT)


def test_the_answer_that_was_read_is_shown_in_canonical_form() -> None:
    assert score_gsm8k("#### -$1,234.50 each", "18").final_answer == "-1234.5"
    assert score_exact("about 007.0", "18").final_answer == "7"
    assert score_gsm8k("none", "18").final_answer is None


def test_an_error_names_the_gold_answer() -> None:
    assert "'eighteen'" in score_gsm8k("#### 18", "eighteen").note


@pytest.mark.parametrize("kind", ["gsm8k", "exact"])
def test_a_truncated_completion_is_truncated_even_if_it_is_right(kind) -> None:
    verdict = score_job(kind, job("#### 18", truncated=True, answer="18"), strict=False)
    assert (verdict.outcome, verdict.score) == (Outcome.TRUNCATED, 0.0)


@pytest.mark.parametrize(
    ("kind", "strictly"), [("gsm8k", "9\n#### 18"), ("exact", "18"), ("math", "9\nso \\boxed{18}")]
)
def test_strict_trusts_one_form_alone(kind: VerifierKind, strictly: str) -> None:
    for text, outcome in ((strictly, CORRECT), ("It is 18 then", UNPARSABLE), ("The answer is 18", UNPARSABLE)):
        assert score_job(kind, job(text, answer="18"), strict=True).outcome is outcome
        assert score_job(kind, job(text, answer="18"), strict=False).outcome is CORRECT


def test_a_task_without_an_answer_is_an_error() -> None:
    verdict = score_job("gsm8k", job("#### 18", question="?"), strict=False)
    assert verdict.outcome is ERROR
    assert "`answer`" in verdict.note


def test_a_text_over_the_cap_is_not_read() -> None:
    assert score_gsm8k("x" * (MAX_CHARS - 7) + "#### 18", "18").outcome is CORRECT
    assert score_gsm8k("x" * (MAX_CHARS - 6) + "#### 18", "18").outcome is UNPARSABLE


@pytest.mark.one_in(3)
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "filler",
    ["1", "1,", "-", "####", "1,234", "#### 1", "123,456", "0", " ", "-$", "1.", "*", "12,345,6", "1\n"],
)
def test_time_grows_with_the_length_only(filler: str) -> None:
    text = "#### " + filler * (400_000 // len(filler))
    score_gsm8k(text, "18")
    score_exact(text, "18")


def test_numbers_of_any_length_are_compared_exactly() -> None:
    digits = "7" * 100_000
    assert score_gsm8k(f"#### {digits}", digits).outcome is CORRECT
    assert score_gsm8k(f"#### {digits}", digits[:-1] + "8").outcome is WRONG


@pytest.mark.skipif(not GSM8K.exists(), reason="needs gsm8k/test.jsonl beside the repository, which is not part of it")
def test_every_gold_solution_of_gsm8k_is_correct() -> None:
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert len(solutions) == 1319
    assert [text for text in solutions if score_gsm8k(text, text).outcome is not CORRECT] == []
    assert [text for text in solutions if score_exact(text, text).outcome is not CORRECT] == []


@pytest.mark.skipif(not GSM8K.exists(), reason="needs gsm8k/test.jsonl beside the repository, which is not part of it")
def test_no_gold_solution_of_gsm8k_is_correct_for_another_answer() -> None:
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert [text for text in solutions if score_gsm8k(text, "#### 123454321").outcome is not WRONG] == []
