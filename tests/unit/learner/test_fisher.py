"""The Fisher of dW: against brute force on two parameters, against autograd on a real policy, and how it is scaled."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from learner.continual.fisher import diagonal_fisher, merged, normalised, weight_gradients
from shared.model.layers.lora import Adapter, DenseMatmul, FrozenLinear, LoraLinear
from tests.reference import bernoulli_fisher
from tests.support.fakes import hidden_of, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def logistic(theta: list[float]) -> Adapter:
    """p(1 | x) = sigma(theta x) as a linear of one output whose adapter is all there is: theta = dW."""
    layer = LoraLinear(FrozenLinear(DenseMatmul(torch.zeros(1, 2)), None), (1, 2), rank=2, scale=0.5)
    layer.lora_A.data = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    layer.lora_B.data = torch.tensor([[theta[0], theta[1] / 2]])
    adapter = Adapter({"only": layer})
    adapter.requires_grad()
    return adapter


def drawn(adapter: Adapter, outputs: list[tuple[list[float], int]]) -> Iterator[torch.Tensor]:
    """log p(y | x) of each."""
    for x, y in outputs:
        logit = adapter.layers["only"](torch.tensor([x]))
        yield F.logsigmoid(logit if y else -logit).sum()


def test_two_parameters_by_brute_force() -> None:
    theta = [math.log(3.0), -math.log(3.0)]
    # In these inputs p is 3/4 or 1/4, so four outputs hold each y in exactly its share: the sum is the expectation.
    inputs, ones = [[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]], [3, 1, 3]
    outputs = [(x, int(place < n)) for x, n in zip(inputs, ones, strict=True) for place in range(4)]
    adapter = logistic(theta)
    found = diagonal_fisher(adapter, drawn(adapter, outputs))
    assert np.allclose(found["only"].numpy(), bernoulli_fisher(inputs, theta), rtol=1e-5)


def test_squares_come_before_the_mean_and_zero_is_no_special_case() -> None:
    adapter = logistic([0.0, 0.0])
    assert not adapter.layers["only"].lora_B.any()
    found = diagonal_fisher(adapter, drawn(adapter, [([1.0, 2.0], 1), ([1.0, 2.0], 0)]))
    assert np.allclose(found["only"].numpy(), [[0.25, 1.0]]), "the mean gradient is zero, its square would be too"


def test_a_layer_that_is_passed_twice_in_one_completion_has_one_gradient() -> None:
    adapter = logistic([0.0, 0.0])
    layer = adapter.layers["only"]

    def both() -> Iterator[torch.Tensor]:
        yield F.logsigmoid(layer(torch.tensor([[1.0, 0.0]])) + layer(torch.tensor([[1.0, 2.0]]))).sum()

    found = diagonal_fisher(adapter, both())
    assert np.allclose(found["only"].numpy(), [[(0.5 * 2) ** 2, (0.5 * 2) ** 2]]), "x is the sum (2, 2)"


def test_another_factorisation_of_the_same_policy_has_the_same_fisher() -> None:
    first, second = logistic([0.7, -0.2]), logistic([0.7, -0.2])
    mix = torch.tensor([[1.0, 2.0], [-0.5, 3.0]])
    layer = second.layers["only"]
    layer.lora_A.data, layer.lora_B.data = mix @ layer.lora_A.data, layer.lora_B.data @ torch.linalg.inv(mix)
    outputs = [([1.0, 2.0], 1), ([0.5, -1.0], 0)]
    one, other = (diagonal_fisher(adapter, drawn(adapter, outputs))["only"] for adapter in (first, second))
    assert torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_real_policy_s_gradients_are_those_that_autograd_gives_to_a_and_b(checkpoint: Path, recompute: bool) -> None:
    policy = tiny_policy(checkpoint)
    if recompute:
        policy.recompute_activations()
    ids = torch.arange(24).reshape(2, 12)
    with weight_gradients(policy.adapter) as found:
        hidden_of(policy, ids).square().sum().backward()
    assert set(found) == set(policy.adapter.layers)
    for name, layer in policy.adapter.layers.items():
        assert layer.lora_A.grad is not None and layer.lora_B.grad is not None
        a_grad = layer.scale * layer.lora_B.detach().t() @ found[name]
        b_grad = layer.scale * found[name] @ layer.lora_A.detach().t()
        assert torch.allclose(a_grad, layer.lora_A.grad, rtol=1e-3, atol=1e-4 * float(a_grad.abs().max()))
        assert torch.allclose(b_grad, layer.lora_B.grad, rtol=1e-3, atol=1e-4 * float(b_grad.abs().max()))
    assert not any(layer._forward_hooks for layer in policy.adapter.layers.values())


def test_the_mean_over_all_layers_is_one_and_their_ratio_stays() -> None:
    found = normalised({"x": torch.tensor([[1.0, 3.0]]), "y": torch.tensor([[8.0], [0.0]])})
    assert torch.equal(found["x"], torch.tensor([[1 / 3, 1.0]])) and torch.equal(found["y"][0], torch.tensor([8 / 3]))
    nothing = {"x": torch.zeros(2, 2)}
    assert torch.equal(normalised(nothing)["x"], nothing["x"])


def test_the_online_form_fades_what_was_before() -> None:
    new = {"x": torch.ones(1, 2)}
    assert torch.equal(merged({"x": torch.full((1, 2), 4.0)}, new, 0.5)["x"], torch.full((1, 2), 3.0))
    assert merged({}, new, 0.5)["x"] is new["x"]
