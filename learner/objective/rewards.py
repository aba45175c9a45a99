"""The reward of each sample, each part kept apart, and its advantage in its group.

    r = score + sum_k w_k named_k + w_length clip((T - free) / (cap - free), 0, 1) + truncated

    mean    A_i = r_i - mean(r)                             Dr. GRPO (2503.20783)
    std     A_i = (r_i - mean(r)) / (std(r) + 1e-4)         GRPO (2402.03300)
    rloo    A_i = r_i - mean of the others' r               RLOO (2402.14740)
    maxrl   A_i = (r_i - mean(r)) / mean(r)                 MaxRL (2602.02710), for scores from 0 to 1
    batch   A_i = (r_i - mean(r)) / (std_step + 1e-4)       REINFORCE++ with a baseline (2501.03262)
    gdpo    A_i = z_i / (std_step + 1e-4),                  GDPO (2601.05242)
            z_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-4), over the parts k of the reward

std_step is the standard deviation of what is divided, r_i - mean(r) or z_i, over the samples of the step: those of
groups that teach nothing count with 0, as in the divisor of the loss, and its mean is 0 in every group.
None of the shaping changes the outcome: a long correct completion is correct. A group teaches only if its verifier
scores differ: shaped rewards (a length penalty, say) do not make a group of all-wrong completions informative.
With `gdpo` and a score that is a sum of rewards, it teaches if their z_i differ, whether or not the score does.
Mean and std run over the group's kept samples. The std is the population's: TRL, verl and torch divide by G - 1, so
advantages here are sqrt(G / (G - 1)) times theirs, 6.9 % more at G = 8; Adam takes most of that out again.
Left out: a critic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from learner.objective.turns import sampled_lengths
from protocol.messages import Finish, Group
from shared.config.data import RewardConfig

STD_EPSILON = 1e-4
OfOneGroup = Literal["mean", "std", "rloo", "maxrl"]
"""Advantages that no other group has a part in."""


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """One of several rewards."""

    weight: float
    """w_k"""
    values: np.ndarray
    """[G] r_k"""
    in_score: bool = False
    """Whether the score has it already: it is the score itself, or one of the rewards that add up to it."""


def parts_of(
    group: Group, named_weights: Mapping[str, float], config: RewardConfig, max_new_tokens: int, *, scored: bool
) -> tuple[RewardPart, ...]:
    """What a reward is made of. scored: the score is the weighted sum of the named rewards, and no part of its own."""
    truncated = np.array([finish is Finish.LENGTH for finish in group.finishes], dtype=np.float64)
    score = [] if scored else [RewardPart(weight=1.0, values=np.array(group.scores), in_score=True)]
    return (
        *score,
        *(
            RewardPart(weight=weight, values=np.array(group.rewards[name]), in_score=scored)
            for name, weight in named_weights.items()
        ),
        RewardPart(weight=config.length, values=length_reward(group, config.length_free, max_new_tokens)),
        RewardPart(weight=config.truncated, values=truncated),
    )


def total_reward(group: Group, parts: Sequence[RewardPart]) -> np.ndarray:
    """[G] the score and what is added to it."""
    total = np.array(group.scores)
    for part in parts:
        if not part.in_score:
            total = total + part.weight * part.values
    return total


def reward_parts(group: Group, config: RewardConfig, max_new_tokens: int) -> dict[str, np.ndarray]:
    """[G] by name, unweighted; empty if the score is the only part."""
    parts = {name: np.array(values) for name, values in group.rewards.items()}
    if config.length:
        parts["length"] = length_reward(group, config.length_free, max_new_tokens)
    return {"score": np.array(group.scores), **parts} if parts else {}


def length_reward(group: Group, free: int, cap: int) -> np.ndarray:
    """[G] from 0 to 1, by the number of sampled tokens."""
    return np.clip((sampled_lengths(group) - free) / max(1, cap - free), 0.0, 1.0)


def teaches(values_G: np.ndarray, kept_G: np.ndarray, rounding: float = 0.0) -> bool:
    """Whether the kept samples' values differ by more than rounding; False also when fewer than two are kept."""
    kept = values_G[kept_G]
    return len(kept) > 1 and bool(np.ptp(kept) > rounding)


def group_advantages(rewards_G: np.ndarray, kept_G: np.ndarray, kind: OfOneGroup) -> np.ndarray:
    """[G] rewards, [G] bool -> [G] advantages; samples that are not kept get 0 and do not enter the mean."""
    kept = rewards_G[kept_G]
    centred = rewards_G - kept.mean()
    match kind:
        case "mean":
            scaled = centred
        case "std":
            scaled = centred / (kept.std() + STD_EPSILON)
        case "rloo":
            # r_i - (n mean - r_i) / (n - 1)
            scaled = centred * (len(kept) / (len(kept) - 1))
        case "maxrl":
            scaled = centred / kept.mean()
    return np.where(kept_G, scaled, 0.0)


def combined(parts: Sequence[RewardPart], kept_G: np.ndarray) -> np.ndarray:
    """[G] sum of the parts of a reward, each over its own standard deviation."""
    total = np.zeros(len(kept_G))
    for part in parts:
        total = total + part.weight * group_advantages(part.values, kept_G, "std")
    return total


def over_step_std(advantages: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
    """Ragged rows of [G], each of mean 0 -> the same over their standard deviation. samples: of the step, with those
    that are 0 and not among them."""
    std = math.sqrt(sum(float(np.square(row).sum()) for row in advantages) / samples) if samples else 0.0
    return [row / (std + STD_EPSILON) for row in advantages]
