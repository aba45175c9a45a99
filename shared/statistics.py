"""Statistics of evaluations: the interval of a share, the difference of two policies, pass@k and maj@k.

Share: Wilson's 95 % score interval. Unlike p +- z s it stays inside [0, 1] and has a width at p = 0 and p = 1.

    center = (p + z^2 / 2n) / (1 + z^2 / n)
    half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2),   z = 1.96

Difference of two policies on the same tasks: d_i = a_i - b_i, D = mean d.

- Every d is -1, 0 or 1: Tango's score interval for paired shares, and the exact sign test

      p = min(1, 2 P(X <= min(up, down))),   X ~ Binomial(up + down, 1/2)

- Otherwise, if at least MANY tasks differ: the paired bootstrap. The n tasks are resampled in pairs, so that tasks that
  are hard for both policies cancel out. The seed is fixed, so the interval is a function of the data.
- With fewer tasks that differ, or with 0/1 differences, the bootstrap is too confident: with four flips against none it
  excludes zero one time in eight when the policies are equal. So the sign test decides, and an interval that excludes
  zero without a significant test is widened to include it.

k completions of a task, estimated without bias from n >= k of which c are right:

    pass@k = P(at least one of k is right)      = 1 - C(n - c, k) / C(n, k)
    maj@k  = P(the most frequent final answer of k is right), where a tie of m final answers counts 1/m for each

Both are means over all C(n, k) subsets, so k = n is what was sampled; a smaller k has less noise than new samples.
maj@k adds up, over the votes v for the right final answer, the chance that no other gets more, and that a random draw
among those that get as many picks it:

    maj@k = 1 / b_n(k) * sum_v b_c(v) * [z^(k-v)] integral_0^1 prod_i (sum_(g<v) b_i(g) z^g + x b_i(v) z^v) dx

with b_m(g) the chance of g among m completions if each is chosen by itself: given that k are chosen, all subsets are as
likely. The integral of x^t is 1 / (1 + t), for t ties. The products are taken at the roots of unity, which is quick for
thousands of completions, and right to DECIMALS. A completion without a final answer has no vote; with no votes at all,
nothing is right. Left out on purpose: plug-in estimates such as 1 - (1 - c/n)^k, which are biased for small n.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import comb, sqrt
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
CHUNK = 1 << 20
"""Largest number of values in memory at once."""
MANY = 30
"""Number of tasks that must differ for the bootstrap to decide."""
DECIMALS = 10
"""Of maj@k."""
NEGLIGIBLE = 1e-16
"""A chance that changes none of them."""
MOST_NODES = 200
"""Enough for as many ties as an evaluation can have."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two policies on n tasks."""

    mean: float
    """a - b."""
    low: float
    """Lower end of its interval."""
    high: float
    """Upper end."""
    n: int
    """Tasks."""
    p: float | None = None
    """p of the sign test if it decides, or None if the bootstrap does."""

    @property
    def certain(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """a, b: [n] score of each policy on each task. level: of the interval and the test."""
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    up, down, n = int((differences > 0).sum()), int((differences < 0).sum()), len(differences)
    zero_one = bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())
    if not zero_one and up + down >= MANY:
        return paired_bootstrap(a, b, level)
    low, high = tango(up, down, n, level) if zero_one else ends_of(paired_bootstrap(a, b, level))
    p = sign_test(up, down)
    if p > 1 - level:
        low, high = min(low, 0.0), max(high, 0.0)
    return Difference(mean=float(differences.mean()), low=low, high=high, n=n, p=p)


def ends_of(found: Difference) -> tuple[float, float]:
    return found.low, found.high


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], level: float = 0.95, resamples: int = RESAMPLES
) -> Difference:
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    n, rng = len(differences), np.random.Generator(np.random.Philox(key=0))
    rows = max(1, CHUNK // n)
    means = np.concatenate(
        [
            differences[rng.integers(0, n, (min(rows, resamples - done), n))].mean(axis=1)
            for done in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Difference(mean=float(differences.mean()), low=float(low), high=float(high), n=n)


def sign_test(up: int, down: int) -> float:
    """Two-sided p of `up` against `down` flips if each way were equally likely."""
    flips = up + down
    tail = sum(comb(flips, count) for count in range(min(up, down) + 1))
    return min(1.0, 2 * tail / 2**flips)


def tango(up: int, down: int, n: int, level: float) -> tuple[float, float]:
    """All differences that the score test does not reject (Tango 1998).

    (up - down - n D)^2 <= z^2 n (2 q + D (1 - D)),   q = the likeliest share of `down` if D is the difference
    """
    z2, seen = NormalDist().inv_cdf((1 + level) / 2) ** 2, (up - down) / n

    def is_inside(difference: float) -> bool:
        linear = (2 * n - up + down) * difference - up - down
        root = sqrt(max(0.0, linear * linear + 8 * n * down * difference * (1 - difference)))
        share = max(0.0, (root - linear) / (4 * n))
        spread = n * max(0.0, 2 * share + difference * (1 - difference))
        return (up - down - n * difference) ** 2 <= z2 * spread

    return edge(is_inside, seen, -1.0), edge(is_inside, seen, 1.0)


def edge(is_inside: Callable[[float], bool], within: float, limit: float) -> float:
    """Where an interval around `within` ends on the way to `limit`, by bisection."""
    if is_inside(limit):
        return limit
    outside = limit
    for _ in range(60):
        middle = (within + outside) / 2
        within, outside = (middle, outside) if is_inside(middle) else (within, middle)
    return within


Z_95 = 1.959963984540054


def wilson(correct: float, n: int) -> tuple[float, float]:
    """(low, high) for `correct` out of `n`; (0, 1) at n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2_n = correct / n, Z_95**2 / n
    center = (share + z2_n / 2) / (1 + z2_n)
    half = Z_95 / (1 + z2_n) * math.sqrt(share * (1 - share) / n + z2_n / (4 * n))
    return max(0.0, center - half), min(1.0, center + half)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Share of the subsets of k with at least one that is right."""
    return 1 - comb(n - right, k) / comb(n, k)


def maj_at_k(right: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """right: votes for the right final answer. wrong: votes for each other one. silent: completions without a vote."""
    return _maj_at_k(right, tuple(sorted(wrong)), silent, k)


@cache
def _maj_at_k(right: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """Cached, because many tasks have the same counts."""
    n = right + sum(wrong) + silent
    # Any share gives the same result; this one makes k the likeliest number, and is neither 0 nor 1.
    share = (k + 0.5) / (n + 1)
    chances = binomial(right, share)
    # No fewer votes than make k with all other completions.
    possible = range(max(1, k - n + right), min(right, k) + 1)
    won = sum(
        chances[votes] * chance_to_win(wrong, silent, votes, k - votes, share)
        for votes in possible
        if chances[votes] > NEGLIGIBLE
    )
    return max(0.0, round(float(won / binomial(n, share)[k]), DECIMALS))


def chance_to_win(wrong: Sequence[int], silent: int, votes: int, others: int, share: float) -> float:
    """Chance that `others` of the other completions are chosen, that no rival gets more than `votes`, and that the
    right final answer is drawn among those that get as many."""
    strong = Counter(size for size in wrong if size >= votes)
    ties, weights = gauss(min(strong.total(), others // votes))
    length = sum(wrong) + silent + 1
    root = np.exp(-2j * np.pi * np.arange(length // 2 + 1) / length)
    weak = silent + sum(size for size in wrong if size < votes)
    product = (1 - share + share * root) ** weak
    for size, count in strong.items():
        chances = binomial(size, share)
        fewer, as_many = np.fft.rfft(chances[:votes], length), chances[votes] * root**votes
        product = product * (fewer + ties * as_many) ** count
    return np.fft.irfft(weights @ np.atleast_2d(product), length)[others]


@cache
def gauss(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Places [nodes, 1] and weights [nodes] of Gauss's rule from 0 to 1, for a polynomial of this degree."""
    places, weights = np.polynomial.legendre.leggauss(min(degree // 2 + 1, MOST_NODES))
    return (places[:, None] + 1) / 2, weights / 2


@lru_cache(maxsize=1024)
def binomial(n: int, share: float) -> np.ndarray:
    """[n + 1] chance of each number of n, where each of them comes with probability `share`."""
    log_factorials = np.array([math.lgamma(number + 1) for number in range(n + 1)])
    counts = np.arange(n + 1)
    logs = log_factorials[n] - log_factorials - log_factorials[::-1]
    return np.exp(logs + counts * math.log(share) + (n - counts) * math.log1p(-share))


def sizes(n: int) -> list[int]:
    """1, 2, 4 ... and n itself."""
    powers = [2**power for power in range(n.bit_length()) if 2**power < n]
    return [*powers, n]
