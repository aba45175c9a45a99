"""From tasks to orders: names, seeds and the cut into units that are decoded together.

An order is a function of its arguments alone. Whoever builds it again, after a crash or for a replay, builds the same
one.
"""

from collections.abc import Sequence
from typing import Protocol

from learner.tasks.tasks import Task
from protocol.messages import FilledOrder, Group, GroupOrder, Order, Sampling
from shared.seeding import sample_seeds

TRAIN_LANE = "train"


class Recorder(Protocol):
    """Where answers are found and kept."""

    def find(self, order: Order) -> FilledOrder | None:
        """The recorded answer to this order, if there is one."""
        ...

    def record(self, answers: Sequence[FilledOrder]) -> None:
        """Make these durable; when it returns they may be acknowledged."""
        ...

    def is_durable(self, order_id: str) -> bool:
        """Whether nobody else need keep the answer to this order: it is durable, or was never to be recorded."""
        ...


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
    stream: str = "",
) -> list[Order]:
    """One group a task, `groups_per_order` groups an order (0: all in one); seeds of this stream, or of the lane."""
    groups = [
        GroupOrder(
            group_id=f"{lane}/{step:06d}/{slot:04d}",
            prompt_ids=task.prompt_ids,
            columns=task.columns,
            seeds=sample_seeds(seed, stream or lane, step, slot, samples),
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


def fills(order: Order, groups: Sequence[Group]) -> bool:
    """Whether these groups are the ordered ones: same ids, same prompts, same number of samples."""
    if len(groups) != len(order.groups):
        return False
    return all(
        (got.group_id, got.prompt_ids.tolist(), len(got.lengths))
        == (wanted.group_id, wanted.prompt_ids.tolist(), len(wanted.seeds))
        for wanted, got in zip(order.groups, groups, strict=True)
    )
