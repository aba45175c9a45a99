"""From the groups of a step to the micro-batches of an update.

    groups -> samples that teach, with advantages -> token mask over the step -> token weights -> micro-batches
           -> idle samples, of groups that teach nothing: in the divisor, and in the KL

Everything that couples samples (mean rewards, entropy threshold, divisor of the loss) is settled here, once, for the
whole step. What follows is a plain sum over tokens, so any cut into micro-batches gives the same gradient.

A group of equal scores has A = 0, and in the papers its samples still count in the divisor and in the KL: the fewer
groups teach, the smaller the step. One that was replaced (rollout.replacement_rounds, DAPO's dynamic sampling) was
sampled out and counts in nothing. Entropy mask and constraint choose among the samples that teach.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from learner.objective.advantage import group_advantages, teaches
from learner.objective.constraint import held_tokens
from learner.objective.entropy_mask import select_tokens
from learner.objective.loss import token_weights
from learner.objective.rewards import refuse_other_rewards, rewards
from protocol.messages import FilledOrder, Group, Outcome
from shared.config.tree import Config
from shared.errors import TrainingStopped


def flat(answers: Iterable[FilledOrder]) -> list[Group]:
    """All groups, in order."""
    return [group for answer in answers for group in answer.groups]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer that will be trained on."""

    name: str
    """group id and index, for error messages."""
    prompt_ids: np.ndarray
    """[Tp] int32."""
    completion_ids: np.ndarray
    """[T] int32."""
    actor_logprobs: np.ndarray
    """[T] fp32, from the process that drew the tokens."""
    entropies: np.ndarray | None
    """[T] fp32, if the engine could tell."""
    advantage: float
    """A of this sample."""

    @property
    def group(self) -> str:
        """Samples of one group have one prompt."""
        return self.name.partition("[")[0]


@dataclass(frozen=True, kw_only=True)
class TrainSample:
    """A sample with its share in the loss settled."""

    sample: Sample
    """The answer."""
    selected: np.ndarray
    """[T] bool: tokens that carry gradient."""
    weight: float
    """What each selected token counts in the loss."""
    held: np.ndarray
    """[T] fp32 what each token counts in the constraint, before the weight; zeros where none is configured."""
    in_kl: bool
    """Whether its tokens, all of them, count in the KL to the base."""

    @property
    def scored(self) -> np.ndarray:
        """[T] bool: tokens whose log-prob the update needs."""
        return self.selected | (self.held != 0) | self.in_kl


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A step, ready for an update of any cut."""

    samples: tuple[TrainSample, ...]
    """Samples of the groups that teach; empty if none does."""
    idle: tuple[TrainSample, ...]
    """Samples that only the KL needs; empty if there is none."""
    dropped: int
    """Groups whose scores were all equal."""
    response_tokens: int
    """All response tokens of the groups that teach, masked ones too."""

    @property
    def scored(self) -> tuple[TrainSample, ...]:
        """Everything that the update runs over."""
        return self.samples + self.idle

    @property
    def sampled(self) -> int:
        """Groups of the step, those that teach and those that do not."""
        return self.dropped + len({sample.sample.group for sample in self.samples})


class StopOnOutcome(TrainingStopped):
    """The config says stop for an outcome that occurred."""


def kept_samples(group: Group, config: Config) -> np.ndarray:
    """[G] bool: samples that enter means. Raises where the config says stop, or asked for other rewards."""
    refuse_other_rewards(group, config)
    treatments = [config.verifier.treatment(outcome) for outcome in group.outcomes]
    if "stop" in treatments:
        index = treatments.index("stop")
        raise StopOnOutcome(
            f"The verifier's outcome for sample {index} of group {group.group_id} is '{group.outcomes[index]}' and"
            f" verifier.on_{group.outcomes[index]} is 'stop'; see logs/actor0.log, mend the verifier, then resume."
        )
    return np.array([treatment != "drop" for treatment in treatments])


def trained_samples(group: Group, config: Config) -> np.ndarray:
    """[G] bool: samples that enter the loss as well."""
    masked = np.array([config.verifier.treatment(outcome) == "mask" for outcome in group.outcomes])
    return kept_samples(group, config) & ~masked


def group_teaches(group: Group, config: Config) -> bool:
    """Whether this group has anything to say."""
    shaped = config.reward.shaped_groups == "train"
    differ = teaches(rewards(group, config) if shaped else np.array(group.scores), kept_samples(group, config))
    return differ and bool(trained_samples(group, config).any())


def samples_of(group: Group, config: Config) -> list[Sample]:
    """The samples of one group that are trained on, with their advantages."""
    advantages = group_advantages(rewards(group, config), kept_samples(group, config), config.divides_by_std)
    samples = all_samples(group, advantages)
    return [samples[index] for index in np.flatnonzero(trained_samples(group, config))]


def all_samples(group: Group, advantages: np.ndarray) -> list[Sample]:
    """Every sample of a group, whatever the verifier said of it."""
    cuts = np.cumsum(group.lengths)[:-1]
    ids, logprobs = np.split(group.completion_ids, cuts), np.split(group.logprobs, cuts)
    entropies = [None] * len(ids) if group.entropies is None else np.split(group.entropies, cuts)
    return [
        Sample(
            name=f"{group.group_id}[{index}]",
            prompt_ids=group.prompt_ids,
            completion_ids=ids[index],
            actor_logprobs=logprobs[index],
            entropies=entropies[index],
            advantage=float(advantages[index]),
        )
        for index in range(len(ids))
    ]


def teaching_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    """What is trained on of the groups that teach, in batch order."""
    return [sample for group in groups if group_teaches(group, config) for sample in samples_of(group, config)]


def idle_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    """What would be trained on of the groups that teach nothing and were not replaced, in batch order."""
    teaching = [group_teaches(group, config) for group in groups]
    idle = [group for group, teaches_something in zip(groups, teaching, strict=True) if not teaches_something]
    unreplaced = first_ordered(teaching, config.rollout.replacement_rounds) - sum(teaching)
    return [sample for group in idle[len(idle) - unreplaced :] for sample in without_advantage(group, config)]


def first_ordered(teaching: Sequence[bool], rounds: int) -> int:
    """How many groups the step began with, from what all its groups came to, in slot order.

    P groups and k rounds make T_k = P + (groups among the first T_k-1 that teach nothing). T_k grows with P, so one P
    makes as many as there are. The last of those that teach nothing are the ones that nobody replaced.
    """
    idle = [0, *accumulate(not one for one in teaching)]

    def ordered(first: int) -> int:
        total = first
        for _ in range(rounds):
            total = first + idle[min(total, len(teaching))]
        return total

    return bisect_left(range(len(teaching)), len(teaching), key=ordered)


def without_advantage(group: Group, config: Config) -> list[Sample]:
    """The samples of a group that teaches nothing."""
    samples = all_samples(group, np.zeros(len(group.lengths)))
    return [samples[index] for index in np.flatnonzero(trained_samples(group, config))]


def step_batch(samples: Sequence[Sample], dropped: int, config: Config, idle: Sequence[Sample] = ()) -> StepBatch:
    """Settle mask, constraint and weights over the whole step. Samples must carry entropies if these ask for them."""
    lengths = [len(sample.completion_ids) for sample in [*samples, *idle]]
    weights = token_weights(config.loss.kind, lengths, config.rollout.max_new_tokens)
    regularised = config.loss.kl_beta > 0.0
    rows = zip(samples, selection(samples, config.loss.entropy_fraction), held_back(samples, config), strict=True)
    trained = [
        TrainSample(sample=sample, selected=mask, weight=weight, held=held, in_kl=regularised)
        for (sample, mask, held), weight in zip(rows, weights[: len(samples)], strict=True)
    ]
    unmoved = zip(idle, weights[len(samples) :], strict=True) if regularised else ()
    return StepBatch(
        samples=tuple(trained),
        idle=tuple(only_in_kl(sample, weight) for sample, weight in unmoved),
        dropped=dropped,
        response_tokens=sum(lengths[: len(samples)]),
    )


def only_in_kl(sample: Sample, weight: float) -> TrainSample:
    """No token of the objective."""
    nothing = np.zeros(len(sample.completion_ids))
    return TrainSample(
        sample=sample, selected=nothing.astype(bool), weight=weight, held=nothing.astype(np.float32), in_kl=True
    )


def selection(samples: Sequence[Sample], fraction: float, *, lowest: bool = False) -> list[np.ndarray]:
    """[T] bool for each sample: the share of the step's tokens with the highest entropy, or with the lowest."""
    if fraction == 1.0 or not samples:
        return [np.ones(len(sample.completion_ids), dtype=bool) for sample in samples]
    entropies = [sample.entropies for sample in samples if sample.entropies is not None]
    return select_tokens([-row for row in entropies] if lowest else entropies, fraction)


def held_back(samples: Sequence[Sample], config: Config) -> list[np.ndarray]:
    """[T] fp32 for each sample: its tokens' coefficients in the constraint."""
    if config.constraint.beta == 0.0 or not samples:
        return [np.zeros(len(sample.completion_ids), dtype=np.float32) for sample in samples]
    return held_tokens(
        selection(samples, config.constraint.low_entropy, lowest=True),
        [sample.actor_logprobs for sample in samples],
        [sample.advantage for sample in samples],
        config.constraint,
    )


def needs_entropies(config: Config) -> bool:
    """Whether mask or constraint choose by entropy."""
    constrained = config.constraint.beta > 0.0 and config.constraint.low_entropy < 1.0
    return config.loss.entropy_fraction < 1.0 or constrained


def outcome_counts(groups: Sequence[Group]) -> dict[Outcome, int]:
    """How often each outcome occurred, zeros included."""
    counted = Counter(outcome for group in groups for outcome in group.outcomes)
    return {outcome: counted[outcome] for outcome in Outcome}
