"""The run as lines of text, for logs and pipes."""

import re
from collections.abc import Sequence

from launch.watch import WINDOW, Row, clock, mean, number, outcome_shares, seconds_left, steps_done, value

LINES = 50
"""A longer run prints only every k-th step, so that about this many lines come."""
PATIENCE_S = 30.0
"""A step is printed all the same if nothing was printed for so long."""

STAMP = re.compile(r"^[-\d]{10} [:,\d]{8,12} (?:INFO )?")
"""What logging puts before a message; the log file keeps it."""
LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^(warning|error): ")


class Pace:
    """Which steps get a line."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.every = -(-steps // LINES)
        self.printed_at = float("-inf")

    def due(self, step: int, now: float) -> bool:
        """Every k-th step, the first, the last, and any after a long silence."""
        due = step % self.every == 0 or step in (1, self.steps) or now - self.printed_at >= PATIENCE_S
        if due:
            self.printed_at = now
        return due


def step_line(rows: Sequence[Row], steps: int) -> str:
    """`step 12/40  reward 0.71  mean5 0.69  correct 71%  ...` for the last of these rows."""
    row = rows[-1]
    parts = [
        f"step {steps_done(rows):>{len(str(steps))}}/{steps}",
        f"reward {number(value(row, 'reward/mean'), '.3f')}",
        f"mean5 {number(mean(rows[-WINDOW:], 'reward/mean'), '.3f')}",
        *(f"{name} {share:.0%}" for name, share in outcome_shares(row).items()),
        f"dropped {number(value(row, 'groups/dropped'), '.0f')}/{number(value(row, 'groups/total'), '.0f')}",
        f"entropy {number(value(row, 'entropy/mean'), '.3f')}",
        f"tokens/s {number(value(row, 'tokens_per_s'), '.0f')}",
        f"left {clock(seconds_left(rows, steps))}",
    ]
    return "  ".join(parts)


def loud(line: str) -> bool:
    """Whether a log line is a warning or worse."""
    return LOUD.search(line) is not None


def bare(name: str, line: str) -> str:
    """A log line of this process without time stamp and name, which stands before it anyway."""
    return STAMP.sub("", line).removeprefix(f"{name} ")
