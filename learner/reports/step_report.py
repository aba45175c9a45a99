"""After each step: a row of metrics, rollouts, and a checkpoint when one is due."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from msgspec import structs

from learner.curriculum.curriculum import CurriculumFigures
from learner.durable.state import RunTotals
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.reports.step_metrics import Clock, Shown, step_metrics
from learner.update.figures import StepResult
from protocol.plain_text import for_log
from shared.config.tree import Config
from shared.process.energy import NO_METER, EnergyMeter
from shared.process.free_memory import peak_memory_mb
from shared.process.lease import Turn
from shared.process.trace import NO_TRACE, Trace
from shared.run.metrics import StepMetrics

MAX_LOGGED_NAMES = 64
"""Names from log_metric that rows may have, from one start of the learner to the next."""

log = logging.getLogger("learner")


class Files(Protocol):
    """Where a run is written: its folder, or nowhere in a replay."""

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """A row of metrics and its rollouts."""
        ...

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """The whole state after this many steps."""
        ...


class StepReport:
    """What is written of each step, and when."""

    def __init__(
        self,
        config: Config,
        files: Files,
        totals: RunTotals,
        stop: Callable[[], bool],
        curriculum: Callable[[], CurriculumFigures],
        trace: Trace = NO_TRACE,
        meter: EnergyMeter = NO_METER,
    ) -> None:
        """totals: of the run before this start. curriculum: its figures when a step is recorded."""
        self.config = config
        self.shown = Shown(loss=config.objective, constraint=config.constraint, curriculum=config.curriculum)
        self.files = files
        self.curriculum = curriculum
        self.started = time.monotonic() - totals.wall_s
        self.stop = stop
        self.stop_requested = False
        self.step_started = self.started
        self.update_s = 0.0
        self.turn = Turn(waited_s=0.0)
        self.unsaved = False
        self.logged: set[str] = set()
        """Names from log_metric that rows have had since this start."""
        self.said_limit = False
        self.trace = trace
        self.meter = meter

    def begin(self) -> None:
        # Energy that was used between two steps belongs to none.
        self.meter.take()
        self.step_started = time.monotonic()

    @contextmanager
    def updating(self, turn: Turn) -> Iterator[None]:
        self.meter.look()
        self.turn, start = turn, time.monotonic()
        with self.trace.phase("update"):
            yield
        self.update_s = time.monotonic() - start

    def record(self, step: int, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        metrics = step_metrics(step, collected, batch, result, self.clock(), self.curriculum(), self.shown)
        metrics = structs.replace(metrics, logged=self.within_name_limit(metrics.logged))
        self.files.step(step, metrics, collected, batch, result)
        self.stop_requested = self.stop()
        self.unsaved = True
        if self.due(step + 1):
            self.save(step + 1)

    def within_name_limit(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Without new names beyond the limit: each name is a column of all steps for whoever reads them."""
        new = [name for name in logged if name not in self.logged]
        room = MAX_LOGGED_NAMES - len(self.logged)
        self.logged.update(new[:room])
        if len(new) > room and not self.said_limit:
            self.said_limit = True
            log.warning("log_metric got more than %d names; %s is left out", MAX_LOGGED_NAMES, for_log(new[room]))
        return {name: value for name, value in logged.items() if name in self.logged}

    def save(self, done: int) -> None:
        """A checkpoint after `done` steps, unless it exists."""
        if self.unsaved:
            with self.trace.phase("checkpoint"):
                self.files.checkpoint(done, RunTotals(wall_s=self.wall_s()))
            self.unsaved = False

    def clock(self) -> Clock:
        return Clock(
            time_s=self.wall_s(),
            step_s=time.monotonic() - self.step_started,
            update_s=self.update_s,
            swap_s=self.turn.swap_s,
            energy=self.meter.take(),
            learner_mb=peak_memory_mb(),
            card=self.turn.peak,
        )

    def due(self, done: int) -> bool:
        """Every k steps, at the end, when asked to stop, and where an evaluation comes next: it may be the best."""
        evaluated = self.config.eval.is_due(done)
        every = done % self.config.checkpoint.every == 0
        return every or evaluated or done == self.config.run.steps or self.stop_requested

    def wall_s(self) -> float:
        return time.monotonic() - self.started
