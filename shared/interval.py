"""The 95 % interval of a share: Wilson's score interval.

    center = (p + z^2 / 2n) / (1 + z^2 / n)
    half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2),   z = 1.96

Unlike p +- z s it stays inside [0, 1] and has a width at p = 0 and p = 1. Left out on purpose: pairing (base and
trained policy answer the same problems, so their difference is surer than two separate intervals suggest).
"""

import math

Z_95 = 1.959963984540054


def wilson(correct: float, n: int) -> tuple[float, float]:
    """(low, high) for `correct` out of `n`; nothing is known at n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2_n = correct / n, Z_95**2 / n
    center = (share + z2_n / 2) / (1 + z2_n)
    half = Z_95 / (1 + z2_n) * math.sqrt(share * (1 - share) / n + z2_n / (4 * n))
    return max(0.0, center - half), min(1.0, center + half)
