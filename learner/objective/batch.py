"""From the groups of a step to the samples of an update, which learner/update/microbatch.py cuts.

    judged groups -> samples that teach, with advantages -> token mask over the step -> token weights
                  -> idle samples, of groups that teach nothing: in the divisor, and in the KL

Everything that couples samples (mean rewards, entropy threshold, divisor of the loss) is fixed here, once, for the
whole step. What follows is a plain sum over tokens, so any cut into micro-batches gives the same gradient.

Minibatches (batch.updates): the groups of a step go, in slot order, into K parts that differ by one group at most, each
with an update of its own. Weights are K times those of the whole step, so that the mean of the K gradients at one
policy is the step's, and a token counts the same in whichever part it is.

A group of equal scores has A = 0, and in the papers its samples still count in the divisor and in the KL: the fewer
groups teach, the smaller the step. One that was replaced (rollout.replacement_rounds, DAPO's dynamic sampling) was
sampled out and counts in nothing. Entropy mask and constraint choose among the samples that teach.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from learner.objective.constraint import penalty_coefficients
from learner.objective.entropy_mask import select_tokens
from learner.objective.judged import JudgedGroup
from learner.objective.loss import token_weights
from learner.objective.rewards import combined, group_advantages, over_step_std
from learner.objective.turns import by_completion, trained_tokens
from protocol.messages import FilledOrder, Group, Outcome
from shared.config.data import Advantage
from shared.config.tree import ConstraintConfig, LossConfig


def flat(filled: Iterable[FilledOrder]) -> list[Group]:
    return [group for order in filled for group in order.groups]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion that will be trained on."""

    name: str
    """group id and index, for error messages."""
    prompt_ids: np.ndarray
    """[Tp] int32."""
    completion_ids: np.ndarray
    """[T] int32."""
    trained: np.ndarray
    """[T] bool: sampled tokens. The others are what an environment put between two turns."""
    actor_logprobs: np.ndarray
    """[T] fp32, from the process that drew the tokens."""
    entropies: np.ndarray | None
    """[T] fp32, if the engine could tell."""
    advantage: float
    """A of this sample."""
    teacher_logprobs: np.ndarray | None = None
    """[T] fp32, of the teacher in a distillation."""

    @property
    def length(self) -> int:
        """Sampled tokens: T_i of the formulas."""
        return int(self.trained.sum())

    @property
    def group(self) -> str:
        """Samples of one group have one prompt."""
        return self.name.partition("[")[0]


@dataclass(frozen=True, kw_only=True)
class TrainSample:
    """A sample with its share in the loss."""

    sample: Sample
    """The completion."""
    selected: np.ndarray
    """[T] bool: tokens that carry gradient."""
    weight: float
    """What each selected token counts in the loss."""
    penalties: np.ndarray
    """[T] fp32 what each token counts in the constraint, before the weight; zeros where none is configured."""
    in_kl: bool
    """Whether its sampled tokens, all of them, count in the KL to the base."""

    @cached_property
    def used(self) -> np.ndarray:
        """[T] bool: tokens whose log-prob the update needs."""
        return self.selected | (self.penalties != 0) | (self.sample.trained & self.in_kl)

    @cached_property
    def num_fed(self) -> int:
        """Completion tokens before the last used one. Nothing depends on the others, so they are not fed."""
        return int(np.flatnonzero(self.used)[-1]) if self.used.any() else 0


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A step, ready for an update of any cut."""

    samples: tuple[TrainSample, ...]
    """Samples of the groups that teach; empty if none does."""
    idle: tuple[TrainSample, ...]
    """Samples that only the KL needs; empty if there is none."""
    idle_groups: int
    """Groups that teach nothing: their kept scores are all equal."""
    replaced: int
    """Of these, the groups that were replaced."""
    on_policy: bool
    """All of it was sampled from the version that is updated, so the actor must agree about it."""
    response_tokens: int
    """All sampled tokens of the groups that teach, masked ones too."""
    updates: int
    """K, at most the number of groups."""

    @property
    def used(self) -> tuple[TrainSample, ...]:
        """Everything that the update runs over."""
        return self.samples + self.idle

    def minibatches(self) -> list[list[TrainSample]]:
        """What each update runs over: its share of the groups that teach, and of those that only the KL needs."""
        taught, idle = grouped(self.samples), grouped(self.idle)
        return [[*share(taught, part, self.updates), *share(idle, part, self.updates)] for part in range(self.updates)]

    @property
    def sampled(self) -> int:
        """Groups that count: those that teach, and those that do not and were not replaced."""
        return self.idle_groups - self.replaced + len({sample.sample.group for sample in self.samples})


def grouped(samples: Iterable[TrainSample]) -> list[list[TrainSample]]:
    """The samples of each group, groups in the order of the batch."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.sample.group, []).append(sample)
    return list(groups.values())


def share(groups: Sequence[list[TrainSample]], part: int, parts: int) -> list[TrainSample]:
    """The samples of one of so many parts of the groups."""
    first, last = part * len(groups) // parts, (part + 1) * len(groups) // parts
    return [sample for group in groups[first:last] for sample in group]


def samples_of(judged: JudgedGroup, advantages: np.ndarray) -> list[Sample]:
    """The samples of one group that are trained on. advantages: [G]."""
    samples = all_samples(judged.group, advantages)
    return [samples[index] for index in np.flatnonzero(judged.in_loss)]


def all_samples(group: Group, advantages: np.ndarray) -> list[Sample]:
    """Every sample of a group, trained on or not."""
    ids, logprobs = by_completion(group, group.completion_ids), by_completion(group, group.logprobs)
    entropies = [None] * len(ids) if group.entropies is None else by_completion(group, group.entropies)
    trained = by_completion(group, trained_tokens(group))
    teacher = [None] * len(ids) if group.teacher is None else by_completion(group, group.teacher)
    return [
        Sample(
            name=f"{group.group_id}[{index}]",
            prompt_ids=group.prompt_ids,
            completion_ids=ids[index],
            trained=trained[index],
            actor_logprobs=logprobs[index],
            entropies=entropies[index],
            advantage=float(advantages[index]),
            teacher_logprobs=teacher[index],
        )
        for index in range(len(ids))
    ]


def teaching_samples(groups: Sequence[JudgedGroup], kind: Advantage, rounds: int) -> list[Sample]:
    """The samples that are trained on, with their advantages, in batch order. rounds: of replacements."""
    teaching = [judged for judged in groups if judged.teaches]
    counted = sum(judged.counted for judged in [*teaching, *idle_groups(groups, rounds)])
    rows = zip(teaching, advantages_of(teaching, kind, counted), strict=True)
    return [sample for judged, advantages in rows for sample in samples_of(judged, advantages)]


def advantages_of(teaching: Sequence[JudgedGroup], kind: Advantage, counted: int) -> list[np.ndarray]:
    """[G] of each group. counted: kept samples of the step, those of groups that teach nothing too."""
    match kind:
        case "batch":
            return over_step_std([group_advantages(one.rewards, one.kept, "mean") for one in teaching], counted)
        case "gdpo":
            return over_step_std([combined(one.weighted, one.kept) for one in teaching], counted)
        case _:
            return [group_advantages(one.rewards, one.kept, kind) for one in teaching]


def idle_samples(groups: Sequence[JudgedGroup], rounds: int) -> list[Sample]:
    """The samples of the groups that teach nothing and were not replaced, without an advantage, in batch order."""
    return [
        sample
        for judged in idle_groups(groups, rounds)
        for sample in samples_of(judged, np.zeros(len(judged.group.lengths)))
    ]


def idle_groups(groups: Sequence[JudgedGroup], rounds: int) -> list[JudgedGroup]:
    """The groups that teach nothing and were not replaced. rounds: of replacements."""
    teaching = [judged.teaches for judged in groups]
    idle = [judged for judged in groups if not judged.teaches]
    unreplaced = first_ordered(teaching, rounds) - sum(teaching)
    return idle[len(idle) - unreplaced :]


def first_ordered(teaching: Sequence[bool], rounds: int) -> int:
    """How many groups the step began with, from what all its groups came to, in slot order.

    P groups and k rounds make T_k = P + (groups among the first T_k-1 that teach nothing). T_k grows with P, so one P
    makes as many as there are. The last of those that teach nothing are those that were not replaced.
    """
    idle = [0, *accumulate(not one for one in teaching)]

    def ordered(first: int) -> int:
        total = first
        for _ in range(rounds):
            total = first + idle[min(total, len(teaching))]
        return total

    return bisect_left(range(len(teaching)), len(teaching), key=ordered)


def step_batch(
    samples: Sequence[Sample],
    idle: Sequence[Sample],
    *,
    idle_groups: int,
    replaced: int,
    on_policy: bool,
    loss: LossConfig,
    constraint: ConstraintConfig,
    max_new_tokens: int,
    most_updates: int,
) -> StepBatch:
    """Fix mask, constraint and weights over the whole step. Samples must carry entropies if these choose by them.

    most_updates: as configured.
    """
    lengths = [sample.length for sample in [*samples, *idle]]
    regularised = loss.kl_beta > 0.0
    groups = len({one.group for one in samples or idle})
    updates = max(1, min(most_updates, groups))
    weights = [updates * weight for weight in token_weights(loss.kind, lengths, max_new_tokens)]
    rows = zip(samples, selection(samples, loss.entropy_fraction), penalties(samples, constraint), strict=True)
    trained = [
        TrainSample(sample=sample, selected=mask, weight=weight, penalties=penalty, in_kl=regularised)
        for (sample, mask, penalty), weight in zip(rows, weights[: len(samples)], strict=True)
    ]
    unmoved = zip(idle, weights[len(samples) :], strict=True) if regularised else ()
    return StepBatch(
        samples=tuple(trained),
        idle=tuple(only_in_kl(sample, weight) for sample, weight in unmoved),
        idle_groups=idle_groups,
        replaced=replaced,
        on_policy=on_policy,
        response_tokens=sum(lengths[: len(samples)]),
        updates=updates,
    )


def only_in_kl(sample: Sample, weight: float) -> TrainSample:
    nothing = np.zeros(len(sample.completion_ids))
    return TrainSample(
        sample=sample, selected=nothing.astype(bool), weight=weight, penalties=nothing.astype(np.float32), in_kl=True
    )


def selection(samples: Sequence[Sample], fraction: float, *, lowest: bool = False) -> list[np.ndarray]:
    """[T] bool for each sample: the share of the step's sampled tokens with the highest entropy, or with the lowest."""
    if fraction == 1.0 or not samples:
        return [sample.trained for sample in samples]
    entropies = [sample.entropies[sample.trained] for sample in samples if sample.entropies is not None]
    chosen = select_tokens([-row for row in entropies] if lowest else entropies, fraction)
    return [at_sampled(sample, row) for sample, row in zip(samples, chosen, strict=True)]


def at_sampled(sample: Sample, values: np.ndarray) -> np.ndarray:
    """One value for each sampled token -> [T], zero at the others."""
    whole = np.zeros(len(sample.completion_ids), values.dtype)
    whole[sample.trained] = values
    return whole


def penalties(samples: Sequence[Sample], config: ConstraintConfig) -> list[np.ndarray]:
    """[T] fp32 for each sample: its tokens' coefficients in the constraint."""
    if config.beta == 0.0 or not samples:
        return [np.zeros(len(sample.completion_ids), dtype=np.float32) for sample in samples]
    low = selection(samples, config.low_entropy, lowest=True)
    coefficients = penalty_coefficients(
        [row[sample.trained] for row, sample in zip(low, samples, strict=True)],
        [sample.actor_logprobs[sample.trained] for sample in samples],
        [sample.advantage for sample in samples],
        config,
    )
    return [at_sampled(sample, row) for sample, row in zip(samples, coefficients, strict=True)]


def needs_entropies(loss: LossConfig, constraint: ConstraintConfig) -> bool:
    """Whether mask or constraint choose by entropy."""
    return loss.entropy_fraction < 1.0 or (constraint.beta > 0.0 and constraint.low_entropy < 1.0)


def outcome_counts(groups: Sequence[Group]) -> dict[Outcome, int]:
    """How often each outcome occurred, zeros included."""
    counted = Counter(outcome for group in groups for outcome in group.outcomes)
    return {outcome: counted[outcome] for outcome in Outcome}
