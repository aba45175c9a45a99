"""Scores samples while others of the same order are still being decoded.

    math         each at once: one that takes its whole limit should have begun early
    the others   as many at a time as make a call worth its while; what is left over follows at the end

Nothing here waits before `verdicts`. In between, the workers are looked after as often as a wait would do it, so one
that hangs is replaced while tokens are drawn.

The verdicts of one order, begun before all of its samples are there.

    together   jobs are kept until all are there, and scored in order by one call: a function of the user's sees the
               whole batch, as in TRL
    streamed   (score_stream.py) jobs are scored while other samples are still being decoded

Whoever hands samples over need not know which.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from actor.scoring.batch import CHUNK_JOBS, Batch
from actor.verifiers.verdict import ScoreJob, Verdict

TURN_S = 0.05


class Pool(Protocol):
    """What a stream needs of score_pool.py."""

    def num_parts(self, num_jobs: int) -> int:
        """Calls that so many jobs are cut into."""
        ...

    def turn(self, batch: Batch) -> None:
        """Take verdicts in, hand chunks out; do not wait."""
        ...

    def finish(self, batch: Batch, on_progress: Callable[[], None]) -> list[Verdict]:
        """Wait for all verdicts: one a job, in the order in which the jobs came."""
        ...


class Streamed:
    """One order's jobs on their way through the pool."""

    def __init__(self, pool: Pool, *, one_by_one: bool) -> None:
        self.pool = pool
        self.batch = Batch([], one_by_one=one_by_one)
        self.at_once = 1 if one_by_one else CHUNK_JOBS
        self.places: list[int] = []
        self.held: list[ScoreJob] = []
        self.turned_at = time.monotonic()

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        """Hand over what has gathered, if it is enough."""
        self.places += jobs
        self.held += jobs.values()
        if len(self.held) >= self.at_once:
            self.hand_over(1)
        elif time.monotonic() - self.turned_at < TURN_S or self.batch.is_done():
            return
        self.turned_at = time.monotonic()
        self.pool.turn(self.batch)

    def hand_over(self, num_parts: int) -> None:
        """Into the queue."""
        self.batch.add(self.held, num_parts)
        self.held = []

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        """Sorted back into the order's own order."""
        self.hand_over(self.pool.num_parts(len(self.held)))
        found = dict(zip(self.places, self.pool.finish(self.batch, on_progress), strict=True))
        return [found[place] for place in sorted(found)]


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
