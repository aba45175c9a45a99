"""AdamW and its schedule against their definitions, and a state that survives as bytes."""

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from learner.update.optimizer import Optimizer, learning_rate
from shared.config.tree import OptimizerConfig
from shared.errors import DamageError
from tests import reference
from tests.support.cramped_card import Allocations

SHAPES = {"a.lora_A": (4, 6), "a.lora_B": (6, 4), "a.b.lora_A": (2, 3)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_five_steps_equal_the_definition(decay: float) -> None:
    config = OptimizerConfig(lr=0.03, beta1=0.8, beta2=0.95, weight_decay=decay, warmup_steps=2, schedule="cosine")
    params = parameters()
    exact = {
        name: reference.AdamW(value.detach().double().numpy(), beta1=0.8, beta2=0.95, decay=decay)
        for name, value in params.items()
    }
    rates = reference.learning_rates(0.03, 2, 5, "cosine", config.final_lr_fraction)
    optimizer = Optimizer(params, config, 5)
    for step, rate in enumerate(rates):
        give_gradients(params, step)
        for name, parameter in params.items():
            assert parameter.grad is not None
            exact[name].step(parameter.grad.double().numpy(), rate)
        assert optimizer.step(step) == pytest.approx(rate)
        for name, parameter in params.items():
            np.testing.assert_allclose(parameter.detach().numpy(), exact[name].theta, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(
    ("warmup", "steps", "final"), [(0, 10, 0.1), (3, 10, 0.0), (4, 5, 0.5), (0, 1, 0.1), (2, 4, 1)]
)
def test_rates_equal_the_definition(schedule: str, warmup: int, steps: int, final: float) -> None:
    config = OptimizerConfig(
        lr=2e-3,
        warmup_steps=warmup,
        schedule=schedule,  # pyright: ignore[reportArgumentType]
        final_lr_fraction=final,
    )
    got = [learning_rate(config, step, steps) for step in range(steps)]
    assert got == pytest.approx(reference.learning_rates(2e-3, warmup, steps, schedule, final))
    assert got[0] > 0


def test_a_state_put_down_and_taken_up_continues_with_the_same_bits() -> None:
    config = OptimizerConfig(lr=0.05, weight_decay=0.01, schedule="linear")
    through, params = parameters(), parameters()
    straight, first = Optimizer(through, config, 6), Optimizer(params, config, 6)
    for step in range(3):
        for optimizer, owned in ((straight, through), (first, params)):
            give_gradients(owned, step)
            optimizer.step(step)
    second = Optimizer(params, config, 6)
    second.load_state_bytes(first.state_bytes())
    assert second.state_bytes() == first.state_bytes()
    for step in range(3, 6):
        for optimizer, owned in ((straight, through), (second, params)):
            give_gradients(owned, step)
            optimizer.step(step)
    assert all(torch.equal(through[name], params[name]) for name in SHAPES)


def test_the_moments_are_made_at_the_start_as_pytorch_makes_them_in_the_first_step() -> None:
    params, plain = parameters(), parameters()
    optimizer, config = Optimizer(params, OptimizerConfig(), 3), OptimizerConfig()
    assert all(set(optimizer.adamw.state[value]) == {"step", "exp_avg", "exp_avg_sq"} for value in params.values())
    optimizer.load_state_bytes(optimizer.state_bytes())
    adamw = torch.optim.AdamW(plain.values(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=0.0)
    for owned in (params, plain):
        give_gradients(owned, 0)
    optimizer.step(0)
    adamw.step()
    for name, value in params.items():
        assert torch.equal(value, plain[name])
        made, expected = optimizer.adamw.state[value], adamw.state[plain[name]]
        assert {key: (v.dtype, v.shape) for key, v in made.items()} == {
            key: (v.dtype, v.shape) for key, v in expected.items()
        }


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_all_that_a_step_allocates_was_asked_for_before_it(decay: float) -> None:
    """Otherwise memory could run out between two parameters."""
    for device in ("cpu", "meta"):
        params = {name: nn.Parameter(value.to(device)) for name, value in parameters().items()}
        optimizer = Optimizer(params, OptimizerConfig(weight_decay=decay), 3)
        for value in params.values():
            value.grad = torch.ones_like(value)
        with Allocations(device=device) as reserved:
            optimizer.reserve()
        with Allocations(device=device) as stepped:
            optimizer.adamw.step()
        large = [size for size in stepped.sizes if size >= min(value.nbytes for value in params.values())]
        assert reserved.sizes and not Counter(large) - Counter(reserved.sizes)
        assert bool(large) == (device == "meta"), "on a CPU it goes over each parameter once"


def test_a_state_of_another_adapter_is_refused() -> None:
    params = parameters()
    optimizer = Optimizer(params, OptimizerConfig(), 3)
    give_gradients(params, 0)
    optimizer.step(0)
    foreign = {f"other.{key}": value for key, value in load(optimizer.state_bytes()).items()}
    with pytest.raises(DamageError, match="another adapter"):
        Optimizer(parameters(), OptimizerConfig(), 3).load_state_bytes(save(foreign))
    more = load(optimizer.state_bytes()) | foreign
    with pytest.raises(DamageError, match=r"names 'other\."):
        Optimizer(parameters(), OptimizerConfig(), 3).load_state_bytes(save(more))


def test_clipping_scales_the_whole_gradient_to_the_norm() -> None:
    params = parameters()
    give_gradients(params, 0)
    before = {name: value.grad.clone() for name, value in params.items() if value.grad is not None}
    norm = sum(float(grad.double().square().sum()) for grad in before.values()) ** 0.5
    assert Optimizer(params, OptimizerConfig(max_grad_norm=0.5), 3).clip() == pytest.approx(norm)
    for name, parameter in params.items():
        torch.testing.assert_close(parameter.grad, before[name] * 0.5 / norm, rtol=1e-5, atol=1e-7)


def test_a_gradient_within_the_norm_is_left_alone() -> None:
    params = parameters()
    give_gradients(params, 0)
    before = {name: value.grad.clone() for name, value in params.items() if value.grad is not None}
    optimizer = Optimizer(params, OptimizerConfig(max_grad_norm=100.0), 3)
    optimizer.clip()
    assert all(
        torch.equal(grad, before[name]) for name, grad in ((n, p.grad) for n, p in params.items()) if grad is not None
    )
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in params.values())
