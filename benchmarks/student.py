"""Means of a few seeds with their 95 % interval: Student's t, as wide as so few measurements make it."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""By degrees of freedom."""


def mean_interval(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Mean and interval; no interval of a single value."""
    mean = fmean(values)
    half = T_975[len(values) - 1] * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    ends = {"low": round(mean - half, digits), "high": round(mean + half, digits)} if len(values) > 1 else {}
    return {"mean": round(mean, digits), **ends, "n": len(values)}


def ratio_interval(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Geometric mean of value / other, seed by seed, with its interval."""
    logs = [math.log(value / other) for value, other in zip(values, others, strict=True)]
    found = mean_interval(logs, digits=12)
    return {key: found[key] if key == "n" else round(math.exp(found[key]), 3) for key in found}
