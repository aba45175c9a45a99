"""Which part of a completion counts, and what is taken from it as the final answer."""

import contextlib

import pytest

from actor.scoring.pool import ScorePool
from actor.verifiers.final_answer import counted, final_answers
from actor.verifiers.verdict import ScoreJob
from actor.verifiers.verifier import score_job
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig, VerifierKind


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("a<think>b", "a"),
        ("a<|im_end|>b", "a"),
        ("a</s>b<|eot_id|>c", "a"),
        ("<think>a<|im_end|></think>b", ""),
    ],
)
def test_what_counts(text: str, part: str) -> None:
    assert counted(text) == part


@pytest.mark.parametrize("kind", ["gsm8k", "exact", "math"])
def test_it_holds_for_every_builtin_verifier(kind: VerifierKind) -> None:
    def outcome(text: str) -> Outcome:
        columns = {"answer": "18"}
        job = ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns=columns)
        return score_job(kind, job, strict=False).outcome

    assert outcome("<think>#### 17</think>#### 18<|im_end|>#### 19") is Outcome.CORRECT
    assert outcome("<think>#### 18</think>No.") is Outcome.UNPARSABLE


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("\\boxed{1} then \\boxed{2}", ["2"]),
        ("\\boxed{1}, \\boxed{2} and \\boxed{3}.", ["1", "2", "3"]),
        ("\\boxed{\\frac{1}{2}}", ["\\frac{1}{2}"]),
        ("\\boxed{\\{1, 2\\}}", ["\\{1, 2\\}"]),
        ("\\boxed{\\boxed{2}}", ["2"]),
        ("\\fbox{2}", ["2"]),
        ("\\boxed{2} and \\boxed{3", ["2"]),
        ("\\boxed{2}\n#### 3", ["3"]),
        ("#### 3\n\\boxed{2}", ["3"]),
        ("#### Conclusion\nIt is \\boxed{2}", ["2"]),
        ("#### 3. Conclusion\nIt is \\boxed{2}", ["2"]),
        ("#### **Step 3:** add\nIt is \\boxed{2}", ["2"]),
        ("\\boxed{2}\n#### x", ["x"]),
        ("\\boxed{2}\n####", ["2"]),
        ("#### 3\nAnswer: 4", ["3", "4"]),
        ("#### \\boxed{3}", ["3"]),
        ("#### \\boxed{3}, \\boxed{4}", ["3", "4"]),
        ("#### **Final answer:** 3", ["3"]),
        ("#### 2 or \\boxed{3}", ["2", "\\boxed{3}"]),
        ("\\boxed{3} or 4", ["3", "4"]),
        ("$x = -\\boxed{3}$", ["$x = -3$"]),
        ("#### 3\nThe answer is plausible", ["3"]),
        ("\\boxed{3}. Actually 4", ["3", "4"]),
        ("we get \\sqrt3 then", ["\\sqrt3"]),
        ("so $\\frac13 $.", ["\\frac13 "]),
        ("it is .4", [".4"]),
        ("The largest $n$ is 34.", ["34"]),
        ("$\\boxed{1}\\quad\\text{and}\\quad\\boxed{2}$", ["1", "2"]),
        ("\\\\boxed{\\\\frac{1}{2}}", ["\\frac{1}{2}"]),
        ("Answer: 4\nwhich is $5$", ["4"]),
        ("Answer: 4. Or 5.", ["4", "5"]),
        ("The answer is $x$ or $y$.", ["x", "y"]),
        ("Answer:\n\n  4", ["4"]),
        ("so $5$ and then 6", ["6"]),
        ("it costs $18 and then $20", ["$20"]),
        ("", []),
        ("no", []),
    ],
)
def test_the_final_answer_in_order_of_trust(text: str, answers: list[str]) -> None:
    assert final_answers(text) == answers


@pytest.mark.one_in(3)
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        "1" + " " * 100_000 + "x 2",
        "1" + "$" * 100_000 + "x 2",
        "1" + ", " * 50_000 + "x 2",
        r"1\quad" + r"\quad" * 20_000 + "x 2",
        r"\boxed{1}" + " " * 100_000 + "x",
        r"\boxed{1}" + "$ " * 50_000 + r"is\boxed{2}",
        r"\boxed{1}" + "$ " * 50_000 + r"or 2",
        r"2-\boxed{1} million" * 8_000,
        "#### " + "so a word " * 12_000 + r"\boxed{1}" + " and" * 30_000,
        "42" + " " * 100_000 + "%",
        "42" + ")" * 100_000 + "k",
        "1+" * 50_000 + r"\sqrt",
        "x" + "^2" * 50_000,
        "$ 1" * 30_000,
        "- 42 is " * 12_000,
        "Answer: 1 " * 10_000 + "Actually " * 10_000,
        "#### 42\n" + "Wait 1 " * 14_000,
        "42" + "\u4e2a" * 100_000 + "x",
        "42 " + "\u00e9" * 100_000 + "x",
        "\u4e0d" * 100_000 + "42",
        "42/hour" * 15_000,
        "42/\\text{" * 10_000,
        "42~\\text{km}" * 10_000,
        "1\uff0c" * 50_000 + "x 2",
        r"\text{and" * 10_000,
        "1" + r"\text{and" * 10_000 + "2",
        "\u4e2a\\boxed{" * 12_000,
        "42 " + "\u2705" * 100_000,
        "42" + "\u2705 " * 50_000 + "x",
        "42\u2705" + " " * 100_000 + "\u2705x",
        "42 \u2705\n" * 20_000 + "x",
        "<<1" * 30_000,
        "<<1=1>>" * 15_000 + "1",
        "<<" + "1+" * 50_000 + "1=1>>1",
    ],
    ids=lambda text: text[:12] + text[-4:],
)
def test_every_pattern_takes_linear_time(text: str) -> None:
    kinds: tuple[VerifierKind, ...] = ("gsm8k", "exact", "math")
    columns = {"answer": "42"}
    job = ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns=columns)
    for kind in kinds:
        for strict in (False, True):
            score_job(kind, job, strict=strict)


def test_in_workers_an_order_of_work_costs_only_itself() -> None:
    jobs = [
        ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns={"answer": r"\frac{x}{2}"})
        for text in (r"\boxed{x/2}", r"\boxed{(10^{9})!}", r"\boxed{\frac12 x}")
    ]
    with contextlib.closing(ScorePool(VerifierConfig(kind="math", workers=2))) as pool:
        verdicts = pool.score(jobs, lambda: None)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.CORRECT, Outcome.UNPARSABLE, Outcome.CORRECT]
