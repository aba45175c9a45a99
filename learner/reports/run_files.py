"""The files a run writes as it goes: metrics.jsonl, rollouts.jsonl, checkpoints, eval/*.json, summary.json."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec
import numpy as np

from learner.durable.checkpoint import CheckpointStore
from learner.durable.recorder import Compaction
from learner.durable.state import ADAPTER, Best, LearnerState, RunTotals, better
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.reports.rollout_log import RolloutLog, Words
from learner.update.figures import StepResult
from shared.base.checksum import BaseChecksum
from shared.config.processes import LogConfig
from shared.run.evaluation import Evaluation, figures, read_evaluation, write_evaluation
from shared.run.files import LineLog
from shared.run.forecast import measured, read_prediction, spent
from shared.run.metrics import MetricsLog, MetricsTable, StepMetrics
from shared.run.run_dir import RunDir
from shared.run.summary import ActorsReport, Status, Summary, first_and_last, write_summary


class RunFiles:
    """Writes into a run directory."""

    def __init__(
        self,
        run: RunDir,
        log: LogConfig,
        state: LearnerState,
        checkpoints: CheckpointStore,
        compaction: Compaction,
        base: BaseChecksum,
        words: Words,
        best: Best | None = None,
        unread: Mapping[str, str] = MappingProxyType({}),
        actors: Callable[[], ActorsReport] = ActorsReport,
        *,
        sampled: bool = True,
    ) -> None:
        """log: how much of the rollouts is kept. best: of the run before this start. unread: sources of energy without
        a figure, and why. actors: asked once for a row. sampled: as of RolloutLog."""
        self.run = run
        self.state = state
        self.checkpoints = checkpoints
        self.compaction = compaction
        self.base = base
        self.best = best
        self.actors = actors
        self.reported = ActorsReport()
        self.unread = unread
        self.waiting: Collection[int] = ()
        self.shown: set[int] = set()
        self.unreported: deque[Evaluation] = deque()
        self.metrics = MetricsLog(LineLog(run.metrics))
        self.rollouts = RolloutLog(LineLog(run.rollouts), log, words, sampled=sampled)

    def resume_at(self, step: int) -> None:
        self.metrics.resume_at(step)
        self.rollouts.resume_at(step)
        shown = MetricsTable(self.run.metrics).column("eval/step")
        self.shown = set(shown[np.isfinite(shown)].astype(int).tolist())

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """A row, with what the actors did and one evaluation that came since the row before, and its rollouts."""
        self.rollouts.log(step, collected, batch, result)
        evaluated = figures(self.unreported.popleft()) if self.unreported else {}
        self.reported = self.actors()
        actors = {
            f"{actor_id}/{name}": float(figure)
            for actor_id, found in self.reported.actors.items()
            for name, figure in msgspec.structs.asdict(found).items()
        }
        limited = self.reported.limited
        self.metrics.log(msgspec.structs.replace(metrics, evaluated=evaluated, actors=actors, limited=limited))

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """The whole state after this many steps, if the base they used is whole; then the journal may shrink."""
        self.base.check()
        # A resumed run starts after this checkpoint and does not write the rows of its steps again.
        self.metrics.sync()
        unsaved = self.state.to_save(step, replace(totals, best=self.best))
        best = {self.best.step} if self.best else set[int]()
        self.checkpoints.save(unsaved, keep_also=best.union(self.waiting))
        self.compaction.after_checkpoint(step)

    def evaluation(self, label: str) -> Evaluation | None:
        return read_evaluation(self.run.eval / f"{label}.json")

    def write_evaluation(self, evaluation: Evaluation) -> None:
        write_evaluation(self.run.eval, evaluation)

    def note(self, evaluation: Evaluation, *, may_be_best: bool) -> None:
        """For the next row, unless one has it; may_be_best: the checkpoint is the best until now if its accuracy is."""
        if evaluation.version not in self.shown:
            self.shown.add(evaluation.version)
            self.unreported.append(evaluation)
        if not may_be_best:
            return
        found = Best(step=evaluation.version, accuracy=evaluation.greedy.accuracy)
        self.best = better(self.best, found)
        self.checkpoints.note_best(self.best.step, self.best.accuracy)

    def adapters(self) -> dict[int, str]:
        return self.checkpoints.digests(ADAPTER)

    def adapter(self, step: int) -> str:
        return self.checkpoints.digest(step, ADAPTER)

    def written_at(self) -> int:
        return self.run.eval.stat().st_mtime_ns if self.run.eval.is_dir() else 0

    def keep(self, steps: Collection[int]) -> None:
        self.waiting = steps

    def write_summary(self, status: Status, steps: int, wall_s: float) -> None:
        versions = self.state.publisher.versions
        summary = Summary(
            status=status,
            steps=steps,
            wall_s=round(wall_s, 3),
            adapter_sha256=versions[max(versions)].sha256,
            predicted=read_prediction(self.run),
            measured=measured(self.run),
            spent=spent(MetricsTable(self.run.metrics), self.unread),
            eval=first_and_last(self.run),
            actors=self.reported,
        )
        write_summary(self.run, summary)


class NoFiles:
    """A replay writes nothing."""

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """Not written."""

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """Not written."""


class ToldState:
    """A rank that writes nothing, but has a part of what rank 0 saves."""

    def __init__(self, state: LearnerState) -> None:
        self.state = state

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        """Rank 0 writes it."""

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        self.state.optimizer.state_parts()
