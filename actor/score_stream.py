"""Scores samples while others of the same order are still being decoded.

    math         each at once: one that takes its whole limit should have begun early
    the others   as many at a time as make a call worth its while; what is left over follows at the end

Nothing here waits before `verdicts`. In between, the workers are looked after as often as a wait would do it, so one
that hangs is replaced while tokens are drawn.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from actor.score_batch import CHUNK_JOBS, Batch
from actor.verdict import ScoreJob, Verdict

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
