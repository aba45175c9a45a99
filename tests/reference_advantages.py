"""Advantages in float64, slowly, written from the papers' definitions and nothing of ours.

Sources: DeepSeekMath 2402.03300 (std), Dr. GRPO 2503.20783 (mean), RLOO 2402.14740, MaxRL 2602.02710 (algorithm 1),
REINFORCE++ 2501.03262 (the variant with a baseline), GDPO 2601.05242.
"""

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """`mean`, `std`, `rloo` or `maxrl`."""
    n = len(rewards)
    mean = math.fsum(rewards) / n
    match kind:
        case "mean":
            return [r - mean for r in rewards]
        case "std":
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / n)
            return [(r - mean) / (deviation + 1e-4) for r in rewards]
        case "rloo":
            return [r - math.fsum([*rewards[:i], *rewards[i + 1 :]]) / (n - 1) for i, r in enumerate(rewards)]
        case "maxrl":
            return [(r - mean) / mean for r in rewards]
        case unknown:
            raise ValueError(unknown)


def batch_normalised(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """REINFORCE++ with a baseline: (A' - mean of the batch) / its standard deviation, A' = r - mean of the group."""
    return normalised([group_advantages(rewards, "mean") for rewards in groups])


def gdpo(groups: Sequence[Sequence[Sequence[float]]], weights: Sequence[float]) -> list[list[float]]:
    """groups: of each its rewards, K lists of G. A weighted sum of normalised rewards, normalised in the batch."""
    sums = []
    for rewards in groups:
        advantages = [group_advantages(one, "std") for one in rewards]
        count = len(rewards[0])
        sums.append([math.fsum(w * a[i] for w, a in zip(weights, advantages, strict=True)) for i in range(count)])
    return normalised(sums)


def normalised(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Over all samples of a batch."""
    flat = [value for row in groups for value in row]
    mean = math.fsum(flat) / len(flat)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / len(flat))
    return [[(value - mean) / (deviation + 1e-4) for value in row] for row in groups]
