"""The jobs of one order: which still wait, which have a verdict, and which one caused a failed call.

    job     one completion to score
    call    consecutive jobs that one worker scores together, with one time limit

Jobs start in as few calls as there are workers: then a user's function sees all jobs or the largest part of them, and
the simple verifiers waste no time. A function may compare the completions of a prompt, so it is given groups, which are
neighbours with equal prompts and columns, as a whole. When such a call fails, each of its groups is tried again by
itself, and then each job of a group that fails, alone. Mathematics is slow and may hang, so without functions its calls
are small and score one job after the other: it is known which job a worker failed at.

    timeout of a call with one job    the job's fault: it had the whole limit to itself
    failed call with one job          the job's fault
    crash during one job              the job's fault if it had crashed a worker or failed a call before and this worker
                                      had done nothing else yet. Otherwise it is tried again, before all others and
                                      alone. So no job is blamed for a worker that something else killed or damaged.
"""

from bisect import bisect_left
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


def call_limit_s(verifier: VerifierConfig, num_jobs: int) -> float:
    """Time limit of one reply. With a reward function, a call of `math` may have many jobs; it gets limit_s for every
    CALL_JOBS of them."""
    calls = -(-num_jobs // CALL_JOBS) if verifier.kind == "math" and runs_functions(verifier) else 1
    return verifier.limit_s * calls


@dataclass(frozen=True, kw_only=True)
class Call:
    """Jobs that a worker scores together."""

    jobs: range
    """Their indices in the queue."""


class JobQueue:
    """The jobs of one order, from waiting calls to verdicts."""

    def __init__(
        self, jobs: Sequence[ScoreJob], num_calls: int = 1, *, one_by_one: bool, whole_groups: bool = False
    ) -> None:
        self.jobs: list[ScoreJob] = []
        self.one_by_one = one_by_one
        self.whole_groups = whole_groups
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
        self.waiting += split(self.groups(range(first, len(self.jobs))), num_calls)

    def groups(self, jobs: range) -> list[range]:
        """What no call may split: groups where a function sees them whole, else single jobs."""
        starts = [job for job in jobs if job == jobs.start or not self.belongs_to_the_job_before(job)]
        return [range(start, end) for start, end in pairwise([*starts, jobs.stop])]

    def belongs_to_the_job_before(self, job: int) -> bool:
        one, before = self.jobs[job], self.jobs[job - 1]
        is_same_task = (one.prompt, one.columns) == (before.prompt, before.columns)
        return self.whole_groups and not one.compares_answers and is_same_task

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
        """Give the verdict to the one job it must be, or try each group by itself, or each job of the only group."""
        if self.is_alone(call):
            self.settle(call, [verdict])
            self.requeue(call.jobs[1:])
            return
        self.suspects |= set(call.jobs)
        groups = self.groups(call.jobs)
        for part in groups if len(groups) > 1 else [range(job, job + 1) for job in call.jobs]:
            self.requeue(part)

    def requeue(self, jobs: range) -> None:
        if jobs:
            self.waiting.append(Call(jobs=jobs))

    def in_order(self) -> list[Verdict]:
        return [self.verdicts[job] for job in range(len(self.jobs))]


def split(groups: Sequence[range], num_calls: int) -> list[Call]:
    """Consecutive calls of nearly equal size, none empty and none with a part of a group."""
    if not groups:
        return []
    start, ends = groups[0].start, [group.stop for group in groups]
    even = [start + (ends[-1] - start) * part // num_calls for part in range(1, num_calls + 1)]
    edges = [start, *(ends[bisect_left(ends, edge)] for edge in even)]
    return [Call(jobs=range(start, end)) for start, end in pairwise(edges) if end > start]
