"""What is known about a running run, read from metrics.jsonl as it grows.

One JSON object a line, one line a step (`shared/run/metrics.py`). Keys that are missing or null count as not a number
and
are shown as a dash; a line that is no such object (a power cut may leave zeros) is passed over:
a picture must not end a run.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from launch.supervisor.growing_file import GrowingFile

Row = Mapping[str, float | None]

PHASES = ("rollout", "verify", "update", "idle")
OUTCOMES = ("correct", "wrong", "unparsable", "truncated", "timeout", "error", "abstain")
WINDOW = 5


class Watch:
    """The rows of one run so far."""

    def __init__(self, metrics: Path) -> None:
        self.file = GrowingFile(metrics)
        self.generation = 0
        self.rows: list[Row] = []

    def poll(self) -> list[Row]:
        """The rows that are new; in a file written anew, those that did not stand in the old one."""
        found = [row for line in self.file.new_lines() for row in parsed(line)]
        if self.file.generation == self.generation:
            self.rows += found
            return found
        self.generation = self.file.generation
        before, self.rows = self.rows, found
        return [row for row in found if row not in before]


def parsed(line: str) -> list[Row]:
    """The row in a line, if it is one."""
    try:
        return [msgspec.json.decode(line, type=dict[str, float | None])]
    except (ValueError, RecursionError):
        return []


def step_of(row: Row) -> int:
    """Its number, counted from 1."""
    return int(row.get("step") or 0)


def value(row: Row, key: str) -> float:
    """A metric, or not-a-number."""
    found = row.get(key)
    return math.nan if found is None else float(found)


def mean(rows: Sequence[Row], key: str) -> float:
    """Over the given rows."""
    return sum(value(row, key) for row in rows) / len(rows) if rows else math.nan


def rewards(rows: Sequence[Row]) -> list[float]:
    """The reward of each step."""
    return [value(row, "reward/mean") for row in rows]


def steps_done(rows: Sequence[Row]) -> int:
    """The number of the last finished step."""
    return step_of(rows[-1]) if rows else 0


def time_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of each phase in the time of the last five steps."""
    seconds = {phase: mean(rows[-WINDOW:], f"time/{phase}_s") for phase in PHASES}
    known = {phase: s for phase, s in seconds.items() if not math.isnan(s)}
    total = sum(known.values())
    return {phase: s / total for phase, s in known.items()} if total > 0 else {}


def outcome_shares(row: Row) -> dict[str, float]:
    """Outcomes that occurred in this step, with their fraction."""
    return {name: value(row, f"outcome/{name}") for name in OUTCOMES if value(row, f"outcome/{name}") > 0}


def seconds_left(rows: Sequence[Row], steps: int) -> float:
    """Remaining steps at the pace of the last five."""
    return (steps - steps_done(rows)) * mean(rows[-WINDOW:], "time/step_s")


def clock(seconds: float) -> str:
    """75.2 -> 1:15, 3700 -> 1:01:40."""
    if math.isnan(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(amount: float, form: str) -> str:
    """Formatted, or a dash where the number is not known."""
    return "-" if math.isnan(amount) else format(amount, form)
