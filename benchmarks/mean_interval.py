"""The mean of a handful of runs with its 95 % interval: mean -+ t(0.975, n - 1) s / sqrt(n)."""

import math
import statistics
from collections.abc import Sequence

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's quantile by degrees of freedom."""


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """[mean, low, high] of two to ten values; None of fewer."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(value, 4) for value in (mean, mean - half, mean + half)]
