"""Which tokens of a group were sampled: those of the model's turns, and not what an environment put between them.

    sampled          2 + 3 <end>          7 0 <end>
    put between                 answer: 5
    trained          1 1 1 1    0 0 0     1 1 1            T_i, the length of a completion in every formula, is 7 here

Log-probs, entropies and gradients exist for sampled tokens only. So the entropy threshold, the divisors of the loss,
the KL, the length reward and all figures of a step count these, and the others are context: the model reads them.
Without an environment every token was sampled, and the group says so by having no mask.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from protocol.messages import Group


def trained_tokens(group: Group) -> np.ndarray:
    """[S] bool."""
    return np.ones(len(group.completion_ids), bool) if group.trained is None else group.trained.astype(bool)


def by_completion(group: Group, values_S: np.ndarray) -> list[np.ndarray]:
    """One number a token -> G rows of [T]."""
    return np.split(values_S, np.cumsum(group.lengths)[:-1])


def sampled_lengths(group: Group) -> np.ndarray:
    """[G] sampled tokens of each completion."""
    if group.trained is None:
        return np.array(group.lengths)
    return np.array([int(row.sum()) for row in by_completion(group, trained_tokens(group))])


def turns(group: Group) -> np.ndarray:
    """[G] runs of sampled tokens: how often the model wrote."""
    rows = by_completion(group, trained_tokens(group))
    return np.array([sum(sampled for sampled, _ in pieces(row)) for row in rows])


def pieces(trained_T: np.ndarray) -> Iterator[tuple[bool, slice]]:
    """The turns of one completion and what is between them, in order: whether it was sampled, and where it is."""
    changes = np.flatnonzero(np.diff(trained_T)) + 1
    for start, end in pairwise([0, *changes.tolist(), len(trained_T)]):
        if end > start:
            yield bool(trained_T[start]), slice(start, end)
