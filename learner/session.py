"""One run of the learner process: recover, listen, evaluate the base, train, evaluate the result, close.

Recovery is not a mode: the state comes from the newest whole checkpoint (or step 0), and orders whose groups are in
the journal are filled from there. From then on the loop is the same as in an undisturbed run.
"""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType

import torch

from learner.durable.checkpoint import Checkpoint, CheckpointStore, packed_checkpoint
from learner.durable.find_adapter import adapters_of
from learner.durable.journal import Journal
from learner.durable.recorder import Compaction, JournalRecorder
from learner.durable.repair_advice import repair_advice
from learner.durable.resample import with_way_back
from learner.durable.state import RunTotals, refuse_other_tasks, write_task_digests
from learner.evaluation.evaluate import Evaluator, digest_of_questions
from learner.evaluation.schedule import NO_EVALUATIONS, BesideSchedule, EvalSchedule, NoEvaluations
from learner.loop import train
from learner.objective.judged import Admission
from learner.orders.audited import AuditedOrders
from learner.orders.dispatch import Dispatcher
from learner.orders.plan import OrderFiller, Unfilled, nobody_lied
from learner.orders.shared import STOPS, FirstRank, agreed
from learner.orders.written import WrittenOrders
from learner.quarantine.quarantine import write_batch
from learner.reports.disk_need import bytes_needed, refuse_if_short
from learner.reports.rollout_log import Words
from learner.reports.run_files import RunFiles
from learner.reports.step_report import StepReport
from learner.tasks.overlap import find_overlap
from learner.tasks.tasks import missing_answers
from learner.update.placement.ranks import RankGroup, meeting
from learner.wiring import Learner, Model, build_audit, build_learner, load_model, placement_on
from protocol.access.key_list import revoke
from protocol.access.keys import load_learner_keys
from protocol.errors import SecurityError
from protocol.messages import Welcome
from protocol.transport import LearnerPort, ZmqLearnerPort
from shared.base.checksum import BaseChecksum
from shared.base.load import pick_device
from shared.base.loading import fitting, lighter
from shared.base.residency import WakingLease, lend, residency_of
from shared.config.processes import ActorConfig, ComputeConfig, LinkConfig, bind_address
from shared.config.tree import Config
from shared.model.adapter_file import adapter_parts
from shared.process.card import card_facts, driver_of
from shared.process.determinism import record
from shared.process.energy import open_meter
from shared.process.lease import ComputeLease, lease_for
from shared.process.trace import Trace
from shared.process.watchdog import Watchdog, WatchedLearnerPort
from shared.run.files import finish_writes, make_folder
from shared.run.forecast import planned_on_card
from shared.run.run_dir import RunDir
from shared.run.summary import Status

log = logging.getLogger("learner")
LEAVE_WAIT_S = 5.0


class StopFlag:
    """Set by SIGTERM; read before the first step, after each, during evaluations, and while no actor is connected."""

    def __init__(self) -> None:
        self.raised = False
        signal.signal(signal.SIGTERM, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only remembered: a step is never cut short."""
        self.raised = True
        log.info("asked to stop: finishing this step; an evaluation is left to the next start")

    def __call__(self) -> bool:
        return self.raised


def train_run(
    run: RunDir, config: Config, watchdog: Watchdog, trace: Trace, name: str = "", *, own_cores: bool = False
) -> None:
    """A whole run of the process, from loading to leaving. name: of the meeting with other ranks. own_cores: whether no
    other process of the run computes on them."""
    stop, planned = StopFlag(), planned_on_card(run, "learner")
    fits = partial(fitting, "learner", planned, lighter(config.compute, config.model, config.lora))
    with fits():
        device = pick_device(config.compute.device, config.compute.learner_card)
        lock, overlaps = None if own_cores else run.lease, config.pipeline.max_lag > 0
        lease = lease_for(config.compute, device, lock, trace, planned, overlaps=overlaps)
        alone = why_alone(config.actor, needs_actor=config.needs_actor)
        lender = lend(config.compute, device, run.lease.parent, alone)
    place = lender.place if lender else None
    with ExitStack() as opened:
        with loading(lease, device), fits(driver_of(device)):
            with trace.phase("load"):
                model = load_model(config, adapters_of(run, config.lora.start_from, config.teacher.adapter), place)
            log.info("computes with %s", json.dumps(record()))
            report_tasks(model)
            store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
            journal = open_journal(run, store)
            waking = WakingLease(lease, residency_of(config.compute, model.policy, "learner", lender))
            ranks = opened.enter_context(met(run, config.compute.ranks, name, config.link.silence_s))
            port = opened.enter_context(listening(run, config.link, watchdog))
            session = Session(run, model, store, journal, port, stop, trace, waking, ranks)
        session.run_to_end()
    journal.close()


def loading(lease: ComputeLease, device: torch.device) -> AbstractContextManager[object]:
    """On a card this is a turn, since the bases of both processes together may be too large. On a CPU they are one, and
    both processes load at the same time."""
    return nullcontext() if device.type == "cpu" else lease.hold("learner")


def met(run: RunDir, ranks: int, name: str, warn_after_s: float) -> AbstractContextManager[RankGroup | None]:
    """The other ranks, if there are any."""
    return (
        meeting(run.lease.parent, name, rank=0, size=ranks, warn_after_s=warn_after_s) if ranks > 1 else nullcontext()
    )


def cards_of(compute: ComputeConfig, device: torch.device) -> list[str]:
    """UUIDs of the cards that this run uses on this machine."""
    if device.type == "cpu":
        return []
    numbers = {compute.learner_card, compute.actor_card}
    here = [number for number in sorted(numbers) if number < torch.cuda.device_count()]
    return [card_facts(torch.device("cuda", number)).uuid for number in here]


def why_alone(actor: ActorConfig, *, needs_actor: bool) -> str:
    """Why no actor can use the learner's base; empty if one can."""
    if actor.engine != "hf":
        return f"{actor.engine} has a base of its own"
    return "" if needs_actor else "there is no actor"


def open_journal(run: RunDir, store: CheckpointStore) -> Journal:
    """After everything that an earlier start began to write."""
    make_folder(run.lease.parent)
    for folder in (run.journal, run.checkpoints, run.eval):
        make_folder(folder)
        finish_writes(folder)
    with repair_advice(store):
        journal = Journal.open(run.journal)
    if journal.recovered:
        log.warning("journal: %s", journal.recovered)
    return journal


@contextmanager
def listening(run: RunDir, link: LinkConfig, watchdog: Watchdog) -> Iterator[LearnerPort]:
    listener = ZmqLearnerPort(bind_address(link, run.path), load_learner_keys(run.keys))
    port = WatchedLearnerPort(listener, watchdog)
    try:
        yield port
    finally:
        port.close()


class Session:
    """Everything that is open while a run trains."""

    def __init__(
        self,
        run: RunDir,
        model: Model,
        store: CheckpointStore,
        journal: Journal,
        port: LearnerPort,
        stop: StopFlag,
        trace: Trace,
        lease: WakingLease,
        ranks: RankGroup | None,
    ) -> None:
        self.run = run
        self.model = model
        self.stop = stop
        self.trace = trace
        self.lease = lease
        self.ranks = ranks
        checkpoint = store.load_latest()
        self.first_step = checkpoint.step if checkpoint else 0
        write_or_check_tasks(run, model, begins=not checkpoint and not journal.next_record)
        recorder = self.recorder_in(journal)
        self.dispatcher = self.dispatcher_on(port, recorder)
        self.orders = AuditedOrders(self.dispatcher, recorder.void, partial(revoke_key, run))
        self.learner = self.new_learner(recorder, checkpoint)
        self.orders.audit = build_audit(model, run, lease, self.orders, self.learner.update.gate)
        self.state = self.learner.state
        self.refuse_if_disk_is_short()
        self.totals = self.state.load(checkpoint) if checkpoint else RunTotals()
        self.meter = open_meter(cards_of(model.config.compute, model.policy.device))
        self.files = self.run_files(store, recorder)
        lease.residency.sleep()

    def recorder_in(self, journal: Journal) -> JournalRecorder:
        config = self.model.config
        recorder = JournalRecorder(journal, self.first_step, Admission.of(config.verifier, config.reward))
        recorder.note_ranks(config.compute.ranks)
        return recorder

    def dispatcher_on(self, port: LearnerPort, recorder: JournalRecorder) -> Dispatcher:
        model, link = self.model, self.model.config.link
        greeting = welcome(self.run.read_info().run_id, link)
        return Dispatcher(
            port, recorder, model.expected(), greeting, model.order_check(), late_s=link.late_s, stop=self.stop
        )

    def new_learner(self, recorder: JournalRecorder, checkpoint: Checkpoint | None) -> Learner:
        """At step 0, before the checkpoint is loaded. With several ranks it is that of rank 0, which sends the
        checkpoint to the others."""
        model, ranks = self.model, self.ranks
        build = partial(build_learner, model, keep=partial(write_batch, self.run.quarantine), trace=self.trace)
        filler = training_filler(model, self.orders, recorder)
        if not ranks:
            return build(filler, notes=recorder, recheck=self.orders.recheck)
        ranks.from_first(packed_checkpoint(checkpoint))
        first = FirstRank(ranks, filler, recorder)
        placement = placement_on(ranks, model.policy, model.config.compute.parallel)
        # The others have used its orders already, so none can be taken back.
        return build(first, notes=first, recheck=nobody_lied, placement=placement)

    def refuse_if_disk_is_short(self) -> None:
        adapter_bytes = sum(map(len, adapter_parts(self.model.policy.adapter)))
        anchor_bytes = self.state.anchor.most_bytes() if self.state.anchor else 0
        refuse_if_short(self.run, bytes_needed(self.model.config, adapter_bytes, self.first_step, anchor_bytes))

    def run_files(self, store: CheckpointStore, recorder: JournalRecorder) -> RunFiles:
        config = self.model.config
        return RunFiles(
            self.run,
            config.log,
            self.state,
            store,
            Compaction(config.journal, store, recorder),
            BaseChecksum(self.lease.residency.sums),
            words_of(self.model),
            self.totals.best,
            self.meter.unread,
            self.dispatcher.peers.report,
            sampled=not config.is_warm_start,
        )

    def run_to_end(self) -> None:
        """Train what is left, and say in the summary how it ended."""
        curriculum = self.state.plan.curriculum
        stop = partial(agreed, self.ranks, self.stop) if self.ranks else self.stop
        report = StepReport(
            self.model.config, self.files, self.totals, stop, curriculum.metrics, self.trace, self.meter
        )
        self.files.resume_at(self.first_step + 1)
        self.files.write_summary("running", self.first_step, report.wall_s())
        try:
            status, done = self.train_until_stopped(report)
        except BaseException as error:
            done = max(self.state.publisher.versions)
            self.files.write_summary("failed", done, report.wall_s())
            raise with_way_back(error, self.run.path, done + 1)  # noqa: B904
        self.files.write_summary(status, done, report.wall_s())
        self.dispatcher.end_run(LEAVE_WAIT_S)

    def train_until_stopped(self, report: StepReport) -> tuple[Status, int]:
        """Status and steps done, also if the learner was asked to stop where orders can be left to the next start."""
        try:
            return self.train_and_evaluate(report)
        except Unfilled:
            done = max(self.state.publisher.versions)
            log.info("ending after step %d; the next start goes on from there", done)
            # After the last step the others have left.
            if self.ranks and done < self.model.config.run.steps:
                self.ranks.from_first(STOPS)
            report.save(done)
            return "stopped", done

    def train_and_evaluate(self, report: StepReport) -> tuple[Status, int]:
        """Base, steps, result; returns status and steps done."""
        steps, evaluations = self.model.config.run.steps, self.evaluations()
        self.reopen()
        if self.model.policy.device.type != "cpu" and self.first_step < steps:
            with self.lease.hold("learner", self.dispatcher.pump):
                self.learner.rehearsal.run()
        evaluations.begin(self.first_step)
        if self.stop() and self.first_step < steps:
            raise Unfilled
        done = train(self.learner.parts(report, self.lease, evaluations), self.first_step, steps)
        if done < steps:
            return "stopped", done
        evaluations.end(done)
        return "done", done

    def evaluations(self) -> EvalSchedule | BesideSchedule | NoEvaluations:
        """As configured, if there is something to evaluate on."""
        config, tasks, publisher = self.model.config, self.model.tasks.held_out, self.state.publisher
        if not tasks or config.eval.problems == 0:
            return NO_EVALUATIONS
        if config.eval.beside:
            digest = digest_of_questions(tasks[: config.eval.problems])
            return BesideSchedule(config.eval, config.run.steps, self.files, digest)
        evaluator = Evaluator(config, tasks, self.orders, self.model.prompter.text)
        return EvalSchedule(
            config.eval,
            config.run.steps,
            evaluator.run,
            digest=lambda version: publisher.versions[version].sha256,
            store=self.files,
            tasks_sha256=evaluator.tasks_sha256,
            trace=self.trace,
        )

    def reopen(self) -> None:
        """Publish the versions that pending orders name, and have those orders filled."""
        for version in sorted(self.state.publisher.versions):
            self.learner.filler.publish(self.state.publisher.versions[version].message, oldest_needed=0)
        if self.ranks:
            # Actors are served once there is a policy for them.
            self.ranks.meanwhile = self.dispatcher.pump
        self.state.plan.submit_pending()
        log.info("begins at step %d of %d", self.first_step, self.model.config.run.steps)


def write_or_check_tasks(run: RunDir, model: Model, *, begins: bool) -> None:
    """DataError if the run began with others."""
    digests = model.tasks.digests()
    if begins:
        write_task_digests(run, digests)
    else:
        refuse_other_tasks(run, digests)


def welcome(run_id: str, link: LinkConfig) -> Welcome:
    return Welcome(run_id=run_id, heartbeat_s=link.heartbeat_s, silence_s=link.silence_s, mark=0)


def training_filler(model: Model, orders: OrderFiller, recorder: JournalRecorder) -> OrderFiller:
    """Who fills the orders of steps; those of evaluations go to actors in any run."""
    if not model.config.is_warm_start:
        return orders
    return WrittenOrders(model.tasks.answers, model.config.verifier.rewards, orders, recorder)


def revoke_key(run: RunDir, actor_id: str, reason: str) -> None:
    # It may be revoked already, by hand or for an earlier lie.
    with suppress(SecurityError):
        revoke(run.keys, actor_id, reason, time.time())


def words_of(model: Model) -> Words:
    prompter = model.prompter
    return Words(text=prompter.text, spelled=prompter.as_the_model_sees)


def report_tasks(model: Model) -> None:
    tasks = model.tasks
    log.info("%d training tasks, %d held out", len(tasks.train), len(tasks.held_out))
    for reason, count in tasks.dropped.items():
        log.warning("%d rows left out: %s", count, reason)
    if said := missing_answers([*tasks.train, *tasks.held_out]):
        log.warning("%s", said)
    overlap = find_overlap([task.columns for task in tasks.train], [task.columns for task in tasks.held_out])
    for sentence in overlap.in_words():
        log.warning("%s", sentence)
