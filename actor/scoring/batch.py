"""The bookkeeping of one scoring call: which jobs wait, which verdicts are in, and who is to blame for a failure.

Jobs start out in as few chunks as there are workers: a user's function sees the batch, or the largest part of it, and
the plain verifiers waste no time. When a call fails, each of its jobs is tried once more, alone. Mathematics, which is
slow and may hang, takes one job at a time out of small chunks, so it is known during which job a worker failed.

    timeout of a call with one job          its fault: it had the whole limit to itself
    failed call with one job                its fault
    crash during one job                    its fault if it had crashed or failed a call before and this worker had done
                                            nothing else yet; else it is tried again, first of all and alone. So no job
                                            suffers for a worker that somebody else killed or spoiled.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from actor.verifiers.verdict import ScoreJob, Verdict, fault
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig
from shared.config.named_rewards import is_function

CHUNK_JOBS = 32


def runs_functions(verifier: VerifierConfig) -> bool:
    """Whether anything of the user's runs in a worker."""
    return verifier.kind == "callable" or any(map(is_function, verifier.rewards))


def is_one_by_one(verifier: VerifierConfig) -> bool:
    """Whether it answers job by job. Functions may look at the whole call, and their failure may be any job's fault."""
    return verifier.kind == "math" and not runs_functions(verifier)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Jobs that a worker gets together."""

    jobs: range
    """Their places in the batch."""


class Batch:
    """The jobs of one call on their way to verdicts."""

    def __init__(self, jobs: Sequence[ScoreJob], num_parts: int = 1, *, one_by_one: bool) -> None:
        self.jobs: list[ScoreJob] = []
        self.one_by_one = one_by_one
        self.lost_keeper = False
        """Whether a keeper went while it was scored: whoever is at work alone when it happens again is the one."""
        self.waiting: deque[Chunk] = deque()
        self.add(jobs, num_parts)
        self.verdicts: dict[int, Verdict] = {}
        self.suspects: set[int] = set()

    def add(self, jobs: Sequence[ScoreJob], num_parts: int) -> None:
        """More jobs, in so many chunks."""
        first = len(self.jobs)
        self.jobs += jobs
        self.waiting += cut(range(first, len(self.jobs)), num_parts)

    def is_done(self) -> bool:
        """Whether every job has its verdict."""
        return len(self.verdicts) == len(self.jobs)

    def settle(self, chunk: Chunk, verdicts: Sequence[Verdict]) -> Chunk | None:
        """The verdicts on the first jobs of a chunk are in; what is left of it."""
        self.verdicts.update(zip(chunk.jobs, verdicts, strict=False))
        left = chunk.jobs[len(verdicts) :]
        return Chunk(jobs=left) if left else None

    def overrun(self, chunk: Chunk, note: str) -> None:
        """A worker was stopped for time on what is left of this chunk."""
        self.blame_or_split(chunk, fault(Outcome.TIMEOUT, note))

    def refuse(self, chunk: Chunk, note: str) -> None:
        """The call failed, the worker did not."""
        self.blame_or_split(chunk, fault(Outcome.ERROR, note))

    def crash(self, chunk: Chunk, note: str, *, is_fresh: bool) -> None:
        """The worker is gone."""
        suspect = chunk.jobs[0]
        if not self.is_alone(chunk) or (is_fresh and suspect in self.suspects):
            self.blame_or_split(chunk, fault(Outcome.ERROR, note))
            return
        self.suspects.add(suspect)
        self.wait(chunk.jobs[1:])
        self.waiting.appendleft(Chunk(jobs=chunk.jobs[:1]))

    def is_alone(self, chunk: Chunk) -> bool:
        """Whether its first job is the only one that the worker was at."""
        return self.one_by_one or len(chunk.jobs) == 1

    def blame_or_split(self, chunk: Chunk, verdict: Verdict) -> None:
        """The one job it can have been, or else each alone."""
        if self.is_alone(chunk):
            self.settle(chunk, [verdict])
            self.wait(chunk.jobs[1:])
            return
        self.suspects |= set(chunk.jobs)
        for job in chunk.jobs:
            self.wait(range(job, job + 1))

    def wait(self, jobs: range) -> None:
        """Back into the queue, if there are any."""
        if jobs:
            self.waiting.append(Chunk(jobs=jobs))

    def in_order(self) -> list[Verdict]:
        """One verdict a job."""
        return [self.verdicts[job] for job in range(len(self.jobs))]


def cut(jobs: range, num_parts: int) -> list[Chunk]:
    """Consecutive chunks of nearly equal size, none empty."""
    edges = [len(jobs) * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    return [Chunk(jobs=jobs[start:end]) for start, end in pairwise(edges) if end > start]
