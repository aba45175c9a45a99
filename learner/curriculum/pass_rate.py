"""Tasks drawn where groups teach most: in proportion to the expected p (1 - p), from the run's own rollouts.

A group of G answers, each right with probability p, has outcome variance p (1 - p): nothing to learn from what always
or never succeeds. p of a task is not known but has a distribution, Beta(a, b):

    a = k m + right        b = k (1 - m) + wrong        m = (R + 1) / (S + 2)
    E[p (1 - p)] = a b / ((a + b) (a + b + 1))
    q = (1 - e) E^c / sum E^c + e / number of tasks

right and wrong are the task's own answers, R of S those of all tasks in its stratum (the tasks that share one value of
`curriculum.column`; all, where there is no such column): so what is seen of some tasks is expected of their like, with
the weight of k answers. The policy moves, so all counts halve every `half_life` steps. Draws are without replacement
within a call, and never of a task that is being sampled, while there are others.

The draws are Efraimidis and Spirakis' weighted sampling: the `count` largest log(u_i) / q_i, u from the run's seed and
the number of the call. Left out on purpose: anything that looks at the text of a task.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.pass_counts import Observed, pass_rate
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
        """Weighted draws; a call for more tasks than there are goes round again."""
        drawn: list[int] = []
        while len(drawn) < count:
            busy = self.in_flight + drawn
            free = np.setdiff1d(np.arange(len(self.strata)), busy)
            drawn += self.draw(free if len(free) else np.arange(len(self.strata)), count - len(drawn))
        self.in_flight += drawn
        return drawn

    def draw(self, free: np.ndarray, count: int) -> list[int]:
        """At most `count` of these tasks, the best keys first."""
        keys = np.log(1.0 - uniforms(derive(self.seed, STREAM, self.draws), len(self.strata)))
        self.draws += 1
        order = np.argsort(-(keys / self.probabilities())[free], kind="stable")
        return free[order[:count]].tolist()

    def probabilities(self) -> np.ndarray:
        """[tasks] q."""
        promise = self.expected_variance() ** self.config.sharpness
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

    def observe(self, groups: Sequence[Observed]) -> None:
        """Older counts fade, new ones come in."""
        fade = 0.5 ** (1 / self.config.half_life)
        self.right *= fade
        self.samples *= fade
        for group in groups:
            self.right[group.task] += group.right
            self.samples[group.task] += group.samples
            self.in_flight.remove(group.task)
        self.last = pass_rate(groups)

    def metrics(self) -> CurriculumFigures:
        """How sharply it chooses."""
        effective = 1 / float((self.probabilities() ** 2).sum())
        return CurriculumFigures(stage=0, pass_rate=self.last, effective_tasks=effective)

    def state_dict(self) -> dict[str, Any]:
        """Counts of the tasks that were ever seen; a float's shortest form gives the same float back."""
        seen = np.flatnonzero(self.samples).tolist()
        counts = {str(task): [float(self.right[task]), float(self.samples[task])] for task in seen}
        return {"draws": self.draws, "in_flight": self.in_flight, "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.draws = int(state["draws"])
        self.in_flight = list(state["in_flight"])
        self.right[:] = 0.0
        self.samples[:] = 0.0
        for task, (right, samples) in state["counts"].items():
            self.right[int(task)], self.samples[int(task)] = right, samples
