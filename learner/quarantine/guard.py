"""Applies the updates of a run, and quarantines the batch of one that must not be applied.

    refused update: restore the position before the step -> batch into quarantine/ -> stop, or go on without the batch

A step without its batch has no update: its policy version has the adapter of the one before. The decision follows
from the numbers alone, so a resumed or replayed run makes it again. `guard.skips_in_a_row` ends a run that has nothing
but such steps, since the fault is then not in the batches.
"""

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from learner.durable.resample import way_back
from learner.objective.batch import StepBatch
from learner.quarantine.quarantine import KeptBatch
from learner.update.figures import StepResult
from learner.update.gradient_check import NumericalFault
from learner.update.mismatch import Mismatch
from learner.update.update import Position, Update
from protocol.messages import FilledOrder
from shared.config.tree import GuardConfig
from shared.errors import TrainingStopped
from shared.process.trace import NO_TRACE, Trace

log = logging.getLogger("learner")
Keep = Callable[[KeptBatch], Path | None]
"""Keeps a batch; returns the file, or None where nothing is written."""


class Guard:
    """Between the loop and the update."""

    def __init__(
        self, update: Update, config: GuardConfig, config_json: bytes, keep: Keep, trace: Trace = NO_TRACE
    ) -> None:
        """config_json: of the run, for the batches that are kept."""
        self.update = update
        self.config = config
        self.config_json = config_json
        self.keep = keep
        self.trace = trace
        self.skips = 0
        """Steps in a row until now whose batch was quarantined."""

    def apply(self, step: int, filled: Sequence[FilledOrder], batch: StepBatch) -> StepResult:
        """The update of a step. filled: the orders that the batch was built from."""
        if not batch.used:
            return StepResult()
        try:
            with self.trace.phase("passes"):
                stats = self.update.apply(step, batch)
        except NumericalFault as fault:
            self.update.undo()
            return self.set_aside(fault, filled)
        except Mismatch:
            # The step may be sampled again, from other actors.
            self.update.undo()
            raise
        self.update.forget_gradient()
        self.skips = 0
        return StepResult(stats=stats)

    def set_aside(self, fault: NumericalFault, filled: Sequence[FilledOrder]) -> StepResult:
        """Quarantine; then stop or go on, as configured."""
        path = self.keep(self.kept(fault, filled, self.update.position()))
        if self.config.on_fault == "stop":
            raise TrainingStopped(f"{fault} {next_steps(path, fault.step + 1)}") from fault
        self.skips += 1
        if self.skips > self.config.skips_in_a_row:
            raise TrainingStopped(
                f"{fault} It is one more in a row than guard.skips_in_a_row = {self.config.skips_in_a_row} allows, so"
                f" the batches are unlikely to be the cause; the last one is kept in {path}."
            ) from fault
        log.warning("%s Training goes on without its batch, kept in %s.", fault, path)
        return StepResult(quarantined=sum(len(order.groups) for order in filled))

    def kept(self, fault: NumericalFault, filled: Sequence[FilledOrder], position: Position) -> KeptBatch:
        return KeptBatch(
            step=fault.step,
            kind=fault.refusal.kind,
            what=fault.refusal.what,
            sample=fault.suspect.sample,
            base_digest=self.update.policy.base_digest,
            config=self.config_json,
            position=position,
            filled=tuple(filled),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"skips": self.skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skips = int(state["skips"])


def next_steps(path: Path | None, step: int) -> str:
    """What a user can type now."""
    if path is None:
        return "Its batch is kept nowhere."
    run = path.parents[1]
    return (
        f"Its batch is kept: `python -m launch replay --batch {shlex.quote(str(path))}` looks at it alone,"
        f" `python -m launch resume {shlex.quote(str(run))} --on-fault skip` goes on without it."
        f" {way_back(run, step)}"
    )
