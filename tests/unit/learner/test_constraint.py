"""SENT's second variant and KL-Cov: which tokens are penalised, how strongly, and the gradient of the penalty."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from learner.objective.batch import Sample, TrainSample, needs_entropies
from learner.objective.constraint import PenalisedTokens, constraint_loss, penalty_coefficients
from learner.update.figures import UpdateStats
from protocol.messages import Group
from shared.config.tree import BatchConfig, Config, ConstraintConfig, LossConfig, OptimizerConfig, RolloutConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests import reference
from tests.support.dense_truth import Named, Truth, near_policy, penalty_strengths, sampled_nearby
from tests.support.fakes import CrampedBackbone, shake, tiny_group, tiny_policy
from tests.support.steps import (
    NotedSizes,
    batch_of,
    fitted,
    gradients,
    later_pass,
    step_batch,
    teaching_samples,
    update_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
# One sample a micro-batch; a few; all in one.
BUDGETS = (1, 45, 10_000)
TEMPERATURE = 0.8
TOLERANCE = 1e-5
SENT = ConstraintConfig(beta=0.3, share=0.1)
KL_COV = ConstraintConfig(beta=0.3, share=0.1, low_entropy=1.0, low=0.0, reference="old")


def config_for(
    constraint: ConstraintConfig, *, kind: str = "dapo", fraction: float = 1.0, budget: int = 45, **loss: Any
) -> Config:
    return Config(
        loss=LossConfig(kind=kind, entropy_fraction=fraction, **loss),  # pyright: ignore[reportArgumentType]
        constraint=constraint,
        rollout=RolloutConfig(temperature=TEMPERATURE, max_new_tokens=14),
        optimizer=OptimizerConfig(max_grad_norm=1e9),
        batch=BatchConfig(token_budget=budget, head_rows=5),
    )


def samples_for(config: Config) -> list[Sample]:
    """Ragged groups with more than two advantages."""
    return teaching_samples(groups_of_a_step(), config)


def groups_of_a_step() -> list[Group]:
    return [
        tiny_group(scores, lengths, group_id=name, seed=seed)
        for seed, (name, scores, lengths) in enumerate(
            [("a", [1.0, 0.0, 0.0], [3, 12, 7]), ("b", [0.0, 1.0, 1.0, 1.0], [1, 5, 2, 8]), ("c", [1.0, 0.0], [6, 9])]
        )
    ]


def assert_close(got: Named, wanted: Named) -> None:
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert expected.norm() > 0, name
        assert (got[name].double() - expected).norm() <= TOLERANCE * expected.norm(), name


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


@pytest.fixture(scope="module")
def recomputing(checkpoint: Path) -> Policy:
    """The same, which computes its activations again in the backward pass."""
    policy = tiny_policy(checkpoint, dequantize="each_call")
    policy.recompute_activations()
    return policy


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("low_entropy", "share"), list(itertools.product((0.3, 0.8, 1.0), (1e-4, 0.1, 0.5))))
def test_the_penalised_tokens_are_the_papers(low_entropy: float, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, 6)
    entropies = [rng.random(n).astype(np.float32) for n in lengths]
    logprobs = [-rng.exponential(2.0, n).astype(np.float32) for n in lengths]
    advantages = rng.standard_normal(6).tolist()
    config = ConstraintConfig(beta=0.25, low_entropy=low_entropy, share=share, high=2.0, low=0.5)
    low = reference.top_tokens([(-row).tolist() for row in entropies], low_entropy)
    got = penalty_coefficients([np.array(row) for row in low], logprobs, advantages, config)
    expected = reference.penalised_tokens(
        [row.tolist() for row in entropies],
        [row.tolist() for row in logprobs],
        advantages,
        low_entropy=low_entropy,
        share=share,
        strengths=(2.0, 0.5),
    )
    assert [row.tolist() for row in got] == [[0.25 * strength for strength in row] for row in expected]
    count = math.ceil(share * math.ceil(low_entropy * sum(lengths)))
    assert sum(int((row == 0.5).sum()) for row in got) == count


def test_a_token_that_runs_away_is_penalised_and_one_that_turns_round_counts_least() -> None:
    """Likely and good, unlikely and bad: these the update drives on. Likely and bad: that one it reverses."""
    logprobs = [np.array([-0.1, -3.0], np.float32), np.array([-0.1, -3.0], np.float32)]
    everything = [np.ones(2, bool)] * 2
    got = penalty_coefficients(
        everything, logprobs, [1.0, -1.0], ConstraintConfig(beta=1.0, share=0.5, high=2.0, low=0.5)
    )
    assert [row.tolist() for row in got] == [[2.0, 0.5], [0.5, 2.0]]


def test_half_at_each_end_with_equal_strengths_penalises_all_of_low_entropy() -> None:
    """SENT's first variant."""
    rng = np.random.default_rng(0)
    low = [rng.random(n) < 0.8 for n in (5, 8, 4)]
    logprobs = [-rng.exponential(2.0, len(row)).astype(np.float32) for row in low]
    config = ConstraintConfig(beta=0.25, share=0.5, high=1.0, low=1.0)
    got = penalty_coefficients(low, logprobs, [1.0, -1.0, 0.5], config)
    assert [row.tolist() for row in got] == [(0.25 * row).tolist() for row in low]


def test_the_penalty_is_zero_with_zero_gradient_at_its_reference() -> None:
    logprobs = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    terms = constraint_loss(PenalisedTokens(logprobs=logprobs, reference=logprobs.detach(), weights=torch.ones(3)))
    terms.loss.backward()
    assert terms.loss.item() == 0.0 and logprobs.grad is not None and (logprobs.grad == 0).all()


CASES = [(kind, fraction, beta) for kind in KINDS for fraction, beta in ((0.2, 0.0), (0.5, 0.05), (1.0, 0.0))]
CASES = [case for case in CASES if case[0] != "gspo" or case[1] == 1.0]


@pytest.mark.parametrize(("kind", "fraction", "kl_beta"), CASES)
def test_the_gradient_with_sent_is_that_of_the_paper_for_any_cut(
    checkpoint: Path, policy: Policy, recomputing: Policy, kind: str, fraction: float, kl_beta: float
) -> None:
    """Some tokens are masked and penalised, some only one of the two; the KL of the objective keeps to its own."""
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for(SENT, kind=kind, fraction=fraction, kl_beta=kl_beta)
    samples = sampled_nearby(truth, samples_for(config))
    batch = step_batch(samples, 0, config)
    expected = truth.gradients(samples, config, {})
    free = truth.gradients(samples, config_for(ConstraintConfig(), kind=kind, fraction=fraction, kl_beta=kl_beta), {})
    assert all((expected[name] - free[name]).norm() > 1e-3 * free[name].norm() for name in free)
    for budget, trained in itertools.product(BUDGETS, (policy, recomputing)):
        shake(trained, 1)
        update = update_of(trained, config_for(SENT, kind=kind, fraction=fraction, budget=budget, kl_beta=kl_beta))
        stats = update.apply(0, batch)
        assert stats is not None
        assert_close(gradients(trained), expected)
        assert_figures(stats, truth, batch.samples, fraction)


def assert_figures(stats: UpdateStats, truth: Truth, samples: tuple[TrainSample, ...], fraction: float) -> None:
    """Its share of the loss and its KL, logged apart; the mask's figures know nothing of it."""
    kl, loss = [], 0.0
    for s in samples:
        pairs = zip(truth.logprobs(s.sample), truth.logprobs(s.sample, adapter=False), s.penalties, strict=True)
        found = [(reference.k3(p, q).item(), float(c)) for p, q, c in pairs if c]
        kl += [k3 for k3, _ in found]
        loss += s.weight * sum(k3 * c for k3, c in found)
    np.testing.assert_allclose(np.sort(stats.penalised_kl), np.sort(kl), rtol=1e-4, atol=1e-6)
    assert stats.constraint_loss == pytest.approx(loss, rel=1e-4)
    assert len(stats.ratios) == math.ceil(fraction * sum(len(s.penalties) for s in samples))


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_gradient_with_kl_cov_is_that_of_the_paper_in_a_later_pass(
    checkpoint: Path, policy: Policy, fraction: float
) -> None:
    shake(policy, 1)
    truth = Truth(checkpoint, policy, TEMPERATURE)
    config = config_for(KL_COV, fraction=fraction, passes=2)
    samples = sampled_nearby(truth, samples_for(config))
    old = near_policy(truth, samples, 0.6)
    expected = truth.gradients(samples, config, old)
    for budget in BUDGETS:
        shake(policy, 1)
        update = update_of(policy, config_for(KL_COV, fraction=fraction, budget=budget, passes=2))
        batch = step_batch(samples, 0, config)
        used = {s.sample.name: old[s.sample.name][torch.from_numpy(s.used)] for s in batch.samples}
        later_pass(update, batch, used)
        assert_close(gradients(policy), expected)


def test_old_log_probs_cover_penalised_tokens_so_that_a_second_pass_feels_them(policy: Policy) -> None:
    config = config_for(msgspec.structs.replace(KL_COV, beta=5.0), fraction=0.2, passes=2)
    config = msgspec.structs.replace(config, optimizer=OptimizerConfig(lr=0.05))
    shake(policy, 1)
    stats = update_of(policy, config).apply(0, step_batch(samples_for(config), 0, config))
    assert stats is not None and stats.penalised_kl.max() > 1e-3 and stats.constraint_loss > 0


def test_the_step_settles_the_same_coefficients_as_the_reference() -> None:
    config = config_for(SENT, fraction=0.2)
    samples = samples_for(config)
    batch = step_batch(samples, 0, config)
    wanted = [[SENT.beta * strength for strength in row] for row in penalty_strengths(samples, config)]
    for sample, row in zip(batch.samples, wanted, strict=True):
        np.testing.assert_allclose(sample.penalties, row, rtol=1e-6)
        assert (sample.used == (sample.selected | (np.array(row) != 0))).all()
    selected, penalised = (
        np.concatenate([getattr(s, name) for s in batch.samples]).astype(bool) for name in ("selected", "penalties")
    )
    assert (penalised & ~selected).any(), "a token may be masked out and penalised"


def test_only_completions_with_penalised_tokens_meet_the_base(checkpoint: Path) -> None:
    """The pass with the adapter off runs over the completions with penalised tokens, and over none where no token is
    penalised."""
    policy = tiny_policy(checkpoint)
    config = config_for(msgspec.structs.replace(SENT, share=1e-4, low=0.0), budget=1)
    batch = step_batch(samples_for(config), 0, config)
    constrained = [s for s in batch.samples if s.penalties.any()]
    assert len(constrained) == 1 < len(batch.samples)
    update = update_of(policy, config)
    found = [update.penalty_reference([s]) for s in batch.samples]
    assert [None if x is None else len(x) for x in found] == [1 if s.penalties.any() else None for s in batch.samples]


def test_without_the_term_nothing_is_penalised_and_not_a_bit_changes(policy: Policy) -> None:
    plain = config_for(ConstraintConfig(), fraction=0.5)
    absent = config_for(msgspec.structs.replace(SENT, high=0.0, low=0.0), fraction=0.5)
    found = []
    for config in (plain, absent):
        shake(policy, 1)
        batch = step_batch(samples_for(config), 0, config)
        assert not any(s.penalties.any() for s in batch.samples)
        stats = update_of(policy, config).apply(0, batch)
        assert stats is not None and stats.constraint_loss == 0.0 and len(stats.penalised_kl) == 0
        found.append(adapter_bytes(policy.adapter))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("fraction", "constraint", "needed"),
    [
        (1.0, ConstraintConfig(), False),
        (0.2, ConstraintConfig(), True),
        (1.0, SENT, True),
        (1.0, KL_COV, False),
        (0.2, KL_COV, True),
    ],
)
def test_entropies_are_asked_for_only_where_something_is_chosen_by_them(
    policy: Policy, fraction: float, constraint: ConstraintConfig, needed: bool
) -> None:
    config = config_for(constraint, fraction=fraction, passes=2)
    assert needs_entropies(config.loss, config.constraint) is needed
    blind = [msgspec.structs.replace(group, entropies=None) for group in groups_of_a_step()]
    filled = batch_of(blind, policy, config).samples
    assert filled and all((s.sample.entropies is not None) is needed for s in filled)


def test_running_out_of_memory_with_penalised_tokens_replays_the_pass(checkpoint: Path) -> None:
    config = config_for(SENT, fraction=0.5, budget=10_000)
    roomy, small = (replace(tiny_policy(checkpoint), layers=None) for _ in range(2))
    cramped = CrampedBackbone(small.backbone, limit=48)
    small = replace(small, backbone=cramped, layers=None)
    batch = step_batch(samples_for(config), 0, config)
    notes = NotedSizes()
    fitted(small, config, batch, notes)
    assert cramped.refused
    fitting = config_for(SENT, fraction=0.5, budget=notes.sizes[0].tokens)
    update_of(roomy, fitting).apply(0, batch)
    assert adapter_bytes(roomy.adapter) == adapter_bytes(small.adapter)
