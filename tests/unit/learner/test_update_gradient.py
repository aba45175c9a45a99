"""The whole path from groups to LoRA gradients, on real NF4, against the same model in float64 with full logits.

tests/support/dense_truth.py runs transformers' own code on W + s B A, one sequence at a time.
Gradients are compared tensor by tensor: |ours - reference| <= 1e-5 |reference| in the Euclidean norm.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from learner.objective.batch import Sample
from learner.quarantine.guard import Guard
from learner.quarantine.quarantine import keep_nowhere
from learner.update.budget import OutOfMemory
from learner.update.figures import StepResult, UpdateStats
from protocol.messages import Finish, Group, Outcome
from shared.config.data import VerifierConfig
from shared.config.tree import BatchConfig, Config, LossConfig, OptimizerConfig, RolloutConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.dense_truth import Truth, near_policy, sampled_nearby
from tests.support.fakes import CrampedBackbone, shake, tiny_group, tiny_policy
from tests.support.steps import (
    NotedSizes,
    batch_of,
    fitted,
    forward_pass_of,
    gradients,
    idle_samples,
    later_pass,
    never_stepped,
    step_batch,
    teaching_samples,
    update_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo")
FRACTIONS = (0.2, 0.5, 1.0)
GRID = [(kind, rho) for kind, rho in itertools.product(KINDS, FRACTIONS) if kind != "gspo" or rho == 1.0]
# One sample a micro-batch; a few; all in one.
BUDGETS = (1, 45, 10_000)
TEMPERATURE = 0.8
LONGEST = 14
TOLERANCE = 1e-5


def config_for(kind: str, fraction: float, budget: int = 45, **loss: Any) -> Config:
    return Config(
        loss=LossConfig(kind=kind, entropy_fraction=fraction, **loss),  # pyright: ignore[reportArgumentType]
        rollout=RolloutConfig(temperature=TEMPERATURE, max_new_tokens=LONGEST),
        optimizer=OptimizerConfig(max_grad_norm=1e9),
        batch=BatchConfig(token_budget=budget, head_rows=5),
        verifier=VerifierConfig(on_truncated="drop"),
    )


def values(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.adapter.parameters().items()}


def step_groups() -> list[Group]:
    """Ragged groups, one that teaches nothing, one with a truncated sample that is dropped."""
    correct, wrong, truncated = Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED
    return [
        tiny_group([1.0, 0.0, 0.0], [3, 12, 7], group_id="a", seed=1),
        tiny_group([1.0, 1.0, 1.0], [4, 4, 4], group_id="equal", seed=2),
        tiny_group([0.0, 1.0, 1.0], [1, 5, 2], group_id="b", seed=3),
        tiny_group(
            [1.0, 0.0, 0.0],
            [6, 14, 9],
            group_id="c",
            seed=4,
            outcomes=[correct, truncated, wrong],
            finishes=[Finish.STOP, Finish.LENGTH, Finish.STOP],
        ),
    ]


def step_samples(config: Config) -> list[Sample]:
    samples = teaching_samples(step_groups(), config)
    assert [s.name for s in samples] == ["a[0]", "a[1]", "a[2]", "b[0]", "b[1]", "b[2]", "c[0]", "c[2]"]
    return samples


def assert_equal_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert wanted.norm() > 0, name
        assert (got[name].double() - wanted).norm() <= TOLERANCE * wanted.norm(), name


def norm(grads: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(grad.norm()) ** 2 for grad in grads.values()))


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


@pytest.fixture(scope="module")
def recomputing(checkpoint: Path) -> Policy:
    """The same, which computes its activations again in the backward pass."""
    policy = tiny_policy(checkpoint, dequantize="each_call")
    policy.recompute_activations()
    return policy


@pytest.mark.parametrize(("kind", "fraction"), GRID)
def test_the_gradient_is_that_of_the_papers_for_any_cut(
    checkpoint: Path, policy: Policy, recomputing: Policy, kind: str, fraction: float
) -> None:
    """One pass: the ratio is one, nothing is clipped."""
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for(kind, fraction, importance_cap=1.2, kl_beta=0.05)
    samples = sampled_nearby(truth, step_samples(config))
    idle = sampled_nearby(truth, idle_samples(step_groups(), config))
    assert [s.name for s in idle] == ["equal[0]", "equal[1]", "equal[2]"]
    expected = truth.gradients(samples, config, {}, idle)
    for budget, trained in itertools.product(BUDGETS, (policy, recomputing)):
        shake(trained, 1)
        update = update_of(trained, config_for(kind, fraction, budget, importance_cap=1.2, kl_beta=0.05))
        stats = update.apply(0, step_batch(samples, 1, config, idle))
        assert stats is not None
        assert_equal_gradients(gradients(trained), expected)
        assert (stats.ratios == 1).all() and not stats.clipped.any()
        assert len(stats.ratios) == math.ceil(fraction * sum(len(s.completion_ids) for s in samples))
        assert stats.grad_norm == pytest.approx(norm(expected), rel=TOLERANCE)
        assert len(stats.kl) == sum(len(s.completion_ids) for s in [*samples, *idle])


@pytest.mark.parametrize(("kind", "fraction"), GRID)
def test_the_gradient_is_that_of_the_papers_away_from_the_old_policy(
    checkpoint: Path, policy: Policy, kind: str, fraction: float
) -> None:
    """A later pass: ratios differ from one and some tokens are clipped."""
    own: dict[str, dict[str, Any]] = {"sapo": {}, "dppo": {"clip_low": 1e-3, "clip_high": 1e-3}}
    clip = own.get(kind, {"clip_low": 0.2, "clip_high": 0.28})
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for(kind, fraction, importance_cap=1.2, **clip)
    samples = sampled_nearby(truth, step_samples(config))
    old = near_policy(truth, samples, 0.6)
    expected = truth.gradients(samples, config, old)
    for budget in BUDGETS:
        shake(policy, 1)
        update = update_of(policy, config_for(kind, fraction, budget, importance_cap=1.2, **clip))
        batch = step_batch(samples, 1, config)
        selected = {s.sample.name: old[s.sample.name][torch.from_numpy(s.selected)] for s in batch.samples}
        stats = later_pass(update, batch, selected)
        assert_equal_gradients(gradients(policy), expected)
        assert (stats.ratios != 1).any() and not stats.clipped.all()
        assert stats.clipped.any() or kind == "sapo"


def applied(policy: Policy, config: Config, samples: Sequence[Sample]) -> UpdateStats:
    stats = update_of(policy, config).apply(0, step_batch(samples, 0, config))
    assert stats is not None
    return stats


def test_recomputed_activations_give_the_same_bits(checkpoint: Path) -> None:
    """Every product is computed again over the same rows, and the prompts are shared in both."""
    config = config_for("dapo", 0.5)
    samples = step_samples(config)
    plain, lean = tiny_policy(checkpoint), tiny_policy(checkpoint)
    lean.recompute_activations()
    applied(plain, config, samples)
    applied(lean, config, samples)
    for name, expected in gradients(plain).items():
        assert torch.equal(gradients(lean)[name], expected), name


@pytest.mark.parametrize("recompute", [False, True])
def test_in_bf16_the_gradient_differs_by_rounding(checkpoint: Path, recompute: bool) -> None:
    """Some 250 roundings of 2^-9 on the way there and back, independent of one another: 16 of them in length. They are
    relative to the gradients of the samples, which partly cancel in the sum. The error of a log-prob counts twice, in
    the probabilities that the gradient is made of and in the importance weight."""
    policy = tiny_policy(checkpoint, dtype=torch.bfloat16)
    if recompute:
        policy.recompute_activations()
    config = config_for("dapo", 1.0)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    samples = sampled_nearby(truth, step_samples(config))
    expected = truth.gradients(samples, config, {})
    tokens = sum(len(sample.completion_ids) for sample in samples)
    shares = [(len(sample.completion_ids) / tokens, truth.gradients([sample], config, {})) for sample in samples]
    batch = step_batch(samples, 0, config)
    logprobs = forward_pass_of(policy, config).recomputed(batch.samples, TEMPERATURE)
    exact = np.concatenate([truth.logprobs(sample).detach().numpy() for sample in samples])
    off = float(np.sqrt(np.square(logprobs - exact).mean()))
    assert off < 0.1
    update_of(policy, config).apply(0, batch)
    for name, wanted in expected.items():
        found, size = gradients(policy)[name], math.hypot(*(share * float(grad[name].norm()) for share, grad in shares))
        assert found.dtype == torch.float32
        assert (found.double() - wanted).norm() <= (16 * 2**-9 + 2 * off) * size, name


def test_clipping_comes_alive_in_the_second_pass(policy: Policy) -> None:
    config = config_for("grpo", 1.0, passes=2)
    config = msgspec.structs.replace(config, optimizer=OptimizerConfig(lr=0.05))
    shake(policy, 1)
    stats = applied(policy, config, step_samples(config))
    first, second = np.split(stats.ratios, 2)
    np.testing.assert_allclose(first, 1.0, atol=1e-5)
    assert np.abs(second - 1).max() > 0.3
    stopped_first, stopped_second = np.split(stats.clipped, 2)
    assert not stopped_first.any() and stopped_second.any()


def test_several_passes_take_several_steps(policy: Policy) -> None:
    config = config_for("dapo", 1.0, passes=3)
    shake(policy, 1)
    update = update_of(policy, config)
    update.apply(0, step_batch(step_samples(config), 0, config))
    assert {float(state["step"]) for state in update.optimizer.adamw.state.values()} == {3.0}


@pytest.mark.parametrize("kl_gradient", ["kl", "k3"])
def test_the_kl_in_a_later_pass_is_weighted_by_the_ratio_or_not_at_all(
    checkpoint: Path, policy: Policy, kl_gradient: str
) -> None:
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for("dapo", 0.2, importance_cap=1.2, kl_beta=0.3, kl_gradient=kl_gradient)
    samples = sampled_nearby(truth, step_samples(config))
    idle = sampled_nearby(truth, idle_samples(step_groups(), config))
    old = near_policy(truth, [*samples, *idle], 0.6)
    expected = truth.gradients(samples, config, old, idle)
    later_pass(update_of(policy, config), step_batch(samples, 1, config, idle), old)
    assert_equal_gradients(gradients(policy), expected)


ALIVE = tiny_group([1.0, 0.0], [4, 6], group_id="alive", seed=1)
OTHER = tiny_group([0.0, 1.0], [3, 8], group_id="other", seed=3)
EQUAL = tiny_group([1.0, 1.0], [9, 2], group_id="equal", seed=2)


def gradient_of(policy: Policy, config: Config, groups: list[Group]) -> torch.Tensor:
    """Of a whole step, flat."""
    shake(policy, 1)
    batch = step_batch(teaching_samples(groups, config), 0, config, idle_samples(groups, config))
    update_of(policy, config).apply(0, batch)
    return torch.cat([grad.reshape(-1) for grad in gradients(policy).values()])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_teach_nothing_stay_in_the_divisor(policy: Policy, kind: str) -> None:
    """Two that teach among four weigh half of what they do alone, or their share of the tokens."""
    config = config_for(kind, 1.0)
    alone = gradient_of(policy, config, [ALIVE, OTHER])
    among = gradient_of(policy, config, [EQUAL, ALIVE, OTHER, EQUAL])
    share = 21 / (21 + 2 * 11) if kind in ("dapo", "cispo") else 1 / 2
    torch.testing.assert_close(among, share * alone, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_were_replaced_count_in_nothing(policy: Policy, kind: str) -> None:
    """The first two were ordered; one taught nothing, and the third came for it."""
    config = config_for(kind, 1.0, kl_beta=0.1)
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, replacement_rounds=1))
    replaced = gradient_of(policy, config, [EQUAL, ALIVE, OTHER])
    assert torch.equal(replaced, gradient_of(policy, config, [ALIVE, OTHER]))


def test_a_step_without_teachers_touches_nothing(policy: Policy) -> None:
    config = config_for("dapo", 0.2)
    before = adapter_bytes(policy.adapter)
    update = update_of(policy, config)
    batch = step_batch(teaching_samples([EQUAL], config), 1, config, idle_samples([EQUAL], config))
    guard = Guard(update, config.guard, b"", keep_nowhere)
    assert guard.apply(0, [], batch) == StepResult()
    assert adapter_bytes(policy.adapter) == before
    assert never_stepped(update.optimizer)


@pytest.mark.parametrize("fraction", [0.2, 1.0])
def test_a_step_without_teachers_still_has_the_penalty_to_the_base(
    checkpoint: Path, policy: Policy, fraction: float
) -> None:
    """The better a policy gets, the fewer groups teach; the penalty must not go with them."""
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for("dapo", fraction, kl_beta=0.1)
    idle = sampled_nearby(truth, idle_samples([EQUAL], config))
    expected = truth.gradients([], config, {}, idle)
    stats = update_of(policy, config).apply(0, step_batch([], 1, config, idle))
    assert stats is not None and len(stats.ratios) == 0 and len(stats.kl) == 11 == len(stats.mismatch)
    assert_equal_gradients(gradients(policy), expected)
    assert stats.weight_sum == 0.0 and stats.grad_norm == pytest.approx(norm(expected), rel=TOLERANCE)


def test_masked_tokens_meet_the_head_only_for_the_kl(policy: Policy) -> None:
    for kl_beta, everything in ((0.0, False), (0.1, True)):
        config = config_for("dapo", 0.2, kl_beta=kl_beta)
        batch = step_batch(step_samples(config), 1, config, idle_samples(step_groups(), config))
        assert all(s.used.all() == everything or len(s.used) == 1 for s in batch.used)
        assert bool(batch.idle) is everything


@pytest.mark.parametrize("passes", [1, 2])
def test_running_out_of_memory_replays_the_pass_with_smaller_micro_batches(checkpoint: Path, passes: int) -> None:
    config = config_for("dapo", 0.5, 10_000, passes=passes)
    samples = step_samples(config)
    roomy, small = (replace(tiny_policy(checkpoint), layers=None) for _ in range(2))
    cramped = CrampedBackbone(small.backbone, limit=48)
    notes = NotedSizes()
    stats = fitted(replace(small, backbone=cramped, layers=None), config, step_batch(samples, 0, config), notes)
    assert cramped.refused

    fitting = config_for("dapo", 0.5, notes.sizes[0].tokens, passes=passes)
    assert applied(roomy, fitting, samples).grad_norm == stats.grad_norm
    assert adapter_bytes(roomy.adapter) == adapter_bytes(small.adapter)


def test_what_was_computed_before_memory_ran_out_is_forgotten(checkpoint: Path) -> None:
    """The first micro-batch fits (one call for its prompts, one for its completions), a later one does not."""
    config = config_for("dapo", 0.5, 60)
    samples = step_samples(config)
    roomy, small = (replace(tiny_policy(checkpoint), layers=None) for _ in range(2))
    cramped, notes = CrampedBackbone(small.backbone, limit=24, grace=2), NotedSizes()
    fitted(replace(small, backbone=cramped, layers=None), config, step_batch(samples, 0, config), notes)
    assert cramped.refused
    applied(roomy, config_for("dapo", 0.5, notes.sizes[0].tokens), samples)
    assert adapter_bytes(roomy.adapter) == adapter_bytes(small.adapter)


def test_a_step_forgets_the_gradient_of_the_step_before(policy: Policy) -> None:
    config = config_for("dapo", 0.5)
    batch = step_batch(step_samples(config), 0, config)
    update = update_of(policy, config)
    found = []
    for _ in range(2):
        shake(policy, 1)
        update.apply(0, batch)
        found.append(gradients(policy))
    assert_equal_gradients(found[1], found[0])


def test_a_single_sequence_that_does_not_fit_is_an_error(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    before = adapter_bytes(policy.adapter)
    config = config_for("dapo", 0.5)
    cramped = replace(policy, backbone=CrampedBackbone(policy.backbone, limit=4), layers=None)
    with pytest.raises(OutOfMemory, match=r"^Step 1 does not fit into the memory of the card with one completion"):
        fitted(cramped, config, step_batch(step_samples(config), 0, config))
    assert adapter_bytes(policy.adapter) == before


def test_entropies_that_the_engine_could_not_tell_are_filled_in(checkpoint: Path, policy: Policy) -> None:
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for("dapo", 0.2)
    blind = [replace(s, entropies=None) for s in step_samples(config)]
    filled = forward_pass_of(policy, config).with_entropies(blind)
    assert [s.name for s in filled] == [s.name for s in blind]
    for sample in filled:
        assert sample.entropies is not None
        np.testing.assert_allclose(sample.entropies, truth.entropies(sample), rtol=1e-5)


def test_known_entropies_and_full_masks_cost_no_pass(policy: Policy) -> None:
    config, full = config_for("dapo", 0.2), config_for("dapo", 1.0)
    samples = step_samples(config)
    blind = [msgspec.structs.replace(group, entropies=None) for group in step_groups()]
    nothing_fits = replace(policy, backbone=CrampedBackbone(policy.backbone, limit=0), layers=None)
    assert forward_pass_of(nothing_fits, config).with_entropies(samples) == samples
    assert all(s.sample.entropies is None for s in batch_of(blind, nothing_fits, full).samples)


def test_the_figures_of_a_step(checkpoint: Path, policy: Policy) -> None:
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for("dapo", 0.5, 1)
    samples = step_samples(config)
    batch = step_batch(samples, 0, config)
    stats = applied(policy, config, samples)
    logprobs = [truth.logprobs(s.sample).detach().numpy()[s.selected] for s in batch.samples]
    actor = [s.sample.actor_logprobs[s.selected] for s in batch.samples]
    expected = np.abs(np.concatenate(logprobs) - np.concatenate(actor))
    np.testing.assert_allclose(np.sort(stats.mismatch), np.sort(expected), rtol=1e-4, atol=1e-5)
    assert stats.weight_sum == pytest.approx(math.ceil(0.5 * batch.response_tokens) / batch.response_tokens)
    weights = np.exp(np.concatenate(logprobs) - np.concatenate(actor))
    np.testing.assert_allclose(np.sort(stats.importance), np.sort(weights), rtol=1e-4)
    assert len(stats.entropies) == 0
    assert stats.loss == pytest.approx(truth.loss(samples, config, {}).item(), rel=1e-4)
    assert len(stats.kl) == 0 and stats.lr == config.optimizer.lr
