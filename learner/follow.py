"""A rank of the learner other than the first: the same loop, with orders from rank 0, and nothing on disk.

    state of rank 0 -> its versions -> steps: orders of rank 0, a share of the micro-batches, the same update

It has neither journal nor actors nor reports, and takes no lease: it computes in the turns of rank 0. When rank 0
writes a checkpoint, it sends the part of the state that it alone has. It ends after the last step, or when rank 0 says
that the run stops. Only rank 0 handles SIGTERM. On cards, rank r computes on number compute.learner_card + r.
"""

import json
import logging
import signal
from functools import partial

from msgspec import structs

from learner.durable.checkpoint import unpacked_checkpoint
from learner.durable.find_adapter import adapters_of
from learner.durable.state import RunTotals
from learner.loop import train
from learner.orders.plan import Unfilled
from learner.orders.shared import OtherRank, agreed
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.run_files import ToldState
from learner.reports.step_report import StepReport
from learner.update.placement.ranks import RankGroup, meeting
from learner.wiring import Model, build_learner, load_model, placement_on
from shared.config.tree import Config
from shared.process.determinism import record
from shared.process.lease import NoLease
from shared.process.watchdog import Watchdog
from shared.run.run_dir import RunDir

log = logging.getLogger("learner")


def follow_run(run: RunDir, config: Config, watchdog: Watchdog, *, rank: int, name: str) -> None:
    """From loading to leaving. name: of the meeting."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    compute = structs.replace(config.compute, learner_card=config.compute.learner_card + rank)
    config = structs.replace(config, compute=compute)
    model = load_model(config, adapters_of(run, config.lora.start_from, config.teacher.adapter))
    log.info("computes with %s", json.dumps(record()))
    warn_after_s = config.link.silence_s
    try:
        with meeting(run.lease.parent, name, rank=rank, size=compute.ranks, warn_after_s=warn_after_s) as group:
            group.meanwhile = watchdog.progress
            follow(model, group)
    finally:
        watchdog.rest()


def follow(model: Model, group: RankGroup) -> None:
    """Until the last step is done, or the run stops."""
    config, policy = model.config, model.policy
    filler = OtherRank(group, group.meanwhile)
    checkpoint = unpacked_checkpoint(group.from_first())
    placement = placement_on(group, policy, config.compute.parallel)
    learner = build_learner(model, filler, keep_nowhere, notes=filler, placement=placement)
    state = learner.state
    first = checkpoint.step if checkpoint else 0
    totals = state.load(checkpoint) if checkpoint else RunTotals()
    stop = partial(agreed, group, lambda: False)
    report = StepReport(config, ToldState(state), totals, stop, state.plan.curriculum.metrics)
    for _, version in sorted(state.publisher.versions.items()):
        filler.publish(version.message, oldest_needed=0)
    state.plan.submit_pending()
    if policy.device.type != "cpu" and first < config.run.steps:
        learner.rehearsal.run()
    try:
        train(learner.parts(report, NoLease()), first, config.run.steps)
    except Unfilled:
        log.info("rank 0 says that the run stops")
        report.save(max(state.publisher.versions))
