"""Memory that runs out in the middle of a step: the step is repeated in smaller parts, and nothing else is different.

tests/support/cramped_card.py refuses single operations, or all that go beyond so many bytes.
"""

import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.objective.batch import StepBatch
from learner.update.budget import FIRST_WAIT, Attempts, Budget, Size
from learner.update.figures import UpdateStats
from learner.wiring import Trainer
from shared.config.data import CurriculumConfig
from shared.config.tree import BatchConfig, Config, GrowthConfig, LossConfig, OptimizerConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.cramped_card import Allocations, Kind, Refusing, named, product_of_width
from tests.support.fake_card import FakeDriver
from tests.support.fakes import VOCAB, tiny_group, tiny_policy
from tests.support.steps import NotedSizes, gradients, step_batch, teaching_samples, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, TOKENS = 150, 10_000
WIDTH = 128
"""Of the feed-forward layers."""
KINDS = {
    "embedding": named("embedding"),
    "attention": named("_softmax"),
    "feed-forward product": product_of_width(WIDTH),
    "head tile": product_of_width(VOCAB),
    "loss": named("minimum"),
    "backward": named("silu_backward"),
    "optimizer": named("empty_like"),
}


def config_for(size: Size | None = None, **loss: Any) -> Config:
    size = size or Size(tokens=TOKENS, rows=ROWS)
    return Config(
        loss=LossConfig(**loss),
        optimizer=OptimizerConfig(lr=0.01),
        batch=BatchConfig(token_budget=size.tokens, head_rows=size.rows),
    )


def batch_for(config: Config) -> StepBatch:
    lengths = [[30, 45, 12], [50, 8, 21], [33, 40, 9]]
    groups = [tiny_group([1.0, 0.0, 0.0], row, group_id="abc"[seed], seed=seed) for seed, row in enumerate(lengths)]
    return step_batch(teaching_samples(groups, config), 0, config)


class Watched(FakeDriver):
    """Notes what is in use when memory is to be given back."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use: Callable[[], int] = lambda: 0
        self.found: list[int] = []

    def release(self) -> None:
        self.found.append(self.in_use())


class Step:
    """A policy's first step, and what it came to."""

    def __init__(self, checkpoint: Path, config: Config) -> None:
        self.policy: Policy = tiny_policy(checkpoint, dequantize="each_call")
        self.trainer: Trainer = trainer_of(self.policy, config)
        self.notes = NotedSizes()
        self.driver = Watched()
        self.batch = batch_for(config)

    def run(self, step: int = 0) -> UpdateStats:
        attempts = Attempts(self.budget, self.trainer.update, self.notes, self.driver)
        return attempts.until_it_fits(step, lambda: self.trainer.update.apply(step, self.batch))

    @property
    def budget(self) -> Budget:
        return self.trainer.budget

    @property
    def size(self) -> Size:
        """Of the attempt that succeeded."""
        return self.notes.sizes[0]


def assert_same(found: UpdateStats, expected: UpdateStats) -> None:
    mine, wanted = asdict(found), asdict(expected)
    ours, theirs = mine.pop("logprobs"), wanted.pop("logprobs")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(values, theirs[name]) for name, values in ours.items())
    for name, value in mine.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, wanted[name], equal_nan=True), name
        else:
            assert value == wanted[name], name


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_repeated_in_smaller_parts_with_the_same_gradient(checkpoint: Path, kind: str, times: int) -> None:
    cramped, roomy = Step(checkpoint, config_for()), Step(checkpoint, config_for())
    with Refusing(KINDS[kind], times=times) as card:
        found = cramped.run()
    assert card.left == 0 and len(cramped.driver.found) == times
    assert cramped.size.rows == (75, 64, 64)[times - 1]
    assert (cramped.size.tokens < TOKENS) == (times > 2)

    twin = Step(checkpoint, config_for(cramped.size))
    assert_same(found, twin.run())
    assert adapter_bytes(cramped.policy.adapter) == adapter_bytes(twin.policy.adapter)
    assert cramped.trainer.update.optimizer.state_bytes() == twin.trainer.update.optimizer.state_bytes()
    assert cramped.trainer.update.norms.state_dict() == twin.trainer.update.norms.state_dict()

    undisturbed = roomy.run()
    expected = gradients(roomy.policy)
    for name, gradient in gradients(cramped.policy).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert found.loss == pytest.approx(undisturbed.loss, abs=1e-6)
    np.testing.assert_allclose(found.ratios, undisturbed.ratios, rtol=1e-5)
    np.testing.assert_allclose(found.mismatch, undisturbed.mismatch, atol=1e-5)


@pytest.mark.parametrize("at", [1, 4, 5, 8])
def test_a_later_pass_takes_the_earlier_ones_back(checkpoint: Path, at: int) -> None:
    """Two layers and two micro-batches a pass: the fifth and the eighth are of the second one."""
    config = config_for(Size(tokens=180, rows=ROWS), passes=2)
    cramped = Step(checkpoint, config)
    with Refusing(KINDS["backward"], at=at) as card:
        found = cramped.run()
    assert card.left == 0
    twin = Step(checkpoint, config_for(cramped.size, passes=2))
    assert_same(found, twin.run())
    assert adapter_bytes(cramped.policy.adapter) == adapter_bytes(twin.policy.adapter)
    assert cramped.trainer.update.optimizer.state_bytes() == twin.trainer.update.optimizer.state_bytes()
    assert cramped.trainer.update.norms.state_dict() == twin.trainer.update.norms.state_dict()


@pytest.mark.parametrize("kind", ["attention", "head tile", "backward", "optimizer"])
def test_nothing_of_the_failed_attempt_is_left_when_the_next_one_begins(checkpoint: Path, kind: str) -> None:
    """Not even until the garbage collector comes: the exception holds the tensors of the attempt."""
    step = Step(checkpoint, config_for(Size(tokens=180, rows=ROWS)))
    with Allocations() as card, Refusing(KINDS[kind], at=2):
        step.driver.in_use = lambda: card.now
        gc.collect()
        gc.disable()
        try:
            step.run()
        finally:
            gc.enable()
    assert step.driver.found == [0] and card.peak > 0


def test_a_step_shrinks_until_it_fits_into_so_many_bytes(checkpoint: Path) -> None:
    whole, small = Step(checkpoint, config_for()), Step(checkpoint, config_for())
    with Allocations() as card:
        whole.run()
    with Allocations(room=card.peak // 2) as cramped:
        found = small.run()
    assert small.size.tokens < TOKENS and cramped.peak <= card.peak // 2
    assert_same(found, Step(checkpoint, config_for(small.size)).run())


def test_the_next_steps_are_as_small_and_later_ones_as_large_as_before(checkpoint: Path) -> None:
    step = Step(checkpoint, config_for(Size(tokens=180, rows=64)))
    with Refusing(KINDS["attention"]):
        step.run()
    assert step.size.tokens < 180
    for _ in range(2 * FIRST_WAIT - 1):
        step.budget.end()
    assert step.budget.now == step.size
    step.budget.end()
    assert step.budget.now.tokens == 2 * step.size.tokens


MASKED = Config(loss=LossConfig(entropy_fraction=0.5), batch=BatchConfig(head_rows=20))
NOISE, TWO_PASSES = Config(growth=GrowthConfig(max_prompts=8)), Config(loss=LossConfig(kl_beta=0.1, passes=2))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(NOISE, KINDS["attention"], id="second group"),
        pytest.param(NOISE, named("clone"), id="gradient of a group"),
        pytest.param(TWO_PASSES, KINDS["head tile"], id="reference"),
        pytest.param(MASKED, KINDS["head tile"], id="masked"),
    ],
)
def test_whatever_a_step_computes_it_is_repeated_whole(checkpoint: Path, config: Config, kind: Kind) -> None:
    cramped, twin = Step(checkpoint, config), Step(checkpoint, config)
    with Refusing(kind, at=3) as card:
        found = cramped.run()
    assert card.left == 0
    twin.budget.now = cramped.size
    assert_same(found, twin.run())
    assert adapter_bytes(cramped.policy.adapter) == adapter_bytes(twin.policy.adapter)


def test_the_end_of_a_stage_does_not_depend_on_the_size(checkpoint: Path) -> None:
    """Its Fisher is computed once, in the attempt that then may fail."""
    curriculum = CurriculumConfig(kind="levels", stage_steps=1, ewc=10.0, ewc_samples=4)
    config = Config(curriculum=curriculum, batch=BatchConfig(head_rows=ROWS))
    sample = teaching_samples([tiny_group([1.0, 0.0], [80, 40])], config)[0]
    found: list[torch.Tensor] = []
    for rows in (ROWS, 7):
        forward_pass = trainer_of(tiny_policy(checkpoint), config).update.forward_pass
        forward_pass.budget.now = Size(tokens=100, rows=rows)
        with Refusing(product_of_width(VOCAB), at=99) as card:
            found.append(forward_pass.log_likelihood(sample))
        assert card.seen == 1
    assert torch.equal(*found)
