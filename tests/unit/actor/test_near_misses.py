"""The table of near misses: nothing in it is correct, strict or not, and what looks like one but is right is."""

import pytest

from actor.verifiers.verdict import ScoreJob
from actor.verifiers.verifier import score_job
from protocol.outcome import Outcome
from shared.config.data import VerifierKind
from tests.support.near_misses import FORMULAS, LAST_NUMBERS, NUMBERS, PROSE, RIGHT_FORMULAS, RIGHT_NUMBERS, TEXTS

TICKED = [
    "#### 18 \u2705",
    "#### 18\u2714\ufe0f",
    "**Final Answer: 18** \u2705",
    "**Final Answer: 18 \u2705**\r\nThat is all.",
    "The answer is **18** \U0001f389",
    "The answer is 18 \u2713",
    "The answer is 18 \u2705\u2728 \U0001f44d\U0001f3fd!",
    "Thus: 9 \u00d7 2 = 18 \u2705",
    "9 + 9 = 18 \u2714\ufe0f.",
    "18 apples \U0001f34e",
    "18 \u2705",
    "17 \u274c\n18 \u2705",
    # The check of a line is not listed beside what follows.
    "Check: 18 - 9 = 9 \u2705\n\n18",
]

CALCULATED = [
    ("She makes 9*2=$<<9*2=18>>18 every day.", "18"),
    ("Total: <<5+5=10>>10 apples", "10"),
    ("#### <<9*2=18>>18", "18"),
    ("The answer is <<9*2=18>>18.", "18"),
    ("He pays 15*495=$<<15*495=7425>>7,425.00", "7425"),
    ("2-20 = <<2-20=-18>>-18", "-18"),
    ("5+5=<<5+5=10>>10 apples, and 10+8=<<10+8=18>>18 in all", "18"),
]
# The value behind a note is another one, none, or joined to what is before it; or it is no note.
NOT_CALCULATED = [
    ("Total: <<5+5=10>>11", "11"),
    ("Total: <<5+5=10>>11", "10"),
    ("2-20 = -<<2-20=-18>>18", "18"),
    ("She sells them at 2 = <<9*2=18>> dollars", "2"),
    ("She sells them at 2 = <<9*2=18>> dollars", "18"),
    ("1<<4+4=8>>8", "18"),
    ("1<<4+4=8>>8", "8"),
    ("1.<<4+4=8>>8", "1.8"),
    ("41 or <<40+2=42>>42", "42"),
    ("<<not=18>>18", "18"),
    ("<<17 or=18>>18", "18"),
    ("<<=18>>18", "18"),
    ("<<18>>18", "18"),
    ("x<<18=18>>18", "18"),
    ("not <<9*2=18>>18", "18"),
    ("<<9*2=18>>18 million", "18"),
    ("<<9*2=18>>18^2", "18"),
    ("><<9*2=18>>18", "18"),
    ("<<9*2=18>>180", "18"),
    ("<<9*2=18>>18.5", "18"),
]

MIXED = [
    ("The answer is 12 1/2.", "12.5"),
    ("#### 3 1/2", "3.5"),
    ("#### -3 1/2", "-3.5"),
    ("#### +3 1/2", "3.5"),
    ("#### $3 1/2", "3.5"),
    ("\\boxed{3 1/2}", "3.5"),
    ("**Answer:** 3 1/2 hours", "3.5"),
    ("7/2 = 3 1/2", "3.5"),
    ("#### x = 3 1/2", "3.5"),
    ("She needs 3 1/2 cups", "3.5"),
]
NOT_MIXED = [
    *(("#### 12 1/2", gold) for gold in ("12", "0.5", "1", "2", "6", "121", "121.5", "60.5", "11.5")),
    *(("#### 1 1/2", gold) for gold in ("1", "0.5", "11", "5.5")),
    *(("#### 3 4", gold) for gold in ("3", "4", "34", "7", "12", "0.75")),
    ("#### 3 4 1/2", "4.5"),
    ("#### 3 4 1/2", "7.5"),
    ("#### 1 200 1/2", "1200.5"),
    ("#### 1 200", "1200"),
    ("#### 11 7/6", "12"),
    ("#### 3 2/2", "4"),
    ("#### 3 1/0", "3"),
    ("#### 3 1/2 / 2", "1.75"),
    ("#### 3 1/2 -", "3.5"),
    ("#### --3 1/2", "3.5"),
    ("#### --3 1/2", "1.5"),
    ("#### 5-3 1/2", "1.5"),
    ("#### --3 1/2", "-3.5"),
    ("#### 3 * 12 1/2", "18"),
    ("#### 3 * 12 1/2", "37.5"),
    ("#### 2 1/2 * 2", "5"),
    ("#### 2 1/2 + 1", "3.5"),
    ("#### 2 1/2^2", "2.25"),
    ("#### 2 1/2/2", "2.25"),
    ("#### 2 1/2.5", "2.4"),
    ("#### 2 1/2 3", "2.5"),
    ("#### 2 1/2 3/4", "2.5"),
    ("#### 3 1/2 = 4", "4"),
    ("#### 3 1/2 = 1.5", "1.5"),
    ("#### 3 1/2 = 3", "3"),
    ("#### 3 1/2 or 3.5", "3.5"),
    ("#### 3 1/2, 3.5", "3.5"),
    ("#### about 3 1/2", "3.5"),
    ("#### ~3 1/2", "3.5"),
    ("#### > 3 1/2", "3.5"),
    ("#### not 3 1/2", "3.5"),
    ("#### 3 1/2 million", "3.5"),
    ("#### 3 1/2 dozen", "3.5"),
    ("#### 3 1/2%", "3.5"),
    ("#### 3 1/2x", "3.5"),
    ("#### 3\t1/2", "3.5"),
    ("#### 3 -1/2", "3.5"),
    ("#### 3.0 1/2", "3.5"),
    ("#### 1,000 1/2", "1.5"),
    ("The answer is 3 1/2 or 4", "3.5"),
    ("The answer is 3 1/2. Actually 4", "3.5"),
]

BOXED = [
    r"It is \boxed{18}.",
    r"= \boxed{18}",
    r"\boxed{18} apples",
    r"\boxed{18}! Done",
    r"\boxed{18} because 3 * 6 = 18",
    r"$\boxed{18}$ dollars",
    r"$\boxed{18}$ dozen eggs",
    r"\boxed{18}:00 pm",
    r"$3!\times 3!=\boxed{18}$",
    "3!+3!+3!=18",
    r"$\boxed{18}$ times as many",
    r"$\boxed{18}$ feet less than 20 feet",
    r"\boxed{18}^\circ",
    r"$\boxed{18}^{\text{th}}$",
    r"$\boxed{18}\text{ cm}^2$",
    r"$\boxed{18} \pmod{20}$",
    r"\boxed{18}/hour",
    r"about \boxed{18}",
    r"3 less than 21 is \boxed{18}",
    r"$x \approx \boxed{18}$",
    r"$x \le \boxed{18}$",
    r"- \boxed{18}",
    r"- $\boxed{18}$",
    r"The final answer - \boxed{18}",
    r"The final answer---\boxed{18}",
    r"Step 3 - \boxed{18}",
    r"Part 2: \boxed{18}",
    r"$3 \cdot 6 = 18$ $\boxed{18}$",
    r"\boxed{18}, or 18.0.",
    r"\boxed{18}, or 1 hour and 3 quarters",
    r"\boxed{18} or 18.00 dollars",
    r"\boxed{18}, or 1.5 dozen",
    r"\boxed{18} or more",
    r"She pays 9 + 9 = $\boxed{18}.00 for it",
    r"\boxed{18}. This is not the only way.",
    r"\boxed{18}. That is correct.",
    "\\boxed{18}\u5143",
    r"#### \boxed{18}",
    r"#### $\boxed{18}$",
    r"#### **\boxed{18}**",
    r"#### Final answer: \boxed{18}",
    r"#### The total is $\boxed{18}$ dollars.",
    r"#### $x = \boxed{18}$",
    r"#### \boxed{18}\%",
    "#### Answer: 18",
    "#### **Final answer:** 18",
    "#### So, the answer is 18",
    "so n!=18",
    r"$n!=\boxed{18}$",
    # What stands on the line before.
    "The total is 18\n\\boxed{18}",
    "So 6 * 3 = 18\n\\boxed{18}",
    "### Step 3\n\\boxed{18}",
    "So:\n#### 18\n\\boxed{18}",
    "\\[x = 18\n\\boxed{18}\\]",
    "$$\nx = 18\n\\boxed{18}\n$$",
    "$x = 18$ is not negative\n\\boxed{18}",
    "x cannot be negative\n\n\\boxed{18}",
    # A dash of a list.
    r"Answer:-\boxed{18}",
    "\n-\\boxed{18}",
    "That is all.\n-$\\boxed{18}$",
    "$x = 18$\n-\\boxed{18}",
]
NOT_BOXED = [
    *(f"{text}\\boxed{{18}}" for text in ("-", "2", "3/", "2(", "3 - ", "x = 3 - ", "x = - ", "x-", r"\pm", "\u00b1")),
    *(
        f"{text} \\boxed{{18}}"
        for text in ("not", "isn't", "cannot be", "never", "negative", "minus", r"\neq", "!=", "\u2260")
    ),
    *(
        f"\\boxed{{18}}{text}"
        for text in (
            ",000",
            "{,}000",
            ".5",
            "5",
            ":30",
            "k",
            "M",
            "^2",
            "^{-1}",
            "^n",
            "/2",
            r"\sqrt{2}",
            r"\pi",
            "\u00b2",
        )
    ),
    *(
        f"$\\boxed{{18}}$ {text}"
        for text in (
            "million",
            r"\text{ thousand}",
            "lakh",
            "squared",
            "or 20",
            "or 12.50.",
            "or $20$.",
            "plus 2",
            "and a half",
        )
    ),
    r"$x=-\boxed{18}$",
    r"$x!=\boxed{18}$",
    r"$n! != \boxed{18}$",
    r"\boxed{18}.005",
    r"\frac{\boxed{18}}{2}",
    r"\frac{2}{\boxed{18}}",
    r"\sqrt{\boxed{18}}",
    r"$\boxed{18} \times 10^3$",
    r"$\boxed{18}$ \text{ or } 20",
    r"The answer is not \boxed{18}.",
    r"\boxed{18}. That is incorrect.",
    r"\boxed{18}, which is not correct.",
    r"Is it $\boxed{18}$? This is not the answer.",
    r"#### -\boxed{18}",
    r"#### 17 or \boxed{18}",
    r"#### \boxed{18} or x",
    r"#### A or \boxed{18}",
    r"#### \boxed{18} 20",
    r"#### \boxed{17} then \boxed{18}",
    r"#### \boxed{18} million",
    r"#### not \boxed{18}",
    "#### Answer: 18. Answer: 20",
    "#### The answer is not 18",
    "#### The answer is 18 million",
    "#### 20. The answer is 18",
]
# What is in the box and what changes it, read together.
READ_WITH_THE_BOX = [
    (r"$-\boxed{5}$", "-5"),
    (r"$x=-\boxed{5}$", "-5"),
    (r"$x=-\boxed{-5}$", "5"),
    (r"\boxed{1},000", "1000"),
    (r"$\frac{\boxed{18}}{2}$", "9"),
    (r"#### -\boxed{5}", "-5"),
    (r"= -\boxed{5}", "-5"),
    ("$$\n-\\boxed{5}\n$$", "-5"),
    ("\\[\n-\\boxed{5}\n\\]", "-5"),
    ("$x =\n-\\boxed{5}$", "-5"),
    ("= -3\n\\boxed{-3}", "-3"),
    ("The slope is negative\n\n\\boxed{-2}", "-2"),
    (r"\boxed{2.5} or 2.50 dollars", "2.5"),
]
BOXED_FORMULAS = [
    (r"\boxed{5}\sqrt{2}", r"5\sqrt{2}"),
    ("x^2\n\\boxed{x^2}", "x^2"),
    (r"$\boxed{\frac{5}{2}}$ or 2.5 hours.", r"\frac{5}{2}"),
    (r"\boxed{\frac{1}{8}} or 12.5%.", r"\frac{1}{8}"),
    (r"\boxed{2\sqrt{3}} or 3.46.", r"2\sqrt{3}"),
    (r"\boxed{C} or 12.", "C"),
]


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


@pytest.mark.parametrize("kind", ["gsm8k", "exact", "math"])
def test_a_tick_or_a_picture_behind_an_answer_changes_nothing(kind: VerifierKind) -> None:
    assert [text for text in TICKED if outcome(kind, text, "18", strict=False) is not Outcome.CORRECT] == []


@pytest.mark.parametrize("kind", ["gsm8k", "exact", "math"])
def test_notes_of_a_calculator_are_no_part_of_a_text(kind: VerifierKind) -> None:
    for table, right in ((CALCULATED, True), (NOT_CALCULATED, False)):
        found = [(case, outcome(kind, *case, strict=False)) for case in table]
        assert [case for case, outcome in found if (outcome is Outcome.CORRECT) != right] == []


@pytest.mark.parametrize("kind", ["gsm8k", "exact"])
def test_a_mixed_number_is_one_number_only_where_nothing_else_is_beside_it(kind: VerifierKind) -> None:
    for table, right in ((MIXED, True), (NOT_MIXED, False)):
        found = [(case, outcome(kind, *case, strict=False)) for case in table]
        assert [case for case, outcome in found if (outcome is Outcome.CORRECT) != right] == []


@pytest.mark.parametrize("kind", ["gsm8k", "exact", "math"])
def test_a_box_is_read_with_what_changes_it_beside_it(kind: VerifierKind) -> None:
    right = [(text, "18") for text in BOXED] + READ_WITH_THE_BOX
    assert [case for case in right if outcome(kind, *case, strict=False) is not Outcome.CORRECT] == []
    assert [text for text in NOT_BOXED if outcome(kind, text, "18", strict=False) is Outcome.CORRECT] == []


def test_so_it_is_where_only_a_box_counts() -> None:
    right = [(text, "18") for text in BOXED if "boxed" in text] + READ_WITH_THE_BOX
    boxed = [case for case in right if not case[0].startswith("#")] + BOXED_FORMULAS
    assert [case for case in boxed if outcome("math", *case, strict=True) is not Outcome.CORRECT] == []
    wrong = [text for text in NOT_BOXED if not text.startswith("#")]
    assert [text for text in wrong if outcome("math", text, "18", strict=True) is Outcome.CORRECT] == []
