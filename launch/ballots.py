"""How the wrong answers of an evaluation vote, heard where they are scored.

The verifier says what it took for the final answer; that is the vote. So nothing is read a second time, and what counts
for the reward counts for the majority. Votes are counted by value, as in clusters.py: one wrong formula in four
spellings is one candidate with four votes. A user's own function says no such thing, and then there is no vote.
"""

from collections.abc import Callable, Mapping, Sequence

from actor.scoring.stream import Scorer, Scores
from actor.verifiers.verdict import ScoreJob, Verdict
from launch.clusters import clusters, comparison
from learner.evaluation.evaluate import Votes
from learner.tasks.tasks import Task
from shared.config.data import VerifierKind

Heard = dict[tuple[str, tuple[int, ...]], str | None]
"""Question and tokens of an answer -> its vote."""


class Ballots:
    """A scorer that remembers what was extracted."""

    def __init__(self, scorer: Scorer, kind: VerifierKind) -> None:
        self.scorer = scorer
        self.kind: VerifierKind = kind
        self.heard: Heard = {}

    def begin(self) -> Scores:
        """As the scorer does."""
        return Counted(self.scorer.begin(), self.heard)

    def count(self, tasks: Sequence[Task], wrong: Sequence[Sequence[list[int]]]) -> list[Votes]:
        """wrong: the wrong answers to each task, as tokens."""
        said = [
            [self.heard[task.columns["question"], tuple(ids)] for ids in answers]
            for task, answers in zip(tasks, wrong, strict=True)
        ]
        voted = [[vote for vote in votes if vote is not None] for votes in said]
        same = comparison(self.kind, voted, self.scorer)
        return [(clusters(votes, same), len(answers) - len(votes)) for votes, answers in zip(voted, said, strict=True)]


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
