"""The learner's loop.

    order_ahead --> Orders --> actors --> FilledOrder --> journal
                                                        |
    publish v+1 <-- update <-- batch <-- collect <------'         checkpoint every k steps, metrics every step

produces      policy versions, one a step; checkpoints; a row of metrics a step
waits for     the answers to the step's orders (actors' or the journal's), the lease
unblocked by  a delivery; silence beyond the limit, which is an error that says what was awaited

There is one loop. A lag is a number of steps ordered ahead; resuming and replaying change only where answers come from.
"""

from dataclasses import dataclass

from learner.evaluation.schedule import NO_EVALUATIONS, Schedule
from learner.orders.plan import OrderDesk, StepPlan
from learner.quarantine.guard import Guard
from learner.reports.step_report import Ledger
from learner.update.batches import Batches
from learner.update.publisher import Publisher
from shared.process.lease import ComputeLease


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop is made of, built before it starts."""

    plan: StepPlan
    """Orders and collects."""
    desk: OrderDesk
    """Where versions are published."""
    batches: Batches
    """Groups to batch."""
    guard: Guard
    """Batch to new parameters, or into quarantine."""
    publisher: Publisher
    """Parameters to messages."""
    ledger: Ledger
    """Metrics, rollout samples, checkpoints; knows when to stop."""
    lease: ComputeLease
    """Who computes."""
    evaluations: Schedule = NO_EVALUATIONS
    """Held-out accuracy on the way."""


def train(parts: Parts, first_step: int, last_step: int) -> int:
    """Run steps first_step .. last_step - 1; returns how many updates the policy has behind it."""
    for step in range(first_step, last_step):
        parts.ledger.begin()
        parts.plan.order_ahead(version=step)
        answers = parts.plan.collect(step)
        with parts.lease.hold("learner", parts.desk.pump), parts.ledger.updating():
            batch = parts.batches.build(answers)
            stats = parts.guard.apply(step, answers, batch)
            policy = parts.publisher.snapshot(version=step + 1)
        parts.plan.resize(stats)
        parts.publisher.forget_before(parts.plan.oldest_needed())
        parts.desk.publish(policy, parts.plan.oldest_needed())
        parts.ledger.record(step, answers, batch, stats)
        if parts.ledger.stop_requested:
            return step + 1
        parts.evaluations.after(step + 1)
    return last_step
