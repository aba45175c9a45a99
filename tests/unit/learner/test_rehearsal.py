"""The largest step is tried before the first one, and leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from learner.tasks.tasks import TaskSet
from learner.update.budget import Attempts, OutOfMemory, Size
from learner.update.forward_pass import UNCHANGED
from learner.update.microbatch import cut, fed_tokens
from learner.update.rehearsal import Largest, Rehearsal
from learner.wiring import Trainer, largest_step
from shared.config.tree import BatchConfig, Config, ConstraintConfig, LossConfig, RolloutConfig
from shared.errors import UserError
from tests.support.cramped_card import Allocations, Refusing, named
from tests.support.fakes import tiny_group, tiny_policy, toy_tasks
from tests.support.steps import NotedSizes, step_batch, teaching_samples, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")

CAP = 30
SIZE = Size(tokens=200, rows=80)
CONFIG = Config(
    rollout=RolloutConfig(max_new_tokens=CAP, group=4, prompts=8),
    batch=BatchConfig(token_budget=SIZE.tokens, head_rows=SIZE.rows),
)
LARGEST = Largest(prompt=9, completion=CAP, group=4, groups=8, tells_entropies=True)


class Rehearsed:
    """A learner that is about to begin."""

    def __init__(self, checkpoint: Path, config: Config = CONFIG, largest: Largest = LARGEST) -> None:
        self.trainer: Trainer = trainer_of(tiny_policy(checkpoint, dequantize="each_call"), config)
        self.notes = NotedSizes()
        attempts = Attempts(self.trainer.budget, self.trainer.update, self.notes)
        self.rehearsal = Rehearsal(self.trainer.update, attempts, largest)

    def position(self) -> Any:
        update = self.trainer.update
        drawn = torch.get_rng_state().tolist(), str(np.random.get_state())
        return update.position(), update.gate.state_dict(), drawn


def equal(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


def test_it_is_as_large_as_a_step_can_be() -> None:
    samples = LARGEST.samples(SIZE.tokens, in_kl=False, penalised=False)
    first, second, *_ = cut(samples, SIZE.tokens, padding=False)
    for part in (first, second):
        assert SIZE.tokens - (CAP - 1) < fed_tokens(part) <= SIZE.tokens
    assert {(len(s.sample.prompt_ids), int(s.used.sum())) for s in samples} == {(9, CAP)}
    assert len({s.sample.group for s in samples}) < LARGEST.groups
    few = Largest(prompt=9, completion=CAP, group=4, groups=1, tells_entropies=True)
    assert len(few.samples(SIZE.tokens, in_kl=False, penalised=False)) == 4


def test_its_size_is_that_of_the_run() -> None:
    tasks = TaskSet(train=tuple(toy_tasks(5)), held_out=(), dropped={})
    longest = max(len(task.prompt_ids) for task in tasks.train)
    assert largest_step(CONFIG, tasks) == Largest(
        prompt=longest, completion=CAP, group=4, groups=8, tells_entropies=True
    )
    vllm = structs.replace(CONFIG, actor=structs.replace(CONFIG.actor, engine="vllm"))
    assert not largest_step(vllm, tasks).tells_entropies


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        structs.replace(CONFIG, loss=LossConfig(kl_beta=0.1, passes=2)),
        structs.replace(CONFIG, constraint=ConstraintConfig(beta=0.1)),
    ],
    ids=["plain", "kl", "constraint"],
)
def test_nothing_is_left_of_it(checkpoint: Path, config: Config) -> None:
    rehearsed, fresh = Rehearsed(checkpoint, config), Rehearsed(checkpoint, config)
    before = rehearsed.position()
    rehearsed.rehearsal.run()
    assert equal(rehearsed.position(), before) and rehearsed.notes.sizes == {}
    assert all(value.grad is None for value in rehearsed.trainer.update.optimizer.parameters.values())
    assert vars(rehearsed.trainer.budget) | {"largest": None} == vars(fresh.trainer.budget) | {"largest": None}
    assert equal(*(first_step(one, config) for one in (rehearsed, fresh)))


def first_step(rehearsed: Rehearsed, config: Config) -> Any:
    groups = [tiny_group([1.0, 0.0, 0.0], [3, 12, 7], group_id="ab"[seed], seed=seed) for seed in range(2)]
    rehearsed.trainer.update.apply(0, step_batch(teaching_samples(groups, config), 0, config))
    return rehearsed.trainer.update.position()


def test_no_step_of_full_length_takes_more(checkpoint: Path) -> None:
    rehearsed = Rehearsed(checkpoint)
    samples = LARGEST.samples(10 * SIZE.tokens, in_kl=False, penalised=False)
    assert len({sample.sample.group for sample in samples}) == LARGEST.groups
    peaks: list[int] = []
    for work in (rehearsed.rehearsal.run, lambda: rehearsed.trainer.update.accumulate(samples, UNCHANGED)):
        with Allocations() as card:
            work()
        peaks.append(card.peak)
    # The figures of every micro-batch are kept until the end of a step, a few bytes a token.
    assert peaks[1] <= 1.05 * peaks[0]


def test_what_does_not_fit_is_tried_in_smaller_parts_and_the_run_begins_with_those(checkpoint: Path) -> None:
    rehearsed = Rehearsed(checkpoint)
    before = rehearsed.position()
    with Refusing(named("silu_backward"), at=3, times=2):
        rehearsed.rehearsal.run()
    budget = rehearsed.trainer.budget
    assert budget.now == Size(tokens=96, rows=64) and equal(rehearsed.position(), before)
    rehearsed.rehearsal.attempts.until_it_fits(0, lambda: True)
    assert rehearsed.notes.sizes == {0: budget.now}
    assert budget.state_dict()["wait"] > 16, "a resumed run, which reads the note, waits as long"


def test_the_state_of_a_resumed_run_is_kept(checkpoint: Path) -> None:
    """It is loaded after the update was built, and before the rehearsal."""
    bf16 = structs.replace(CONFIG, compute=structs.replace(CONFIG.compute, dtype="bf16"))
    policy = tiny_policy(checkpoint, dtype=torch.bfloat16)
    trainer = trainer_of(policy, bf16)
    trainer.update.gate.load_state_dict({"mean": 0.25, "p99": 0.75})
    with Refusing(named("silu_backward")):
        Rehearsal(trainer.update, Attempts(trainer.budget, trainer.update, NotedSizes()), LARGEST).run()
    assert trainer.update.gate.state_dict() == {"mean": 0.25, "p99": 0.75}


def always(work: Callable[[], None]) -> OutOfMemory:
    with Refusing(named("silu_backward"), times=1000), pytest.raises(OutOfMemory) as caught:
        work()
    return caught.value


def test_what_never_fits_ends_the_run_with_one_sentence(checkpoint: Path) -> None:
    error = always(Rehearsed(checkpoint).rehearsal.run)
    assert isinstance(error, UserError), "exit code 2, no traceback"
    assert str(error).startswith("The largest step does not fit into the memory of the card with one completion at a")
    assert all(key in str(error) for key in ("rollout.max_new_tokens", "tasks.max_prompt_tokens", "lora.rank"))
    assert str(error).count(". ") == 0 and error.__context__ is None
