"""Micro-batches divided among ranks: who gets which, the gradient of all, what crosses, and what ends a run."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from learner.orders.plan import Unfilled
from learner.orders.shared import STOPS, FirstRank, OtherRank, agreed
from learner.update.budget import Attempts, Budget, Size
from learner.update.figures import PASS_PART
from learner.update.forward_pass import UNCHANGED
from learner.update.gradient_check import NumericalFault
from learner.update.placement.placement import ALONE, Form, InTurns, Placement, rank_of_each, tokens_of_rank
from learner.update.placement.ranks import Ranks, packed, unpacked, wait_for_all
from learner.update.rehearsal import Largest, Rehearsal
from learner.wiring import build_trainer
from protocol.codec import encode
from protocol.messages import FilledOrder, Order
from shared.config.tree import Config, GrowthConfig, GuardConfig
from shared.errors import TrainingStopped
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.cramped_card import Kind, Refusing, named
from tests.support.fakes import filled, shake, tiny_group, tiny_policy, toy_orders, toy_policy
from tests.support.rank_processes import CONFIG, batch_of_step, gradients_of
from tests.support.ranks_in_threads import ThreadGroup, on_ranks
from tests.support.steps import NotedSizes, batch_of, gradients

pytestmark = pytest.mark.usefixtures("one_thread")
UNUSED = (3, 1, 7)
"""Shape of a parameter that gets no gradient; no other tensor has it."""
LARGE_GROUPS = [tiny_group([1.0] + 5 * [0.0], 6 * [5], group_id=name, seed=seed) for seed, name in enumerate("ab")]
"""Each makes micro-batches of several samples, which can be smaller."""


@pytest.fixture
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


def parameters(policy: Policy) -> list[torch.nn.Parameter]:
    return [*policy.adapter.parameters().values()]


# --- who gets which


def test_the_largest_goes_first_to_the_rank_with_the_fewest_tokens() -> None:
    assert rank_of_each([5, 9, 4, 4], 2) == [1, 0, 1, 0]
    assert rank_of_each([3, 3, 3], 1) == [0, 0, 0]
    assert rank_of_each([7], 4) == [0]


def test_no_rank_has_more_than_the_others_and_one_micro_batch() -> None:
    tokens = [int(size) for size in np.random.default_rng(0).integers(1, 500, 40)]
    for ranks in (2, 3, 4, 8):
        places = rank_of_each(tokens, ranks)
        loads = [0] * ranks
        for size, place in zip(tokens, places, strict=True):
            loads[place] += size
        assert sum(loads) == sum(tokens) and max(loads) - min(loads) <= max(tokens)


def test_micro_batches_are_small_enough_for_every_rank_to_get_one() -> None:
    assert (tokens_of_rank(100, 150, 4), tokens_of_rank(30, 150, 4), tokens_of_rank(100, 1, 4)) == (38, 30, 1)
    assert ALONE.most_tokens(100, lambda: 10) == 100


# --- the gradient


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_gradient_of_all_ranks_is_that_of_one_process(policy: Policy, ranks: int) -> None:
    expected, alone = gradients_of(policy, ALONE)
    shake(policy, 1)
    found, stats = gradients_of(policy, InTurns(parameters(policy), ranks))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() and gradient.norm() > 0, name
    assert stats.loss == pytest.approx(alone.loss, rel=1e-5)
    assert sorted(stats.mismatch) == pytest.approx(sorted(alone.mismatch), abs=1e-5)
    assert stats.weight_sum == pytest.approx(alone.weight_sum) and stats.logprobs.keys() == alone.logprobs.keys()


def test_bits_repeat_for_a_number_of_ranks_and_one_rank_is_one_process(policy: Policy) -> None:
    def bits(placement: Placement) -> list[bytes]:
        shake(policy, 1)
        return [gradient.numpy().tobytes() for gradient in gradients_of(policy, placement)[0].values()]

    assert bits(InTurns(parameters(policy), 3)) == bits(InTurns(parameters(policy), 3))
    assert bits(InTurns(parameters(policy), 1)) == bits(ALONE)


def test_what_the_guard_does_after_a_pass_finds_the_gradient_in_place(policy: Policy) -> None:
    """Forward passes in between, such as the gate's, take no gradient away."""
    update = build_trainer(policy, CONFIG, lambda: None, placement=InTurns(parameters(policy), 2)).update
    samples = batch_of_step(policy).used
    update.accumulate(samples, UNCHANGED)
    before = gradients(policy)
    update.forward_pass.recomputed(samples, 1.0)
    assert all(torch.equal(gradients(policy)[name], gradient) for name, gradient in before.items())


# --- what crosses


def test_what_was_found_arrives_as_it_was(policy: Policy) -> None:
    update = build_trainer(policy, CONFIG, lambda: None).update
    parts = dict(enumerate(update.accumulate(batch_of_step(policy).used, UNCHANGED)[0]))
    told = unpacked(packed({n: PASS_PART.pack(part) for n, part in parts.items()}))
    assert len(told) >= 2 and told.keys() == parts.keys()
    for n, part in parts.items():
        arrived = PASS_PART.unpack(told[n])
        assert [*arrived.used.items()] == [*part.used.items()] and arrived.weight_sum == part.weight_sum
        for name in ("mismatch", "logprobs", "entropies", "loss"):
            assert torch.equal(getattr(arrived, name), getattr(part, name)), name
        for inner in ("terms", "kl", "penalty"):
            there, here = getattr(arrived, inner), getattr(part, inner)
            assert all(torch.equal(getattr(there, one.name), getattr(here, one.name)) for one in fields(here)), inner
    assert unpacked(packed({})) == {}, "a rank without micro-batches"


class Fakes:
    """A group of two ranks of which the other one says what the test wants."""

    def __init__(self, rank: int = 0, first: Sequence[bytes] = (), other: Callable[[bytes], bytes] = bytes) -> None:
        self.rank, self.size = rank, 2
        self.first = [*first]
        self.other = other
        self.told: list[bytes] = []

    def from_first(self, data: bytes = b"") -> bytes:
        if self.rank:
            return self.first.pop(0)
        self.told.append(data)
        return data

    def gathered(self, data: bytes) -> list[bytes]:
        both = [data, self.other(data)]
        return both[::-1] if self.rank else both


def test_memory_that_runs_out_on_one_rank_runs_out_on_all() -> None:
    def work(part: object) -> int:
        raise torch.OutOfMemoryError("no room")

    form: Form[int] = Form(pack=lambda found: {"n": torch.tensor(found)}, unpack=lambda told: int(told["n"]))
    fine = Ranks(Fakes(other=lambda _: b""), [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(torch.OutOfMemoryError, match="rank 1 of the learner ran out of memory"):
        fine.each([[]], lambda _: 1, lambda _: 7, form)
    short = Ranks(Fakes(other=lambda _: packed({})), [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(torch.OutOfMemoryError, match="rank 0 of the learner ran out of memory"):
        short.each([[]], lambda _: 1, work, form)


def ends_of_two(checkpoint: Path, kind: Kind, at: int = 1, config: Config = CONFIG) -> list[tuple[int, Size, bytes]]:
    """Of a step on two ranks, of which the second once has no memory for an operation."""
    policies = [tiny_policy(checkpoint) for _ in range(2)]

    def end(group: ThreadGroup) -> tuple[int, Size, bytes]:
        policy = policies[group.rank]
        unused = torch.nn.Parameter(torch.zeros(UNUSED))
        placement = Ranks(group, [*parameters(policy), unused])  # pyright: ignore[reportArgumentType]
        trainer = build_trainer(policy, config, lambda: None, placement=placement)
        batch, attempts = batch_of(LARGE_GROUPS, policy, config), Attempts(trainer.budget, trainer.update, NotedSizes())
        fault = pytest.raises(NumericalFault) if config.guard.grad_norm_limit else nullcontext()
        with Refusing(kind, at, times=group.rank) as card, fault:
            attempts.until_it_fits(0, lambda: trainer.update.apply(0, batch))
        return card.left, trainer.budget.now, adapter_bytes(policy.adapter)

    return on_ranks(2, end)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "at", "config"),
    [
        (lambda func, args: named("zeros_like")(func, args) and args[0].shape == UNUSED, 1, CONFIG),
        (lambda func, args: named("_to_copy")(func, args) and args[0].shape == UNUSED, 1, CONFIG),
        (named("empty_like"), 1, CONFIG),
        (named("linalg_vector_norm"), 1, CONFIG),
        (named("_foreach_norm"), 1, CONFIG),
        (named("_foreach_norm"), 3, structs.replace(CONFIG, growth=GrowthConfig(max_prompts=8))),
        (named("_foreach_norm"), 3, structs.replace(CONFIG, guard=GuardConfig(grad_norm_limit=1e-6))),
    ],
    ids=["no gradient", "sum", "optimizer", "norm of one", "norm", "norm of the groups' sum", "norm of a sample alone"],
)
def test_memory_that_one_rank_lacks_after_its_micro_batches_repeats_the_step_on_all(
    checkpoint: Path, kind: Kind, at: int, config: Config
) -> None:
    """The norms before: of two groups; of a gradient that is refused, and of the same once more."""
    first, second = ends_of_two(checkpoint, kind, at, config)
    assert first == second and first[0] == 0 and first[1] != Budget.of(config.batch).limit


def test_the_largest_step_is_tried_again_by_all_ranks(checkpoint: Path) -> None:
    policies = [tiny_policy(checkpoint) for _ in range(2)]
    largest = Largest(prompt=9, completion=14, group=3, groups=4, tells_entropies=True)

    def rehearsed(group: ThreadGroup) -> Size:
        placement = Ranks(group, parameters(policies[group.rank]))  # pyright: ignore[reportArgumentType]
        trainer = build_trainer(policies[group.rank], CONFIG, lambda: None, placement=placement)
        attempts = Attempts(trainer.budget, trainer.update, NotedSizes())
        with Refusing(named("empty_like"), times=group.rank):
            Rehearsal(trainer.update, attempts, largest).run()
        return trainer.budget.now

    first, second = on_ranks(2, rehearsed)
    assert first == second != Budget.of(CONFIG.batch).limit


def test_a_rank_with_fewer_micro_batches_makes_as_many_passes_and_keeps_its_own_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    made: list[int] = []

    def work(part: list[int]) -> int:  # rank 0 has the first micro-batch, rank 1 the three others
        made.extend(part)
        (float(part[0]) * parameter).sum().backward()
        return part[0]

    form: Form[int] = Form(pack=lambda found: {"n": torch.tensor(found)}, unpack=lambda told: int(told["n"]))
    others = packed({n: {"n": torch.tensor(20 + n)} for n in (1, 2, 3)})
    ranks = Ranks(Fakes(other=lambda _: others), [parameter], in_step=True)  # pyright: ignore[reportArgumentType]
    cuts: list[Any] = [[10], [11], [12], [13]]
    tokens: Any = lambda part: 5 if part is cuts[0] else 1  # noqa: E731
    found = ranks.each(cuts, tokens, work, form)  # pyright: ignore[reportArgumentType]
    assert found == [10, 21, 22, 23] and made == [10, 13, 13]
    assert parameter.grad is not None and float(parameter.grad) == 10.0


class ScriptedFiller:
    """Orders that are filled at once."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.submitted: list[Order] = []

    def publish(self, policy: object, oldest_needed: int) -> None:
        self.published.append(oldest_needed)

    def submit(self, orders: Iterable[Order]) -> None:
        self.submitted += orders

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        return [filled(order, toy_policy(0)) for order in self.submitted]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Nothing."""


def test_filled_orders_and_sizes_reach_the_other_ranks_as_they_are() -> None:
    group = Fakes()
    size = Size(tokens=100, rows=7)
    first = FirstRank(group, ScriptedFiller(), NotedSizes({3: size}))
    first.submit(toy_orders(count=2))
    sent = first.collect(["a", "b"])
    assert [first.size_of(3), first.size_of(4)] == [size, None]
    other = OtherRank(Fakes(1, first=group.told), lambda: None)
    other.submit(toy_orders(count=2))
    assert [encode(one) for one in other.collect(["a", "b"])] == [encode(one) for one in sent]
    assert [other.size_of(3), other.size_of(4)] == [size, None]


def test_a_rank_that_is_told_that_the_run_stops_has_nothing_more_to_do() -> None:
    with pytest.raises(Unfilled):
        OtherRank(Fakes(1, first=[STOPS]), lambda: None).collect(["a"])


@pytest.mark.parametrize("asked", [True, False])
def test_all_ranks_stop_after_the_step_in_which_the_first_one_was_asked_to(asked: bool) -> None:
    group = Fakes()
    assert agreed(group, lambda: asked) is asked
    for others_flag in (True, False):
        assert agreed(Fakes(1, first=group.told), lambda flag=others_flag: flag) is asked


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_another_adapter_end_the_run_before_it_is_published(rank: int) -> None:
    policy = toy_policy(5)
    filler = ScriptedFiller()
    group = Fakes(rank, other=lambda _: b"f" * 64)
    ranked = FirstRank(group, filler, NotedSizes()) if rank == 0 else OtherRank(group, lambda: None)
    with pytest.raises(TrainingStopped, match="After step 5 rank 1 of the learner has another adapter than rank 0"):
        ranked.publish(policy, 0)
    assert filler.published == []
    FirstRank(Fakes(), filler, NotedSizes()).publish(policy, 3)
    assert filler.published == [3]


def test_a_rank_that_waits_for_another_goes_on_and_says_once_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit would end runs whose rank 0 waits for its card, or reads a long journal."""

    def rank(number: int, warn_after_s: float) -> Thread:
        store = FileStore(str(tmp_path / "meeting"), 3)
        thread = Thread(target=wait_for_all, args=(store, number, 3, warn_after_s), daemon=True)
        thread.start()
        return thread

    first, second = rank(0, 0.1), rank(2, 60.0)
    first.join(1.0)
    assert first.is_alive() and second.is_alive()
    assert [record.getMessage() for record in caplog.records] == [
        "has waited 0.1 s for these ranks of the learner: 1; logs/learnerN.log says what rank N does"
        " (logs/learner.log for rank 0)"
    ]
    for thread in (rank(1, 60.0), first, second):
        thread.join(60.0)
        assert not thread.is_alive()
    assert len(caplog.records) == 1
