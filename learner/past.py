"""What a ledger must know of the steps behind it. It is in a checkpoint, so that a resume changes no score.

score of a checkpoint = mean sampled reward of the last REWARDS_KEPT steps
"""

from dataclasses import dataclass
from statistics import fmean

REWARDS_KEPT = 5


@dataclass(frozen=True, kw_only=True)
class Past:
    """The steps until now."""

    wall_s: float = 0.0
    """Time spent on them, all lives of the run together."""
    rewards: tuple[float, ...] = ()
    """Mean sampled reward of each of the last steps, REWARDS_KEPT at most."""

    @property
    def score(self) -> float:
        """By which the best checkpoint is chosen."""
        return fmean(self.rewards)
