"""What is ordered when, and from which version, at any lag; and that a resumed plan orders the same."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from learner.curriculum.curriculum import Shuffled
from learner.curriculum.pass_rate import PassRate
from learner.objective.batch import flat
from learner.objective.judged import PassCount
from learner.orders.plan import StepPlan, Unfilled
from protocol.messages import FilledOrder, Order, Policy
from shared.config.data import CurriculumConfig
from shared.config.processes import PipelineConfig
from shared.config.tree import Config, RolloutConfig, RunConfig
from tests.support.fakes import filled, toy_policy, toy_tasks
from tests.support.steps import teaches
from tests.support.wire_examples import plain

NUM_STEPS = 8


class NotedFiller:
    """Answers at once from the version that an order names, which must have been published; notes every order."""

    def __init__(self) -> None:
        self.ordered: list[Order] = []
        self.versions: dict[int, Policy] = {0: toy_policy(0)}
        self.filled: dict[str, FilledOrder] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        self.versions[policy.version] = policy
        self.versions = {v: p for v, p in self.versions.items() if v >= oldest_needed}

    def submit(self, orders: Iterable[Order]) -> None:
        for order in orders:
            self.ordered.append(order)
            self.filled[order.order_id] = filled(order, self.versions[order.policy_version])

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        return [self.filled.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        pass


class CountingCurriculum(Shuffled):
    """A shuffle that notes what it is told of each step."""

    def __init__(self, num_tasks: int, seed: int) -> None:
        super().__init__(num_tasks, seed)
        self.observed: list[list[int]] = []

    def observe(self, groups: Sequence[PassCount]) -> None:
        self.observed.append([group.task for group in groups])


def config_for(max_lag: int, rounds: int = 0, groups_per_order: int = 2) -> Config:
    return Config(
        run=RunConfig(steps=NUM_STEPS, seed=5),
        rollout=RolloutConfig(
            prompts=4, group=2, max_new_tokens=6, groups_per_order=groups_per_order, replacement_rounds=rounds
        ),
        pipeline=PipelineConfig(max_lag=max_lag),
    )


def build(config: Config, filler: NotedFiller) -> StepPlan:
    return StepPlan(config, toy_tasks(30), CountingCurriculum(30, config.run.seed), filler)


def run(plan: StepPlan, filler: NotedFiller, first: int, last: int) -> list[Sequence[FilledOrder]]:
    """The learner's loop without learning."""
    collected: list[Sequence[FilledOrder]] = []
    for step in range(first, last):
        plan.order_ahead(version=step)
        collected.append(plan.collect(step).filled)
        filler.publish(toy_policy(step + 1), plan.oldest_needed())
    return collected


def step_of(order: Order) -> int:
    return int(order.order_id.split("/")[1])


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("rounds", [0, 2])
def test_step_s_is_sampled_from_version_s_minus_lag(max_lag: int, rounds: int) -> None:
    filler = NotedFiller()
    collected = run(build(config_for(max_lag, rounds), filler), filler, 0, NUM_STEPS)
    assert {step_of(order) for order in filler.ordered} == set(range(NUM_STEPS))
    for order in filler.ordered:
        assert order.policy_version == max(0, step_of(order) - max_lag)
    for step, step_orders in enumerate(collected):
        assert {filled_order.policy_version for filled_order in step_orders} == {max(0, step - max_lag)}


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_orders_run_ahead_by_the_lag_and_never_beyond_the_last_step(max_lag: int) -> None:
    filler = NotedFiller()
    plan = build(config_for(max_lag), filler)
    for step in range(NUM_STEPS):
        plan.order_ahead(version=step)
        assert max(map(step_of, filler.ordered)) == min(step + max_lag, NUM_STEPS - 1)
        plan.collect(step)
        filler.publish(toy_policy(step + 1), plan.oldest_needed())
    assert len(filler.ordered) == NUM_STEPS * 2
    assert filler.filled == {}


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_versions_are_kept_exactly_while_open_orders_name_them(max_lag: int) -> None:
    filler = NotedFiller()
    plan = build(config_for(max_lag), filler)
    for step in range(NUM_STEPS - max_lag - 1):
        run(plan, filler, step, step + 1)
        assert sorted(filler.versions) == list(range(max(0, step + 1 - max_lag), step + 2))


def test_a_step_has_its_groups_in_slot_order() -> None:
    filler = NotedFiller()
    (step_orders,) = run(build(config_for(0), filler), filler, 0, 1)
    assert [group.group_id for group in flat(step_orders)] == [f"train/000000/{slot:04d}" for slot in range(4)]


def test_groups_that_teach_nothing_are_replaced_within_the_step() -> None:
    config = config_for(0, rounds=2)
    filler = NotedFiller()
    plan = build(config, filler)
    collected = run(plan, filler, 0, NUM_STEPS)
    curriculum = plan.curriculum
    assert isinstance(curriculum, CountingCurriculum)
    tasks = toy_tasks(30)
    for seen, step_orders in zip(curriculum.observed, collected, strict=True):
        prompts = [group.prompt_ids.tolist() for group in flat(step_orders)]
        assert [tasks[task].prompt_ids.tolist() for task in seen] == prompts
    replaced = 0
    for step_orders in collected:
        groups = flat(step_orders)
        assert [int(group.group_id.split("/")[2]) for group in groups] == list(range(len(groups)))
        first, teaching = groups[:4], [teaches(group, config) for group in groups]
        expected = 4
        for _ in range(2):
            expected += 4 - sum(teaching[:expected])
        assert len(groups) == expected
        replaced += len(groups) - len(first)
    assert replaced > 0
    prompts = [group.prompt_ids.tolist() for step_orders in collected[:1] for group in flat(step_orders)]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_without_rounds_nothing_is_replaced() -> None:
    filler = NotedFiller()
    assert all(len(flat(step_orders)) == 4 for step_orders in run(build(config_for(0), filler), filler, 0, NUM_STEPS))


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_sampler_orders_what_an_undisturbed_one_orders(max_lag: int, rounds: int, stop: int) -> None:
    config = config_for(max_lag, rounds)
    whole = NotedFiller()
    undisturbed = run(build(config, whole), whole, 0, NUM_STEPS)

    before = NotedFiller()
    stopped = build(config, before)
    run(stopped, before, 0, stop)
    saved = json.loads(json.dumps(stopped.state_dict()))

    after = NotedFiller()
    after.versions = before.versions
    resumed = build(config, after)
    resumed.load_state_dict(saved)
    resumed.submit_pending()
    rest = run(resumed, after, stop, NUM_STEPS)
    assert [plain(filled_order) for step_orders in rest for filled_order in step_orders] == [
        plain(filled_order) for step_orders in undisturbed[stop:] for filled_order in step_orders
    ]
    again = {order.order_id: plain(order) for order in after.ordered}
    assert again == {order.order_id: plain(order) for order in whole.ordered if step_of(order) >= stop}
    assert resumed.state_dict() == json.loads(json.dumps(resumed.state_dict()))


class LeavingFiller(NotedFiller):
    """Nobody is there any more once so many orders have been collected."""

    def __init__(self, collected: int) -> None:
        super().__init__()
        self.left = collected

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        self.left -= len(order_ids)
        if self.left < 0:
            raise Unfilled
        return super().collect(order_ids)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("collected", range(0, 24, 3))
def test_a_step_that_is_left_unfilled_is_ordered_again(max_lag: int, collected: int) -> None:
    """Also where it is left while groups of it are replaced."""
    config = config_for(max_lag, rounds=2)
    whole = NotedFiller()
    undisturbed = run(build(config, whole), whole, 0, NUM_STEPS)
    filler = LeavingFiller(collected)
    stopped = build(config, filler)
    done = 0
    with pytest.raises(Unfilled):
        while True:
            run(stopped, filler, done, done + 1)
            done += 1
    after = NotedFiller()
    after.versions = filler.versions
    resumed = build(config, after)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    resumed.submit_pending()
    rest = run(resumed, after, done, NUM_STEPS)
    assert [plain(filled_order) for step_orders in rest for filled_order in step_orders] == [
        plain(filled_order) for step_orders in undisturbed[done:] for filled_order in step_orders
    ]


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_step_that_is_sampled_again_is_ordered_as_before(rounds: int) -> None:
    filler, config = NotedFiller(), config_for(0, rounds)
    liars = [True]
    plan = StepPlan(config, toy_tasks(30), CountingCurriculum(30, 0), filler, lambda filled: liars.pop())
    plan.order_ahead(version=0)
    before = plan.state_dict()
    found = plan.collect(0)
    prompts = [group.prompt_ids.tolist() for order in found.filled for group in order.groups]
    assert [task.prompt_ids.tolist() for task in found.tasks] == prompts
    ordered, after = list(map(plain, filler.ordered)), plan.state_dict()
    assert plan.sample_again(found.filled)
    assert plan.state_dict() == before != after
    again = plan.collect(0)
    assert list(map(plain, filler.ordered)) == 2 * ordered
    assert list(map(plain, again.filled)) == list(map(plain, found.filled)) and plan.state_dict() == after


class LargePassRate(PassRate):
    """Of so many tasks that nobody may spell its state in a step."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_step_does_not_ask_a_curriculum_for_its_whole_state(rounds: int) -> None:
    """Though it may be sampled again, after which all is as before."""
    filler, config = NotedFiller(), config_for(0, rounds)
    curriculum = LargePassRate([0] * 30, 0, CurriculumConfig())
    plan = StepPlan(config, toy_tasks(30), curriculum, filler, lambda filled: True)
    plan.order_ahead(version=0)
    plan.collect(0)
    filler.publish(toy_policy(1), plan.oldest_needed())
    plan.order_ahead(version=1)
    before = PassRate.state_dict(curriculum)
    found = plan.collect(1)
    after = PassRate.state_dict(curriculum)
    assert plan.sample_again(found.filled) and PassRate.state_dict(curriculum) == before
    again = plan.collect(1)
    assert list(map(plain, again.filled)) == list(map(plain, found.filled))
    assert before != after == PassRate.state_dict(curriculum)


def test_a_step_in_which_nobody_lied_stays() -> None:
    filler = NotedFiller()
    plan = build(config_for(0), filler)
    plan.order_ahead(version=0)
    found = plan.collect(0)
    after = plan.state_dict()
    assert not plan.sample_again(found.filled) and plan.state_dict() == after
