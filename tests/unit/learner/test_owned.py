"""AdamW divided among ranks: who owns what, the same bits as whole moments, and the other users of the gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load

from learner.update.gradient_check import NumericalFault
from learner.update.optimizer import Optimizer
from learner.update.placement.owned import Owned
from learner.update.placement.placement import ALONE, InTurns, Placement
from learner.update.placement.ranks import Ranks
from learner.update.update import Update
from learner.wiring import build_trainer, placement_on
from shared.config.data import CurriculumConfig
from shared.config.processes import ComputeConfig
from shared.config.tree import Config, GrowthConfig, GuardConfig, OptimizerConfig
from shared.model.policy import Policy
from tests.support.fakes import tiny_policy
from tests.support.rank_processes import CLIPPED, CONFIG, batch_of_step, gradients_of
from tests.support.ranks_in_threads import ThreadGroup, on_ranks
from tests.support.steps import gradients

pytestmark = pytest.mark.usefixtures("one_thread")
ZERO2 = ComputeConfig(parallel="zero2", ranks=2)
Bits = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class End:
    """What a rank ends with."""

    adapter: Bits
    norms: list[float]
    figures: list[Any]
    moments: bytes
    """As rank 0 saves them."""
    own: bytes


def end_of(policy: Policy, placement: Placement, config: Config = CLIPPED, anchored: bool = False) -> End:
    """After two steps of two updates each, clipped."""
    update = build_trainer(policy, config, lambda: None, placement=placement).update
    if anchored:
        anchor(update)
    stats = [update.apply(step, batch_of_step(policy)) for step in range(2)]
    return End(
        adapter={name: value.detach().clone() for name, value in policy.adapter.parameters().items()},
        norms=[one.grad_norm for one in stats],
        figures=[(one.loss, one.noise, one.ewc_penalty) for one in stats],
        moments=update.optimizer.state_bytes(),
        own=update.optimizer.own_state_bytes(),
    )


def anchor(update: Update) -> None:
    """To the adapter as it was a moment ago, with a Fisher of ones."""
    assert update.anchor
    layers = update.policy.adapter.layers
    update.anchor.set(1, {name: torch.ones(len(one.lora_B), one.lora_A.shape[1]) for name, one in layers.items()})
    with torch.no_grad():
        for parameter in update.policy.adapter.parameters().values():
            parameter.add_(0.01)


def owned_ends(checkpoint: Path, ranks: int, config: Config = CLIPPED, anchored: bool = False) -> list[End]:
    return on_ranks(ranks, lambda group: end_of(tiny_policy(checkpoint), placed(group, checkpoint), config, anchored))


def placed(group: ThreadGroup, checkpoint: Path) -> Ranks:
    raise NotImplementedError
