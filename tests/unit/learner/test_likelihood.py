"""The objective of a warm start on real NF4, against the likelihood in float64: one answer at a time, no packing."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.batch import StepBatch
from learner.reports.step_metrics import Clock, Shown, step_metrics
from learner.update.figures import StepResult
from learner.update.microbatch import cut
from protocol.messages import FilledOrder, Group, Outcome
from shared.config.tree import BatchConfig, Config, LossConfig, OptimizerConfig, warm_start
from shared.model.policy import Policy
from tests.support.dense_truth import Truth
from tests.support.fakes import shake, tiny_group, tiny_policy
from tests.support.steps import batch_of, collected_of, gradients, update_of
from tests.support.wire_examples import timings

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 12, 1, 7, 5)
# One answer a micro-batch; a few; all in one.
BUDGETS = (1, 30, 10_000)
TOLERANCE = 1e-5


def config_for(budget: int = 30) -> Config:
    return warm_start(
        Config(
            loss=LossConfig(kind="gspo", kl_beta=0.5, passes=3),
            optimizer=OptimizerConfig(max_grad_norm=1e9),
            batch=BatchConfig(token_budget=budget, head_rows=5),
        )
    )


def answers() -> list[Group]:
    """As the journal has them: nobody sampled these tokens, so their log-probs are 0."""
    groups = [tiny_group([1.0], [n], group_id=f"train/000000/{n:04d}", seed=n, entropies=False) for n in LENGTHS]
    for group in groups:
        group.logprobs[:] = 0.0
    return groups


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


def batch_for(policy: Policy, config: Config) -> StepBatch:
    return batch_of(answers(), policy, config)


def test_loss_and_gradient_are_the_mean_over_answer_tokens_for_any_packing(checkpoint: Path, policy: Policy) -> None:
    shake(policy, 1)
    truth = Truth(checkpoint, policy, temperature=1.0)
    samples = [trained.sample for trained in batch_for(policy, config_for()).samples]
    assert sorted(len(sample.completion_ids) for sample in samples) == sorted(LENGTHS)
    loss = -sum(truth.logprobs(sample).sum() for sample in samples) / sum(LENGTHS)
    assert isinstance(loss, torch.Tensor)
    expected = dict(zip(truth.leaves, torch.autograd.grad(loss, list(truth.leaves.values())), strict=True))
    for budget in BUDGETS:
        shake(policy, 1)
        config = config_for(budget)
        update = update_of(policy, config)
        stats = update.apply(0, batch_for(policy, config))
        assert stats.loss == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        found = gradients(policy)
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            assert wanted.norm() > 0 and (found[name].double() - wanted).norm() <= TOLERANCE * wanted.norm(), name


def test_examples_are_packed_without_padding_up_to_the_budget(policy: Policy) -> None:
    batch = batch_for(policy, config_for())
    prompt = len(batch.samples[0].sample.prompt_ids)
    parts = cut(batch.samples, 30, padding=False)
    # The last token of an answer is predicted and never read.
    sizes = [sum(prompt + len(s.sample.completion_ids) - 1 for s in part) for part in parts]
    assert sum(len(part) for part in parts) == len(LENGTHS) and len(parts) < len(LENGTHS)
    assert all(size <= 30 or len(part) == 1 for size, part in zip(sizes, parts, strict=True))


def test_an_answer_teaches_alone_and_the_mismatch_gate_does_not_ask_who_wrote_it(policy: Policy) -> None:
    batch = batch_for(policy, config_for())
    assert len(batch.samples) == len(LENGTHS) and batch.idle_groups == 0 and not batch.on_policy
    assert all(sample.selected.all() and sample.weight == 1 / sum(LENGTHS) for sample in batch.samples)
    assert not batch_of(answers(), policy, Config()).samples


def test_a_row_has_no_figures_of_what_was_not_sampled(policy: Policy) -> None:
    config = config_for()
    batch = batch_for(policy, config)
    result = StepResult(stats=update_of(policy, config).apply(0, batch))
    order = FilledOrder(
        order_id="train/000000/u0000",
        policy_version=0,
        adapter_sha256="a" * 64,
        groups=tuple(answers()),
        timings=timings(),
    )
    clock = Clock(time_s=1.0, step_s=1.0, update_s=0.5, learner_mb=1.0)
    shown = Shown(loss=config.objective, constraint=config.constraint, curriculum=config.curriculum)
    figures = CurriculumFigures(stage=0, pass_rate=1.0, effective_tasks=5)
    row = step_metrics(0, collected_of([order], config), batch, result, clock, figures, shown).to_row()
    absent = ("reward/mean", "reward/max", "advantage/mean", "ratio/mean", "clip/fraction", "mismatch/p99", "kl")
    assert all(row[key] is None for key in (*absent, "importance/ess", "outcome/correct", "curriculum/pass_rate"))
    assert set(row) >= {f"outcome/{outcome}" for outcome in Outcome}
    assert row["loss"] > 0 and row["entropy/mean"] > 0 and row["length/mean"] == np.mean(LENGTHS)
    assert math.isclose(row["weight/sum"], 1.0, rel_tol=1e-6) and row["selected/fraction"] == 1.0
