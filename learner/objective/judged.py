"""What became of one group, worked out once, when its step is collected.

    group -> Admission (before the journal) -> Judge -> JudgedGroup -> curriculum, replacements, batch, metrics, log

    kept      the sample enters means: the verifier's treatment of its outcome is `train` or `mask`
    in_loss   it enters the loss as well: `train`
    teaches   the kept scores differ (or rewards, with reward.shaped_groups = "train") and something is trained on; with
              `gdpo`, the sum of their normalised parts does; with answers to learn (sft) or a teacher to follow (opd)
              the scores need not differ
    right     kept samples whose outcome is `correct`, so a truncated one is not; counted: all kept samples

With a reward function of the user's own, a completion is `correct` if its score is 0.5 or more, or the value of the
reward that `verifier.correct` names. Left out on purpose: scores in the pass counts. What a group can teach follows
from right and wrong, and p (1 - p) needs nothing else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from learner.objective.rewards import RewardPart, combined, parts_of, reward_parts, teaches, total_reward
from learner.tasks.tasks import Task
from protocol.messages import FilledOrder, Group, Outcome
from shared.config.data import RewardConfig, VerifierConfig
from shared.config.named_rewards import weights
from shared.errors import TrainingStopped

ROUNDING = 1e-6
"""More than is left of normalised rewards that cancel each other; they are around 1."""


class StopOnOutcome(TrainingStopped):
    """The config says stop for an outcome that occurred."""


@dataclass(frozen=True, kw_only=True)
class PassCount:
    """How often one group's task was solved, as a curriculum sees it."""

    task: int
    """Index of the task."""
    right: int
    """Samples that are correct."""
    counted: int
    """Samples that count, G at most."""


@dataclass(frozen=True, kw_only=True)
class JudgedGroup:
    """A group and everything that follows from its outcomes, scores and lengths."""

    group: Group
    """As it came."""
    kept: np.ndarray
    """[G] bool: samples that enter means."""
    in_loss: np.ndarray
    """[G] bool: samples that enter the loss as well."""
    rewards: np.ndarray
    """[G] all parts, weighted."""
    weighted: tuple[RewardPart, ...]
    """What they are the sum of."""
    parts: Mapping[str, np.ndarray]
    """[G] by name, unweighted; empty if the score is the only part."""
    teaches: bool
    """Whether an update can learn from it."""
    right: int
    """Kept samples that are correct."""
    counted: int
    """Kept samples."""

    def pass_count(self, task: int) -> PassCount:
        return PassCount(task=task, right=self.right, counted=self.counted)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Makes a JudgedGroup of a group."""

    verifier: VerifierConfig
    reward: RewardConfig
    max_new_tokens: int
    compares: bool = True
    """Whether a group teaches only if its scores differ."""

    def __call__(self, group: Group) -> JudgedGroup:
        """Raises as Admission does: the journal of an earlier start may have what the configuration now refuses."""
        Admission.of(self.verifier, self.reward)(group)
        treatments = [self.verifier.treatment(outcome) for outcome in group.outcomes]
        kept = np.array([treatment != "drop" for treatment in treatments])
        in_loss = kept & np.array([treatment != "mask" for treatment in treatments])
        weighted, total = self.rewarded(group)
        right = np.array([outcome is Outcome.CORRECT for outcome in group.outcomes])
        return JudgedGroup(
            group=group,
            kept=kept,
            in_loss=in_loss,
            rewards=total,
            weighted=weighted,
            parts=reward_parts(group, self.reward, self.max_new_tokens),
            teaches=bool(in_loss.any()) and (not self.compares or self.differs(group, kept, weighted, total)),
            right=int((right & kept).sum()),
            counted=int(kept.sum()),
        )

    def rewarded(self, group: Group) -> tuple[tuple[RewardPart, ...], np.ndarray]:
        """The parts of the rewards, and [G] their weighted sum."""
        named, scored = weights(self.verifier.rewards), self.verifier.adds_up_rewards
        weighted = parts_of(group, named, self.reward, self.max_new_tokens, scored=scored)
        return weighted, total_reward(group, weighted)

    def mean_rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of groups that are not trained on, `mean` and each part unweighted; the length reward has the cap of
        training. Empty if a reward is 1 for right and 0 for wrong."""
        parts = [reward_parts(group, self.reward, self.max_new_tokens) for group in groups]
        is_built_in = self.verifier.kind not in ("callable", "environment")
        if is_built_in and not parts[0] and not self.reward.truncated:
            return {}
        values = {"mean": [self.rewarded(group)[1] for group in groups]}
        values |= {name: [one[name] for one in parts] for name in parts[0]}
        return {name: float(np.mean(np.concatenate(found))) for name, found in values.items()}

    def differs(self, group: Group, kept: np.ndarray, weighted: Sequence[RewardPart], total: np.ndarray) -> bool:
        """Whether the kept samples' scores or rewards do. `gdpo` normalises each part separately: it may find an
        advantage where their sum is the same, and none where it is not."""
        shaped = self.reward.shaped_groups == "train"
        if self.reward.advantage == "gdpo" and (shaped or self.verifier.adds_up_rewards):
            return teaches(combined([part for part in weighted if shaped or part.in_score], kept), kept, ROUNDING)
        return teaches(total if shaped else np.array(group.scores), kept)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Raises, and so stops the run, for a group that it cannot go on with: the names of its rewards are not those that
    the run asks for, the advantage is not defined for a score, or the treatment of an outcome is `stop`."""

    rewards: frozenset[str]
    """Names of those that the run asks for."""
    no_negative_scores: bool
    stopping: frozenset[Outcome]
    """Those whose treatment is `stop`."""

    @classmethod
    def of(cls, verifier: VerifierConfig, reward: RewardConfig) -> Self:
        return cls(
            rewards=frozenset(weights(verifier.rewards)),
            no_negative_scores=reward.advantage == "maxrl",
            stopping=frozenset(outcome for outcome in Outcome if verifier.treatment(outcome) == "stop"),
        )

    def __call__(self, group: Group) -> None:
        if group.rewards.keys() != self.rewards:
            raise TrainingStopped(
                f"Group {group.group_id} came with the rewards {sorted(group.rewards)} and the run asks for"
                f" {sorted(self.rewards)}; start the actor with this run's config.json."
            )
        if self.no_negative_scores and min(group.scores) < 0.0:
            raise TrainingStopped(
                f"Group {group.group_id} has a score of {min(group.scores):g}, and reward.advantage = 'maxrl' divides"
                " by the mean of scores that are 0 or more; let verifier.function return such scores, or start a run"
                " with another advantage."
            )
        if self.stopping and not self.stopping.isdisjoint(group.outcomes):
            index = next(place for place, outcome in enumerate(group.outcomes) if outcome in self.stopping)
            raise StopOnOutcome(
                f"The verifier's outcome for sample {index} of group {group.group_id} is '{group.outcomes[index]}' and"
                f" verifier.on_{group.outcomes[index]} is 'stop'; see logs/actor*.log, fix the verifier, then resume."
            )


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The groups of a step, in slot order."""

    filled: tuple[FilledOrder, ...]
    """The filled orders, as they came."""
    groups: tuple[JudgedGroup, ...]
    """Their groups."""
    tasks: tuple[Task, ...] = ()
    """Of the groups, once the step is complete."""

    def __add__(self, other: "Collected") -> "Collected":
        return Collected(filled=self.filled + other.filled, groups=self.groups + other.groups)

    @property
    def teaching(self) -> int:
        return sum(group.teaches for group in self.groups)

    def pass_counts(self, tasks: Sequence[int]) -> list[PassCount]:
        """tasks: of all groups, in slot order."""
        return [group.pass_count(task) for task, group in zip(tasks, self.groups, strict=True)]


def collected(filled: Iterable[FilledOrder], judge: Callable[[Group], JudgedGroup]) -> Collected:
    orders = tuple(filled)
    return Collected(filled=orders, groups=tuple(judge(group) for order in orders for group in order.groups))


def pass_rate(counts: Sequence[PassCount]) -> float:
    """Share of correct samples; NaN where none was counted."""
    samples = sum(count.counted for count in counts)
    return sum(count.right for count in counts) / samples if samples else float("nan")
