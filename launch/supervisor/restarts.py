"""When a dead actor is started again: after a pause that doubles, and only so often without a step in between."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long, how often."""

    tick_s: float = 0.1
    """Between two looks at the processes."""
    silence_s: float = 120.0
    """A process that was stopped for longer is given up; as `link.silence_s`, after which its peer does so."""
    grace_s: float = 10.0
    """An actor that was asked to stop is killed after this."""
    restarts: int = 5
    """Of one actor, without a step in between."""
    pause_s: float = 0.5
    """Before the first restart; doubles with each."""
    farewell_s: float = 10.0
    """An actor that exits 0 was sent home, so the learner should end too; after this long it is started again."""


class Restarts:
    """Counts deaths and knows when each dead actor is due."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.deaths: Counter[str] = Counter()
        self.due: dict[str, float] = {}
        self.steps_done = 0

    def noticed(self, name: str) -> bool:
        """Whether this death is already waiting for its restart."""
        return name in self.due

    def plan(self, name: str, code: int, now: float) -> bool:
        """Set the time of the restart; False when it died too often. An exit with 0 is no failure."""
        if code == 0:
            self.due[name] = now + self.patience.farewell_s
            return True
        self.deaths[name] += 1
        self.due[name] = now + self.patience.pause_s * 2 ** (self.deaths[name] - 1)
        return self.deaths[name] <= self.patience.restarts

    def take_due(self, name: str, now: float) -> bool:
        """Whether it is time; if so, the wait is over."""
        if now < self.due[name]:
            return False
        del self.due[name]
        return True

    def steps(self, done: int) -> None:
        """A finished step proves the actors are well: deaths before it are forgiven."""
        if done > self.steps_done:
            self.steps_done = done
            self.deaths.clear()
