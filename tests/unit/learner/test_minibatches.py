"""Several updates in a step: what each runs over, its gradient, the figures of the step, and how it is undone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from learner.objective.batch import StepBatch, TrainSample
from learner.quarantine.guard import Guard
from learner.quarantine.quarantine import keep_nowhere
from learner.update.forward_pass import UNCHANGED
from learner.update.mismatch import BF16, Mismatch
from protocol.messages import Group
from shared.config.tree import BatchConfig, Config, GuardConfig, LossConfig, OptimizerConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.dense_truth import Truth, sampled_nearby
from tests.support.fakes import CrampedBackbone, shake, tiny_group, tiny_policy
from tests.support.steps import NotedSizes, fitted, gradients, idle_samples, step_batch, teaching_samples, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = ([3, 12, 7], [5, 2, 4], [6, 9, 8], [4, 4, 5])
TEACHING = [tiny_group([1.0, 0.0, 0.0], row, group_id="abcd"[seed], seed=seed) for seed, row in enumerate(LENGTHS)]
EQUAL = tiny_group([1.0, 1.0], [9, 2], group_id="equal", seed=9)


def config_for(updates: int, *, tokens: int = 60, **loss: Any) -> Config:
    return Config(
        loss=LossConfig(**loss),
        optimizer=OptimizerConfig(lr=0.05, max_grad_norm=1e9),
        batch=BatchConfig(updates=updates, token_budget=tokens, head_rows=5),
        guard=GuardConfig(spike_factor=0.0),
    )


def batch_for(config: Config, groups: list[Group] | None = None) -> StepBatch:
    found = TEACHING if groups is None else groups
    return step_batch(teaching_samples(found, config), 0, config, idle_samples(found, config))


def names(samples: list[TrainSample]) -> list[str]:
    return [sample.sample.name for sample in samples]


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


@pytest.mark.parametrize(
    ("updates", "parts"), [(1, ["abcd"]), (2, ["ab", "cd"]), (3, ["a", "b", "cd"]), (9, [*"abcd"])]
)
def test_groups_stay_whole_and_are_shared_out_evenly(updates: int, parts: list[str]) -> None:
    batch = batch_for(config_for(updates))
    assert [names(part) for part in batch.minibatches()] == [
        [f"{group}[{index}]" for group in part for index in range(3)] for part in parts
    ]
    assert batch.updates == len(parts)


def test_groups_that_only_the_kl_needs_are_shared_out_too() -> None:
    batch = batch_for(config_for(2, kl_beta=0.1), [EQUAL, *TEACHING[:2]])
    assert [names(part)[-1] for part in batch.minibatches()] == ["a[2]", "equal[1]"]
    alone = batch_for(config_for(2, kl_beta=0.1), [EQUAL])
    assert alone.updates == 1 and names(alone.minibatches()[0]) == ["equal[0]", "equal[1]"]
    two = batch_for(config_for(2, kl_beta=0.1), [EQUAL, structs.replace(EQUAL, group_id="same")])
    assert two.updates == 2
    assert [names(part) for part in two.minibatches()] == [["equal[0]", "equal[1]"], ["same[0]", "same[1]"]]


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo"])
def test_the_mean_of_the_minibatches_gradients_is_the_steps(policy: Policy, kind: str) -> None:
    """At one policy. The divisor is the step's, so no token counts more because it is among few."""
    shake(policy, 1)

    def gradient(samples: list[TrainSample], config: Config) -> torch.Tensor:
        update = update_of(policy, config)
        update.accumulate(samples, UNCHANGED)
        return torch.cat([one.reshape(-1) for one in gradients(policy).values()])

    one, three = config_for(1, kind=kind), config_for(3, kind=kind)
    whole = gradient(list(batch_for(one).used), one)
    parts = [gradient(part, three) for part in batch_for(three).minibatches()]
    torch.testing.assert_close(torch.stack(parts).mean(dim=0), whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("passes", [1, 2])
def test_each_minibatch_has_an_update_and_only_the_first_a_ratio_of_one(policy: Policy, passes: int) -> None:
    config = config_for(2, passes=passes, kind="grpo")
    shake(policy, 1)
    update, batch = update_of(policy, config), batch_for(config)
    stats = update.apply(0, batch)
    assert {float(state["step"]) for state in update.optimizer.adamw.state.values()} == {2.0 * passes}
    tokens = sum(len(one.selected) for one in batch.minibatches()[0])
    assert np.abs(stats.ratios[:tokens] - 1).max() < 1e-5 and not stats.clipped[:tokens].any()
    assert np.abs(stats.ratios[tokens:] - 1).max() > 0.3 and stats.clipped[tokens:].any()
    assert len(stats.ratios) == passes * batch.response_tokens
    assert len(stats.mismatch) == len(stats.importance) == batch.response_tokens
    assert stats.weight_sum == pytest.approx(1.0)


def test_the_second_gradient_is_that_of_the_paper_against_the_first_policy(checkpoint: Path, policy: Policy) -> None:
    """pi_old of all minibatches is the policy before the step, and mu what came with the samples. The divisor of six
    samples is that of twelve over two."""
    config = config_for(2, kind="grpo", importance_cap=1.2)
    shake(policy, 1)
    truth = Truth(checkpoint, policy, config.rollout.temperature)
    samples = sampled_nearby(truth, teaching_samples(TEACHING, config))
    batch = step_batch(samples, 0, config)
    update_of(policy, config).apply(0, batch)
    after = adapter_bytes(policy.adapter)

    shake(policy, 1)
    update = update_of(policy, config)
    old = update.forward_pass.old(batch.used)
    first, second = batch.minibatches()
    update.applied(0, update.usable_gradient(0, first, old, update.accumulate))
    now = Truth(checkpoint, policy, config.rollout.temperature)
    exact = {sample.name: truth.logprobs(sample).detach() for sample in samples}
    expected = now.gradients([one.sample for one in second], config, exact)
    gradient = update.usable_gradient(0, second, old, update.accumulate)
    for name, wanted in expected.items():
        assert (gradients(policy)[name].double() - wanted).norm() <= 1e-4 * wanted.norm(), name
    update.applied(0, gradient)
    assert adapter_bytes(policy.adapter) == after


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_a_minibatch_without_a_selected_token_leaves_no_norm(policy: Policy, kl_beta: float) -> None:
    """What its KL moves is far less than what a group teaches, so the next norm would look like a spike."""
    config = config_for(4, entropy_fraction=0.2, kl_beta=kl_beta)
    surest = [structs.replace(group, entropies=np.zeros(sum(group.lengths), np.float32)) for group in TEACHING[1:]]
    shake(policy, 1)
    update, batch = update_of(policy, config), batch_for(config, [TEACHING[0], *surest])
    assert [any(one.selected.any() for one in part) for part in batch.minibatches()] == [True, False, False, False]
    update.apply(0, batch)
    assert len(update.norms.recent) == 1


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_a_minibatch_of_masked_samples_leaves_no_norm(policy: Policy, kl_beta: float) -> None:
    config = config_for(2, importance="sequence_mask", kl_beta=kl_beta)
    shake(policy, 1)
    update = update_of(policy, config)
    samples = teaching_samples(TEACHING, config)
    logprobs = update.forward_pass.old(step_batch(samples, 0, config).used).by_sample
    own = [replace(s, actor_logprobs=logprobs[s.name].numpy()) for s in samples]
    likelier = [replace(s, actor_logprobs=s.actor_logprobs - 5) if s.group in "cd" else s for s in own]
    update.apply(0, step_batch(likelier, 0, config))
    assert len(update.norms.recent) == 1


def test_a_step_that_is_refused_in_its_second_update_is_undone(policy: Policy) -> None:
    config = config_for(2)
    shake(policy, 1)
    update, batch = update_of(policy, config), batch_for(config)
    before = adapter_bytes(policy.adapter), update.optimizer.state_bytes(), update.norms.state_dict()
    last = batch.samples[-1]
    broken = replace(last, sample=replace(last.sample, advantage=float("nan")))
    guard = Guard(update, GuardConfig(on_fault="skip"), b"{}", keep_nowhere)
    result = guard.apply(0, [], replace(batch, samples=(*batch.samples[:-1], broken)))
    assert result.stats is None
    assert (adapter_bytes(policy.adapter), update.optimizer.state_bytes(), update.norms.state_dict()) == before


def test_between_two_steps_no_gradient_is_held_and_the_next_one_is_the_same(policy: Policy) -> None:
    config = config_for(2)
    found: list[bytes] = []
    for guarded in (True, False):
        shake(policy, 1)
        update, batch = update_of(policy, config), batch_for(config)
        guard = Guard(update, GuardConfig(), b"{}", keep_nowhere)
        for step in range(2):
            stats = guard.apply(step, [], batch).stats if guarded else update.apply(step, batch)
            assert stats and bool(gradients(policy)) is not guarded
        found.append(adapter_bytes(policy.adapter))
    assert found[0] == found[1]


def test_all_samples_pass_the_mismatch_gate_before_the_first_update(policy: Policy) -> None:
    """Those of later minibatches too."""
    config = config_for(2, max_mismatch=0.05)
    shake(policy, 1)
    update = update_of(policy, config)
    logprobs = update.forward_pass.old(batch_for(config).used).by_sample
    honest = [replace(s, actor_logprobs=logprobs[s.name].numpy()) for s in teaching_samples(TEACHING, config)]
    wrong = [replace(s, actor_logprobs=s.actor_logprobs - 0.5) if s.name.startswith("d") else s for s in honest]
    before = adapter_bytes(policy.adapter)
    with pytest.raises(Mismatch):
        update.apply(0, step_batch(wrong, 0, config, on_policy=True))
    assert adapter_bytes(policy.adapter) == before
    update.undo()
    assert update.apply(0, step_batch(honest, 0, config, on_policy=True)).mismatch.max() < 1e-6


def test_what_a_refused_step_has_measured_is_undone(checkpoint: Path) -> None:
    """In bf16 the learner's own rounding has raised the limits, which no resumed run would have."""
    config = config_for(1)
    update = update_of(tiny_policy(checkpoint, dtype=torch.bfloat16), config)
    with pytest.raises(Mismatch):
        update.apply(0, step_batch(teaching_samples(TEACHING, config), 0, config, on_policy=True))
    assert update.gate.limits != BF16
    update.undo()
    assert update.gate.limits == BF16


def test_memory_that_runs_out_in_a_later_minibatch_repeats_the_whole_step(checkpoint: Path) -> None:
    """The pass for log pi_old and the first update fit, two calls each, for prompts and completions."""
    config = config_for(2, tokens=10_000)
    roomy, small = (replace(tiny_policy(checkpoint), layers=None) for _ in range(2))
    cramped, notes = CrampedBackbone(small.backbone, limit=24, grace=4), NotedSizes()
    fitted(replace(small, backbone=cramped, layers=None), config, batch_for(config), notes)
    assert cramped.refused
    fitting = config_for(2, tokens=notes.sizes[0].tokens)
    update_of(roomy, fitting).apply(0, batch_for(fitting))
    assert adapter_bytes(roomy.adapter) == adapter_bytes(small.adapter)
