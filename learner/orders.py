"""From tasks to orders: names, seeds and the cut into units that are decoded together.

An order is a function of (run seed, lane, step, first slot, tasks) alone. Whoever builds it again, after a crash or for
a replay, builds the same one.
"""

from collections.abc import Sequence

from learner.tasks import Task
from protocol.messages import GroupOrder, Order, Sampling
from shared.seeding import sample_seeds


def build_orders(
    tasks: Sequence[Task],
    *,
    seed: int,
    lane: str,
    step: int,
    first_slot: int,
    samples: int,
    version: int,
    sampling: Sampling,
    groups_per_order: int,
) -> list[Order]:
    """One group a task, `groups_per_order` groups an order (0: all in one)."""
    groups = [
        GroupOrder(
            group_id=f"{lane}/{step:06d}/{slot:04d}",
            prompt_ids=task.prompt_ids,
            columns=task.columns,
            seeds=sample_seeds(seed, lane, step, slot, samples),
        )
        for slot, task in enumerate(tasks, start=first_slot)
    ]
    size = groups_per_order or len(groups)
    return [
        Order(
            order_id=f"{lane}/{step:06d}/u{first_slot + start:04d}",
            policy_version=version,
            sampling=sampling,
            groups=tuple(groups[start : start + size]),
        )
        for start in range(0, len(groups), size)
    ]
