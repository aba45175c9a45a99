"""The files a run writes as it goes: metrics.jsonl, rollouts.jsonl, checkpoints, eval/*.json, summary.json.

rollouts.jsonl: a few groups of each step in full, for people: text, ids, outcomes, entropies, mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from learner.durable.checkpoint import CheckpointStore
from learner.durable.recorder import Compaction
from learner.objective.batch import StepBatch, flat
from learner.objective.rewards import reward_parts, rewards
from learner.quarantine.quarantine import KeptBatch, file_name, pack_batch
from learner.state import Best, LearnerState, Past, better
from protocol.messages import FilledOrder, Group
from shared.config.tree import Config
from shared.model.base_checksum import BaseChecksum
from shared.run.evaluation import Evaluation, read_evaluation, write_evaluation
from shared.run.files import LineLog, make_folder, write_whole
from shared.run.metrics import MetricsLog, StepMetrics
from shared.run.run_dir import RunDir
from shared.run.summary import Status, Summary, write_summary

DIGITS = 4


class RolloutLog:
    """Writes the first groups of each step."""

    def __init__(self, lines: LineLog, config: Config, text: Callable[[list[int]], str]) -> None:
        self.lines = lines
        self.config = config
        self.text = text

    def log(self, step: int, answers: Sequence[FilledOrder], batch: StepBatch) -> None:
        """One row a group."""
        masks = {sample.sample.name: sample.selected for sample in batch.samples}
        for group in flat(answers)[: self.config.log.rollouts_per_step]:
            self.lines.append(self.row(step, group, masks))

    def resume_at(self, step: int) -> None:
        """Drop rows of steps that will be done again."""
        self.lines.truncate_from(step)

    def row(self, step: int, group: Group, masks: dict[str, np.ndarray]) -> dict[str, Any]:
        """A group as plain JSON; a sample that was not trained on has no mask."""
        return {
            "step": step + 1,
            "group_id": group.group_id,
            "prompt": self.text(group.prompt_ids.tolist()),
            "samples": [self.sample(group, index, masks) for index in range(len(group.lengths))],
        }

    def sample(self, group: Group, index: int, masks: dict[str, np.ndarray]) -> dict[str, Any]:
        """One answer."""
        start = sum(group.lengths[:index])
        part = slice(start, start + group.lengths[index])
        ids = group.completion_ids[part].tolist()
        mask = masks.get(f"{group.group_id}[{index}]")
        return {
            "text": self.text(ids),
            "ids": ids,
            "outcome": group.outcomes[index],
            "reward": float(rewards(group, self.config)[index]),
            "rewards": {name: float(values[index]) for name, values in reward_parts(group, self.config).items()},
            "finish": group.finishes[index],
            "entropy": None if group.entropies is None else rounded(group.entropies[part]),
            "mask": None if mask is None else mask.astype(int).tolist(),
        }


def rounded(values: np.ndarray) -> list[float]:
    """Short enough to read."""
    return [round(float(value), DIGITS) for value in values]


class RunBooks:
    """Writes into a run directory."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        state: LearnerState,
        checkpoints: CheckpointStore,
        compaction: Compaction,
        base: BaseChecksum,
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

    def step(self, step: int, metrics: StepMetrics, answers: Sequence[FilledOrder], batch: StepBatch) -> None:
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

    def step(self, step: int, metrics: StepMetrics, answers: Sequence[FilledOrder], batch: StepBatch) -> None:
        """Not written."""

    def checkpoint(self, step: int, past: Past) -> None:
        """Not written."""

    def quarantine(self, batch: KeptBatch) -> None:
        """Not written."""
