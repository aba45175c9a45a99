"""The learner on a card: the gradient of the CPU, the same bits again, and all of it when memory is short."""

import argparse
from collections.abc import Sequence

import pytest
import torch

from benchmarks.update_bound import drawn_batch
from learner.objective.batch import StepBatch
from learner.update.budget import Attempts
from learner.update.forward_pass import UNCHANGED
from learner.wiring import load_trained_policy
from shared.model.policy import Policy
from shared.process.card import driver_of
from tests.support.card_sides import Sides, limited_to, make_sides, num_ooms, release
from tests.support.fakes import shake
from tests.support.steps import NotedSizes, gradients, trainer_of, update_of

pytestmark = pytest.mark.gpu
MIB = 2**20
KEYS = {"loss__entropy_fraction": 1.0, "optimizer__warmup_steps": 0}


EVEN, UNEVEN = [48] * 8, [200, 150, 90, 40, 40, 12, 2, 1]


def batch(side: Sides, lengths: Sequence[int] = EVEN) -> StepBatch:
    args = argparse.Namespace(prompt=40, lengths=lengths)
    return drawn_batch(side.config, len(side.policy.head), args)


def gradient(side: Sides, policy: Policy, found: StepBatch) -> dict[str, torch.Tensor]:
    """Before it is clipped."""
    update = update_of(policy, side.config)
    update.accumulate(found.used, UNCHANGED)
    return gradients(policy)


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all values as one vector."""
    a, b = (torch.cat([part[name].flatten().cpu().double() for name in sorted(part)]) for part in (found, expected))
    assert a.isfinite().all() and b.norm() > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_is_the_cpus(clean: torch.device, dtype: str, recompute: str, lengths: list[int]) -> None:
    side = make_sides(clean, compute__dtype=dtype, batch__recompute=recompute, **KEYS)
    found = batch(side, lengths)
    there = load_trained_policy(side.config, "cpu")
    shake(there, 1)
    here = gradient(side, side.policy, found)
    assert relative(here, gradient(side, there, found)) < {"fp32": 1e-4, "bf16": 0.05}[dtype]


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_gradient_has_the_same_bits_again(clean: torch.device, recompute: str, lengths: list[int]) -> None:
    side = make_sides(clean, batch__recompute=recompute, **KEYS)
    found = batch(side, lengths)
    first = gradient(side, side.policy, found)
    again = gradient(side, side.policy, found)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_an_update_has_the_same_bits_again(clean: torch.device) -> None:
    """From the same position."""
    side = make_sides(clean, **KEYS)
    found, update = batch(side), update_of(side.policy, side.config)
    begin = update.position()
    update.apply(0, found)
    first = update.position()
    update.restore(begin)
    update.apply(0, found)
    assert update.position() == first and first != begin


def step(side: Sides, found: StepBatch, notes: NotedSizes) -> dict[str, torch.Tensor]:
    """A whole step from the same adapter, repeated in smaller parts if it does not fit: its clipped gradient."""
    shake(side.policy, 1)
    trainer = trainer_of(side.policy, side.config)
    attempts = Attempts(trainer.budget, trainer.update, notes, driver_of(side.policy.device))
    attempts.until_it_fits(0, lambda: trainer.update.apply(0, found))
    return gradients(side.policy)


def test_a_step_that_does_not_fit_is_computed_in_smaller_parts(clean: torch.device) -> None:
    side = make_sides(clean, compute__dtype="fp32", batch__recompute="never", batch__token_budget=16_384, **KEYS)
    found, whole, parts = batch(side, [384] * 32), NotedSizes(), NotedSizes()
    step(side, found, whole)
    release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    expected = step(side, found, whole)
    needed, failures = torch.cuda.max_memory_allocated(), num_ooms()
    with limited_to(before + (needed - before) // 2):
        again = step(side, found, parts)
    assert num_ooms() > failures, "the limit was not felt"
    assert whole.sizes[0].tokens == 16_384 and parts.sizes[0] != whole.sizes[0]
    assert relative(again, expected) < 1e-4


def test_what_a_failed_step_held_is_free_again(clean: torch.device) -> None:
    """The exception would hold its tensors."""
    side = make_sides(clean, batch__recompute="never", batch__token_budget=16_384, **KEYS)
    found = batch(side, [384] * 32)
    step(side, found, NotedSizes())
    side.policy.adapter.requires_grad()
    release()
    before = torch.cuda.memory_allocated()
    with limited_to(before + 64 * MIB):
        step(side, found, NotedSizes())
    assert torch.cuda.memory_allocated() <= before + MIB
