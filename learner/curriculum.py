"""Which tasks come next.

A curriculum is asked for tasks, told what came of them, and can save itself; the loop knows no more. `Shuffled` goes
through all tasks in an order drawn anew for each epoch from the run's seed.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from protocol.messages import Group
from shared.seeding import permutation


class Curriculum(Protocol):
    """Chooses tasks by index."""

    def next(self, count: int) -> list[int]:
        """The next `count` tasks."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """What the groups of one step came to, in the order of steps."""
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

    def next(self, count: int) -> list[int]:
        """Positions run on across epochs; each position has one task."""
        positions = range(self.position, self.position + count)
        self.position += count
        return [self.task_at(position) for position in positions]

    def task_at(self, position: int) -> int:
        """The task at this position of the endless sequence."""
        epoch, offset = divmod(position, self.num_tasks)
        return int(permutation(self.seed, epoch, self.num_tasks)[offset])

    def observe(self, groups: Sequence[Group]) -> None:
        """A shuffle does not learn."""

    def state_dict(self) -> dict[str, Any]:
        """Where we are."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.position = int(state["position"])
