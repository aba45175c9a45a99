"""The reward of each sample: the verifier's score plus the shaping of the configuration, each part kept apart.

    r = score + sum_k w_k named_k + w_length clip((T - free) / (cap - free), 0, 1) + truncated

None of it changes the outcome: a long correct completion is correct.
"""

from collections.abc import Mapping

import numpy as np

from protocol.messages import Finish, Group
from shared.config.data import RewardConfig


def rewards(group: Group, named_weights: Mapping[str, float], config: RewardConfig, max_new_tokens: int) -> np.ndarray:
    """[G] all parts, weighted. named_weights: of the rewards that came with the group."""
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
    return {"outcome": np.array(group.scores), **parts} if parts else {}


def length_reward(group: Group, free: int, cap: int) -> np.ndarray:
    """[G] from 0 to 1, by the number of tokens."""
    return np.clip((np.array(group.lengths) - free) / max(1, cap - free), 0.0, 1.0)
