"""The files a run writes as it goes: metrics.jsonl, rollouts.jsonl, checkpoints, eval/*.json, summary.json.

rollouts.jsonl: a few groups of each step in full, for people to read: text, ids, outcomes, entropies, mask. `turns` has
the text in pieces, the model's own and what an environment put between them; `extras` what rewards gave to log_extra.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from learner.durable.checkpoint import CheckpointStore
from learner.durable.recorder import Compaction
from learner.durable.state import ADAPTER, Best, LearnerState, RunTotals, better
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected, JudgedGroup
from learner.objective.turns import by_completion, pieces, trained_tokens
from shared.base.checksum import BaseChecksum
from shared.run.evaluation import Evaluation, figures, read_evaluation, write_evaluation
from shared.run.files import LineLog
from shared.run.forecast import measured, read_prediction, read_rows
from shared.run.metrics import MetricsLog, StepMetrics
from shared.run.run_dir import RunDir
from shared.run.summary import Status, Summary, first_and_last, write_summary

DIGITS = 4


class RolloutLog:
    """Writes the first groups of each step."""

    def __init__(self, lines: LineLog, groups_per_step: int, text: Callable[[list[int]], str]) -> None:
        self.lines = lines
        self.groups_per_step = groups_per_step
        self.text = text

    def log(self, step: int, collected: Collected, batch: StepBatch) -> None:
        masks = {sample.sample.name: sample.selected for sample in batch.samples}
        for judged in collected.groups[: self.groups_per_step]:
            self.lines.append(self.row(step, judged, masks))

    def resume_at(self, step: int) -> None:
        self.lines.truncate_from(step)

    def row(self, step: int, judged: JudgedGroup, masks: dict[str, np.ndarray]) -> dict[str, Any]:
        """A group as plain JSON; a sample that was not trained on has no mask."""
        group = judged.group
        return {
            "step": step + 1,
            "group_id": group.group_id,
            "prompt": self.text(group.prompt_ids.tolist()),
            "samples": [self.sample(judged, index, masks) for index in range(len(group.lengths))],
        }

    def sample(self, judged: JudgedGroup, index: int, masks: dict[str, np.ndarray]) -> dict[str, Any]:
        group = judged.group
        ids = by_completion(group, group.completion_ids)[index]
        trained = by_completion(group, trained_tokens(group))[index]
        mask = masks.get(f"{group.group_id}[{index}]")
        return {
            "text": self.text(ids.tolist()),
            "turns": None if group.trained is None else self.turns(ids, trained),
            "ids": ids.tolist(),
            "outcome": group.outcomes[index],
            "reward": float(judged.rewards[index]),
            "rewards": {name: float(values[index]) for name, values in judged.parts.items()},
            **({"extras": {name: texts[index] for name, texts in group.extras.items()}} if group.extras else {}),
            "finish": group.finishes[index],
            "entropy": None if group.entropies is None else rounded(by_completion(group, group.entropies)[index]),
            "mask": None if mask is None else mask.astype(int).tolist(),
        }

    def turns(self, ids: np.ndarray, trained: np.ndarray) -> list[dict[str, Any]]:
        return [{"sampled": sampled, "text": self.text(ids[part].tolist())} for sampled, part in pieces(trained)]


def rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), DIGITS) for value in values]


class RunFiles:
    """Writes into a run directory."""

    def __init__(
        self,
        run: RunDir,
        groups_per_step: int,
        state: LearnerState,
        checkpoints: CheckpointStore,
        compaction: Compaction,
        base: BaseChecksum,
        text: Callable[[list[int]], str],
        best: Best | None = None,
    ) -> None:
        """groups_per_step: in rollouts.jsonl. best: of the run before this start."""
        self.run = run
        self.state = state
        self.checkpoints = checkpoints
        self.compaction = compaction
        self.base = base
        self.best = best
        self.waiting: Collection[int] = ()
        self.shown: set[int] = set()
        self.unreported: deque[Evaluation] = deque()
        self.metrics = MetricsLog(LineLog(run.metrics))
        self.rollouts = RolloutLog(LineLog(run.rollouts), groups_per_step, text)

    def resume_at(self, step: int) -> None:
        self.metrics.resume_at(step)
        self.rollouts.resume_at(step)
        self.shown = {int(row["eval/step"]) for row in read_rows(self.run.metrics) if "eval/step" in row}

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch) -> None:
        """A row, with one evaluation that came since the row before, and a few rollouts."""
        self.rollouts.log(step, collected, batch)
        evaluated = figures(self.unreported.popleft()) if self.unreported else {}
        self.metrics.log(msgspec.structs.replace(metrics, evaluated=evaluated))

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """The whole state after `step` updates, if the base they used is whole; then the journal may shrink."""
        self.base.check()
        # A resumed run starts after this checkpoint and does not write the rows of its steps again.
        self.metrics.sync()
        saved = self.state.save(step, replace(totals, best=self.best))
        best = {self.best.step} if self.best else set[int]()
        self.checkpoints.save(saved, keep_also=best.union(self.waiting))
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
            eval=first_and_last(self.run),
        )
        write_summary(self.run, summary)


class NoFiles:
    """A replay writes nothing."""

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch) -> None:
        """Not written."""

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """Not written."""
