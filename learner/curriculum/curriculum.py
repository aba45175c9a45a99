"""Which tasks come next.

A curriculum chooses tasks, observes the results of their groups, and saves its state. `Shuffled` takes all tasks once
per epoch, in an order that follows from the run's seed and the epoch.

    step s:   next (P tasks of step s + max_lag)  ->  next (replacements of step s)  ->  observe (all groups of step s)

Every start of a run and every replay makes these calls in this order. So the tasks of step s depend only on the groups
of the steps before s - max_lag (replacements: before s).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from learner.objective.judged import PassCount, pass_rate
from shared.seeding import permutation


@dataclass(frozen=True, kw_only=True)
class CurriculumFigures:
    """The curriculum's part of a row of metrics."""

    stage: int
    """Stage of the next tasks, from 0; 0 where there are no stages."""
    pass_rate: float
    """Share of correct completions in the last observed step; NaN before the first."""
    effective_tasks: float
    """1 / sum q_i^2 over the probabilities q_i of the tasks: from how many tasks it effectively chooses."""


class Curriculum(Protocol):
    """Chooses tasks by index."""

    def next(self, count: int) -> list[int]:
        """The next `count` tasks."""
        ...

    def observe(self, groups: Sequence[PassCount]) -> None:
        """The results of one step's groups; called in the order of steps."""
        ...

    def metrics(self) -> CurriculumFigures:
        """For the row of this step."""
        ...

    def way_back(self) -> Callable[[], None]:
        """A function that restores the state that it has now. Asked for in every step, so making it must cost no more
        than copying an array of the tasks."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Shuffled:
    """Every task once per epoch."""

    def __init__(self, num_tasks: int, seed: int) -> None:
        self.num_tasks = num_tasks
        self.seed = seed
        self.position = 0
        self.pass_rate = float("nan")
        self.epoch = -1
        """Of `order`. Both are kept because an order takes long to make, and are no state."""
        self.order = np.zeros(0, np.int64)

    def next(self, count: int) -> list[int]:
        positions = range(self.position, self.position + count)
        self.position += count
        return [self.task_at(position) for position in positions]

    def task_at(self, position: int) -> int:
        """Random access, so that the position is the whole state."""
        epoch, offset = divmod(position, self.num_tasks)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, permutation(self.seed, epoch, self.num_tasks)
        return int(self.order[offset])

    def observe(self, groups: Sequence[PassCount]) -> None:
        """Only for the metrics; the order does not depend on it."""
        self.pass_rate = pass_rate(groups)

    def metrics(self) -> CurriculumFigures:
        return CurriculumFigures(stage=0, pass_rate=self.pass_rate, effective_tasks=self.num_tasks)

    def way_back(self) -> Callable[[], None]:
        return partial(self.load_state_dict, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
