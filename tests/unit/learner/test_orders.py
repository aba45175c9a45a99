"""Orders are a function of their arguments: names, seeds, and the cut into units."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from learner.orders.orders import build_orders
from learner.tasks.tasks import Task, fault_of
from protocol.codec import encode
from protocol.messages import Order, Sampling
from tests.support.fakes import toy_tasks
from tests.support.wire_examples import plain

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)


ARGUMENTS: dict[str, Any] = {
    "seed": 3,
    "lane": "train",
    "step": 12,
    "first_slot": 0,
    "samples": 4,
    "version": 11,
    "sampling": SAMPLING,
    "groups_per_order": 2,
}


def build(num_tasks: int = 5, **changes: Any) -> list[Order]:
    return build_from(toy_tasks(num_tasks), **changes)


def build_from(tasks: Sequence[Task], **changes: Any) -> list[Order]:
    return build_orders(tasks, **ARGUMENTS | changes)


def seeds(orders: list[Order]) -> list[int]:
    return [seed for order in orders for group in order.groups for seed in group.seeds]


def test_the_same_arguments_give_the_same_orders() -> None:
    assert [plain(order) for order in build()] == [plain(order) for order in build()]


def test_tasks_become_groups_in_their_order() -> None:
    orders, tasks = build(), toy_tasks(5)
    groups = [group for order in orders for group in order.groups]
    assert [group.columns for group in groups] == [task.columns for task in tasks]
    assert [group.prompt_ids.tolist() for group in groups] == [task.prompt_ids.tolist() for task in tasks]
    assert {order.policy_version for order in orders} == {11}
    assert {order.sampling for order in orders} == {SAMPLING}


@pytest.mark.parametrize(("size", "cut"), [(0, [5]), (1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_groups_are_cut_into_orders(size: int, cut: list[int]) -> None:
    assert [len(order.groups) for order in build(groups_per_order=size)] == cut


def test_names_say_lane_step_and_slot() -> None:
    orders = build(first_slot=16)
    assert [order.order_id for order in orders] == ["train/000012/u0016", "train/000012/u0018", "train/000012/u0020"]
    assert [g.group_id for g in orders[0].groups] == ["train/000012/0016", "train/000012/0017"]


def test_ids_and_seeds_are_unique_across_samples_slots_steps_and_lanes() -> None:
    everything = [
        order
        for lane in ("train", "eval-base-greedy")
        for step in (0, 1)
        for first_slot in (0, 5)
        for order in build(lane=lane, step=step, first_slot=first_slot)
    ]
    assert len(seeds(everything)) == len(set(seeds(everything))) == 8 * 5 * 4
    order_ids = [order.order_id for order in everything]
    group_ids = [group.group_id for order in everything for group in order.groups]
    assert len(order_ids) == len(set(order_ids)) and len(group_ids) == len(set(group_ids))
    assert not set(seeds(build(seed=4))) & set(seeds(build(seed=3)))


def test_the_cut_does_not_change_the_seeds() -> None:
    assert seeds(build(groups_per_order=0)) == seeds(build(groups_per_order=1))


def test_lanes_may_share_a_stream_of_seeds() -> None:
    base = build(lane="eval-base-sampled", stream="eval-sampled")
    final = build(lane="eval-final-sampled", stream="eval-sampled")
    assert seeds(base) == seeds(final)
    assert not {order.order_id for order in base} & {order.order_id for order in final}


def test_no_tasks_give_no_orders() -> None:
    assert build(num_tasks=0) == []


def test_tasks_with_large_columns_are_divided_among_orders_that_a_message_takes() -> None:
    large = {"tests": "x" * 33_000, "unconverted": "\u00e9" * 16_500}
    tasks = [replace(task, columns=task.columns | large) for task in toy_tasks(128)]
    orders, again = (build_from(tasks, groups_per_order=0, first_slot=16) for _ in range(2))
    assert all(encode(order) for order in orders)
    assert [len(order.groups) for order in orders] == [124, 4]
    assert [order.order_id for order in orders] == ["train/000012/u0016", "train/000012/u0140"]
    assert [plain(order) for order in again] == [plain(order) for order in orders]
    assert seeds(orders) == seeds(build(128, groups_per_order=0, first_slot=16))


def test_the_largest_row_fits_into_an_order_alone() -> None:
    (task,) = toy_tasks(1)
    columns = task.columns | {f"column {n}": "\u8a9e" * 39_400 for n in range(62)}
    assert fault_of(columns, "gsm8k") is None
    (order,) = build_from([replace(task, columns=columns)], samples=4096)
    assert encode(order)
    columns |= {"column 0": "\u8a9e" * 65_000}
    assert fault_of(columns, "gsm8k") == "with more than 7 MiB of columns"
