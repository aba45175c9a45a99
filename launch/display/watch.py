"""The metrics of a run, read from metrics.jsonl while it grows, and what the display computes from them.

The file has one JSON object for each step (`shared/run/metrics.py`). A missing or null key counts as NaN, is shown as a
dash, and is left out of a mean. A line that cannot be read is skipped (a power cut may leave zeros): the display must
never end a run.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from protocol.outcome import Outcome
from shared.run.growing_file import GrowingFile
from shared.run.metrics import Row, parsed

PHASES = ("rollout", "verify", "swap", "update", "idle")
IN_TURNS = ("rollout", "swap")
"""What actors on one card, or on too few cores, do one after the other."""
WINDOW = 5
"""Steps in a moving mean."""


class Watch:
    """The rows of one run."""

    def __init__(self, metrics: Path) -> None:
        self.file = GrowingFile(metrics)
        self.generation = 0
        self.rows: list[Row] = []

    def poll(self) -> list[Row]:
        """The new rows. If the file was replaced: the rows that the old one did not have."""
        found = [row for line in self.file.new_lines() if (row := parsed(line)) is not None]
        if self.file.generation == self.generation:
            self.rows += found
            return found
        self.generation = self.file.generation
        before, self.rows = {step_of(row): row for row in self.rows}, found
        return [row for row in found if row != before.get(step_of(row))]


def step_of(row: Row) -> int:
    """Counted from 1; 0 if the row does not say."""
    return int(row.get("step") or 0)


def value(row: Row, key: str) -> float:
    found = row.get(key)
    return math.nan if found is None else float(found)


def known(rows: Sequence[Row], key: str) -> list[float]:
    return [found for row in rows if not math.isnan(found := value(row, key))]


def mean(rows: Sequence[Row], key: str) -> float:
    """NaN if it was measured in none of them."""
    found = known(rows, key)
    return fmean(found) if found else math.nan


def goal(rows: Sequence[Row]) -> str:
    """The figure that training is about: a warm start has no rewards."""
    return "loss" if rows and math.isnan(value(rows[-1], "reward/mean")) else "reward/mean"


def curve(rows: Sequence[Row]) -> list[float]:
    return [value(row, goal(rows)) for row in rows]


def steps_done(rows: Sequence[Row]) -> int:
    """The number of the last finished step."""
    return step_of(rows[-1]) if rows else 0


def time_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of each phase in the time of the last steps."""
    late = [phase_seconds(row) for row in rows[-WINDOW:]]
    seconds = {phase: mean(late, phase) for phase in PHASES}
    known = {phase: s for phase, s in seconds.items() if not math.isnan(s)}
    total = sum(known.values())
    return {phase: s / total for phase, s in known.items()} if total > 0 else {}


def phase_seconds(row: Row) -> dict[str, float]:
    """How long each phase of a step was. A row has the sum over all actors, who score at once; they also decode at
    once, unless they take turns, and then all of it fits into the step. From time/idle_s the sums are taken off, so it
    is too small with several. The page does the same (ui/static/figures.js).
    """
    found = {phase: value(row, f"time/{phase}_s") for phase in PHASES}
    count = actors_at_work(row)
    found["verify"] /= count
    left = value(row, "time/step_s") - found["update"] - found["verify"]
    summed = sum(found[phase] for phase in IN_TURNS if not math.isnan(found[phase]))
    at_once = min(count, max(1.0, summed / left)) if left > 0 else count
    if count > 1:
        found["idle"] = max(left - summed / at_once, 0.0)
    return found | {phase: found[phase] / at_once for phase in IN_TURNS}


def actors_at_work(row: Row) -> int:
    """Those that had an order in this step; 1 in a run with one actor."""
    return max(1, sum(value(figures, "waiting") < 1.0 for figures in actor_figures(row).values()))


def outcome_shares(row: Row) -> dict[str, float]:
    """Only the outcomes that occurred in this step."""
    shares = {outcome.value: value(row, f"outcome/{outcome}") for outcome in Outcome}
    return {name: share for name, share in shares.items() if share > 0}


def actor_figures(row: Row) -> dict[str, Row]:
    """By actor id; empty in a run with one actor. Columns of actors that came later are null in the rows before."""
    figures: dict[str, dict[str, float | None]] = {}
    for key, found in row.items():
        if key.startswith("actors/") and found is not None:
            actor_id, _, name = key.removeprefix("actors/").rpartition("/")
            figures.setdefault(actor_id, {})[name] = found
    return dict(figures)


def seconds_left(rows: Sequence[Row], steps: int) -> float:
    """At the pace of the last steps."""
    return (steps - steps_done(rows)) * mean(rows[-WINDOW:], "time/step_s")


def clock(seconds: float) -> str:
    """75.2 -> 1:15, 3700 -> 1:01:40."""
    if math.isnan(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds(amount: float) -> str:
    """`0.42 s`, `12 s`, `21 min`, `3.5 h`."""
    if amount < 120:
        return f"{amount:.2g} s" if amount < 10 else f"{amount:.0f} s"
    return f"{amount / 60:.0f} min" if amount < 7200 else f"{amount / 3600:.1f} h"


def number(amount: float, form: str) -> str:
    """A dash if the number is not known."""
    return "-" if math.isnan(amount) else format(amount, form)
