"""Which tokens carry gradient: the top rho of all response tokens of a step, by entropy (arXiv 2506.01939).

    k = ceil(rho * S);  the k tokens with the highest entropy, earlier ones first among equals

The threshold is taken over the whole step, so it does not depend on how the step is cut into micro-batches. The loss is
still divided by all S tokens. rho = 1 selects everything and needs no entropies.
"""

import math
from collections.abc import Sequence

import numpy as np


def select_tokens(entropies_NT: Sequence[np.ndarray], fraction: float) -> list[np.ndarray]:
    """N ragged rows of [T] entropies -> N rows of [T] bool, with exactly ceil(rho * S) True."""
    flat = np.concatenate(entropies_NT)
    chosen = np.zeros(len(flat), dtype=bool)
    count = math.ceil(fraction * len(flat))
    chosen[np.argsort(-flat, kind="stable")[:count]] = True
    return np.split(chosen, np.cumsum([len(row) for row in entropies_NT])[:-1])
