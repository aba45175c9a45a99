"""How each answer of an evaluation votes, heard where the answers are scored.

The verifier says what it took for the final answer; that is the vote. So nothing is read a second time, and what counts
for the reward counts for the majority. A user's own function says no such thing, and then there is no vote.
"""

from collections.abc import Callable, Sequence

from actor.rollout import Scorer
from actor.verdict import ScoreJob, Verdict
from learner.tasks import Task


class Ballots:
    """A scorer that remembers what was extracted."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.heard: dict[tuple[str, tuple[int, ...]], str | None] = {}

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """As the scorer does."""
        verdicts = self.scorer.score(jobs, on_progress)
        for job, verdict in zip(jobs, verdicts, strict=True):
            self.heard[job.columns["question"], tuple(job.completion_ids)] = verdict.extracted
        return verdicts

    def ballot(self, task: Task, ids: list[int]) -> str | None:
        """What this answer votes for."""
        return self.heard[task.columns["question"], tuple(ids)]
