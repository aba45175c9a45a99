"""Which answers to one question mean the same.

Answers are compared as the verifier compares one with a gold answer: as canonical numbers, or, where it compares
formulas, by asking it whether the one would be right if the other were gold. An answer joins the first cluster whose
first member it equals. What has no final answer is one cluster.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

from actor.scoring.stream import Scorer, score_all
from actor.verifiers.verdict import ScoreJob
from protocol.outcome import Outcome
from shared.config.data import VerifierKind

Same = Callable[[str, str], bool]


def clusters(answers: Sequence[str | None], same: Same) -> tuple[int, ...]:
    """How many answers have each meaning."""
    firsts: list[str | None] = []
    counts: list[int] = []
    for answer in answers:
        known = (place for place, first in enumerate(firsts) if equal(answer, first, same))
        place = next(known, None)
        if place is None:
            firsts.append(answer)
            counts.append(1)
        else:
            counts[place] += 1
    return tuple(counts)


def equal(answer: str | None, first: str | None, same: Same) -> bool:
    """Two answers, or none twice."""
    if answer is None or first is None:
        return answer is first
    return answer == first or same(first, answer)


def comparison(kind: VerifierKind, questions: Sequence[Sequence[str | None]], scorer: Scorer) -> Same:
    """What decides whether two different spellings mean the same, for the answers to each of these questions."""
    if kind != "math":
        return lambda first, answer: False
    pairs = {pair for answers in questions for pair in combinations(dict.fromkeys(filter(None, answers)), 2)}
    ordered = sorted(pairs)
    verdicts = score_all(scorer, [as_job(first, answer) for first, answer in ordered])
    equals = {pair for pair, verdict in zip(ordered, verdicts, strict=True) if verdict.outcome is Outcome.CORRECT}
    return lambda first, answer: (first, answer) in equals


def as_job(first: str, answer: str) -> ScoreJob:
    """The one as the gold answer, the other as a completion."""
    return ScoreJob(
        prompt="", completion=f"\\boxed{{{answer}}}", completion_ids=[], truncated=False, columns={"answer": first}
    )
