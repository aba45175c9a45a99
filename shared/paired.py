"""The difference of two policies on the same tasks, with its 95 % interval by paired bootstrap.

    d_i = a_i - b_i,   D = mean d,   resample the n tasks with replacement B times, take the 2.5 % and 97.5 % quantiles

Tasks are drawn in pairs: what makes a task hard for both falls out of the difference. The draws come from a fixed seed,
so the interval is a function of the data. Beside it stands the exact sign test on the tasks whose outcome flipped,
which says something also where few of them did:

    p = min(1, 2 P(X <= min(up, down))),   X ~ Binomial(up + down, 1/2)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

RESAMPLES = 10_000
QUANTILES = (0.025, 0.975)
CHUNK = 1 << 20
"""Numbers drawn at once."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far apart two policies are on n tasks."""

    mean: float
    """a - b."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end."""
    n: int
    """Tasks."""

    @property
    def certain(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired_bootstrap(a: Sequence[float], b: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Difference:
    """a, b: [n] what each policy scored on each task."""
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    n, rng = len(differences), np.random.Generator(np.random.Philox(key=seed))
    rows = max(1, CHUNK // n)
    means = np.concatenate(
        [
            differences[rng.integers(0, n, (min(rows, resamples - done), n))].mean(axis=1)
            for done in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, QUANTILES)
    return Difference(mean=float(differences.mean()), low=float(low), high=float(high), n=n)


def sign_test(up: int, down: int) -> float:
    """Two-sided p of `up` against `down` flips if each way were equally likely."""
    flips = up + down
    tail = sum(comb(flips, count) for count in range(min(up, down) + 1))
    return min(1.0, 2 * tail / 2**flips)
