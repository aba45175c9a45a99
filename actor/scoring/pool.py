"""Scores completions in worker processes that can be killed: a hang or crash there costs a verdict, not the run.

    start          all workers start and load the verifier before anything is sampled, or RewardError says why not
    call           a worker scores some jobs (job_queue.py) within a wall-clock limit
    timeout        the worker and all it has started are killed, and a new worker takes its slot
    crash          the same; trying again finds the job that caused it (job_queue.py)
    fork server    the process that forks workers and cleans up after them. If it is killed, all slots start again, and
                   the jobs that were being scored are scored one after the other

Loading a verifier does not count against the limit of a call; it has its own limit. `on_progress` is called at least
four times a second while the pool waits. After an exception the pool can only be closed.

While an order is sampled, `StreamedScores.add` lets the pool do what is due without waiting, as often as a wait would
do it. So a worker that hangs is replaced while tokens are sampled.
"""

import itertools
import select
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from actor.scoring.fork_server_process import ForkServerProcess
from actor.scoring.job_queue import CALL_JOBS, JobQueue, is_one_by_one
from actor.scoring.scores import Scores, ScoresTogether
from actor.scoring.worker_process import Slot, WorkerProcess
from actor.verifiers.verdict import ScoreJob, Verdict
from shared.config.data import VerifierConfig
from shared.config.named_rewards import name_of, runs_functions
from shared.errors import RewardError

TICK_S = 0.25
ADVANCE_S = 0.05
START_LIMIT_S = 120.0


class ScorePool:
    """Started workers that score jobs."""

    def __init__(self, verifier: VerifierConfig, start_limit_s: float = START_LIMIT_S) -> None:
        self.verifier = verifier
        self.start_limit_s = start_limit_s
        self.numbers = itertools.count()
        self.slots: list[Slot] = []
        self.fork_server = self.new_fork_server()
        try:
            self.slots.extend(Slot(verifier, start_limit_s, self.new_worker) for _ in range(verifier.workers))
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def new_fork_server(self) -> ForkServerProcess:
        return ForkServerProcess("actor.scoring.fork_server", self.verifier, self.verifier.environment)

    def new_worker(self) -> WorkerProcess:
        return WorkerProcess(self.fork_server, next(self.numbers))

    def wait_until_ready(self) -> None:
        """Wait until every worker has loaded the verifier."""
        nothing = JobQueue([], 1, one_by_one=True)
        while not all(slot.is_ready for slot in self.slots):
            self.wait_for_any()
            if not self.collect(nothing):
                raise RewardError(
                    f"The verifier ({self.verifier.function or self.verifier.kind}) ended its own fork server."
                )

    def begin(self) -> Scores:
        """The scores of the next order: streamed, unless a user's function must see whole groups of it."""
        if runs_functions(self.verifier):
            return ScoresTogether(self.score)
        return StreamedScores(self, one_by_one=is_one_by_one(self.verifier))

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """One verdict per job, in order."""
        queue = JobQueue(
            jobs,
            self.num_calls(jobs),
            one_by_one=is_one_by_one(self.verifier),
            whole_groups=runs_functions(self.verifier),
        )
        return self.finish(queue, on_progress)

    def advance(self, queue: JobQueue) -> None:
        """Take verdicts and hand out calls; does not wait."""
        if not self.collect(queue):
            queue.lost_fork_server = True
        at_once = 1 if queue.lost_fork_server else len(self.slots)
        for slot in self.slots:
            if slot.is_idle() and queue.waiting and self.num_busy() < at_once:
                slot.give(queue.waiting.popleft(), queue.jobs)
            slot.worker.flush()

    def finish(self, queue: JobQueue, on_progress: Callable[[], None]) -> list[Verdict]:
        """Wait for all verdicts: one per job, in the order in which the jobs came."""
        while not queue.is_done():
            self.advance(queue)
            if not queue.is_done():
                self.wait_for_any()
            on_progress()
        nothing = {name_of(spec): 0.0 for spec in self.verifier.rewards}
        return [structs.replace(verdict, rewards=nothing | verdict.rewards) for verdict in queue.in_order()]

    def num_calls(self, jobs: Sequence[ScoreJob]) -> int:
        """Calls for these jobs: small ones if a job can be slow, but not where a function sees as many as it can."""
        seen = runs_functions(self.verifier) and not all(job.compares_answers for job in jobs)
        small = -(-len(jobs) // CALL_JOBS) if self.verifier.kind == "math" and not seen else 0
        return max(len(self.slots), small)

    def num_busy(self) -> int:
        return sum(slot.call is not None for slot in self.slots)

    def collect(self, queue: JobQueue) -> bool:
        """Take all replies and exits. False if the fork server was gone, in which case there is a new one now."""
        codes = {exited.number: exited.code for exited in self.fork_server.exits()}
        for slot in self.slots:
            slot.collect(queue, codes.get(slot.worker.number))
        if not self.fork_server.is_gone:
            return True
        self.fork_server.close()
        self.fork_server = self.new_fork_server()
        alone = self.num_busy() == 1
        for slot in self.slots:
            slot.restart(queue, alone=alone)
        return False

    def wait_for_any(self) -> None:
        """Wait until a process has sent something, or takes more of a call, or a tick has passed."""
        poll = select.poll()
        poll.register(self.fork_server, select.POLLIN)
        for slot in self.slots:
            # A pipe whose other end is closed would end every wait at once.
            if not slot.worker.output.hung_up:
                poll.register(slot.worker.output.descriptor, select.POLLIN)
            if not slot.worker.hung_up:
                poll.register(slot.worker.replies, select.POLLIN)
            if slot.worker.unsent:
                poll.register(slot.worker.calls, select.POLLOUT)
        poll.poll(TICK_S * 1000)
        for slot in self.slots:
            slot.worker.flush()

    def close(self) -> None:
        """End all workers and what they have started."""
        # First the fork server, which ends all of them at once; a command for each could fill its socket.
        self.fork_server.close()
        for slot in self.slots:
            slot.worker.kill()


class StreamedScores:
    """Scores the completions of an order while others are still being decoded.

    Mathematics is scored at once: a job that takes its whole limit should start early. For other verifiers, jobs wait
    until there are enough for a call; the rest follows at the end.
    """

    def __init__(self, pool: ScorePool, *, one_by_one: bool) -> None:
        self.pool = pool
        self.queue = JobQueue([], one_by_one=one_by_one)
        self.call_jobs = 1 if one_by_one else CALL_JOBS
        self.places: list[int] = []
        self.waiting: list[ScoreJob] = []
        self.advanced_at = time.monotonic()

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        self.places += jobs
        self.waiting += jobs.values()
        if len(self.waiting) >= self.call_jobs:
            self.enqueue(1)
        elif time.monotonic() - self.advanced_at < ADVANCE_S or self.queue.is_done():
            return
        self.advanced_at = time.monotonic()
        self.pool.advance(self.queue)

    def enqueue(self, num_calls: int) -> None:
        self.queue.add(self.waiting, num_calls)
        self.waiting = []

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        self.enqueue(self.pool.num_calls(self.waiting))
        found = dict(zip(self.places, self.pool.finish(self.queue, on_progress), strict=True))
        return [found[place] for place in sorted(found)]
