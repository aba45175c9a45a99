"""Scores completions in worker processes that can be killed: what hangs or crashes in there costs a verdict, not a run.

    start      all workers are up and have loaded the verifier, or RewardError says why not, before anything is sampled
    call       jobs go out in chunks (score_batch.py), each call with a wall-clock limit
    overrun    the worker and all it has started are killed, a fresh worker takes its place
    crash      the same; who is to blame is found by trying again (score_batch.py)
    keeper     the process that forks workers and cleans up behind them; should it be killed, all slots start anew, and
               what was being scored is scored one job after the other

Loading a verifier does not count against the limit of a call; it has one of its own. `on_progress` is called at least
four times a second while a call is waited for. After an exception the pool can only be closed.

The place of one worker: first it starts, then it is idle or busy with a chunk; a worker that fails is replaced.
"""

import itertools
import select
import signal
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from actor.scoring.batch import CHUNK_JOBS, Batch, Chunk, is_one_by_one, runs_functions
from actor.scoring.keeper_process import KeeperProcess
from actor.scoring.pipe import Failed, Ready, Reply, Scored, ScoreRequest
from actor.scoring.stream import Scores, Streamed, Together
from actor.scoring.worker_process import WorkerProcess
from actor.verifiers.verdict import ScoreJob, Verdict
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


TICK_S = 0.25
START_LIMIT_S = 120.0


class ScorePool:
    """Warm workers that score batches in order."""

    def __init__(self, verifier: VerifierConfig, start_limit_s: float = START_LIMIT_S) -> None:
        self.verifier = verifier
        self.start_limit_s = start_limit_s
        self.numbers = itertools.count()
        self.slots: list[Slot] = []
        self.keeper = KeeperProcess(verifier)
        try:
            self.slots.extend(Slot(verifier, start_limit_s, self.new_worker) for _ in range(verifier.workers))
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def new_worker(self) -> WorkerProcess:
        """For a slot."""
        return WorkerProcess(self.keeper, next(self.numbers))

    def wait_until_ready(self) -> None:
        """Until every worker has loaded the verifier."""
        nothing = Batch([], 1, one_by_one=True)
        while not all(slot.is_ready for slot in self.slots):
            self.wait_for_any()
            if not self.collect(nothing):
                raise RewardError(
                    f"The verifier ({self.verifier.function or self.verifier.kind}) ended its own keeper."
                )

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """One verdict a job, in order."""
        batch = Batch(jobs, self.num_parts(len(jobs)), one_by_one=is_one_by_one(self.verifier))
        return self.finish(batch, on_progress)

    def begin(self) -> Scores:
        """The verdicts of one order."""
        if runs_functions(self.verifier):
            return Together(self.score)
        return Streamed(self, one_by_one=is_one_by_one(self.verifier))

    def turn(self, batch: Batch) -> None:
        """Take verdicts in, hand chunks out; do not wait."""
        if not self.collect(batch):
            batch.lost_keeper = True
        at_once = 1 if batch.lost_keeper else len(self.slots)
        for slot in self.slots:
            if slot.is_idle() and batch.waiting and self.num_busy() < at_once:
                slot.give(batch.waiting.popleft(), batch.jobs)
            slot.worker.flush()

    def finish(self, batch: Batch, on_progress: Callable[[], None]) -> list[Verdict]:
        """Wait for all verdicts: one a job, in the order in which the jobs came."""
        while not batch.is_done():
            self.turn(batch)
            if not batch.is_done():
                self.wait_for_any()
            on_progress()
        nothing = {name_of(spec): 0.0 for spec in self.verifier.rewards}
        return [structs.replace(verdict, rewards=nothing | verdict.rewards) for verdict in batch.in_order()]

    def num_parts(self, num_jobs: int) -> int:
        """Calls that a batch is cut into: small ones where a job can be slow, or all of them would share one limit."""
        small = -(-num_jobs // CHUNK_JOBS) if self.verifier.kind == "math" else 0
        return max(len(self.slots), small)

    def num_busy(self) -> int:
        """Slots with a chunk."""
        return sum(slot.chunk is not None for slot in self.slots)

    def collect(self, batch: Batch) -> bool:
        """Take in what all workers and their keeper have to say; False if the keeper was gone and is another now."""
        codes = {ended.number: ended.code for ended in self.keeper.news()}
        for slot in self.slots:
            slot.collect(batch, codes.get(slot.worker.number))
        if not self.keeper.is_gone:
            return True
        self.keeper.close()
        self.keeper = KeeperProcess(self.verifier)
        for slot in self.slots:
            slot.restart(batch)
        return False

    def wait_for_any(self) -> None:
        """Until somebody has something to say or takes more of a request, or a tick has passed."""
        poll = select.poll()
        poll.register(self.keeper, select.POLLIN)
        for slot in self.slots:
            # A pipe whose other end was closed would end every wait at once.
            if not slot.worker.output.hung_up:
                poll.register(slot.worker.output.descriptor, select.POLLIN)
            if not slot.worker.hung_up:
                poll.register(slot.worker.replies, select.POLLIN)
            if slot.worker.unsent:
                poll.register(slot.worker.requests, select.POLLOUT)
        poll.poll(TICK_S * 1000)
        for slot in self.slots:
            slot.worker.flush()

    def close(self) -> None:
        """End all workers, and what they have started."""
        for slot in self.slots:
            slot.worker.kill()
        self.keeper.close()
