"""Builds orders from tasks: ids, seeds, and how many groups are decoded together.

    order id   lane/step/uslot   train/000012/u0000   step from 0; slot of its first group in the step
    group id   lane/step/slot    train/000012/0003

An order is a function of its arguments alone, so a resumed run and a replay build the same orders again. Tasks whose
columns do not fit into one message are divided among more orders. Ids are written and read here only.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

from learner.tasks.tasks import Task
from protocol.codec import body_bytes
from protocol.limits import GROUPS_BYTES
from protocol.messages import FilledOrder, Group, GroupOrder, Order, Sampling
from shared.seeding import sample_seeds

NO_FRAMES: Mapping[str, Sequence[bytes]] = MappingProxyType({})
RECORD_BYTES = 8 * 2**20
"""A record that has so many takes no further order."""
TRAIN_LANE = "train"
TRAINING_ORDER = re.compile(rf"{TRAIN_LANE}/([0-9]{{6,}})/u[0-9]{{4,}}")


class Recorder(Protocol):
    """Stores filled orders and finds them again."""

    def find(self, order: Order) -> FilledOrder | None:
        """The order as it was filled and recorded; None if it was not."""
        ...

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        """Make these durable, and those that were begun. All may be acknowledged once this returns. frames: by order
        id, of those that came as a message."""
        ...

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        """Begin to make these durable. `record` must follow before any is acknowledged."""
        ...

    def is_durable(self, order_id: str) -> bool:
        """Whether the actor may forget this order: it is durable, or it is not one that is recorded."""
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
    votes: bool = False,
    teacher: bool = False,
) -> list[Order]:
    """One group per task. groups_per_order: at most so many in one order; 0 sets no limit besides that of a message.
    stream: names the seeds; default lane. votes, teacher: as in an order."""
    groups = [
        GroupOrder(
            group_id=group_id(lane, step, slot),
            prompt_ids=task.prompt_ids,
            columns=task.columns,
            seeds=sample_seeds(seed, stream or lane, step, slot, samples),
        )
        for slot, task in enumerate(tasks, start=first_slot)
    ]
    return [
        Order(
            order_id=order_id(lane, step, first_slot + start),
            policy_version=version,
            sampling=sampling,
            groups=tuple(groups[start:end]),
            votes=votes,
            teacher=teacher,
        )
        for start, end in pairwise([*order_starts(groups, groups_per_order), len(groups)])
    ]


def order_starts(groups: Sequence[GroupOrder], most: int) -> list[int]:
    """Places of the groups that begin an order. most: groups in one order; 0 for any number."""
    starts: list[int] = []
    size = 0
    for place, group in enumerate(groups):
        own = body_bytes(group)
        size += own
        if not starts or place - starts[-1] == most or size > GROUPS_BYTES:
            starts.append(place)
            size = own
    return starts


def order_id(lane: str, step: int, slot: int) -> str:
    return f"{lane}/{step:06d}/u{slot:04d}"


def group_id(lane: str, step: int, slot: int) -> str:
    return f"{lane}/{step:06d}/{slot:04d}"


def training_step(name: str) -> int | None:
    """Step of the training order with this id; None for any other id. A peer may send any text as an id."""
    match = TRAINING_ORDER.fullmatch(name)
    return int(match[1]) if match else None


def step_of(name: str) -> int:
    """Step of an order of ours, of any lane."""
    return int(name.split("/")[1])


def fills(order: Order, groups: Sequence[Group]) -> bool:
    """Whether these groups are the ordered ones: same ids, same prompts, same number of completions."""
    if len(groups) != len(order.groups):
        return False
    return all(
        (got.group_id, got.prompt_ids.tobytes(), len(got.lengths))
        == (wanted.group_id, wanted.prompt_ids.tobytes(), len(wanted.seeds))
        for wanted, got in zip(order.groups, groups, strict=True)
    )
