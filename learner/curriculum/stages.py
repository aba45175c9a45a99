"""Tasks in stages, one after the other: by difficulty (`levels`), or by semantic entropy (`sent`).

    a stage ends when its mean pass rate over the last WINDOW steps is at least `advance_at`,
    or after `stage_steps` steps; the last stage does not end

A stage shuffles its tasks. A share `replay` of the draws takes tasks of all earlier stages, so that the policy does not
forget them. Only groups of the stage's own tasks count for its pass rate and its steps: with a lag, groups of an
earlier stage still arrive for a while. learner/continual/anchor.py says what happens to the policy between two stages.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from learner.curriculum.curriculum import CurriculumFigures, Shuffled
from learner.objective.judged import PassCount, pass_rate
from shared.errors import DamageError
from shared.seeding import derive

WINDOW = 5


class Staged:
    """Stages of tasks, in order."""

    def __init__(
        self, stages: Sequence[Sequence[int]], seed: int, *, advance_at: float, stage_steps: int, replay: float
    ) -> None:
        """stages: the task indices of each stage; none is empty."""
        self.stages = [list(stage) for stage in stages]
        self.stage_of = {task: index for index, stage in enumerate(stages) for task in stage}
        self.advance_at = advance_at
        self.stage_steps = stage_steps
        self.replay = replay
        self.seed = seed
        self.plan = hashlib.sha256(json.dumps(self.stages).encode()).hexdigest()
        self.last = float("nan")
        self.enter(0)

    def enter(self, stage: int) -> None:
        self.stage = stage
        self.steps = 0
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.earlier = [task for tasks in self.stages[:stage] for task in tasks]
        self.fresh = Shuffled(len(self.stages[stage]), derive(self.seed, "stage", stage))
        self.again = Shuffled(max(1, len(self.earlier)), derive(self.seed, "replay", stage))

    def next(self, count: int) -> list[int]:
        """Mostly tasks of this stage. The share of earlier ones is exact over the stage, not per call."""
        drawn = self.fresh.position + self.again.position
        replayed = int((drawn + count) * self.replay) - self.again.position if self.earlier else 0
        tasks = self.stages[self.stage]
        fresh = [tasks[place] for place in self.fresh.next(count - replayed)]
        return fresh + [self.earlier[place] for place in self.again.next(replayed)]

    def observe(self, groups: Sequence[PassCount]) -> None:
        """Count the groups of this stage, and enter the next one if this one is over."""
        self.last = pass_rate(groups)
        own = [group for group in groups if self.stage_of[group.task] == self.stage and group.counted]
        if not own:
            return
        self.steps += 1
        self.recent.append(pass_rate(own))
        if self.stage < len(self.stages) - 1 and self.is_over():
            self.enter(self.stage + 1)

    def is_over(self) -> bool:
        learnt = len(self.recent) == WINDOW and fmean(self.recent) >= self.advance_at
        return learnt or self.steps >= self.stage_steps

    def metrics(self) -> CurriculumFigures:
        """Effective tasks: 1 / sum q^2, with replay spread over all earlier tasks."""
        share = self.replay if self.earlier else 0.0
        squares = (1 - share) ** 2 / len(self.stages[self.stage]) + share**2 / max(1, len(self.earlier))
        return CurriculumFigures(stage=self.stage, pass_rate=self.last, effective_tasks=1 / squares)

    def way_back(self) -> Callable[[], None]:
        return partial(self.load_state_dict, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "stage": self.stage,
            "steps": self.steps,
            "recent": list(self.recent),
            "fresh": self.fresh.state_dict(),
            "again": self.again.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """DamageError if the stages are not the same."""
        if state["plan"] != self.plan:
            raise DamageError(
                "The stages of this run's curriculum are not those it began with: its data or its semantic entropies"
                " have changed; restore them, or start a new run."
            )
        self.enter(int(state["stage"]))
        self.steps = int(state["steps"])
        self.recent.extend(state["recent"])
        self.fresh.load_state_dict(state["fresh"])
        self.again.load_state_dict(state["again"])
