"""Which tokens carry gradient: the top rho of all response tokens of a step, by entropy (arXiv 2506.01939).

    k = ceil(rho * S);  the threshold is the entropy of the k-th token from above;  all tokens at it or above carry

Equals are taken together: the completions of a group often begin alike, with the same entropies, and a cut through such
a class would keep an advantage in one completion and drop the one that cancels it in another. So ties may add to the k.
S counts the samples that are trained on. The threshold is taken over the whole step, so it does not depend on how the
step is cut into micro-batches. The loss is still divided by all tokens. rho = 1 selects everything and needs no
entropies.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def select_tokens(entropies_NT: Sequence[np.ndarray], fraction: float) -> list[np.ndarray]:
    """N ragged rows of [T] entropies -> N rows of [T] bool, with at least ceil(rho * S) True."""
    falling = -np.concatenate(entropies_NT)
    threshold = np.sort(falling)[share_count(fraction, len(falling)) - 1]
    # Not "<=": an entropy that is no number is selected, so that the update sees the fault behind it.
    chosen = ~(falling > threshold)
    return np.split(chosen, np.cumsum([len(row) for row in entropies_NT])[:-1])


def share_count(fraction: float, count: int) -> int:
    """ceil(fraction * count) of the number as it was written: in floats 0.55 * 100 is more than 55."""
    return math.ceil(Fraction(repr(fraction)) * count)
