"""What a sample is worth: the verifier's score, and the shaping of the configuration on top, each part kept apart.

    r = score + sum_k w_k named_k + w_length clip((T - free) / (cap - free), 0, 1) + truncated

The outcome is not touched by any of it: a long right answer is right.
"""

import numpy as np

from protocol.messages import Finish, Group
from shared.config.named_rewards import weights
from shared.config.tree import Config
from shared.errors import TrainingStopped


def rewards(group: Group, config: Config) -> np.ndarray:
    """[G] all parts, weighted."""
    total = np.array(group.scores)
    for name, weight in weights(config.verifier.rewards).items():
        total = total + weight * np.array(group.rewards[name])
    truncated = np.array([finish is Finish.LENGTH for finish in group.finishes])
    return total + config.reward.length * length_reward(group, config) + config.reward.truncated * truncated


def reward_parts(group: Group, config: Config) -> dict[str, np.ndarray]:
    """[G] by name, unweighted; nothing where the score is all there is."""
    parts = {name: np.array(values) for name, values in group.rewards.items()}
    if config.reward.length:
        parts["length"] = length_reward(group, config)
    return {"outcome": np.array(group.scores), **parts} if parts else {}


def length_reward(group: Group, config: Config) -> np.ndarray:
    """[G] from 0 to 1, by the number of tokens."""
    free, cap = config.reward.length_free, config.rollout.max_new_tokens
    return np.clip((np.array(group.lengths) - free) / max(1, cap - free), 0.0, 1.0)


def refuse_other_rewards(group: Group, config: Config) -> None:
    """An actor of another configuration cannot be learned from."""
    wanted = set(weights(config.verifier.rewards))
    if group.rewards.keys() != wanted:
        raise TrainingStopped(
            f"Group {group.group_id} came with the rewards {sorted(group.rewards)} and the run asks for"
            f" {sorted(wanted)}; start the actor with this run's config.json."
        )
