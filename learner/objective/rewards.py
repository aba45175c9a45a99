"""The reward of each sample, each part kept apart, and its advantage in its group.

    r = score + sum_k w_k named_k + w_length clip((T - free) / (cap - free), 0, 1) + truncated
    A_i = r_i - mean(r)            or            A_i = (r_i - mean(r)) / (std(r) + 1e-4)

None of the shaping changes the outcome: a long correct completion is correct. A group teaches only if its verifier
scores differ: shaped rewards (a length penalty, say) do not make a group of all-wrong completions informative.
Mean and std run over the group's kept samples. The std is the population's: TRL, verl and torch divide by G - 1, so
advantages here are sqrt(G / (G - 1)) times theirs, 6.9 % more at G = 8; Adam takes most of that out again.
Left out: a critic.
"""

from collections.abc import Mapping

import numpy as np

from learner.objective.turns import sampled_lengths
from protocol.messages import Finish, Group
from shared.config.data import RewardConfig

STD_EPSILON = 1e-4


def rewards(group: Group, named_weights: Mapping[str, float], config: RewardConfig, max_new_tokens: int) -> np.ndarray:
    """[G] all parts, weighted. named_weights: of the named rewards that are not in the scores already."""
    total = np.array(group.scores)
    for name, weight in named_weights.items():
        total = total + weight * np.array(group.rewards[name])
    truncated = np.array([finish is Finish.LENGTH for finish in group.finishes])
    by_length = length_reward(group, config.length_free, max_new_tokens)
    return total + config.length * by_length + config.truncated * truncated


def reward_parts(group: Group, config: RewardConfig, max_new_tokens: int) -> dict[str, np.ndarray]:
    """[G] by name, unweighted; empty if the score is the only part."""
    parts = {name: np.array(values) for name, values in group.rewards.items()}
    if config.length:
        parts["length"] = length_reward(group, config.length_free, max_new_tokens)
    return {"score": np.array(group.scores), **parts} if parts else {}


def length_reward(group: Group, free: int, cap: int) -> np.ndarray:
    """[G] from 0 to 1, by the number of sampled tokens."""
    return np.clip((sampled_lengths(group) - free) / max(1, cap - free), 0.0, 1.0)


def teaches(scores_G: np.ndarray, kept_G: np.ndarray) -> bool:
    """Whether the kept samples' verifier scores differ; False also when fewer than two are kept."""
    scores = scores_G[kept_G]
    return len(scores) > 1 and bool((scores != scores[0]).any())


def group_advantages(rewards_G: np.ndarray, kept_G: np.ndarray, divide_by_std: bool) -> np.ndarray:
    """[G] rewards, [G] bool -> [G] advantages; samples that are not kept get 0 and do not enter the mean."""
    kept = rewards_G[kept_G]
    centred = rewards_G - kept.mean()
    scaled = centred / (kept.std() + STD_EPSILON) if divide_by_std else centred
    return np.where(kept_G, scaled, 0.0)
