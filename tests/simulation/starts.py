"""One start of a learner and one of an actor, put together from the product's parts as `learner/session.py` and
`actor/wiring.py` do it.

Real: dispatcher, peers, recorder, journal, plan, orders, publisher, state, step report, run files, both loops, link,
rollout, the folder of a machine. Toy: the update, the engine, the scorer. In memory: wire, checkpoints, time.
"""

from collections.abc import Callable
from typing import Any, cast

from actor.loop import serve
from actor.passed_on import PassedOn
from actor.rollout import Rollout
from learner.curriculum.curriculum import Shuffled
from learner.durable.journal import Journal
from learner.durable.recorder import Compaction
from learner.durable.resample import sample_again
from learner.durable.state import RunTotals
from learner.loop import Parts, train
from learner.objective.judged import Admission
from learner.orders.plan import Unfilled
from learner.quarantine.guard import Guard
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.step_report import StepReport
from learner.update.budget import Attempts, Budget
from learner.update.gradient_check import Norms
from learner.update.mismatch import FP32, Gate
from learner.update.publisher import Publisher
from protocol.messages import FilledOrder, Hello, Order, Policy, Welcome
from shared.config.tree import Config, LossConfig
from shared.process.lease import NoLease
from shared.run.metrics import MetricsLog
from tests.simulation.build import Build
from tests.simulation.disk import SEGMENT_BYTES, Disk, MemoryCheckpoints, recorded_in
from tests.simulation.invariants import Outcome, Watch
from tests.simulation.ports import ActorEnd, LearnerEnd, Point, WatchedJournal, WatchedLines
from tests.simulation.toy import (
    CHECK,
    IDENTITY,
    RULES,
    TASKS,
    ToyAdapter,
    ToyBase,
    ToyBatch,
    ToyBatches,
    ToyEngine,
    ToyOptimizer,
    ToyUpdate,
    begins_even,
)
from tests.simulation.virtual_time import Killed
from tests.support.fake_card import FakeDriver
from tests.support.fakes import ScriptedScorer, hello_of, spelled, spelled_words

LEAVE_WAIT_S = 5.0


class WatchedUpdate:
    """The toy's update, and a look at what it consumed."""

    def __init__(self, update: ToyUpdate, watch: Watch) -> None:
        self.update = update
        self.watch = watch
        self.loss = LossConfig()

    def apply(self, step: int, batch: ToyBatch) -> None:
        """One step; a toy's actor and learner cannot disagree."""
        self.update.apply(step, batch)
        self.watch.consumed(step, list(batch.filled), self.update.optimizer.consumed)

    def undo(self) -> None:
        """A toy that finds a mismatch has changed nothing yet."""

    def forget_gradient(self) -> None:
        """A toy has none."""


class LearnerStart:
    """From opening the journal to the end of the run."""

    def __init__(
        self,
        config: Config,
        build: Build,
        disk: Disk,
        port: LearnerEnd,
        *,
        watch: Watch,
        point: Point,
        clock: Callable[[], float],
        work: Callable[[Callable[[], None]], None],
        stop: Callable[[], bool],
        resample_step: int | None,
    ) -> None:
        """work: lets an update's time pass, with progress in it. stop: whether the learner was asked to. resample_step:
        as given to `resume`."""
        self.config = config
        self.disk = disk
        self.watch = watch
        if resample_step is not None:
            self.void(resample_step, point)
        self.journal = Journal.open(disk.run.journal, segment_bytes=SEGMENT_BYTES)
        disk.cover(*disk.segments())
        checkpoints = cast(Any, MemoryCheckpoints(disk, config.checkpoint.keep, point))
        checkpoint = checkpoints.load_latest()
        self.first_step = checkpoint.step if checkpoint else 0
        watch.learner_is_new(recorded_in(self.journal), self.first_step)
        journal = cast(Journal, WatchedJournal(self.journal, disk, watch, point))
        recorder = build.recorder(journal, self.first_step, Admission.of(config.verifier, config.reward))
        self.dispatcher = port.dispatcher = build.dispatcher(
            port, recorder, expected(), welcome(config), CHECK, clock, config.link.late_s, stop
        )
        adapter = ToyAdapter()
        self.publisher = Publisher(cast(Any, adapter))
        self.publisher.snapshot(version=0)
        self.optimizer = ToyOptimizer()
        self.plan = build.plan(config, TASKS, Shuffled(len(TASKS), config.run.seed), self.dispatcher)
        optimizer, norms = cast(Any, self.optimizer), Norms(config.guard)
        update = ToyUpdate(adapter, self.optimizer, lambda: work(self.dispatcher.pump))
        watched = cast(Any, WatchedUpdate(update, watch))
        self.guard = Guard(watched, config.guard, b"", keep_nowhere)
        gate, budget = Gate(config.loss.max_mismatch, FP32), Budget.of(config.batch)
        self.attempts = Attempts(budget, watched, recorder, FakeDriver())
        kept = (optimizer, norms, self.plan, self.guard, gate, budget)
        state = build.state(config.run.seed, b"{}", self.publisher, *kept, IDENTITY.base_digest)
        self.totals = state.load(checkpoint) if checkpoint else RunTotals()
        compaction = Compaction(config.journal, checkpoints, recorder)
        self.files = build.files(
            disk.run, config.log, state, checkpoints, compaction, cast(Any, ToyBase()), spelled_words()
        )
        self.rows = WatchedLines(self.files.metrics._lines, disk)
        self.files.metrics = MetricsLog(cast(Any, self.rows))
        self.stop = stop

    def void(self, step: int, point: Point) -> None:
        """The step and later ones are sampled again; a death within the write leaves a part of it."""
        point("before a void")
        Journal.open(self.disk.run.journal, segment_bytes=SEGMENT_BYTES).close()
        self.disk.cover(*self.disk.segments())
        tail = self.disk.segments()[-1]
        size = tail.stat().st_size
        checkpoints = cast(Any, MemoryCheckpoints(self.disk, self.config.checkpoint.keep, point))
        if sample_again(self.disk.run, checkpoints, step, self.config.run.steps):
            self.watch.voided(step - 1)
            try:
                point("within a void")
            except Killed:
                self.disk.cut_short(tail, size)
                raise
        self.disk.cover(*self.disk.segments())
        point("after a void")

    def run_once(self) -> Outcome | None:
        """What the run came to, or None if it was asked to stop before its end."""
        self.files.resume_at(self.first_step + 1)
        for version in sorted(self.publisher.versions):
            self.dispatcher.publish(self.publisher.versions[version].message, oldest_needed=0)
        self.plan.submit_pending()
        steps = self.config.run.steps
        parts = self.parts()
        try:
            done = train(parts, self.first_step, steps)
        except Unfilled:
            done = max(self.publisher.versions)
            parts.report.save(done)
        outcome = None
        if done == steps:
            policies = tuple(self.watch.policies[version] for version in sorted(self.watch.policies))
            consumed = tuple(self.optimizer.consumed)
            outcome = Outcome(value=self.publisher.versions[done].sha256, consumed=consumed, policies=policies)
        self.dispatcher.end_run(LEAVE_WAIT_S)
        return outcome

    def parts(self) -> Parts:
        """Of the real loop."""
        return Parts(
            plan=self.plan,
            filler=self.dispatcher,
            batches=cast(Any, ToyBatches()),
            guard=self.guard,
            attempts=self.attempts,
            publisher=self.publisher,
            report=StepReport(self.config, self.files, self.totals, self.stop, self.plan.curriculum.metrics),
            lease=NoLease(),
        )

    def close(self) -> None:
        """Give the descriptors back, as the kernel does for the dead."""
        self.journal.close()
        self.rows.close()
        self.files.rollouts.lines.close()


class WatchedRollout:
    """The real rollout, and a look at what it filled an order from."""

    def __init__(self, rollout: Rollout, engine: ToyEngine, watch: Watch) -> None:
        self.rollout = rollout
        self.engine = engine
        self.watch = watch

    def fill(self, order: Order, policy: Policy, beat: Callable[[str], None]) -> FilledOrder:
        """One order."""
        filled_order = self.rollout.fill(order, policy, beat)
        self.watch.actor_filled(order, filled_order, self.engine.installed_sha256)
        return filled_order


def run_as_actor(
    name: str,
    config: Config,
    build: Build,
    port: ActorEnd,
    *,
    watch: Watch,
    clock: Callable[[], float],
    work: Callable[[Callable[[], None]], None],
    stale: Callable[[], bool],
    passed_on: PassedOn | None,
) -> None:
    """Join, serve, leave. work: lets a group's decoding time pass. stale: whether the next filled order is wrong."""
    engine = ToyEngine(work, stale)
    rollout = build.rollout(engine, ScriptedScorer(begins_even), NoLease(), spelled)
    port.link = link = build.link(port, "the learner", name, IDENTITY, config.link.credits, RULES, clock, passed_on)
    link.join(config.link.silence_s)
    serve(link, cast(Rollout, WatchedRollout(rollout, engine, watch)))


def expected() -> Hello:
    """What every actor must hold."""
    return hello_of(IDENTITY, "any", num_credits=1)


def welcome(config: Config) -> Welcome:
    """What actors are told."""
    link = config.link
    return Welcome(run_id="simulated", heartbeat_s=link.heartbeat_s, silence_s=link.silence_s, mark=0)
