"""How each answer of an evaluation votes, heard where the answers are scored.

The verifier says what it took for the final answer; that is the vote. So nothing is read a second time, and what counts
for the reward counts for the majority. A user's own function says no such thing, and then there is no vote.
"""

from collections.abc import Callable, Mapping

from actor.scores import Scorer, Scores
from actor.verdict import ScoreJob, Verdict
from learner.tasks import Task

Heard = dict[tuple[str, tuple[int, ...]], str | None]
"""Question and tokens of an answer -> its vote."""


class Ballots:
    """A scorer that remembers what was extracted."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.heard: Heard = {}

    def begin(self) -> Scores:
        """As the scorer does."""
        return Counted(self.scorer.begin(), self.heard)

    def ballot(self, task: Task, ids: list[int]) -> str | None:
        """What this answer votes for."""
        return self.heard[task.columns["question"], tuple(ids)]


class Counted:
    """The scores of one order, which leave their votes behind."""

    def __init__(self, scores: Scores, heard: Heard) -> None:
        self.scores = scores
        self.heard = heard
        self.jobs: dict[int, ScoreJob] = {}

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        """Remembered until their verdicts are there."""
        self.jobs |= jobs
        self.scores.add(jobs)

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        """Those of the scorer."""
        verdicts = self.scores.verdicts(on_progress)
        for place, verdict in zip(sorted(self.jobs), verdicts, strict=True):
            job = self.jobs[place]
            self.heard[job.columns["question"], tuple(job.completion_ids)] = verdict.extracted
        return verdicts
