"""The files a run writes as it goes: metrics.jsonl, rollouts.jsonl, checkpoints, eval/*.json, summary.json."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from learner.batch import StepBatch
from learner.checkpoint import CheckpointStore
from learner.compaction import Compaction
from learner.past import Best, Past, better
from learner.quarantine import KeptBatch, file_name, pack_batch
from learner.rollout_log import RolloutLog
from learner.state import LearnerState
from protocol.messages import Groups
from shared.config.tree import Config
from shared.model.base_checksum import FrozenBase
from shared.run.evaluation import Evaluation, read_evaluation, write_evaluation
from shared.run.files import LineLog, make_folder, write_whole
from shared.run.metrics import MetricsLog, StepMetrics
from shared.run.run_dir import RunDir
from shared.run.summary import Status, Summary, write_summary


class RunBooks:
    """Writes into a run directory."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        state: LearnerState,
        checkpoints: CheckpointStore,
        compaction: Compaction,
        base: FrozenBase,
        text: Callable[[list[int]], str],
        best: Best | None = None,
    ) -> None:
        """best: of the earlier lives of this run."""
        self.run = run
        self.state = state
        self.checkpoints = checkpoints
        self.compaction = compaction
        self.base = base
        self.best = best
        self.metrics = MetricsLog(LineLog(run.metrics))
        self.rollouts = RolloutLog(LineLog(run.rollouts), config, text)

    def resume_at(self, step: int) -> None:
        """Drop the rows of steps that will be done again."""
        self.metrics.resume_at(step)
        self.rollouts.resume_at(step)

    def step(self, step: int, metrics: StepMetrics, answers: Sequence[Groups], batch: StepBatch) -> None:
        """A row and a few rollouts."""
        self.rollouts.log(step, answers, batch)
        self.metrics.log(metrics)

    def checkpoint(self, step: int, past: Past) -> None:
        """The whole state after `step` updates, if the base they used is whole; then the journal may shrink."""
        self.base.check()
        # A later life begins behind this checkpoint and writes the rows of its steps no more.
        self.metrics.sync()
        saved = self.state.save(step, replace(past, best=self.best))
        self.checkpoints.save(saved, keep_also=self.best.step if self.best else None)
        self.compaction.after_checkpoint(step)

    def quarantine(self, batch: KeptBatch) -> Path:
        """quarantine/step-000013.safetensors"""
        make_folder(self.run.quarantine)
        path = self.run.quarantine / file_name(batch.step)
        write_whole(path, pack_batch(batch))
        return path

    def evaluation(self, label: str) -> Evaluation | None:
        """A report of an earlier life of this run."""
        return read_evaluation(self.run.eval / f"{label}.json")

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """eval/<label>.json"""
        write_evaluation(self.run.eval, evaluation)

    def judge(self, evaluation: Evaluation) -> None:
        """Note whether the evaluated checkpoint is the best until now."""
        found = Best(step=evaluation.version, score=evaluation.greedy.accuracy)
        self.best = better(self.best, found)
        self.checkpoints.note_best(self.best.step, self.best.score)

    def write_summary(self, status: Status, steps: int, wall_s: float) -> None:
        """summary.json, whole, whenever the status changes."""
        versions = self.state.publisher.versions
        summary = Summary(
            status=status,
            steps=steps,
            wall_s=round(wall_s, 3),
            adapter_sha256=versions[max(versions)].sha256,
            eval={label: report for label in ("base", "final") if (report := self.evaluation(label))},
        )
        write_summary(self.run, summary)


class NoBooks:
    """A replay writes nothing."""

    def step(self, step: int, metrics: StepMetrics, answers: Sequence[Groups], batch: StepBatch) -> None:
        """Not written."""

    def checkpoint(self, step: int, past: Past) -> None:
        """Not written."""

    def quarantine(self, batch: KeptBatch) -> None:
        """Not written."""
