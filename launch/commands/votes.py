"""Which final answers mean the same, and how the wrong ones vote for maj@k.

A vote is the final answer that the verifier read when it scored the completion. Nothing is read a second time,
so what counts for the reward also counts for the majority. Votes are counted by meaning: a wrong formula in four
spellings is one candidate with four votes. A user's own reward function reads none, so its completions cannot
vote.

Two final answers are compared as the verifier compares one with the gold answer. Numbers are canonical already, so
equal text is enough. For formulas the verifier is asked whether the one is correct if the other is the gold answer. A
final answer joins the first cluster whose first member it equals; completions without one form a cluster of their
own.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from actor.scoring.scores import Scorer, Scores, score_all
from actor.verifiers.verdict import ScoreJob, Verdict
from learner.evaluation.evaluate import Votes
from learner.tasks.tasks import Task
from protocol.outcome import Outcome
from shared.config.data import VerifierKind

FinalAnswers = dict[tuple[str, tuple[int, ...]], str | None]
"""(question, tokens of a completion) -> its final answer."""
Same = Callable[[str, str], bool]
"""Whether two final answers mean the same. The first is the one that is taken for gold."""


class VoteCounter:
    """A scorer that remembers each final answer, and counts the votes of an evaluation later."""

    def __init__(self, scorer: Scorer, kind: VerifierKind) -> None:
        self.scorer = scorer
        self.kind: VerifierKind = kind
        self.final_answers: FinalAnswers = {}

    def begin(self) -> Scores:
        return RememberedScores(self.scorer.begin(), self.final_answers)

    def count(self, tasks: Sequence[Task], wrong: Sequence[Sequence[list[int]]]) -> list[Votes]:
        """wrong: for each task, the completions that are wrong, as tokens."""
        final_answers = [
            [self.final_answers[task.columns["question"], tuple(ids)] for ids in completions]
            for task, completions in zip(tasks, wrong, strict=True)
        ]
        votes = [[answer for answer in answers if answer is not None] for answers in final_answers]
        same = comparison(self.kind, votes, self.scorer)
        return [
            (clusters(voted, same), len(answers) - len(voted))
            for voted, answers in zip(votes, final_answers, strict=True)
        ]


class RememberedScores:
    """The scores of one order; each final answer is kept in `final_answers`."""

    def __init__(self, scores: Scores, final_answers: FinalAnswers) -> None:
        self.scores = scores
        self.final_answers = final_answers
        self.jobs: dict[int, ScoreJob] = {}

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        self.jobs |= jobs
        self.scores.add(jobs)

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        verdicts = self.scores.verdicts(on_progress)
        for place, verdict in zip(sorted(self.jobs), verdicts, strict=True):
            job = self.jobs[place]
            self.final_answers[job.columns["question"], tuple(job.completion_ids)] = verdict.final_answer
        return verdicts


def clusters(final_answers: Sequence[str | None], same: Same) -> tuple[int, ...]:
    """The size of each cluster, in the order in which they first appear."""
    firsts: list[str | None] = []
    sizes: list[int] = []
    for answer in final_answers:
        known = (place for place, first in enumerate(firsts) if equal(answer, first, same))
        place = next(known, None)
        if place is None:
            firsts.append(answer)
            sizes.append(1)
        else:
            sizes[place] += 1
    return tuple(sizes)


def equal(answer: str | None, first: str | None, same: Same) -> bool:
    if answer is None or first is None:
        return answer is first
    return answer == first or same(first, answer)


def comparison(kind: VerifierKind, tasks: Sequence[Sequence[str | None]], scorer: Scorer) -> Same:
    """tasks: the final answers to each task. All pairs that differ in spelling are scored in one batch."""
    if kind != "math":
        return lambda first, answer: False
    pairs = {pair for answers in tasks for pair in combinations(dict.fromkeys(filter(None, answers)), 2)}
    ordered = sorted(pairs)
    verdicts = score_all(scorer, [as_job(gold, answer) for gold, answer in ordered])
    equals = {pair for pair, verdict in zip(ordered, verdicts, strict=True) if verdict.outcome is Outcome.CORRECT}
    return lambda first, answer: (first, answer) in equals


def as_job(gold: str, answer: str) -> ScoreJob:
    return ScoreJob(
        prompt="", completion=f"\\boxed{{{answer}}}", completion_ids=[], truncated=False, columns={"answer": gold}
    )
