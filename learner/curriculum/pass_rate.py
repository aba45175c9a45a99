"""Prefers tasks whose groups teach most: draws in proportion to the expected p (1 - p), from the run's own rollouts.

A group of G completions, each correct with probability p, has outcome variance p (1 - p): a task that is always or
never solved teaches nothing. p of a task is unknown; it is estimated as Beta(a, b):

    a = k m + right        b = k (1 - m) + wrong        m = (R + 1) / (S + 2)
    E[p (1 - p)] = a b / ((a + b) (a + b + 1))
    q = (1 - e) E^c / sum E^c + e / number of tasks

right and wrong count the task's own completions. R of S completions are correct in its stratum, which is all tasks with
the same value of `curriculum.column` (all tasks, without such a column). The stratum's rate m counts as k completions
of the task itself. The policy changes, so all counts halve every `half_life` steps. A call draws without replacement,
and draws no task that is being sampled while there are others.

Drawing follows Efraimidis and Spirakis: take the `count` largest log(u_i) / q_i, with u from the run's seed and the
number of the draw. Left out on purpose: anything that looks at the text of a task.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.judged import PassCount, pass_rate
from shared.config.data import CurriculumConfig
from shared.seeding import derive, uniforms

STREAM = "pass rate"


class PassRate:
    """Prefers tasks near p = 1/2."""

    def __init__(self, strata: Sequence[int], seed: int, config: CurriculumConfig) -> None:
        """strata: [tasks] the stratum of each task, from 0."""
        self.strata = np.array(strata)
        self.seed = seed
        self.config = config
        self.draws = 0
        self.in_flight: list[int] = []
        self.right = np.zeros(len(strata))
        self.samples = np.zeros(len(strata))
        self.last = float("nan")

    def next(self, count: int) -> list[int]:
        """If more tasks are asked for than there are, some come twice."""
        drawn: list[int] = []
        while len(drawn) < count:
            busy = self.in_flight + drawn
            free = np.setdiff1d(np.arange(len(self.strata)), busy)
            drawn += self.draw(free if len(free) else np.arange(len(self.strata)), count - len(drawn))
        self.in_flight += drawn
        return drawn

    def draw(self, free: np.ndarray, count: int) -> list[int]:
        """At most `count` of the free tasks, those with the largest keys first."""
        keys = np.log(1.0 - uniforms(derive(self.seed, STREAM, self.draws), len(self.strata)))
        self.draws += 1
        order = np.argsort(-(keys / self.probabilities())[free], kind="stable")
        return free[order[:count]].tolist()

    def probabilities(self) -> np.ndarray:
        """[tasks] q."""
        variance = self.expected_variance()
        # Relative to the largest, which is then 1 at any sharpness: they do not all become zero.
        promise = (variance / variance.max()) ** self.config.sharpness
        share = self.config.explore
        return (1 - share) * promise / promise.sum() + share / len(promise)

    def expected_variance(self) -> np.ndarray:
        """[tasks] E[p (1 - p)]."""
        mean = self.stratum_means()[self.strata]
        a = self.config.prior * mean + self.right
        b = self.config.prior * (1 - mean) + self.samples - self.right
        return a * b / ((a + b) * (a + b + 1))

    def stratum_means(self) -> np.ndarray:
        """[strata] m."""
        right, samples = (np.bincount(self.strata, weights=counts) for counts in (self.right, self.samples))
        return (right + 1) / (samples + 2)

    def observe(self, groups: Sequence[PassCount]) -> None:
        """Decay the counts, then add the new ones."""
        fade = 0.5 ** (1 / self.config.half_life)
        self.right *= fade
        self.samples *= fade
        for group in groups:
            self.right[group.task] += group.right
            self.samples[group.task] += group.counted
            self.in_flight.remove(group.task)
        self.last = pass_rate(groups)

    def metrics(self) -> CurriculumFigures:
        effective = 1 / float((self.probabilities() ** 2).sum())
        return CurriculumFigures(stage=0, pass_rate=self.last, effective_tasks=effective)

    def way_back(self) -> Callable[[], None]:
        """Not by state_dict, which takes half a second for 200,000 tasks."""
        kept = self.draws, list(self.in_flight), self.right.copy(), self.samples.copy()

        def take_back() -> None:
            self.draws, self.in_flight[:], self.right[:], self.samples[:] = kept

        return take_back

    def state_dict(self) -> dict[str, Any]:
        """Counts of tasks that were seen; a float's shortest form reads back as the same float."""
        seen = np.flatnonzero(self.samples).tolist()
        counts = {str(task): [float(self.right[task]), float(self.samples[task])] for task in seen}
        return {"draws": self.draws, "in_flight": list(self.in_flight), "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = int(state["draws"])
        self.in_flight = list(state["in_flight"])
        self.right[:] = 0.0
        self.samples[:] = 0.0
        for task, (right, samples) in state["counts"].items():
            self.right[int(task)], self.samples[int(task)] = right, samples
