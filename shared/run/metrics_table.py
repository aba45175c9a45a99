"""metrics.jsonl as columns, read while it grows.

    row of step s    {"step": s, "reward/mean": 0.7, "kl": null, ...}   ->   columns of float64; NaN: not measured

10,000 steps are 5 MB as columns, and ten times as much as rows, so rows are made of columns when they are asked for. A
line that cannot be read is skipped and counted. A file that was replaced, because a resumed run dropped rows, is read
again from its start. Left out on purpose: smoothing.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from shared.run.growing_file import GrowingFile

BLOCK = 2**20
Row = Mapping[str, float | None]
"""The metrics of one step."""


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """A curve in few points; each stands for neighbouring steps. None: not measured in any of them."""

    step: list[int]
    """The last of its steps."""
    mean: list[float | None]
    """Of its steps."""
    low: list[float | None]
    """The smallest."""
    high: list[float | None]
    """The largest."""


class MetricsTable:
    """The metrics of one run. Each call looks at the file again first."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.columns: dict[str, array[float]] = {}
        self.known = 0
        """Rows until now."""
        self.damaged = 0
        """Lines that were skipped."""
        self.generation = 0
        """Changes when rows were dropped."""

    def look(self) -> None:
        """Add the rows that were written since the last look."""
        lines = self.file.new_lines(BLOCK)
        if self.file.generation != self.generation:
            self.generation = self.file.generation
            self.columns, self.known, self.damaged = {}, 0, 0
        while lines:
            for line in lines:
                self.add(line)
            lines = self.file.new_lines(BLOCK)

    def add(self, line: str) -> None:
        row = parsed(line)
        if row is None:
            self.damaged += 1
            return
        for key in row.keys() - self.columns.keys():
            self.columns[key] = array("d", [math.nan] * self.known)
        for key, column in self.columns.items():
            found = row.get(key)
            column.append(math.nan if found is None else found)
        self.known += 1

    def __len__(self) -> int:
        self.look()
        return self.known

    def keys(self) -> list[str]:
        self.look()
        return list(self.columns)

    def column(self, key: str) -> np.ndarray:
        """[steps] float64, a copy; NaN where it was not measured, or for a key that no row has."""
        self.look()
        return np.array(self.columns.get(key, ()) or [math.nan] * self.known, dtype=np.float64)

    def row(self, place: int) -> Row:
        """By place, -1 for the last; null is None."""
        self.look()
        return {key: None if math.isnan(column[place]) else column[place] for key, column in self.columns.items()}

    def rows(self) -> list[Row]:
        self.look()
        return [self.row(place) for place in range(self.known)]

    def thinned(self, keys: Sequence[str], points: int) -> dict[str, Thinned]:
        """Curves for a chart that is so many points wide."""
        steps = self.column("step")
        ends = np.unique(np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int)).tolist()
        parts = [slice(first, last) for first, last in pairwise(ends)]
        return {key: thin(steps, self.column(key), parts) for key in keys}


def thin(steps: np.ndarray, values: np.ndarray, parts: Sequence[slice]) -> Thinned:
    known = [values[part][~np.isnan(values[part])] for part in parts]
    return Thinned(
        step=[int(np.nan_to_num(steps[part][-1])) for part in parts],
        mean=[float(part.mean()) if len(part) else None for part in known],
        low=[float(part.min()) if len(part) else None for part in known],
        high=[float(part.max()) if len(part) else None for part in known],
    )


def parsed(line: str) -> Row | None:
    """None if the line cannot be read."""
    try:
        return msgspec.json.decode(line, type=dict[str, float | None])
    except (ValueError, RecursionError):
        return None
