"""rollouts.jsonl: a few groups of each step in full, for people: text, ids, outcomes, entropies, mask."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from learner.batch import StepBatch
from learner.rewards import reward_parts, rewards
from learner.sampling import flat
from protocol.messages import Group, Groups
from shared.config.tree import Config
from shared.run.files import LineLog

DIGITS = 4


class RolloutLog:
    """Writes the first groups of each step."""

    def __init__(self, lines: LineLog, config: Config, text: Callable[[list[int]], str]) -> None:
        self.lines = lines
        self.config = config
        self.text = text

    def log(self, step: int, answers: Sequence[Groups], batch: StepBatch) -> None:
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
