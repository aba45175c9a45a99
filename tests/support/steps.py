"""The stages of a step, given a whole configuration: judge, select, batch, update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from learner.objective import batch as product
from learner.objective.batch import Sample, StepBatch
from learner.objective.judged import Collected, JudgedGroup, collected
from learner.orders.plan import judge_of
from learner.tasks.tasks import Task
from learner.update.budget import Attempts, Size
from learner.update.figures import UpdateStats
from learner.update.forward_pass import ForwardPass, OldLogprobs
from learner.update.optimizer import Optimizer
from learner.update.update import Update
from learner.wiring import Trainer, build_trainer
from protocol.messages import FilledOrder, Group
from shared.config.tree import Config
from shared.model.policy import Policy
from tests.support.wire_examples import timings


def judged(groups: Sequence[Group], config: Config) -> list[JudgedGroup]:
    return [judge_of(config)(group) for group in groups]


def collected_of(filled: Sequence[FilledOrder], config: Config) -> Collected:
    found = collected(filled, judge_of(config))
    return replace(found, tasks=tuple(task_of(judged.group) for judged in found.groups))


def task_of(group: Group) -> Task:
    return Task(prompt_ids=group.prompt_ids, columns={"answer": "42"})


def teaches(group: Group, config: Config) -> bool:
    return judge_of(config)(group).teaches


def teaching_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    return product.teaching_samples(judged(groups, config), config.advantage, config.rollout.replacement_rounds)


def idle_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    return product.idle_samples(judged(groups, config), config.rollout.replacement_rounds)


def step_batch(
    samples: Sequence[Sample],
    idle_groups: int,
    config: Config,
    idle: Sequence[Sample] = (),
    *,
    replaced: int = 0,
    on_policy: bool = False,
) -> StepBatch:
    return product.step_batch(
        samples,
        idle,
        idle_groups=idle_groups,
        replaced=replaced,
        on_policy=on_policy,
        loss=config.objective,
        constraint=config.constraint,
        max_new_tokens=config.rollout.max_new_tokens,
        most_updates=config.batch.updates,
    )


def trainer_of(policy: Policy, config: Config) -> Trainer:
    """At step 0, as the product builds it."""
    return build_trainer(policy, config, lambda: None)


def update_of(policy: Policy, config: Config) -> Update:
    return trainer_of(policy, config).update


def update_stats(**changes: Any) -> UpdateStats:
    """Of an update in which nothing happened."""
    quiet = UpdateStats(
        loss=0.2,
        grad_norm=0.1,
        lr=1e-4,
        ratios=np.ones(4),
        clipped=np.zeros(4, bool),
        stale=np.zeros(4, bool),
        importance=np.ones(4),
        kl=np.zeros(4),
        logprobs={},
        entropies=np.ones(4),
        mismatch=np.full(4, 0.01),
        weight_sum=1.0,
        constraint_loss=0.0,
        penalised_kl=np.zeros(0),
        noise=None,
        ewc_penalty=0.0,
    )
    return replace(quiet, **changes)


class NotedSizes:
    """Notes of sizes, in memory."""

    def __init__(self, sizes: dict[int, Size] | None = None) -> None:
        self.sizes = sizes or {}

    def size_of(self, step: int) -> Size | None:
        return self.sizes.get(step)

    def note_size(self, step: int, size: Size) -> None:
        self.sizes[step] = size


def fitted(policy: Policy, config: Config, batch: StepBatch, notes: NotedSizes | None = None) -> UpdateStats:
    """One step, in smaller parts if memory runs out."""
    trainer = trainer_of(policy, config)
    attempts = Attempts(trainer.budget, trainer.update, notes or NotedSizes())
    return attempts.until_it_fits(0, lambda: trainer.update.apply(0, batch))


def forward_pass_of(policy: Policy, config: Config) -> ForwardPass:
    return update_of(policy, config).forward_pass


def batch_of(groups: Sequence[Group], policy: Policy, config: Config) -> StepBatch:
    """Of one order that was filled with these groups, as the product builds it."""
    order = FilledOrder(
        order_id="train/000000/u0000",
        policy_version=0,
        adapter_sha256="a" * 64,
        groups=tuple(groups),
        timings=timings(),
    )
    return trainer_of(policy, config).batches.build(0, collected_of([order], config))


def later_pass(update: Update, batch: StepBatch, old: dict[str, torch.Tensor]) -> UpdateStats:
    """One pass of a step with several, at given log-probs of the old policy."""
    gradient = update.usable_gradient(0, batch.used, OldLogprobs(by_sample=old), update.accumulate)
    return update.applied(0, gradient)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: value.grad for name, value in policy.adapter.parameters().items()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def never_stepped(optimizer: Optimizer) -> bool:
    """Whether its moments are those of the start."""
    return not any(value.any() for state in optimizer.adamw.state.values() for value in state.values())
