"""Which parts a simulated run is made of: the real ones, unless a planted bug replaces one."""

from dataclasses import dataclass

from actor.link import Link
from actor.passed_on import PassedOn
from actor.rollout import Rollout
from learner.durable.recorder import JournalRecorder
from learner.durable.state import LearnerState
from learner.orders.dispatch import Dispatcher
from learner.orders.plan import StepPlan
from learner.reports.run_files import RunFiles


@dataclass(frozen=True, kw_only=True)
class Build:
    """One class a part."""

    dispatcher: type[Dispatcher] = Dispatcher
    """Orders out, groups in."""
    recorder: type[JournalRecorder] = JournalRecorder
    """Between dispatcher and journal."""
    plan: type[StepPlan] = StepPlan
    """What is ordered."""
    state: type[LearnerState] = LearnerState
    """What a checkpoint holds."""
    files: type[RunFiles] = RunFiles
    """Metrics and checkpoints."""
    link: type[Link] = Link
    """The actor's end of the wire."""
    passed_on: type[PassedOn] = PassedOn
    """Between the actors of a machine."""
    rollout: type[Rollout] = Rollout
    """Fills orders."""


REAL = Build()
