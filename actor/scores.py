"""The verdicts of one order, begun before all of its samples are there.

    together   jobs are kept until all are there, and scored in order by one call: a function of the user's sees the
               whole batch, as in TRL
    streamed   (score_stream.py) jobs are scored while other samples are still being decoded

Whoever hands samples over need not know which.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from actor.verdict import ScoreJob, Verdict


class Scores(Protocol):
    """Takes the jobs of one order as they come."""

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        """Some more jobs by their places in the order; does not wait. Called with every token, often with none."""
        ...

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        """Wait for all of them: one a job, by place."""
        ...


class Scorer(Protocol):
    """Scores completions; score_pool.py in real life."""

    def begin(self) -> Scores:
        """The verdicts of one order."""
        ...


class Together:
    """Scored by one call."""

    def __init__(self, score: Callable[[Sequence[ScoreJob], Callable[[], None]], list[Verdict]]) -> None:
        self.score = score
        self.jobs: dict[int, ScoreJob] = {}

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        """Kept."""
        self.jobs |= jobs

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        """All at once."""
        return self.score([self.jobs[place] for place in sorted(self.jobs)], on_progress)


def score_all(scorer: Scorer, jobs: Sequence[ScoreJob]) -> list[Verdict]:
    """Jobs that are there already."""
    scores = scorer.begin()
    scores.add(dict(enumerate(jobs)))
    return scores.verdicts(lambda: None)
