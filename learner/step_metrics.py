"""The figures of one step, as the row that metrics.jsonl holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.batch import StepBatch, outcome_counts
from learner.curriculum import CurriculumFigures
from learner.guard import Skipped
from learner.mismatch import gap_of
from learner.rewards import reward_parts, rewards
from learner.sampling import flat
from learner.update_figures import UpdateStats
from protocol.messages import Finish, Group, Groups, Outcome
from shared.config import Config
from shared.metrics import StepMetrics

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where the learner's time went in a step."""

    time_s: float
    """Since the run began."""
    step_s: float
    """The whole step."""
    update_s: float
    """Batch, update and snapshot."""
    learner_mb: float
    """Peak resident memory."""


def step_metrics(
    step: int,
    answers: Sequence[Groups],
    batch: StepBatch,
    done: UpdateStats | Skipped | None,
    clock: Clock,
    curriculum: CurriculumFigures,
    config: Config,
) -> StepMetrics:
    """One row; what a step without an update cannot know is NaN."""
    stats = done if isinstance(done, UpdateStats) else None
    gap = gap_of(stats.mismatch) if stats else None
    groups = flat(answers)
    tokens = sum(sum(group.lengths) for group in groups)
    num_samples = sum(len(group.lengths) for group in groups)
    rollout_s = sum(answer.timings.rollout_s for answer in answers)
    verify_s = sum(answer.timings.verify_s for answer in answers)
    constrained = config.constraint.beta > 0.0
    return StepMetrics(
        step=step + 1,
        time_s=clock.time_s,
        reward_mean=float(np.concatenate([rewards(group, config) for group in groups]).mean()),
        rewards=reward_means(groups, config),
        outcomes=outcome_shares(groups),
        groups_dropped=batch.dropped,
        groups_quarantined=done.groups if isinstance(done, Skipped) else 0,
        groups_total=len(groups),
        entropy_mean=mean_entropy(groups),
        mask_fraction=masked_fraction(batch),
        ratio_mean=mean(stats.ratios) if stats else NAN,
        clip_fraction=mean(stats.clipped) if stats else NAN,
        mismatch_mean=gap.mean if gap else NAN,
        mismatch_p95=gap.p95 if gap else NAN,
        mismatch_p99=gap.p99 if gap else NAN,
        mismatch_max=gap.largest if gap else NAN,
        kl=mean(stats.kl) if stats else NAN,
        grad_norm=stats.grad_norm if stats else NAN,
        lr=stats.lr if stats else NAN,
        length_mean=tokens / num_samples,
        truncated=sum(f is Finish.LENGTH for group in groups for f in group.finishes) / num_samples,
        tokens_per_s=tokens / clock.step_s,
        rollout_s=rollout_s,
        verify_s=verify_s,
        update_s=clock.update_s,
        idle_s=max(0.0, clock.step_s - clock.update_s - rollout_s - verify_s),
        step_s=clock.step_s,
        actor_mb=max(answer.timings.memory_mb for answer in answers),
        learner_mb=clock.learner_mb,
        weight_sum=stats.weight_sum if stats else 0.0,
        held_fraction=held_fraction(batch) if batch.samples and constrained else NAN,
        held_kl=mean(stats.held_kl) if stats and constrained else NAN,
        constraint_loss=stats.constraint_loss if stats and constrained else NAN,
        noise_signal=stats.noise.signal if stats and stats.noise else NAN,
        noise_spread=stats.noise.spread if stats and stats.noise else NAN,
        ewc_penalty=stats.ewc_penalty if stats and config.curriculum.ewc else NAN,
        policy_version=min(answer.policy_version for answer in answers),
        curriculum_stage=curriculum.stage,
        curriculum_pass_rate=curriculum.pass_rate,
        curriculum_effective_tasks=curriculum.effective_tasks,
    )


def reward_means(groups: Sequence[Group], config: Config) -> dict[str, float]:
    """Mean of each part of the reward, unweighted, over all samples."""
    parts = [reward_parts(group, config) for group in groups]
    return {name: float(np.concatenate([part[name] for part in parts]).mean()) for name in parts[0]}


def outcome_shares(groups: Sequence[Group]) -> dict[Outcome, float]:
    """Share of samples with each outcome."""
    counts = outcome_counts(groups)
    total = sum(counts.values())
    return {outcome: count / total for outcome, count in counts.items()}


def mean_entropy(groups: Sequence[Group]) -> float:
    """Nats a response token, where the engine could tell."""
    entropies = [group.entropies for group in groups if group.entropies is not None]
    return mean(np.concatenate(entropies)) if entropies else NAN


def masked_fraction(batch: StepBatch) -> float:
    """Share of the batch's response tokens that carried gradient."""
    selected = sum(int(sample.selected.sum()) for sample in batch.samples)
    return selected / batch.response_tokens if batch.samples else NAN


def held_fraction(batch: StepBatch) -> float:
    """Share of the batch's response tokens that the constraint held back."""
    return sum(int((sample.held != 0).sum()) for sample in batch.samples) / batch.response_tokens


def mean(values: np.ndarray) -> float:
    """As a plain number; NaN of nothing."""
    return float(values.mean()) if len(values) else NAN
