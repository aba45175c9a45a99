"""Curves of many steps in as many points as a chart is wide.

    10,000 steps in 100 points: each stands for 100 neighbouring steps, with their mean, smallest and largest value

So a peak of one step stays visible. A figure that was not measured in any step of a point is a gap. Left out on
purpose: smoothing, and points by time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


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


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Several of them, with the same points. NaN: not measured in any step of the point."""

    step: list[int]
    """As in Thinned."""
    mean: np.ndarray
    """[curves, points] float64, like the next two."""
    low: np.ndarray
    high: np.ndarray


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> Curves:
    """steps: [steps], values: [curves, steps]. At most so many points, of about as many steps each."""
    # Place of the first step of each point.
    starts = np.unique(np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int))[:-1]
    if not len(starts):
        return Curves(step=[], mean=values, low=values, high=values)
    last = steps[np.append(starts[1:], len(steps)) - 1].astype(int).tolist()
    if len(starts) == len(steps):
        return Curves(step=last, mean=values, low=values, high=values)
    known = ~np.isnan(values)
    counts = np.add.reduceat(known.astype(np.int64), starts, axis=1)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=1)
    return Curves(
        step=last,
        mean=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        low=np.fmin.reduceat(values, starts, axis=1),
        high=np.fmax.reduceat(values, starts, axis=1),
    )


def one_by_one(curves: Curves) -> Iterator[Thinned]:
    for mean, low, high in zip(*map(with_gaps, (curves.mean, curves.low, curves.high)), strict=True):
        yield Thinned(step=curves.step, mean=mean, low=low, high=high)


def with_gaps(values: np.ndarray) -> list[list[float | None]]:
    """None for NaN."""
    found = values.astype(object)
    found[np.isnan(values)] = None
    return found.tolist()
