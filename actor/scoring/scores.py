"""What a rollout needs of a scorer: hand over the jobs of one order while it is sampled, then get their verdicts.

A scorer may score jobs while other completions are still being decoded (StreamedScores in pool.py), or keep them until
all are there (ScoresTogether). The caller need not know which.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from actor.verifiers.verdict import ScoreJob, Verdict


class Scores(Protocol):
    """The scores of one order."""

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        """More jobs, by their places in the order; does not wait. Called with every token, often without jobs."""
        ...

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        """Wait for all verdicts: one per job, by place."""
        ...


class Scorer(Protocol):
    """Scores completions; in a run this is the ScorePool."""

    def begin(self) -> Scores: ...


class ScoresTogether:
    """Scores all jobs of an order together: a user's function sees the whole order, as in TRL, or with several workers
    whole groups of it."""

    def __init__(self, score: Callable[[Sequence[ScoreJob], Callable[[], None]], list[Verdict]]) -> None:
        self.score = score
        self.jobs: dict[int, ScoreJob] = {}

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        self.jobs |= jobs

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        return self.score([self.jobs[place] for place in sorted(self.jobs)], on_progress)


def score_all(
    scorer: Scorer, jobs: Sequence[ScoreJob], on_progress: Callable[[], None] = lambda: None
) -> list[Verdict]:
    """Score jobs that are all there already."""
    scores = scorer.begin()
    scores.add(dict(enumerate(jobs)))
    return scores.verdicts(on_progress)
