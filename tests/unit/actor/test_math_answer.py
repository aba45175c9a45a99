r"""The `math` verifier against what models write: true answers in every spelling; hostile_outputs.py has the others."""

import json
from pathlib import Path

import pytest

from actor.verifiers.final_answer import counted
from actor.verifiers.verdict import ScoreJob
from actor.verifiers.verifier import score_job, score_math
from protocol.outcome import Outcome

MATH500 = Path(__file__).resolve().parents[4] / "shared" / "data" / "math500" / "test.jsonl"

TRUE_ANSWERS = [
    # numbers
    (r"\boxed{42}", "42"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{1234}", r"1,\!234"),
    (r"\boxed{\$18.00}", "18"),
    (r"\boxed{18.}", "18"),
    (r"\boxed{018}", "18"),
    (r"\boxed{+18}", "18"),
    (r"\boxed{-0}", "0"),
    (r"\boxed{.5}", "0.5"),
    (r"\boxed{1/2}", "0.5"),
    (r"\boxed{0.5}", r"\frac12"),
    (r"\boxed{\frac12}", r"\dfrac{1}{2}"),
    (r"\boxed{\tfrac{2}{4}}", "1/2"),
    (r"\boxed{-\frac{1}{2}}", "-0.5"),
    (r"\boxed{\frac{-1}{2}}", "-0.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{1 234}", "1234"),
    ("\\boxed{\u22123}", "-3"),
    ("\\boxed{\u00bd}", "0.5"),
    (r"\boxed{3 \times 10^4}", "30000"),
    (r"\boxed{\frac{270}7}", r"\frac{270}7\text{ degrees}"),
    # units, currency, percent, base
    (r"\boxed{18 \text{ apples}}", "18"),
    (r"\boxed{18 apples}", "18"),
    (r"\boxed{15}", r"15\mbox{ cm}^2"),
    (r"\boxed{15\text{ cm}^2}", r"15\mbox{ cm}^2"),
    (r"\boxed{30}", r"30^\circ"),
    ("\\boxed{30\u00b0}", "30"),
    (r"\boxed{42\%}", r"42\%"),
    (r"\boxed{42}", r"42\%"),
    (r"\boxed{52_{8}}", "52_8"),
    (r"\boxed{52}", "52_8"),
    (r"\boxed{\$32,\!348}", r"\$32,\!348"),
    # words
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{evelyn}", r"\text{Evelyn}"),
    (r"\boxed{C}", r"\text{(C)}"),
    # formulas
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{\frac{\sqrt 2}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{0.5\pi}", r"\frac{\pi}{2}"),
    ("\\boxed{2\u03c0}", r"2\pi"),
    (r"\boxed{(x+1)(x-1)}", "x^2-1"),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1"),
    (r"\boxed{-5i+6}", "6 - 5i"),
    (r"\boxed{y = 2x+3}", "2x + 3"),
    (r"\boxed{2x+3}", "y = 2x + 3"),
    (r"\boxed{10x - 14y + 22z + 8 = 0}", "5x - 7y + 11z + 4 = 0"),
    (r"\boxed{6 \cdot 7 = 42}", "42"),
    (r"\boxed{x = 42}", "42"),
    (r"\boxed{x = 6 \cdot 7 = 42}", "42"),
    (r"\boxed{\frac{1}{2}}, or $\boxed{0.5}$", "1/2"),
    # several parts
    (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{7, 3, 5}", "3, 5, 7"),
    (r"\boxed{3}, \boxed{5} and \boxed{7}", "3,5,7"),
    (r"\boxed{1-\sqrt{19},1+\sqrt{19}}", r"1 \pm \sqrt{19}"),
    (r"\boxed{(3,\infty)\cup(-\infty,2)}", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\boxed{x \in [-2,7]}", "[-2,7]"),
    (r"\boxed{\begin{pmatrix} 0.2 \\ -18/5 \end{pmatrix}}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    # where the final answer is
    ("It is 41. No: \\boxed{41}. Check again: \\boxed{42}.", "42"),
    ("\\boxed{41}\n#### 42", "42"),
    ("#### 41\n#### 42", "42"),
    ("#### 42 apples", "42"),
    ("**Answer:** 42", "42"),
    ("**Answer:**\n$42$", "42"),
    ("A: 42", "42"),
    ("So the answer is $x = 42$.", "42"),
    ("The final answer is 42 apples.", "42"),
    ("9 + 9 = 18, so he has $18.00 left", "18"),
    ("we get $\\frac{1}{2}$", "0.5"),
    ("<think>\\boxed{41}</think>\\boxed{42}", "42"),
    ("\\boxed{42}<|im_end|>\\boxed{41}", "42"),
]


@pytest.mark.parametrize(("text", "gold"), TRUE_ANSWERS)
def test_a_true_answer_is_correct_in_every_spelling(text: str, gold: str) -> None:
    verdict = score_math(counted(text), gold)
    assert (verdict.outcome, verdict.score) == (Outcome.CORRECT, 1.0), verdict


# Rows of our own: percent signs and rounded decimals follow the rules of math_answer.py.
SPELLINGS = Path(__file__).resolve().parents[2] / "answer_spellings.jsonl"
TABLE = [tuple(json.loads(line).values()) for line in SPELLINGS.read_text(encoding="utf-8").splitlines()]


def is_correct(text: str, gold: str) -> bool:
    return score_math(counted(text), gold).outcome is Outcome.CORRECT


def test_the_table_of_spellings() -> None:
    assert [(gold, text) for gold, text, right in TABLE if is_correct(text, gold) != right] == []
    wrong = sum(not right for _, _, right in TABLE)
    assert len(set(TABLE)) == len(TABLE) >= 900 and wrong >= 250


@pytest.mark.long
def test_no_answer_of_the_table_is_right_for_another_gold_answer() -> None:
    """Each right answer against the gold answers of rows that are not the same answer themselves."""
    right = [(gold, text) for gold, text, is_right in TABLE if is_right]
    step = 97
    pairs = [(text, gold, other) for place, (other, text) in enumerate(right) for gold, _ in [right[place - step]]]
    strangers = [
        (text, gold)
        for text, gold, other in pairs
        if not is_correct(f"\\boxed{{{other}}}", gold) and "boxed" not in gold
    ]
    assert len(strangers) > 500
    assert [pair for pair in strangers if is_correct(*pair)] == []


@pytest.mark.one_in(3)
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "filler",
    [
        "\\boldsymbol{",
        "\\begin{pmatrix}1&1\\\\1&1\\end{pmatrix}",
        "+\\begin{pmatrix}1\\end{pmatrix}",
        "|x|<",
        "x \\ne ",
        "x=1,",
        "x=1,y=2;",
        "(A) ",
        "1:",
        "\\pm ",
        "sqrt(",
        "2^(",
        "{1 \\over ",
        "9!",
        "n!",
        "\\binom{n}",
        "x_1",
        "\\text{cm}",
        "a+",
        "f(",
        " ",
    ],
)
def test_a_final_answer_of_any_form_costs_little(filler: str) -> None:
    """A tenth of a second or less; a pattern that tries every combination would not end within the limit."""
    text = filler * (500 // len(filler))
    for gold in ("42", "(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}", text[:-1]):
        score_math(f"\\boxed{{{text}}}", gold)
        score_math(f"\\boxed{{{text}x}}", gold)


ROUNDED = [
    ("0.333", r"\frac{1}{3}", 3),
    ("0.33", r"\frac{1}{3}", 2),
    ("-0.333", r"-\frac13", 3),
    ("1.414", r"\sqrt{2}", 4),
    ("(0.6, 2.667)", r"(\frac35, \frac83)", 3),
    (r"\frac{100}{3}", "33.3", 3),
    ("33.33", "33.333", 3),
    (r"2.3148 \times 10^{-3}", r"\frac{1}{432}", 4),
    (r"2.3148e-3", r"\frac{1}{432}", 4),
    (r"\begin{pmatrix}0.33\\0.2\end{pmatrix}", r"\begin{pmatrix}1/3\\1/5\end{pmatrix}", 2),
]
NOT_ROUNDED = [
    ("0.333", r"\frac{1}{3}", 0),
    ("0.333", r"\frac{1}{3}", 4),
    ("0.334", r"\frac{1}{3}", 3),
    ("0.0", r"\frac{1}{1000}", 1),
    ("0", r"\frac{1}{1000}", 1),
    ("1.415", r"\sqrt{2}", 4),
    (r"2.3149 \times 10^{-3}", r"\frac{1}{432}", 4),
    ("33", r"\frac{100}{3}", 2),
    ("0.33%", r"\frac{1}{3}", 2),
]


@pytest.mark.parametrize(("given", "gold", "digits"), ROUNDED)
def test_a_rounded_decimal_is_the_gold_answer_only_by_leave_and_never_strictly(
    given: str, gold: str, digits: int
) -> None:
    columns = {"answer": gold}
    text = f"\\boxed{{{given}}}"
    job = ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns=columns)
    assert score_job("math", job, strict=False, rounded_digits=digits).outcome is Outcome.CORRECT
    assert score_job("math", job, strict=False).outcome is Outcome.WRONG
    assert score_job("math", job, strict=True, rounded_digits=digits).outcome is Outcome.WRONG


@pytest.mark.parametrize(("given", "gold", "digits"), NOT_ROUNDED)
def test_a_decimal_of_other_digits_or_too_few_is_not_the_gold_answer(given: str, gold: str, digits: int) -> None:
    assert score_math(f"\\boxed{{{given}}}", gold, rounded_digits=digits).outcome is Outcome.WRONG


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "filler",
    [
        "\\boxed{",
        "}",
        "$",
        "$1",
        "1,",
        "#### ",
        "Answer: ",
        "{",
        "\\",
        "\\(",
        "\\[",
        "1 or ",
        "x^",
        "\\pi ",
        "1+",
        "$ ",
        "-$",
        "is not ",
    ],
)
def test_time_grows_with_the_length_only(filler: str) -> None:
    score_math(filler * (100_000 // len(filler)), "42")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("given", ["5", "10^{10}", "x^2", "10^{10^{10}}"])
def test_a_gold_answer_that_nobody_can_compute_is_only_its_own_text(given: str) -> None:
    tower = "10^{10^{10^{10}}}"
    assert score_math(f"\\boxed{{{given}}}", tower).outcome is not Outcome.CORRECT
    assert score_math(f"\\boxed{{{tower}}}", tower).outcome is Outcome.CORRECT


def test_an_empty_gold_answer_is_an_error_of_the_data() -> None:
    assert score_math(r"\boxed{42}", " ").outcome is Outcome.ERROR


def test_what_was_read_is_shown() -> None:
    assert score_math(r"\boxed{41} or \boxed{\frac12}", "42").final_answer == r"41, \frac12"


@pytest.mark.skipif(not MATH500.is_file(), reason="needs math500/test.jsonl beside the repository, not part of it")
def test_every_gold_answer_of_math500_is_correct_and_no_other() -> None:
    rows = [json.loads(line) for line in MATH500.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 500
    boxed = [row for row in rows if score_math(f"So it is $\\boxed{{{row['answer']}}}$.", row["answer"]).score != 1.0]
    assert [row["answer"] for row in boxed] == []
    solved = [row for row in rows if score_math(row["solution"], row["answer"]).score != 1.0]
    assert [row["answer"] for row in solved] == []
    gold = {row["answer"] for row in rows}
    assert [answer for answer in gold if score_math(f"\\boxed{{{answer}}}", "123454321").score] == []
