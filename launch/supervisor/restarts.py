"""Decides when a dead actor is started again: after a pause that doubles with each death, and up to a limit.

A step of the learner resets the count of deaths.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SupervisorLimits:
    """The supervisor's time limits and its limit on restarts."""

    tick_s: float = 0.1
    """Time between two checks of the processes."""
    silence_s: float = 120.0
    """A process that is stopped for longer is given up. Same value as `link.silence_s`, when its peer gives it up."""
    leaving_s: float = 3.0
    """Time for actors to leave by themselves when the learner has ended, before they are asked to stop."""
    grace_s: float = 10.0
    """An actor that was asked to stop is killed after this time, and so is the tracker of a run that has failed."""
    restarts: int = 5
    """Most restarts of one actor without a step in between."""
    pause_s: float = 0.5
    """Pause before the first restart; doubles with each."""
    longest_pause_s: float = 600.0
    """No pause is longer."""
    steady_s: float = 300.0
    """A follower that has lived for so long works: its earlier deaths no longer count."""
    followers_s: float = 60.0
    """Time for a process that only follows the run (its tracker) to send the rest after the end. The evaluator has no
    limit."""
    after_exit_s: float = 10.0
    """An actor exits 0 when the learner ends. If the learner still runs after this time, the actor is started again."""


class Restarts:
    """Counts deaths and plans the restart of each dead actor."""

    def __init__(self, limits: SupervisorLimits) -> None:
        self.limits = limits
        self.deaths: Counter[str] = Counter()
        self.due: dict[str, float] = {}
        self.steps_done = 0

    def is_planned(self, name: str) -> bool:
        """Whether this actor is waiting for its restart."""
        return name in self.due

    def plan(self, name: str, code: int, now: float) -> bool:
        """Set the time of the restart; False if it died too often. An exit with code 0 is not a failure."""
        if code == 0:
            self.due[name] = now + self.limits.after_exit_s
            return True
        self.deaths[name] += 1
        # A float has no powers of two beyond a thousand.
        doubled = self.limits.pause_s * 2 ** min(self.deaths[name] - 1, 100)
        self.due[name] = now + min(doubled, self.limits.longest_pause_s)
        return self.deaths[name] <= self.limits.restarts

    def take_due(self, name: str, now: float) -> bool:
        """Whether it is time for the restart; if so, the plan is removed."""
        if now < self.due[name]:
            return False
        del self.due[name]
        return True

    def count_steps(self, done: int) -> None:
        """A finished step shows that the actors work, so earlier deaths no longer count."""
        if done > self.steps_done:
            self.steps_done = done
            self.deaths.clear()
