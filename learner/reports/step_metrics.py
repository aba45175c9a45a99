"""The figures of one step: its row of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.batch import StepBatch, outcome_counts
from learner.objective.judged import Collected, JudgedGroup
from learner.objective.turns import sampled_lengths, trained_tokens, turns
from learner.update.figures import StepResult, UpdateStats
from learner.update.mismatch import gap_of
from protocol.messages import Finish, Group, Outcome, Timings
from shared.config.data import CurriculumConfig
from shared.config.tree import ConstraintConfig, LossConfig
from shared.process.card import NO_MEMORY, CardMemory
from shared.run.metrics import StepMetrics

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where the learner's time went in a step."""

    time_s: float
    """Since the run began."""
    learner_mb: float
    """Peak resident memory."""
    step_s: float
    """The whole step."""
    update_s: float
    """Batch, update and snapshot."""
    swap_s: float = 0.0
    """Moving the base between card and host memory."""
    energy: Mapping[str, float] = field(default_factory=dict[str, float])
    """Joules of the step on this machine, by source."""
    card: CardMemory = NO_MEMORY
    """Peak on the learner's card in the step's update."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The sections that say which figures a run has."""

    loss: LossConfig
    constraint: ConstraintConfig
    curriculum: CurriculumConfig

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote the completions: those of a warm start have no reward, ratio or mismatch."""
        return self.loss.kind != "sft"


def step_metrics(
    step: int,
    collected: Collected,
    batch: StepBatch,
    result: StepResult,
    clock: Clock,
    curriculum: CurriculumFigures,
    shown: Shown,
) -> StepMetrics:
    """One row; what a step without an update cannot know is NaN."""
    stats, filled, judged = result.stats, collected.filled, collected.groups
    groups = [one.group for one in judged]
    tokens = sum(int(sampled_lengths(group).sum()) for group in groups)
    num_samples = sum(len(group.lengths) for group in groups)
    rollout_s = sum(order.timings.rollout_s for order in filled)
    verify_s = sum(order.timings.verify_s for order in filled)
    swap_s = clock.swap_s + sum(order.timings.swap_s for order in filled)
    busy_s = rollout_s + verify_s + swap_s + clock.update_s
    constrained = batch.samples and shown.constraint.beta > 0.0
    scored = judged if shown.sampled else ()
    return StepMetrics(
        step=step + 1,
        time_s=clock.time_s,
        rewards=reward_means(scored),
        logged=logged_means(groups),
        outcomes=outcome_shares(groups) if scored else dict.fromkeys(Outcome, NAN),
        groups_idle=batch.idle_groups,
        groups_quarantined=result.quarantined,
        groups_total=len(groups),
        entropy_mean=mean_entropy(groups, batch, stats),
        selected_fraction=selected_fraction(batch),
        length_mean=tokens / num_samples,
        turns_mean=sum(int(turns(group).sum()) for group in groups) / num_samples,
        truncated=sum(f is Finish.LENGTH for group in groups for f in group.finishes) / num_samples,
        tokens_per_s=tokens / clock.step_s,
        rollout_s=rollout_s,
        verify_s=verify_s,
        swap_s=swap_s,
        update_s=clock.update_s,
        idle_s=max(0.0, clock.step_s - busy_s),
        step_s=clock.step_s,
        actor_mb=max(order.timings.memory_mb for order in filled),
        learner_mb=clock.learner_mb,
        card_mb=card_mb([order.timings for order in filled], clock.card),
        weight_sum=stats.weight_sum if stats else 0.0,
        penalised_fraction=penalised_fraction(batch) if constrained else NAN,
        teacher_kl=teacher_kl(batch),
        policy_version=min(order.policy_version for order in filled),
        curriculum_stage=curriculum.stage,
        curriculum_pass_rate=curriculum.pass_rate if scored else NAN,
        curriculum_effective_tasks=curriculum.effective_tasks,
        # What is evaluated, and what actors do, the files know (run_files.py).
        evaluated={},
        actors={},
        limited={},
        energy=dict(clock.energy),
        **spread("reward", np.concatenate([one.rewards for one in scored] or [np.array([])])),
        **spread("advantage", np.array([sample.sample.advantage for sample in batch.samples if scored])),
        **(of_update(stats, shown) if stats else dict.fromkeys(OF_UPDATE, NAN)),
    )


OF_UPDATE = (
    *("ratio_mean", "clip_fraction", "importance_mean", "importance_capped", "importance_ess", "stale_fraction"),
    *("mismatch_mean", "mismatch_p95", "mismatch_p99", "mismatch_max", "loss", "kl", "grad_norm", "lr"),
    *("penalised_kl", "constraint_loss", "noise_signal", "noise_spread", "ewc_penalty"),
)
"""What only a step with an update can know."""


def of_update(stats: UpdateStats, shown: Shown) -> dict[str, float]:
    """Those figures, NaN for what the configuration leaves out."""
    gap, noise = gap_of(stats.mismatch if shown.sampled else np.array([NAN])), stats.noise
    constrained = shown.constraint.beta > 0.0
    figures = (
        *(mean(stats.ratios), mean(stats.clipped) if shown.sampled else NAN),
        *(mean(stats.importance), capped(stats.importance, shown.loss), effective_share(stats.importance)),
        mean(stats.stale) if shown.loss.stale_limit else NAN,
        *(gap.mean, gap.p95, gap.p99, gap.largest),
        *(stats.loss, mean(stats.kl), stats.grad_norm, stats.lr),
        *(mean(stats.penalised_kl) if constrained else NAN, stats.constraint_loss if constrained else NAN),
        *(noise.signal if noise else NAN, noise.spread if noise else NAN),
        stats.ewc_penalty if shown.curriculum.ewc else NAN,
    )
    return dict(zip(OF_UPDATE, figures, strict=True))


def capped(importance: np.ndarray, loss: LossConfig) -> float:
    """Share of the weights that are cut off or masked."""
    outside = (importance > loss.cap) | (importance < loss.importance_floor)
    return mean(outside) if loss.cap else NAN


def card_mb(actors: Sequence[Timings], learner: CardMemory) -> dict[str, float]:
    """By process and figure, of those that have a card."""
    largest = {
        "actor_allocated": max(actor.card_allocated_mb for actor in actors),
        "actor_reserved": max(actor.card_reserved_mb for actor in actors),
        "actor_driver": max(actor.card_driver_mb for actor in actors),
        **{f"learner_{name}": amount for name, amount in learner.mib().items()},
    }
    return {name: amount for name, amount in largest.items() if amount}


def reward_means(groups: Sequence[JudgedGroup]) -> dict[str, float]:
    """Mean of each part of the reward, unweighted, over all samples."""
    if not groups:
        return {}
    parts = [judged.parts for judged in groups]
    return {name: float(np.concatenate([part[name] for part in parts]).mean()) for name in parts[0]}


def logged_means(groups: Sequence[Group]) -> dict[str, float]:
    """Over the groups that have it."""
    names = dict.fromkeys(name for group in groups for name in group.metrics)
    return {name: fmean(group.metrics[name] for group in groups if name in group.metrics) for name in names}


def outcome_shares(groups: Sequence[Group]) -> dict[Outcome, float]:
    counts = outcome_counts(groups)
    total = sum(counts.values())
    return {outcome: count / total for outcome, count in counts.items()}


def mean_entropy(groups: Sequence[Group], batch: StepBatch, stats: UpdateStats | None) -> float:
    """Nats a sampled token: the engine's, or the learner's own."""
    told = [group.entropies[trained_tokens(group)] for group in groups if group.entropies is not None]
    samples = [one.sample for one in batch.samples]
    filled = [one.entropies[one.trained] for one in samples if one.entropies is not None]
    if told or filled:
        return mean(np.concatenate(told or filled))
    return mean(stats.entropies) if stats else NAN


def selected_fraction(batch: StepBatch) -> float:
    """Share of the batch's sampled tokens that the entropy mask selected: they carried gradient."""
    selected = sum(int(sample.selected.sum()) for sample in batch.samples)
    return selected / batch.response_tokens if batch.samples else NAN


def penalised_fraction(batch: StepBatch) -> float:
    """Share of the batch's sampled tokens that the constraint penalised."""
    return sum(int((sample.penalties != 0).sum()) for sample in batch.samples) / batch.response_tokens


def teacher_kl(batch: StepBatch) -> float:
    rows = [s.sample for s in batch.samples]
    gaps = [(s.actor_logprobs - s.teacher_logprobs)[s.trained] for s in rows if s.teacher_logprobs is not None]
    return mean(np.concatenate(gaps)) if gaps else NAN


def effective_share(weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2)"""
    squares = float((weights.astype(np.float64) ** 2).sum())
    return float(weights.astype(np.float64).sum()) ** 2 / (len(weights) * squares) if squares else NAN


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation, minimum and maximum; NaN of nothing."""
    found = values if len(values) else np.array([NAN])
    return {
        f"{name}_mean": float(found.mean()),
        f"{name}_std": float(found.std()),
        f"{name}_min": float(found.min()),
        f"{name}_max": float(found.max()),
    }


def mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else NAN
