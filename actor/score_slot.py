"""The place of one worker: first it starts, then it is idle or busy with a chunk; a worker that fails is replaced."""

import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from actor.score_batch import Batch, Chunk
from actor.score_pipe import Failed, Ready, Reply, Scored, ScoreRequest
from actor.verdict import ScoreJob, Verdict
from actor.worker_process import WorkerProcess
from protocol.limits import MAX_SCORE
from shared.config.data import VerifierConfig
from shared.config.named_rewards import name_of
from shared.errors import RewardError
from shared.process.children import how_it_ended


class Slot:
    """One worker after the other."""

    def __init__(self, verifier: VerifierConfig, start_limit_s: float, new: Callable[[], WorkerProcess]) -> None:
        self.verifier = verifier
        self.start_limit_s = start_limit_s
        self.new = new
        self.num_requests = 0
        self.start()

    def start(self) -> None:
        """A fresh worker."""
        self.worker = self.new()
        self.is_ready = False
        self.is_fresh = True
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

    def collect(self, batch: Batch, code: int | None) -> None:
        """Take in what the worker has said and printed; then its exit code, if it has ended, or its lateness."""
        worker = self.worker
        worker.output.drain()
        try:
            while self.worker is worker and (record := worker.receive()) is not None:
                self.take(record, batch)
        except (ValueError, RecursionError):  # not msgpack, not UTF-8, or lists without end
            self.replace(batch, "sent something that is no verdict")
        if self.worker is not worker:
            return
        if code is not None and code == -signal.SIGXCPU:
            self.replace(batch, "used up its processor time", overran=True)
        elif code is not None:
            self.replace(batch, how_it_ended(code))
        elif time.monotonic() > self.deadline and not self.is_idle():
            limit_s = self.verifier.limit_s if self.is_ready else self.start_limit_s
            self.replace(batch, f"was stopped after {limit_s:g} s", overran=True)

    def take(self, record: Reply, batch: Batch) -> None:
        """One reply; each worker has pipes of its own, so there are no leftovers of the one before."""
        match record:
            case Ready(fault=None) if not self.is_ready:
                self.is_ready = True
            case Ready(fault=str(sentence)) if not self.is_ready:
                raise RewardError(sentence)
            case Scored(number=number, verdicts=verdicts) if self.chunk and number == self.num_requests:
                check(verdicts, self.chunk, {name_of(spec) for spec in self.verifier.rewards})
                self.chunk = batch.settle(self.chunk, verdicts)
                self.is_fresh = False
                self.deadline = time.monotonic() + self.verifier.limit_s
            case Failed(number=number, note=note, leaves=False) if self.chunk and number == self.num_requests:
                batch.refuse(self.chunk, note)
                self.chunk = None
                self.is_fresh = False
            case Failed(number=number, note=note, leaves=True) if self.chunk and number == self.num_requests:
                chunk, self.chunk = self.chunk, None
                batch.crash(chunk, note, is_fresh=self.is_fresh)
                self.replace(batch, "left")
            case _:
                raise msgspec.ValidationError("A reply to nothing.")

    def replace(self, batch: Batch, what_happened: str, *, overran: bool = False) -> None:
        """A fresh worker for one that failed; a worker that fails while it starts would do so for ever."""
        self.worker.kill()
        if not self.is_ready:
            raise RewardError(
                f"The verifier ({self.verifier.function or self.verifier.kind}) {what_happened} while it was loaded; "
                "the actor's log may say why."
            )
        self.give_up_chunk(batch, what_happened, overran)
        self.start()

    def restart(self, batch: Batch) -> None:
        """With another keeper. Also a worker that was starting: what ended the keeper need not be its doing."""
        self.worker.kill()
        self.give_up_chunk(batch, "lost its keeper", overran=False)
        self.start()

    def give_up_chunk(self, batch: Batch, what_happened: str, overran: bool) -> None:
        """There will be no more verdicts on it from this worker."""
        if not self.chunk:
            return
        last_line = self.worker.output.last_line()
        note = f"The scoring worker {what_happened}." + (f" It last printed: {last_line}" if last_line else "")
        if overran:
            batch.overrun(self.chunk, note)
        else:
            batch.crash(self.chunk, note, is_fresh=self.is_fresh)


def check(verdicts: Sequence[Verdict], chunk: Chunk, names: set[str]) -> None:
    """Whoever wrote into the pipe may have been the function: no more verdicts than jobs, only finite scores, and the
    rewards that were asked for."""
    if not 0 < len(verdicts) <= len(chunk.jobs):
        raise msgspec.ValidationError(f"{len(verdicts)} verdicts on {len(chunk.jobs)} jobs.")
    # Written so that NaN fails too.
    if not all(abs(score) <= MAX_SCORE for verdict in verdicts for score in (verdict.score, *verdict.rewards.values())):
        raise msgspec.ValidationError("A score that no verdict can hold.")
    if any(verdict.rewards.keys() != names for verdict in verdicts):
        raise msgspec.ValidationError("Other rewards than those asked for.")
