"""Group-relative advantages.

    A_i = r_i - mean(r)            or            A_i = (r_i - mean(r)) / (std(r) + 1e-4)

Mean and std run over the group's kept samples. The std is the population's: TRL, verl and torch divide by G - 1, so
advantages here are sqrt(G / (G - 1)) times theirs, 6.9 % more at G = 8; Adam takes most of that out again. A group
teaches only if its verifier scores differ: shaped rewards (a length penalty, say) do not make a group of all-wrong
completions informative. Left out: a critic.
"""

import numpy as np

STD_FLOOR = 1e-4


def teaches(scores_G: np.ndarray, kept_G: np.ndarray) -> bool:
    """Whether the kept samples' verifier scores differ; False also when fewer than two are kept."""
    scores = scores_G[kept_G]
    return len(scores) > 1 and bool((scores != scores[0]).any())


def group_advantages(rewards_G: np.ndarray, kept_G: np.ndarray, divide_by_std: bool) -> np.ndarray:
    """[G] rewards, [G] bool -> [G] advantages; samples that are not kept get 0 and do not enter the mean."""
    kept = rewards_G[kept_G]
    centred = rewards_G - kept.mean()
    scaled = centred / (kept.std() + STD_FLOOR) if divide_by_std else centred
    return np.where(kept_G, scaled, 0.0)
