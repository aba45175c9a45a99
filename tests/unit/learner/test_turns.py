"""Completions of several turns: what an environment put between them is read by the model, and counts in nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.objective.batch import Sample
from learner.objective.turns import sampled_lengths, trained_tokens, turns
from learner.reports.rollout_log import RolloutLog
from learner.reports.step_metrics import mean_entropy
from learner.update.figures import StepResult
from protocol.messages import FilledOrder, Group
from shared.config.data import RewardConfig
from shared.config.processes import LogConfig
from shared.config.tree import BatchConfig, Config, ConstraintConfig, LossConfig, OptimizerConfig, RolloutConfig
from shared.model.policy import Policy
from shared.run.files import LineLog
from tests.support.dense_truth import Truth, sampled_nearby
from tests.support.fakes import shake, spelled, spelled_words, tiny_group, tiny_policy
from tests.support.steps import (
    batch_of,
    collected_of,
    forward_pass_of,
    gradients,
    step_batch,
    teaching_samples,
    update_of,
)
from tests.support.wire_examples import timings

pytestmark = pytest.mark.usefixtures("one_thread")

# Turns of 3 and 2 tokens; of 1, 1 and 2; one that an environment opens; one of a single turn.
MASKS = ((1, 1, 1, 0, 0, 1, 1), (1, 0, 1, 0, 0, 0, 1, 1), (0, 0, 1, 1, 1), (1, 1, 1, 1))
TURNS = tiny_group(
    [1.0, 0.0, 1.0, 0.0], [7, 8, 5, 4], group_id="turns", seed=5, trained=[mark for mask in MASKS for mark in mask]
)
PLAIN = tiny_group([1.0, 0.0], [6, 3], group_id="plain", seed=6)
KINDS = [("grpo", 1.0), ("grpo", 0.4), ("dr_grpo", 0.4), ("dapo", 0.4), ("gspo", 1.0), ("cispo", 0.4)]


def config_for(kind: str, fraction: float = 1.0, budget: int = 20, **sections: Any) -> Config:
    objective: Any = {"kind": kind, "entropy_fraction": fraction}
    return Config(
        loss=LossConfig(**objective, kl_beta=0.05, importance_cap=1.2),
        rollout=RolloutConfig(temperature=0.8, max_new_tokens=14),
        optimizer=OptimizerConfig(max_grad_norm=1e9),
        batch=BatchConfig(token_budget=budget, head_rows=5),
        **sections,
    )


def samples_of(config: Config) -> list[Sample]:
    return teaching_samples([TURNS, PLAIN], config)


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


@pytest.mark.parametrize(("kind", "fraction"), KINDS)
@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_gradient_is_that_of_the_sampled_tokens_alone(
    checkpoint: Path, policy: Policy, kind: str, fraction: float, budget: int
) -> None:
    """Threshold, divisors, KL, ratios and constraint, against float64 over the sampled tokens."""
    constraint = ConstraintConfig(beta=0.3, low_entropy=0.5, share=0.3)
    shake(policy, 1)
    truth = Truth(checkpoint, policy, 0.8)
    config = config_for(kind, fraction, budget, constraint=constraint)
    samples = sampled_nearby(truth, samples_of(config))
    expected = truth.gradients(samples, config, {})
    stats = update_of(policy, config).apply(0, step_batch(samples, 0, config))
    for name, found in gradients(policy).items():
        assert (found.double() - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert len(stats.kl) == len(stats.mismatch) == 7 - 2 + 8 - 4 + 5 - 2 + 4 + 9


def test_the_environments_tokens_are_context(policy: Policy) -> None:
    """Another answer of a tool changes what the model says of the tokens after it, and of none before."""
    config = config_for("grpo")
    first, *_ = samples_of(config)
    other = msgspec.structs.replace(TURNS, completion_ids=(TURNS.completion_ids + (TURNS.trained == 0)) % 97)
    changed, *_ = teaching_samples([other, PLAIN], config)
    batch = [step_batch([sample], 0, config).samples for sample in (first, changed)]
    before, after = (forward_pass_of(policy, config).recomputed(samples, 0.8) for samples in batch)
    assert (before[:3] == after[:3]).all() and (before[3:] != after[3:]).all()


def test_the_threshold_is_that_of_sampled_tokens() -> None:
    """A share of one half of the sampled tokens, whatever stands between them."""
    config = config_for("grpo", 0.5)
    batch = step_batch(samples_of(config), 0, config)
    assert batch.response_tokens == 16 + 9
    assert sum(int(sample.selected.sum()) for sample in batch.samples) == 13
    assert not any((sample.selected & ~sample.sample.trained).any() for sample in batch.samples)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("grpo", [1 / (6 * n) for n in (5, 4, 3, 4, 6, 3)]), ("dapo", [1 / 25] * 6), ("dr_grpo", [1 / (6 * 14)] * 6)],
)
def test_divisors_count_sampled_tokens(kind: str, expected: Sequence[float]) -> None:
    config = config_for(kind)
    weights = [sample.weight for sample in step_batch(samples_of(config), 0, config).samples]
    assert weights == pytest.approx(expected)


def test_entropies_that_the_learner_adds_are_those_of_sampled_tokens(policy: Policy) -> None:
    config = config_for("grpo", 0.5)
    untold = [msgspec.structs.replace(group, entropies=None) for group in (TURNS, PLAIN)]
    found = forward_pass_of(policy, config).with_entropies(teaching_samples(untold, config))
    assert all(sample.entropies is not None for sample in found)
    assert [int((sample.entropies > 0).sum()) for sample in found] == [5, 4, 3, 4, 6, 3]  # pyright: ignore
    assert all((sample.entropies > 0).tolist() == sample.trained.tolist() for sample in found)  # pyright: ignore


def test_turns_and_lengths() -> None:
    assert turns(TURNS).tolist() == [2, 3, 1, 1] and turns(PLAIN).tolist() == [1, 1]
    assert sampled_lengths(TURNS).tolist() == [5, 4, 3, 4] and sampled_lengths(PLAIN).tolist() == [6, 3]
    assert trained_tokens(PLAIN).all()


def test_the_length_reward_counts_sampled_tokens() -> None:
    config = config_for("grpo", reward=RewardConfig(length=-1.0, length_free=4))
    judged = collected_of([filled(TURNS)], config).groups[0]
    assert judged.parts["length"].tolist() == pytest.approx([0.1, 0.0, 0.0, 0.0])


def filled(*groups: Group) -> FilledOrder:
    return FilledOrder(
        order_id="train/000000/u0", policy_version=0, adapter_sha256="a" * 64, groups=groups, timings=timings()
    )


def test_mean_entropy_is_that_of_sampled_tokens(policy: Policy) -> None:
    config = config_for("grpo")
    found = mean_entropy([TURNS], batch_of([TURNS], policy, config), None)
    assert TURNS.entropies is not None
    assert found == pytest.approx(TURNS.entropies[TURNS.trained == 1].mean())


def test_the_log_shows_turns(tmp_path: Path) -> None:
    config = config_for("grpo")
    lines = tmp_path / "rollouts.jsonl"
    log = RolloutLog(LineLog(lines), LogConfig(), spelled_words())
    batch = step_batch(samples_of(config), 0, config)
    log.log(0, collected_of([filled(TURNS, PLAIN)], config), batch, StepResult())
    first, second = (msgspec.json.decode(line) for line in lines.read_text().splitlines())
    sample = first["samples"][1]
    assert [turn["sampled"] for turn in sample["turns"]] == [True, False, True, False, True]
    assert [turn["tokens"] for turn in sample["turns"]] == [1, 1, 1, 3, 2]
    assert sample["turns"][3]["text"] == spelled(TURNS.completion_ids[10:13].tolist())
    assert np.array(sample["mask"]).tolist() == list(MASKS[1])
    assert second["samples"][0]["turns"] is None
