"""What a step leaves behind: a row of metrics, a few rollouts, a checkpoint when one is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.batch import StepBatch
from learner.quarantine.quarantine import KeptBatch
from learner.reports.step_metrics import Clock, step_metrics
from learner.state import Past
from learner.update.figures import Skipped, UpdateStats
from protocol.messages import FilledOrder
from shared.config.tree import Config
from shared.run.metrics import StepMetrics, peak_memory_mb


class Books(Protocol):
    """Where things are written: files in a run, nowhere in a replay."""

    def step(self, step: int, metrics: StepMetrics, answers: Sequence[FilledOrder], batch: StepBatch) -> None:
        """A row and a few rollouts."""
        ...

    def checkpoint(self, step: int, past: Past) -> None:
        """The whole state after `step` updates."""
        ...

    def quarantine(self, batch: KeptBatch) -> Path | None:
        """Set a batch aside; the file in the run's quarantine/, or None where nothing is written."""
        ...


class Ledger:
    """Keeps the books of the loop."""

    def __init__(
        self,
        config: Config,
        books: Books,
        past: Past,
        stop: Callable[[], bool],
        curriculum: Callable[[], CurriculumFigures],
    ) -> None:
        """past: of the earlier lives of this run. curriculum: where it stands when a step is recorded."""
        self.config = config
        self.books = books
        self.curriculum = curriculum
        self.started = time.monotonic() - past.wall_s
        self.stop = stop
        self.stop_requested = False
        self.step_started = self.started
        self.update_s = 0.0
        self.unsaved = False

    def begin(self) -> None:
        """The clock of a step starts."""
        self.step_started = time.monotonic()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The learner's own share of a step."""
        start = time.monotonic()
        yield
        self.update_s = time.monotonic() - start

    def record(
        self, step: int, answers: Sequence[FilledOrder], batch: StepBatch, stats: UpdateStats | Skipped | None
    ) -> None:
        """Log, save when due."""
        metrics = step_metrics(step, answers, batch, stats, self.clock(), self.curriculum(), self.config)
        self.books.step(step, metrics, answers, batch)
        self.stop_requested = self.stop()
        self.unsaved = True
        if self.due(step + 1):
            self.save(step + 1)

    def save(self, done: int) -> None:
        """A checkpoint after `done` steps, unless the last one is of there."""
        if self.unsaved:
            self.books.checkpoint(done, Past(wall_s=self.wall_s()))
            self.unsaved = False

    def clock(self) -> Clock:
        """The step's times until now."""
        return Clock(
            time_s=self.wall_s(),
            step_s=time.monotonic() - self.step_started,
            update_s=self.update_s,
            learner_mb=peak_memory_mb(),
        )

    def due(self, done: int) -> bool:
        """Every k steps, at the end, when asked to stop, and where an evaluation comes next: it may be the best."""
        evaluated = self.config.eval.is_due(done)
        every = done % self.config.checkpoint.every == 0
        return every or evaluated or done == self.config.run.steps or self.stop_requested

    def wall_s(self) -> float:
        """Since the run began, all its lives."""
        return time.monotonic() - self.started
