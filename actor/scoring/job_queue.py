"""The jobs of one order: which still wait, which have a verdict, and which one caused a failed call.

    job     one completion to score
    call    consecutive jobs that one worker scores together, with one time limit

Jobs start in as few calls as there are workers: then a user's function sees all jobs or the largest part of them, and
the simple verifiers waste no time. When such a call fails, each of its jobs is tried once more, alone. Mathematics is
slow and may hang, so its calls are small and score one job after the other: it is known which job a worker failed at.

    timeout of a call with one job    the job's fault: it had the whole limit to itself
    failed call with one job          the job's fault
    crash during one job              the job's fault if it had crashed a worker or failed a call before and this worker
                                      had done nothing else yet. Otherwise it is tried again, before all others and
                                      alone. So no job is blamed for a worker that something else killed or damaged.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from actor.verifiers.verdict import ScoreJob, Verdict, fault
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig
from shared.config.named_rewards import runs_functions

CALL_JOBS = 32


def is_one_by_one(verifier: VerifierConfig) -> bool:
    """Whether a call replies job by job. A function may look at all jobs, and its failure may be any job's fault."""
    return verifier.kind == "math" and not runs_functions(verifier)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Jobs that a worker scores together."""

    jobs: range
    """Their indices in the queue."""


class JobQueue:
    """The jobs of one order, from waiting calls to verdicts."""

    def __init__(self, jobs: Sequence[ScoreJob], num_calls: int = 1, *, one_by_one: bool) -> None:
        self.jobs: list[ScoreJob] = []
        self.one_by_one = one_by_one
        self.lost_fork_server = False
        """Whether the fork server died during these jobs. From then on one call runs at a time, so that a job that
        kills it again is found."""
        self.waiting: deque[Call] = deque()
        self.add(jobs, num_calls)
        self.verdicts: dict[int, Verdict] = {}
        self.suspects: set[int] = set()

    def add(self, jobs: Sequence[ScoreJob], num_calls: int) -> None:
        first = len(self.jobs)
        self.jobs += jobs
        self.waiting += split(range(first, len(self.jobs)), num_calls)

    def is_done(self) -> bool:
        return len(self.verdicts) == len(self.jobs)

    def settle(self, call: Call, verdicts: Sequence[Verdict]) -> Call | None:
        """Take the verdicts on the first jobs of a call; returns the rest of the call."""
        self.verdicts.update(zip(call.jobs, verdicts, strict=False))
        left = call.jobs[len(verdicts) :]
        return Call(jobs=left) if left else None

    def time_out(self, call: Call, note: str) -> None:
        """A worker was stopped during this call because its time was over."""
        self.blame_or_split(call, fault(Outcome.TIMEOUT, note))

    def fail(self, call: Call, note: str) -> None:
        """The call failed, but its worker did not."""
        self.blame_or_split(call, fault(Outcome.ERROR, note))

    def crash(self, call: Call, note: str, *, is_fresh: bool) -> None:
        """The worker is gone. is_fresh: it had done nothing before this job."""
        suspect = call.jobs[0]
        if not self.is_alone(call) or (is_fresh and suspect in self.suspects):
            self.blame_or_split(call, fault(Outcome.ERROR, note))
            return
        self.suspects.add(suspect)
        self.requeue(call.jobs[1:])
        self.waiting.appendleft(Call(jobs=call.jobs[:1]))

    def is_alone(self, call: Call) -> bool:
        """Whether the worker was at the first job only."""
        return self.one_by_one or len(call.jobs) == 1

    def blame_or_split(self, call: Call, verdict: Verdict) -> None:
        """Give the verdict to the one job it must be, or try each job alone."""
        if self.is_alone(call):
            self.settle(call, [verdict])
            self.requeue(call.jobs[1:])
            return
        self.suspects |= set(call.jobs)
        for job in call.jobs:
            self.requeue(range(job, job + 1))

    def requeue(self, jobs: range) -> None:
        if jobs:
            self.waiting.append(Call(jobs=jobs))

    def in_order(self) -> list[Verdict]:
        return [self.verdicts[job] for job in range(len(self.jobs))]


def split(jobs: range, num_calls: int) -> list[Call]:
    """Consecutive calls of nearly equal size, none empty."""
    edges = [len(jobs) * part // num_calls for part in range(num_calls + 1)] if num_calls else []
    return [Call(jobs=jobs[start:end]) for start, end in pairwise(edges) if end > start]
