"""Which final answers mean the same, and which one each wrong completion votes for: what maj@k needs.

A vote is the final answer that the verifier read when it scored the completion. Nothing is read a second time,
so what counts for the reward also counts for the majority. Votes are told apart by meaning: a wrong formula in four
spellings is one candidate with four votes. A user's own reward function reads none, so its completions cannot
vote.

Two final answers are compared as the verifier compares one with the gold answer. Numbers are canonical already, so
equal text is enough. For formulas the verifier is asked whether the one is correct if the other is the gold answer. A
final answer joins the first cluster whose first member it equals; completions without one form a cluster of their
own.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

from actor.scoring.scores import Scorer, score_all
from actor.verifiers.verdict import ScoreJob, Verdict
from protocol.outcome import Outcome
from shared.config.data import VerifierKind

Verdicts = Sequence[Sequence[Verdict]]
"""Those of each group."""
CastVotes = Callable[[Verdicts, Callable[[], None]], list[tuple[int, ...] | None]]
"""The votes of each group: [G], one number for each wrong final answer, from 1 in the order in which they first appear;
0 for a completion that is right or has none. None where nobody can vote. The second argument is called meanwhile."""
Same = Callable[[str, str], bool]
"""Whether two final answers mean the same. The first is the one that is taken for gold."""


def nobody_votes(groups: Verdicts, on_progress: Callable[[], None]) -> list[tuple[int, ...] | None]:
    return [None for _ in groups]


def casting(kind: VerifierKind, scorer: Scorer) -> CastVotes:
    """How the completions vote that a verifier of this kind has scored."""
    if kind in ("callable", "environment"):
        return nobody_votes

    def cast(groups: Verdicts, on_progress: Callable[[], None]) -> list[tuple[int, ...] | None]:
        wrong = [[wrong_answer(verdict) for verdict in group] for group in groups]
        same = comparison(kind, wrong, scorer, on_progress)
        return [numbers(answers, same) for answers in wrong]

    return cast


def wrong_answer(verdict: Verdict) -> str | None:
    return None if verdict.outcome is Outcome.CORRECT else verdict.final_answer


def numbers(final_answers: Sequence[str | None], same: Same) -> tuple[int, ...]:
    """The cluster of each final answer, from 1; 0 where there is none."""
    given = [answer for answer in final_answers if answer is not None]
    found = iter(places(given, same))
    return tuple(0 if answer is None else 1 + next(found) for answer in final_answers)


def clusters(final_answers: Sequence[str | None], same: Same) -> tuple[int, ...]:
    """The size of each cluster, in the order in which they first appear."""
    found = places(final_answers, same)
    return tuple(found.count(place) for place in range(len(set(found))))


def places(final_answers: Sequence[str | None], same: Same) -> list[int]:
    """The cluster of each, from 0 in the order in which they first appear."""
    firsts: list[str | None] = []
    found: list[int] = []
    for answer in final_answers:
        known = (place for place, first in enumerate(firsts) if equal(answer, first, same))
        place = next(known, len(firsts))
        if place == len(firsts):
            firsts.append(answer)
        found.append(place)
    return found


def equal(answer: str | None, first: str | None, same: Same) -> bool:
    if answer is None or first is None:
        return answer is first
    return answer == first or same(first, answer)


def comparison(
    kind: VerifierKind,
    tasks: Sequence[Sequence[str | None]],
    scorer: Scorer,
    on_progress: Callable[[], None] = lambda: None,
) -> Same:
    """tasks: the final answers to each task. All pairs that differ in spelling are scored in one batch."""
    if kind != "math":
        return lambda first, answer: False
    pairs = {pair for answers in tasks for pair in combinations(dict.fromkeys(filter(None, answers)), 2)}
    ordered = sorted(pairs)
    verdicts = score_all(scorer, [as_job(gold, answer) for gold, answer in ordered], on_progress)
    equals = {pair for pair, verdict in zip(ordered, verdicts, strict=True) if verdict.outcome is Outcome.CORRECT}
    return lambda first, answer: (first, answer) in equals


def as_job(gold: str, answer: str) -> ScoreJob:
    return ScoreJob(
        prompt="",
        completion=f"\\boxed{{{answer}}}",
        completion_ids=[],
        truncated=False,
        columns={"answer": gold},
        compares_answers=True,
    )
