"""Scores completions in worker processes that can be killed: what hangs or crashes in there costs a verdict, not a run.

    start      all workers are up and have loaded the verifier, or RewardError says why not, before anything is sampled
    call       jobs go out in chunks (score_batch.py), each call with a wall-clock limit
    overrun    the worker and all it has started are killed, a fresh worker takes its place
    crash      the same; who is to blame is found by trying again (score_batch.py)
    keeper     the process that forks workers and cleans up behind them; should it be killed, all slots start anew, and
               what was being scored is scored one job after the other

Loading a verifier does not count against the limit of a call; it has one of its own. `on_progress` is called at least
four times a second while a call is waited for. After an exception the pool can only be closed.
"""

import itertools
import select
from collections.abc import Callable, Sequence

from msgspec import structs

from actor.keeper_process import KeeperProcess
from actor.score_batch import CHUNK_JOBS, Batch, is_one_by_one, runs_functions
from actor.score_slot import Slot
from actor.score_stream import Streamed
from actor.scores import Scores, Together
from actor.verdict import ScoreJob, Verdict
from actor.worker_process import WorkerProcess
from shared.config.data import VerifierConfig
from shared.config.named_rewards import name_of
from shared.errors import RewardError

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
