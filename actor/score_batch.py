"""The bookkeeping of one scoring call: which jobs wait, which verdicts are in, and who is to blame for a failure.

Jobs start out in as few chunks as there are workers, in order: a reward function sees the batch, or the largest part
of it. When a chunk fails as a whole, each of its jobs is tried once more, alone. A job that fails alone is guilty;
the others lose nothing but time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from actor.verdict import ScoreJob, Verdict, fault
from protocol.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Jobs that are scored in one call."""

    jobs: range
    """Their places in the batch."""
    second_try: bool = False
    """One job alone, after the chunk it was in failed."""


class Batch:
    """The jobs of one call on their way to verdicts."""

    def __init__(self, jobs: Sequence[ScoreJob], num_workers: int) -> None:
        self.jobs = jobs
        self.waiting = deque(cut(len(jobs), num_workers))
        self.verdicts: dict[int, Verdict] = {}

    def is_done(self) -> bool:
        """Whether every job has its verdict."""
        return len(self.verdicts) == len(self.jobs)

    def settle(self, chunk: Chunk, verdicts: Sequence[Verdict]) -> None:
        """The verdicts on a chunk are in."""
        self.verdicts.update(zip(chunk.jobs, verdicts, strict=True))

    def fail(self, chunk: Chunk, outcome: Outcome, note: str) -> None:
        """There will be no verdicts on this chunk."""
        if chunk.second_try:
            self.settle(chunk, [fault(outcome, note)])
        else:
            self.waiting.extend(Chunk(jobs=range(job, job + 1), second_try=True) for job in chunk.jobs)

    def in_order(self) -> list[Verdict]:
        """One verdict a job."""
        return [self.verdicts[job] for job in range(len(self.jobs))]


def cut(num_jobs: int, num_parts: int) -> list[Chunk]:
    """Consecutive chunks of nearly equal size, none empty."""
    edges = [num_jobs * part // num_parts for part in range(num_parts + 1)]
    return [Chunk(jobs=range(start, end)) for start, end in pairwise(edges) if end > start]
