"""Which tasks come next.

A curriculum is asked for tasks, told what came of them, and can save itself; the loop knows no more. `Shuffled` goes
through all tasks in an order drawn anew for each epoch from the run's seed.

    step s:   next (P tasks of step s + max_lag)  ->  next (replacements of step s)  ->  observe (all groups of step s)

The calls come in this order in every life of a run and in a replay, so what `next` chooses for step s rests on the
groups of the steps before s - max_lag (replacements: before s) and on nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from learner.objective.pass_counts import Observed, pass_rate
from shared.seeding import permutation


@dataclass(frozen=True, kw_only=True)
class CurriculumFigures:
    """What a step's row says of the curriculum."""

    stage: int
    """Of the next choice, from 0; 0 where there are no stages."""
    pass_rate: float
    """Share of right answers in the step just observed; NaN before the first."""
    effective_tasks: float
    """1 / sum q_i^2 of the probabilities q that the next task is drawn with: among how many it really chooses."""


class Curriculum(Protocol):
    """Chooses tasks by index."""

    def next(self, count: int) -> list[int]:
        """The next `count` tasks."""
        ...

    def observe(self, groups: Sequence[Observed]) -> None:
        """What the groups of one step came to, in the order of steps."""
        ...

    def metrics(self) -> CurriculumFigures:
        """Where it stands."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        ...


class Shuffled:
    """Every task once an epoch."""

    def __init__(self, num_tasks: int, seed: int) -> None:
        self.num_tasks = num_tasks
        self.seed = seed
        self.position = 0
        self.pass_rate = float("nan")

    def next(self, count: int) -> list[int]:
        """Positions run on across epochs; each position has one task."""
        positions = range(self.position, self.position + count)
        self.position += count
        return [self.task_at(position) for position in positions]

    def task_at(self, position: int) -> int:
        """The task at this position of the endless sequence."""
        epoch, offset = divmod(position, self.num_tasks)
        return int(permutation(self.seed, epoch, self.num_tasks)[offset])

    def observe(self, groups: Sequence[Observed]) -> None:
        """A shuffle does not learn."""
        self.pass_rate = pass_rate(groups)

    def metrics(self) -> CurriculumFigures:
        """All tasks are as likely."""
        return CurriculumFigures(stage=0, pass_rate=self.pass_rate, effective_tasks=self.num_tasks)

    def state_dict(self) -> dict[str, Any]:
        """Where we are."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.position = int(state["position"])
