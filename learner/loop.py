"""The learner's loop.

    order_ahead --> Orders --> actors --> filled orders --> journal
                                                               |
    publish v+1 <-- update <-- batch <-- collect, judge <------'    checkpoint every k steps, metrics every step

produces      policy versions, one a step; checkpoints; a row of metrics a step
waits for     the step's filled orders (from actors or the journal), the lease
unblocked by  a delivery; silence beyond the limit, which is an error that names what was awaited

There is one loop. A lag is a number of steps ordered ahead. Resuming and replaying change only where filled orders come
from.
"""

from dataclasses import dataclass
from functools import partial

from learner.evaluation.schedule import NO_EVALUATIONS, Schedule
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.orders.plan import OrderFiller, StepPlan
from learner.quarantine.guard import Guard
from learner.reports.step_report import StepReport
from learner.update.batches import Batches
from learner.update.budget import Attempts
from learner.update.figures import StepResult
from learner.update.mismatch import Mismatch
from learner.update.publisher import Publisher
from protocol.messages import Policy
from shared.process.lease import ComputeLease


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop calls."""

    plan: StepPlan
    """Orders, collects and judges."""
    filler: OrderFiller
    """Where versions are published."""
    batches: Batches
    """Groups to batch."""
    guard: Guard
    """Batch to new parameters, or into quarantine."""
    attempts: Attempts
    """Batch and update again in smaller parts if memory runs out."""
    publisher: Publisher
    """Parameters to messages."""
    report: StepReport
    """Metrics, rollout samples, checkpoints; knows when to stop."""
    lease: ComputeLease
    """Which process computes."""
    evaluations: Schedule = NO_EVALUATIONS
    """Held-out accuracy while training."""


def train(parts: Parts, first_step: int, last_step: int) -> int:
    """Run steps first_step .. last_step - 1; returns the number of steps done."""
    for step in range(first_step, last_step):
        parts.report.begin()
        parts.plan.order_ahead(version=step)
        collected, batch, result, policy = learn(parts, step)
        parts.plan.resize(result)
        parts.publisher.forget_before(parts.plan.oldest_needed())
        parts.filler.publish(policy, parts.plan.oldest_needed())
        parts.report.record(step, collected, batch, result)
        if parts.report.stop_requested:
            return step + 1
        parts.evaluations.after(step + 1)
    return last_step


def learn(parts: Parts, step: int) -> tuple[Collected, StepBatch, StepResult, Policy]:
    """Collect a step, update, and make the new version. If the update finds log-probs that are false, and whoever sent
    them can be told, the step is sampled again without that actor."""
    while True:
        collected = parts.plan.collect(step)
        try:
            with parts.lease.hold("learner", parts.filler.pump) as turn, parts.report.updating(turn):
                batch, result = parts.attempts.until_it_fits(step, partial(updated, parts, step, collected))
                return collected, batch, result, parts.publisher.snapshot(version=step + 1)
        except Mismatch:
            if not parts.plan.sample_again(collected.filled):
                raise


def updated(parts: Parts, step: int, collected: Collected) -> tuple[StepBatch, StepResult]:
    """The batch of a step, and what became of it."""
    batch = parts.batches.build(step, collected)
    return batch, parts.guard.apply(step, collected.filled, batch)
