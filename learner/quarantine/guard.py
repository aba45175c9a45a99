"""Applies the updates of a run, and sets aside the batch of one that must not be applied.

    update refused -> everything as it was before the step -> batch into quarantine -> stop, or go on without it

Going on means: the step has no update, its policy version holds the adapter of the one before. The decision follows
from the numbers alone, so a resumed or replayed run makes it again; `guard.skips_in_a_row` ends a run that has nothing
but such steps, since its fault is not in the batches.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from learner.durable.resample import way_back
from learner.objective.batch import StepBatch
from learner.quarantine.quarantine import KeptBatch, Position
from learner.update.figures import Skipped, UpdateStats
from learner.update.gradient_check import NumericalFault
from learner.update.update import Update
from protocol.messages import FilledOrder
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.errors import TrainingStopped
from shared.model.adapter_file import adapter_bytes, install_adapter

log = logging.getLogger("learner")


class Quarantine(Protocol):
    """Where batches are set aside: the run's books."""

    def quarantine(self, batch: KeptBatch) -> Path | None:
        """Keep it; the file in the run's quarantine/, or None where nothing is written."""
        ...


class Guard:
    """Between the loop and the update."""

    def __init__(self, update: Update, quarantine: Quarantine, config: Config) -> None:
        self.update = update
        self.quarantine = quarantine
        self.config = config

    def apply(self, step: int, answers: Sequence[FilledOrder], batch: StepBatch) -> UpdateStats | Skipped | None:
        """The update of a step; None if no group taught anything and there is no KL."""
        # With one pass nothing has been applied when a fault is found, and nothing needs to be kept for it.
        before = self.position() if self.config.loss.passes > 1 else None
        try:
            # Samples of an older version differ rightly.
            stats = self.update.apply(step, batch, gated=all(answer.policy_version == step for answer in answers))
        except NumericalFault as fault:
            if before:
                self.restore(before)
            return self.set_aside(fault, answers)
        if stats:
            self.update.norms.skips = 0
        return stats

    def set_aside(self, fault: NumericalFault, answers: Sequence[FilledOrder]) -> Skipped:
        """Quarantine; then stop or go on, as configured."""
        path = self.quarantine.quarantine(self.kept(fault, answers))
        norms, limit = self.update.norms, self.config.guard.skips_in_a_row
        if self.config.guard.on_fault == "stop":
            raise TrainingStopped(f"{fault} {next_steps(path, fault.step + 1)}") from fault
        norms.skips += 1
        if norms.skips > limit:
            raise TrainingStopped(
                f"{fault} It is one more in a row than guard.skips_in_a_row = {limit} allows, so the fault is hardly in"
                f" the batches; the last one is kept in {path}."
            ) from fault
        log.warning("%s Training goes on without its batch, kept in %s.", fault, path)
        return Skipped(groups=sum(len(answer.groups) for answer in answers))

    def kept(self, fault: NumericalFault, answers: Sequence[FilledOrder]) -> KeptBatch:
        """All that the update needs."""
        return KeptBatch(
            step=fault.step,
            kind=fault.refusal.kind,
            what=fault.refusal.what,
            sample=fault.suspect.sample,
            base_digest=self.update.policy.base_digest,
            config=config_to_json(self.config),
            position=self.position(),
            answers=tuple(answers),
        )

    def position(self) -> Position:
        """What the next update starts from."""
        update = self.update
        return Position(
            adapter=adapter_bytes(update.policy.adapter),
            optimizer=update.optimizer.state_bytes(),
            norms=update.norms.state_dict(),
            anchor=update.anchor.state_bytes() if update.anchor else b"",
        )

    def restore(self, position: Position) -> None:
        """Take back the passes of this step that were applied."""
        install_adapter(self.update.policy.adapter, position.adapter, finite=False)
        self.update.optimizer.load_state_bytes(position.optimizer)
        self.update.norms.load_state_dict(position.norms)


def next_steps(path: Path | None, step: int) -> str:
    """What a user can type now."""
    if path is None:
        return "Its batch is kept nowhere."
    return (
        f"Its batch is kept: `python -m launch replay --batch {path}` looks at it alone,"
        f" `python -m launch resume {path.parents[1]} --on-fault skip` goes on without it."
        f" {way_back(path.parents[1], step)}"
    )
