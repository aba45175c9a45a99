"""Scores completions in worker processes that can be killed: what hangs or crashes in there costs a verdict, not a run.

    start      all workers are up and have loaded the verifier, or RewardError says why not, before anything is sampled
    call       one chunk of jobs, with a wall-clock limit; one worker (the default) gets all jobs in one call
    overrun    the worker's process group gets SIGKILL, a fresh worker takes its place, each job is tried once more
               alone with the same limit; what overruns again is a timeout
    crash      the same, and what crashes the worker again is an error

Loading a verifier does not count against the limit of a call; it has one of its own. `on_progress` is called at least
four times a second while a call is waited for. After an exception the pool can only be closed.
Workers die with the thread that started them (lifeline.py), so a pool is used from the actor's main thread.
"""

import select
import time
from collections.abc import Callable, Sequence

import msgspec

from actor.score_batch import Batch, Chunk
from actor.score_pipe import Ready, ScoreReply, ScoreRequest
from actor.verdict import ScoreJob, Verdict
from actor.worker_process import WorkerProcess
from protocol.outcome import Outcome
from shared.config import VerifierConfig
from shared.errors import RewardError

TICK_S = 0.25
START_LIMIT_S = 120.0


class Slot:
    """The place of one worker: first it starts, then it is idle or busy with a chunk."""

    def __init__(self, verifier: VerifierConfig, start_limit_s: float) -> None:
        self.verifier = verifier
        self.start_limit_s = start_limit_s
        self.num_requests = 0
        self.start()

    def start(self) -> None:
        """A fresh worker."""
        self.worker = WorkerProcess(self.verifier)
        self.is_ready = False
        self.chunk: Chunk | None = None
        self.deadline = time.monotonic() + self.start_limit_s

    def is_idle(self) -> bool:
        """Whether it can be given a chunk."""
        return self.is_ready and self.chunk is None

    def give(self, chunk: Chunk, jobs: Sequence[ScoreJob]) -> None:
        """Have a chunk scored."""
        self.num_requests += 1
        self.chunk = chunk
        self.deadline = time.monotonic() + self.verifier.limit_s
        self.worker.send(ScoreRequest(number=self.num_requests, jobs=[jobs[job] for job in chunk.jobs]))

    def collect(self, batch: Batch) -> None:
        """Take in what the worker has said, or notice that it will say nothing more."""
        try:
            record = self.worker.receive()
        except msgspec.MsgspecError:
            self.replace(batch, Outcome.ERROR, "sent something that is no verdict")
            return
        match record:
            case Ready(fault=None):
                self.is_ready = True
            case Ready(fault=str(sentence)):
                raise RewardError(sentence)
            case ScoreReply(number=number, verdicts=verdicts) if self.chunk and number == self.num_requests:
                batch.settle(self.chunk, verdicts)
                self.chunk = None
            case _:
                self.check(batch)

    def check(self, batch: Batch) -> None:
        """Replace the worker if it is gone or has overrun."""
        if self.worker.has_ended():
            self.replace(batch, Outcome.ERROR, self.worker.kill())
        elif time.monotonic() > self.deadline and not self.is_idle():
            limit_s = self.verifier.limit_s if self.is_ready else self.start_limit_s
            self.replace(batch, Outcome.TIMEOUT, f"was stopped after {limit_s:g} s")

    def replace(self, batch: Batch, outcome: Outcome, what_happened: str) -> None:
        """A fresh worker for one that failed; a worker that fails while it starts would do so for ever."""
        self.worker.kill()
        if not self.is_ready:
            raise RewardError(
                f"The verifier ({self.verifier.function or self.verifier.kind}) {what_happened} while it was loaded; "
                "the actor's log may say why."
            )
        if self.chunk:
            batch.fail(self.chunk, outcome, f"The scoring worker {what_happened}.")
        self.start()


class ScorePool:
    """Warm workers that score batches in order."""

    def __init__(self, verifier: VerifierConfig, start_limit_s: float = START_LIMIT_S) -> None:
        self.slots: list[Slot] = []
        try:
            self.slots.extend(Slot(verifier, start_limit_s) for _ in range(verifier.workers))
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Until every worker has loaded the verifier."""
        nothing = Batch([], 1)
        while not all(slot.is_ready for slot in self.slots):
            wait_for_any(self.slots)
            for slot in self.slots:
                slot.collect(nothing)

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """One verdict a job, in order."""
        batch = Batch(jobs, len(self.slots))
        while not batch.is_done():
            for slot in self.slots:
                slot.collect(batch)
                if slot.is_idle() and batch.waiting:
                    slot.give(batch.waiting.popleft(), jobs)
            if not batch.is_done():
                wait_for_any(self.slots)
            on_progress()
        return batch.in_order()

    def close(self) -> None:
        """End all workers, and what they have started."""
        for slot in self.slots:
            slot.worker.kill()


def wait_for_any(slots: Sequence[Slot]) -> None:
    """Until a worker has something to say or takes more of a request, or a tick has passed."""
    poll = select.poll()
    for slot in slots:
        # An idle worker that died would end every wait at once.
        if not slot.is_idle():
            poll.register(slot.worker.replies, select.POLLIN)
        if slot.worker.unsent:
            poll.register(slot.worker.requests, select.POLLOUT)
    poll.poll(TICK_S * 1000)
    for slot in slots:
        slot.worker.flush()
