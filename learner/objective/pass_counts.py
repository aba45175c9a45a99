"""What one group came to, as a curriculum sees it: which task, how many answers count, how many of them were right.

An answer counts where the verifier's treatment says `train` or `mask`; right is the outcome `correct`, so a truncated
answer that counts was not right. For a reward function of the user's own that means a value of at least one half. Left
out on purpose: scores. What a group can teach follows from right and wrong, and p (1 - p) needs nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from learner.objective.batch import kept_samples
from protocol.messages import Group, Outcome
from shared.config.tree import Config


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One group, counted."""

    task: int
    """Index of the task."""
    right: int
    """Answers that are correct."""
    samples: int
    """Answers that count, G at most."""


def observed(tasks: Sequence[int], groups: Sequence[Group], config: Config) -> list[Observed]:
    """Tasks and their groups, both in slot order."""
    return [count(task, group, config) for task, group in zip(tasks, groups, strict=True)]


def count(task: int, group: Group, config: Config) -> Observed:
    """One group."""
    kept = kept_samples(group, config)
    right = [outcome is Outcome.CORRECT for outcome in group.outcomes]
    return Observed(task=task, right=sum(r for r, k in zip(right, kept, strict=True) if k), samples=int(kept.sum()))


def pass_rate(groups: Sequence[Observed]) -> float:
    """Share of right answers; NaN where nothing was counted."""
    samples = sum(group.samples for group in groups)
    return sum(group.right for group in groups) / samples if samples else float("nan")
