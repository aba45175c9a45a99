"""The noise of a step's gradient against brute force: each group's gradient alone, in float64, and their covariance."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.objective.batch import Sample
from learner.update.figures import UpdateStats
from learner.update.gradient_noise import GradientNoise, noise_of
from shared.config.tree import BatchConfig, Config, GrowthConfig, LossConfig, OptimizerConfig, RolloutConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.dense_truth import Truth
from tests.support.fakes import CrampedBackbone, shake, tiny_group, tiny_policy
from tests.support.steps import NotedSizes, fitted, step_batch, teaching_samples, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

IDLE = 2
BUDGETS = (1, 45, 10_000)


def config_for(kind: str = "dapo", budget: int = 45, *, max_prompts: int = 64, passes: int = 1) -> Config:
    return Config(
        loss=LossConfig(kind=kind, passes=passes),  # pyright: ignore[reportArgumentType]
        rollout=RolloutConfig(max_new_tokens=14),
        optimizer=OptimizerConfig(max_grad_norm=1e-3),
        batch=BatchConfig(token_budget=budget, head_rows=5),
        growth=GrowthConfig(max_prompts=max_prompts),
    )


def samples_for(config: Config, count: int = 4) -> list[Sample]:
    """Ragged groups, too long together for any small budget."""
    lengths = [[3, 12, 7], [1, 5, 2], [8, 9, 14], [4, 4, 6]]
    groups = [tiny_group([1.0, 0.0, 0.0], lengths[j], group_id="abcd"[j], seed=j) for j in range(count)]
    return teaching_samples(groups, config)


def applied(policy: Policy, config: Config, samples: list[Sample]) -> UpdateStats:
    stats = update_of(policy, config).apply(0, step_batch(samples, IDLE, config))
    assert stats is not None
    return stats


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


def brute_force(truth: Truth, config: Config, samples: list[Sample]) -> GradientNoise:
    """n g_j of every group as a row, zeros for those that teach nothing; their covariance as numpy has it."""
    rows = []
    for name in sorted({sample.group for sample in samples}):
        group = [sample for sample in samples if sample.group == name]
        divisor = {"dapo": tokens(group) / tokens(samples), "dr_grpo": len(group) / len(samples)}[config.loss.kind]
        gradient = truth.gradients(group, config, {})
        rows.append(divisor * torch.cat([value.reshape(-1) for value in gradient.values()]).numpy())
    n = len(rows) + IDLE
    each = n * np.array([*rows, *(np.zeros_like(rows[0]) for _ in range(IDLE))])
    spread = float(np.var(each, axis=0, ddof=1).sum())
    mean = each.mean(axis=0)
    return GradientNoise(spread=spread, signal=float(mean @ mean) - spread / n)


def tokens(samples: list[Sample]) -> int:
    return sum(len(sample.completion_ids) for sample in samples)


@pytest.mark.parametrize("kind", ["dapo", "dr_grpo"])
def test_the_estimate_is_that_of_brute_force_for_any_cut(checkpoint: Path, policy: Policy, kind: str) -> None:
    shake(policy, 1)
    config = config_for(kind)
    samples = samples_for(config)
    expected = brute_force(Truth(checkpoint, policy, 1.0), config, samples)
    for budget in BUDGETS:
        shake(policy, 1)
        noise = applied(policy, config_for(kind, budget), samples).noise
        assert noise is not None
        assert noise.spread == pytest.approx(expected.spread, rel=1e-4)
        assert noise.signal == pytest.approx(expected.signal, rel=1e-3, abs=1e-4 * expected.spread)


def test_the_estimate_is_unbiased() -> None:
    """Gaussian gradients of known mean and covariance, n to a step."""
    rng = np.random.default_rng(0)
    mean, deviation, n = rng.standard_normal(20) / 4, rng.random(20), 6
    found = []
    for _ in range(20_000):
        groups = (mean + deviation * rng.standard_normal((n, 20))) / n
        whole = groups.sum(axis=0)
        noise = noise_of(float((groups**2).sum()), float(whole @ whole), n)
        found.append((noise.spread, noise.signal))
    spread, signal = np.mean(found, axis=0)
    assert spread == pytest.approx(float((deviation**2).sum()), rel=0.01)
    assert signal == pytest.approx(float(mean @ mean), rel=0.05)


def test_measuring_changes_the_gradient_by_rounding_alone(policy: Policy) -> None:
    found = []
    for max_prompts in (0, 64):
        shake(policy, 1)
        config = config_for(budget=10_000, max_prompts=max_prompts)
        stats = applied(policy, config, samples_for(config))
        assert (stats.noise is None) == (max_prompts == 0)
        grads = [value.grad for value in policy.adapter.parameters().values() if value.grad is not None]
        found.append((torch.cat([grad.reshape(-1) for grad in grads]), stats.grad_norm))
    (plain, plain_norm), (measured, measured_norm) = found
    assert (plain - measured).norm() <= 1e-6 * plain.norm()
    assert measured_norm == pytest.approx(plain_norm, rel=1e-6)


def test_equal_groups_have_no_spread_but_for_those_that_teach_nothing(policy: Policy) -> None:
    shake(policy, 1)
    config = config_for()
    twins = samples_for(config, 1)
    twins += [replace(sample, name=sample.name.replace("a[", "b[")) for sample in twins]
    stats = update_of(policy, config).apply(0, step_batch(twins, 0, config))
    assert stats is not None and stats.noise is not None
    assert abs(stats.noise.spread) < 1e-5 * stats.noise.signal
    assert stats.noise.signal == pytest.approx(stats.grad_norm**2, rel=1e-5)
    assert applied(policy, config, twins).noise != stats.noise


def test_one_sampled_group_tells_nothing(policy: Policy) -> None:
    config = config_for()
    stats = update_of(policy, config).apply(0, step_batch(samples_for(config, 1), 0, config))
    assert stats is not None and stats.noise is None


def test_one_that_teaches_among_others_that_do_not_is_all_noise(policy: Policy) -> None:
    config = config_for()
    shake(policy, 1)
    stats = applied(policy, config, samples_for(config, 1))
    assert stats.noise is not None
    assert stats.noise.spread == pytest.approx((1 + IDLE) * stats.grad_norm**2, rel=1e-5)
    assert abs(stats.noise.signal) < 1e-5 * stats.noise.spread


def test_of_several_passes_the_first_is_measured(policy: Policy) -> None:
    noises = []
    for passes in (1, 2):
        shake(policy, 1)
        config = config_for(passes=passes)
        stats = applied(policy, config, samples_for(config))
        assert stats.noise is not None
        noises.append(stats.noise.spread)
    # The old log-probs come from a pass without gradient: another rounding.
    assert noises[1] == pytest.approx(noises[0], rel=1e-5)


def test_running_out_of_memory_in_one_group_repeats_them_all(checkpoint: Path) -> None:
    roomy, small = (replace(tiny_policy(checkpoint), layers=None) for _ in range(2))
    config = config_for(budget=10_000)
    samples = samples_for(config)
    cramped, notes = CrampedBackbone(small.backbone, limit=24, grace=4), NotedSizes()
    noise = fitted(
        replace(small, backbone=cramped, layers=None), config, step_batch(samples, IDLE, config), notes
    ).noise
    assert len(cramped.refused) > 0
    assert noise == applied(roomy, config_for(budget=notes.sizes[0].tokens), samples).noise
    assert adapter_bytes(roomy.adapter) == adapter_bytes(small.adapter)


def test_the_same_step_gives_the_same_bits(checkpoint: Path) -> None:
    config = config_for()
    found = []
    for _ in range(2):
        policy = tiny_policy(checkpoint)
        found.append((applied(policy, config, samples_for(config)).noise, adapter_bytes(policy.adapter)))
    assert found[0] == found[1]
