"""Elastic weight consolidation and the policy at a stage's start: the mathematics, and the state."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from learner.continual.anchor import Anchor
from learner.continual.ewc import delta
from shared.config.data import CurriculumConfig
from shared.model.policy import Policy
from tests.reference import ewc_penalty
from tests.support.fakes import hidden_of, shake, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = CurriculumConfig(kind="levels", ewc=0.3, ewc_decay=0.5, kl_to="stage")
IDS = torch.arange(8).reshape(1, 8)


@pytest.fixture
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


def fisher_of(policy: Policy, seed: int = 0) -> dict[str, torch.Tensor]:
    """Made-up, never negative."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(layer.lora_B.shape[0], layer.lora_A.shape[1], generator=generator)
        for name, layer in policy.adapter.layers.items()
    }


def deltas(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: delta(layer.lora_A, layer.lora_B, layer.scale).detach() for name, layer in policy.adapter.layers.items()
    }


def laid(policy: Policy, config: CurriculumConfig = CONFIG) -> Anchor:
    anchor = Anchor(policy.adapter, config)
    anchor.set(1, fisher_of(policy))
    return anchor


def zero_grads(policy: Policy) -> None:
    for parameter in policy.adapter.parameters().values():
        parameter.grad = torch.zeros_like(parameter)


def grads(policy: Policy) -> dict[str, torch.Tensor]:
    """Those in the parameters."""
    return {name: value.grad for name, value in policy.adapter.parameters().items() if value.grad is not None}


def test_at_the_anchor_there_is_no_penalty_and_no_pull(policy: Policy) -> None:
    anchor = laid(policy)
    zero_grads(policy)
    assert anchor.pull(grads(policy)) == 0.0
    assert not any(p.grad.any() for p in policy.adapter.parameters().values() if p.grad is not None)


def test_before_a_stage_has_ended_there_is_nothing(policy: Policy) -> None:
    zero_grads(policy)
    anchor = Anchor(policy.adapter, CONFIG)
    assert (anchor.pull(grads(policy)), anchor.stage) == (0.0, 0)


def test_penalty_and_gradient_are_those_of_the_formula(policy: Policy) -> None:
    anchor = laid(policy)
    then = deltas(policy)
    shake(policy, seed=5)
    zero_grads(policy)
    found = anchor.pull(grads(policy))
    expected = 0.0
    for name, layer in policy.adapter.layers.items():
        fisher = anchor.fisher[name].double()
        a, b = (t.detach().double().requires_grad_() for t in (layer.lora_A, layer.lora_B))
        drift = layer.scale * b @ a - then[name].double()
        now = deltas(policy)[name].double().numpy()
        expected += ewc_penalty(0.3, fisher.numpy(), now, then[name].double().numpy())
        a_grad, b_grad = torch.autograd.grad(0.3 / 2 * (fisher * drift**2).sum(), (a, b))
        assert layer.lora_A.grad is not None and layer.lora_B.grad is not None
        assert torch.allclose(layer.lora_A.grad.double(), a_grad, rtol=1e-4, atol=1e-6)
        assert torch.allclose(layer.lora_B.grad.double(), b_grad, rtol=1e-4, atol=1e-6)
    assert found == pytest.approx(expected, rel=1e-4)


def test_it_adds_to_the_gradient_that_is_there(policy: Policy) -> None:
    anchor = laid(policy)
    shake(policy, seed=5)
    zero_grads(policy)
    anchor.pull(grads(policy))
    once = {name: p.grad.clone() for name, p in policy.adapter.parameters().items() if p.grad is not None}
    anchor.pull(grads(policy))
    for name, parameter in policy.adapter.parameters().items():
        assert parameter.grad is not None and torch.allclose(parameter.grad, 2 * once[name])


def test_another_factorisation_has_the_same_penalty(policy: Policy) -> None:
    anchor = laid(policy)
    shake(policy, seed=5)
    zero_grads(policy)
    penalty = anchor.pull(grads(policy))
    for layer in policy.adapter.layers.values():
        mix = torch.eye(len(layer.lora_A)) + 0.3 * torch.randn(len(layer.lora_A), len(layer.lora_A))
        layer.lora_A.data, layer.lora_B.data = mix @ layer.lora_A.data, layer.lora_B.data @ torch.linalg.inv(mix)
    assert anchor.pull(grads(policy)) == pytest.approx(penalty, rel=1e-3)


def test_a_later_stage_moves_the_anchor_and_keeps_a_share_of_the_older_fisher(policy: Policy) -> None:
    anchor = laid(policy)
    first = {name: values.float() for name, values in anchor.fisher.items()}
    shake(policy, seed=5)
    zero_grads(policy)
    anchor.set(2, {name: torch.ones_like(values) for name, values in first.items()})
    assert anchor.stage == 2 and anchor.pull(grads(policy)) == 0.0
    for name, values in anchor.fisher.items():
        assert torch.allclose(values.float(), 1 + 0.5 * first[name], rtol=0.01)
    assert np.mean([float(values.mean()) for values in first.values()]) == pytest.approx(1.0, abs=0.05)


def test_the_reference_is_the_base_until_a_stage_has_ended_then_the_policy_of_then(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint, shaken=False)
    anchor = Anchor(policy.adapter, CONFIG)
    shake(policy, seed=1)
    with torch.no_grad():
        with anchor.reference():
            first = hidden_of(policy, IDS)
        with policy.adapter.switched_off():
            assert torch.equal(first, hidden_of(policy, IDS))
        then = hidden_of(policy, IDS)
        anchor.set(1, {})
        shake(policy, seed=5)
        now = hidden_of(policy, IDS)
        with anchor.reference():
            assert torch.equal(hidden_of(policy, IDS), then)
        assert torch.equal(hidden_of(policy, IDS), now) and not torch.equal(now, then)
        with Anchor(policy.adapter, msgspec.structs.replace(CONFIG, kl_to="base")).reference():
            assert torch.equal(hidden_of(policy, IDS), first)


def test_what_a_run_starts_from_is_the_reference_that_was_asked_for(policy: Policy) -> None:
    """Of all steps with "start", of the first stage with "stage", and never with "base"."""
    anchors = {
        to: Anchor(policy.adapter, msgspec.structs.replace(CONFIG, kl_to=to)) for to in ("start", "stage", "base")
    }
    with torch.no_grad():
        then = hidden_of(policy, IDS)
        with policy.adapter.switched_off():
            base = hidden_of(policy, IDS)
        shake(policy, seed=5)
        expected = {"start": then, "stage": then, "base": base}
        for to, anchor in anchors.items():
            with anchor.reference():
                assert torch.equal(hidden_of(policy, IDS), expected[to])
        now = hidden_of(policy, IDS)
        anchors["start"].set(1, fisher_of(policy))
        loaded = Anchor(policy.adapter, anchors["start"].config)
        loaded.load_state_bytes(anchors["start"].state_bytes())
        shake(policy, seed=6)
        with loaded.reference():
            assert torch.equal(hidden_of(policy, IDS), then) and not torch.equal(then, now)
        kept = [*loaded.theta.values(), *loaded.fisher.values(), *loaded.start.values()]
        assert sum(values.nbytes for values in kept) == loaded.most_bytes()


def test_saved_and_loaded_it_pulls_the_same(policy: Policy, checkpoint: Path) -> None:
    anchor = laid(policy)
    shake(policy, seed=5)
    loaded = Anchor(policy.adapter, CONFIG)
    loaded.load_state_bytes(anchor.state_bytes())
    assert loaded.stage == 1 and loaded.state_bytes() == anchor.state_bytes()
    zero_grads(policy)
    assert loaded.pull(grads(policy)) == anchor.pull(grads(policy)) > 0.0
    fresh = Anchor(policy.adapter, CONFIG)
    loaded.load_state_bytes(fresh.state_bytes())
    assert (loaded.stage, loaded.theta, loaded.fisher) == (0, {}, {})


def test_its_file_is_no_larger_than_was_said(policy: Policy) -> None:
    for config in (CONFIG, msgspec.structs.replace(CONFIG, ewc=0.0)):
        anchor = Anchor(policy.adapter, config)
        anchor.set(1, fisher_of(policy) if config.ewc else {})
        tensors = sum(t.nbytes for t in [*anchor.theta.values(), *anchor.fisher.values(), *anchor.start.values()])
        assert tensors == anchor.most_bytes() < len(anchor.state_bytes())
