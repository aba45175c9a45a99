"""What a run must know of the steps behind it. It is in a checkpoint, so that a resume changes nothing of it.

The best checkpoint is the one with the highest held-out accuracy (greedy answers, evaluated during the run); of two
equals, the later one. Training reward does not choose: a curriculum decides how hard the tasks behind it are, and
shaping counts in it. So a run without `eval.every` has no best checkpoint.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Best:
    """An evaluated checkpoint."""

    step: int
    """Updates behind it."""
    score: float
    """Share of right greedy answers to the held-out tasks."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The steps until now."""

    wall_s: float = 0.0
    """Time spent on them, all lives of the run together."""
    best: Best | None = None
    """The best of the checkpoints that were evaluated; None if none was."""


def better(known: Best | None, found: Best) -> Best:
    """The higher score, or the later of two equals. A step that is evaluated again replaces itself."""
    if known is None or known.step == found.step:
        return found
    return max(known, found, key=lambda best: (best.score, best.step))
