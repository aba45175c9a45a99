"""AdamW divided among ranks: who owns what, the bits of whole moments, what else reads the gradient, another home."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load
from torch import nn

from learner.update.gradient_check import NumericalFault
from learner.update.optimizer import Optimizer
from learner.update.placement.owned import Owned
from learner.update.placement.placement import ALONE, InTurns, Placement
from learner.update.placement.ranks import Ranks
from learner.update.update import Update
from learner.wiring import build_trainer, placement_on
from shared.config.data import CurriculumConfig
from shared.config.tree import Config, GrowthConfig, GuardConfig, OptimizerConfig
from shared.errors import DamageError
from shared.model.policy import Policy
from tests.support.cramped_card import Refusing, named
from tests.support.fakes import tiny_policy
from tests.support.rank_processes import CLIPPED, batch_of_step, gradients_of
from tests.support.ranks_in_threads import ThreadGroup, on_ranks
from tests.support.steps import gradients

pytestmark = pytest.mark.usefixtures("one_thread")
STEPPED = OptimizerConfig(lr=0.1, max_grad_norm=0.5, weight_decay=0.1)
SHAPES = ((3, 5), (40, 2), (7, 7))
NOISY = structs.replace(CLIPPED, growth=GrowthConfig(max_prompts=8))
ANCHORED = structs.replace(CLIPPED, curriculum=CurriculumConfig(kind="levels", ewc=0.5))


@dataclass(frozen=True, kw_only=True)
class End:
    """What a rank ends with."""

    adapter: dict[str, torch.Tensor]
    figures: list[Any]
    moments: bytes
    """As rank 0 saves them."""
    own: bytes


def end_of(policy: Policy, placement: Placement, config: Config) -> End:
    """After two steps of two updates each, clipped."""
    update = build_trainer(policy, config, lambda: None, placement=placement).update
    if update.anchor:
        hold_back(update)
    stats = [update.apply(step, batch_of_step(policy)) for step in range(2)]
    return End(
        adapter={name: value.detach().clone() for name, value in policy.adapter.parameters().items()},
        figures=[(one.loss, one.grad_norm, one.noise, one.ewc_penalty) for one in stats],
        moments=update.optimizer.state_bytes(),
        own=update.optimizer.own_state_bytes(),
    )


def hold_back(update: Update) -> None:
    """The anchor is the adapter as it was a moment ago, with a Fisher of ones."""
    assert update.anchor
    layers = update.policy.adapter.layers
    update.anchor.set(1, {name: torch.ones(len(one.lora_B), one.lora_A.shape[1]) for name, one in layers.items()})
    with torch.no_grad():
        for parameter in update.policy.adapter.parameters().values():
            parameter.add_(0.01)


def owned(group: ThreadGroup, policy: Policy) -> Placement:
    return placement_on(group, policy, "zero2")  # pyright: ignore[reportArgumentType]


def ends(checkpoint: Path, ranks: int, config: Config) -> tuple[End, list[End]]:
    """In turns, with whole moments; and of each rank, with its part of them."""
    first, *policies = [tiny_policy(checkpoint) for _ in range(ranks + 1)]
    expected = end_of(first, InTurns([*first.adapter.parameters().values()], ranks), config)
    found = on_ranks(ranks, lambda group: end_of(policies[group.rank], owned(group, policies[group.rank]), config))
    return expected, found


# --- who owns what


def test_each_tensor_has_one_owner_and_owners_have_about_as_much(checkpoint: Path) -> None:
    parameters = [*tiny_policy(checkpoint).adapter.parameters().values()]
    for size in (1, 2, 3, 4):
        owners = on_ranks(size, lambda group: Owned(group, parameters))  # pyright: ignore[reportArgumentType]
        loads = [sum(one.numel() for n, one in enumerate(parameters) if owner.has(n)) for owner in owners]
        assert sum(loads) == sum(one.numel() for one in parameters)
        assert max(loads) - min(loads) <= max(one.numel() for one in parameters)
        assert {tuple(owner.places) for owner in owners} == {tuple(owners[0].places)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gradient_is_on_its_owners_alone_and_that_of_one_process(checkpoint: Path, ranks: int) -> None:
    first, *policies = [tiny_policy(checkpoint) for _ in range(ranks + 1)]
    expected, stats = gradients_of(first, ALONE)

    def work(group: ThreadGroup) -> tuple[dict[str, torch.Tensor], float]:
        policy = policies[group.rank]
        found, there = gradients_of(policy, owned(group, policy))
        return found, there.grad_norm

    found = on_ranks(ranks, work)
    assert sorted(name for grads, _ in found for name in grads) == sorted(expected), "each once"
    for grads, norm in found:
        assert norm == pytest.approx(stats.grad_norm, rel=1e-5) and grads
        for name, gradient in grads.items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_memory_that_the_first_owner_lacks_for_its_sums_runs_out_on_all_after_the_last_sum() -> None:
    def added(group: ThreadGroup) -> None:
        parameters = [*some_parameters().values()]
        owners = Owned(group, parameters)  # pyright: ignore[reportArgumentType]
        placement = Ranks(group, parameters, owners=owners)  # pyright: ignore[reportArgumentType]
        with (
            Refusing(named("_to_copy"), times=1 - min(group.rank, 1)),
            pytest.raises(torch.OutOfMemoryError, match="rank 0 of the learner ran out of memory"),
        ):
            placement.together(lambda: owners.added([one.detach() for one in parameters]))

    on_ranks(3, added)


# --- the bits of whole moments


@pytest.mark.parametrize(
    ("config", "ranks"), [(CLIPPED, 3), (NOISY, 2), (ANCHORED, 2)], ids=["plain", "noise", "anchor"]
)
def test_adapter_norms_and_moments_have_the_bits_of_whole_ones(checkpoint: Path, config: Config, ranks: int) -> None:
    expected, found = ends(checkpoint, ranks, config)
    assert found[0].moments == expected.moments, "what a checkpoint has"
    whole = load(expected.moments)
    assert sorted(key for one in found for key in load(one.own)) == sorted(whole), "nobody has those of others"
    for one in found:
        assert one.figures == expected.figures
        assert all(torch.equal(one.adapter[name], value) for name, value in expected.adapter.items())
    noise, penalty = expected.figures[0][2:]
    assert (noise is not None) == (config is NOISY) and bool(penalty) == (config is ANCHORED)


def test_moments_that_were_saved_go_to_their_owners(checkpoint: Path) -> None:
    first, *policies = [tiny_policy(checkpoint) for _ in range(4)]
    whole = end_of(first, ALONE, CLIPPED).moments

    def work(group: ThreadGroup) -> tuple[bytes, bytes]:
        policy = policies[group.rank]
        optimizer = build_trainer(policy, CLIPPED, lambda: None, placement=owned(group, policy)).update.optimizer
        optimizer.load_state_bytes(whole)
        own = optimizer.own_state_bytes()
        optimizer.load_state_bytes(own)
        return optimizer.state_bytes(), own

    (saved, own), *others = on_ranks(3, work)
    assert saved == whole and not load(own).keys() & load(others[0][1]).keys()
    one = build_trainer(policies[0], CLIPPED, lambda: None).update.optimizer
    with pytest.raises(DamageError, match="has nothing for"):
        one.load_state_bytes(own)


# --- what else reads the gradient


def test_a_refused_gradient_is_refused_by_all_ranks_with_the_same_words(checkpoint: Path) -> None:
    config = structs.replace(CLIPPED, guard=GuardConfig(grad_norm_limit=1e-6))
    first, *policies = [tiny_policy(checkpoint) for _ in range(3)]

    def said(policy: Policy, placement: Placement) -> str:
        update = build_trainer(policy, config, lambda: None, placement=placement).update
        with pytest.raises(NumericalFault) as fault:
            update.apply(0, batch_of_step(policy))
        assert not gradients(policy)
        update.undo()
        return str(fault.value)

    expected = said(first, InTurns([*first.adapter.parameters().values()], 2))
    assert "suspect" in expected
    found = on_ranks(2, lambda group: said(policies[group.rank], owned(group, policies[group.rank])))
    assert found == [expected, expected]


# --- steps elsewhere than where the parameters are


def some_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{n}": nn.Parameter(torch.randn(shape, generator=generator)) for n, shape in enumerate(SHAPES)}


def step_all(optimizer: Optimizer, gradient: Callable[[int, nn.Parameter], torch.Tensor]) -> list[float]:
    norms: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        for number, parameter in enumerate(optimizer.parameters.values()):
            parameter.grad = gradient(step + 10 * number, parameter)
        optimizer.bring_home()
        norms.append(optimizer.clip())
        optimizer.step(step)
        with torch.no_grad():  # As if another adapter had been installed.
            optimizer.parameters["t1"].mul_(0.5)
    return norms


def drawn(seed: int, parameter: nn.Parameter) -> torch.Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def test_steps_at_home_give_the_same_bits_and_the_gradient_is_there_alone() -> None:
    """A home that is a device of another name, since there is no card: its tensors are others, as on a card."""
    plain, away = some_parameters(), some_parameters()
    here, home = (
        Optimizer(parameters, STEPPED, 3, home=device)
        for parameters, device in ((plain, None), (away, torch.device("cpu", 0)))
    )
    assert all(home.stepped[name] is not value for name, value in away.items())
    assert all(here.stepped[name] is value for name, value in plain.items())
    assert step_all(here, drawn) == step_all(home, drawn)
    assert all(torch.equal(away[name], value) for name, value in plain.items())
    assert here.state_bytes() == home.state_bytes()
    assert all(value.grad is None for value in away.values()) and home.gradients().keys() == away.keys()
    home.zero_grad()
    assert home.gradients() == {}


def test_ranks_that_own_nothing_follow_the_others() -> None:
    plain = some_parameters()
    expected = step_all(Optimizer(plain, STEPPED, 3), drawn)

    def work(group: ThreadGroup) -> tuple[list[float], dict[str, nn.Parameter], int]:
        parameters = some_parameters()
        owners = Owned(group, [*parameters.values()])  # pyright: ignore[reportArgumentType]
        optimizer = Optimizer(parameters, STEPPED, 3, owners)

        def mine(seed: int, parameter: nn.Parameter) -> torch.Tensor | None:
            return drawn(seed, parameter) if any(parameter is one for one in optimizer.stepped.values()) else None

        norms = step_all(optimizer, mine)  # pyright: ignore[reportArgumentType]
        optimizer.load_state_bytes(optimizer.own_state_bytes())
        return norms, parameters, len(optimizer.stepped)

    found = on_ranks(5, work)
    assert sorted(count for *_, count in found) == [0, 0, 1, 1, 1]
    for norms, parameters, _ in found:
        assert norms == expected and all(torch.equal(parameters[name], value) for name, value in plain.items())
