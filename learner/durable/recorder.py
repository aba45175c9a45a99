"""The journal as the dispatcher sees it: find an order's answer, record new answers.

Only the `train` lane is recorded; an evaluation can be repeated. An answer found must be the one this order asks for:
a journal of another config is refused rather than trained on. A void among the records takes back the answers before it
of its step and later ones (resample.py).

What the journal may give up after a checkpoint.

    journal.keep = "all"           nothing: `replay` goes from step 0
    journal.keep = "checkpoints"   what is older than the newest `checkpoint.keep` checkpoints: `replay` goes from the
                                   oldest of them, and the journal holds the records of checkpoint.keep * every steps

While there are fewer checkpoints than that, nothing goes. The best checkpoint does not count: it may be as old as the
run. A segment ends with each checkpoint, so that it can go as a whole.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from learner.orders.orders import TRAIN_LANE, fills
from protocol.codec import decode, encode, pack, unpack
from protocol.messages import FilledOrder, Group, Order
from shared.config.processes import JournalConfig
from shared.errors import DamageError

TRAINED = re.compile(rf"{TRAIN_LANE}/([0-9]{{6,}})/u[0-9]{{4,}}")
"""Ids of the orders that are recorded."""
VOID = b"void from step "


class JournalRecorder:
    """Answers from and to a journal on disk."""

    def __init__(self, journal: Journal, first_step: int, admit: Callable[[Group], object]) -> None:
        """Records of steps before `first_step` are in a checkpoint already; others stay in memory until asked for.

        admit: raises for a group that must stop the run. Such a group is not recorded, so that once its cause is
        mended a resumed run orders it anew.
        """
        self.journal = journal
        self.first_step = first_step
        self.admit = admit
        self.found: dict[str, bytes] = {}
        self.last_steps: dict[int, int] = {}
        for segment in journal.reading().segments:
            self.last_steps[segment.number] = max(map(self.load, segment.payloads()), default=-1)
        self.durable = set(self.found)

    def load(self, payload: bytes) -> int:
        """A record of an earlier life; returns its step, or -1 for a void."""
        if (voided := voided_from(payload)) is not None:
            self.found = before(self.found, voided)
            return -1
        order_id = read(payload).order_id
        if step_of(order_id) >= self.first_step:
            self.found.setdefault(order_id, payload)
        return step_of(order_id)

    def find(self, order: Order) -> FilledOrder | None:
        """Decoded when asked for; handed out once."""
        payload = self.found.pop(order.order_id, None)
        return None if payload is None else matching(order, payload)

    def record(self, answers: Sequence[FilledOrder]) -> None:
        """One fsync a record: recovery can tell a torn last record from damage, but not two of them."""
        for groups in answers:
            if lane(groups.order_id) == TRAIN_LANE:
                for group in groups.groups:
                    self.admit(group)
                self.journal.append(pack(encode(groups)))
                self.journal.sync()
                self.last_steps[self.journal.tail] = max(step_of(groups.order_id), self.last_step(self.journal.tail))
                self.durable.add(groups.order_id)

    def is_durable(self, order_id: str) -> bool:
        """By its name, so that one which is durable is known before it is ordered, and one which is not is too. What is
        no name of ours is nothing to keep: a peer may have made it up."""
        ours = TRAINED.fullmatch(order_id)
        return ours is None or int(ours[1]) < self.first_step or order_id in self.durable

    def checkpointed(self, step: int) -> None:
        """What earlier steps used is in a checkpoint: their orders need not be remembered."""
        self.first_step = max(self.first_step, step)
        self.durable = {order_id for order_id in self.held if step_of(order_id) >= step}

    def last_step(self, segment: int) -> int:
        """The latest step of which a segment holds a record; -1 if it is empty."""
        return self.last_steps.get(segment, -1)

    def forget_before(self, step: int) -> None:
        """Give up the journal's oldest segments, as far as all their records are of earlier steps."""
        self.journal.begin_segment()
        oldest, tail = min(self.journal.firsts), self.journal.tail
        needed = (segment for segment in range(oldest, tail) if self.last_step(segment) >= step)
        first = next(needed, tail)
        if first > oldest:
            self.journal.drop_before(first, step)
            self.last_steps = {segment: last for segment, last in self.last_steps.items() if segment >= first}


class RecordedOrders:
    """The dispatcher of a replay: every answer comes from the journal, no actor is needed."""

    def __init__(self, records: Iterable[bytes]) -> None:
        self.found = index_records(records)
        self.answers: dict[str, FilledOrder] = {}

    def publish(self, policy: object, oldest_needed: int) -> None:
        """Nobody to send it to."""

    def submit(self, orders: Iterable[Order]) -> None:
        """Answer from the journal. An order it does not hold was never answered and is not asked for again."""
        for order in orders:
            payload = self.found.pop(order.order_id, None)
            if payload is not None:
                self.answers[order.order_id] = matching(order, payload)

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        """What was recorded."""
        for order_id in order_ids:
            if order_id not in self.answers:
                raise DamageError(f"The journal has no answer to order {order_id}; it was not written by this config.")
        return [self.answers.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Nothing comes."""


def index_records(records: Iterable[bytes]) -> dict[str, bytes]:
    """order id -> record, the first where one was written twice; without what was voided."""
    index: dict[str, bytes] = {}
    for payload in records:
        if (voided := voided_from(payload)) is None:
            index.setdefault(read(payload).order_id, payload)
        else:
            index = before(index, voided)
    return index


def before(index: dict[str, bytes], step: int) -> dict[str, bytes]:
    """The records of earlier steps."""
    return {order_id: payload for order_id, payload in index.items() if step_of(order_id) < step}


def pack_void(step: int) -> bytes:
    """The record that voids this step (from 0) and later ones."""
    return VOID + str(step).encode()


def voided_from(payload: bytes) -> int | None:
    """The step of a void; None for an answer, whose first bytes are a small length."""
    return int(payload.removeprefix(VOID)) if payload.startswith(VOID) else None


def read(payload: bytes) -> FilledOrder:
    """A record as the message it is."""
    message = decode(unpack(payload))
    assert isinstance(message, FilledOrder)
    return message


def matching(order: Order, payload: bytes) -> FilledOrder:
    """The recorded answer, or DamageError if it answers something else."""
    groups = read(payload)
    if groups.policy_version != order.policy_version or not fills(order, groups.groups):
        raise DamageError(
            f"The journal's record of order {order.order_id} does not fit this run's config and tasks;"
            " restore config.json, or start a new run."
        )
    return groups


def lane(order_id: str) -> str:
    """`train/000012/u0000` -> `train`"""
    return order_id.partition("/")[0]


def step_of(order_id: str) -> int:
    """`train/000012/u0000` -> 12; for ids of our own, which a peer's need not be."""
    return int(order_id.split("/")[1])


class Compaction:
    """Keeps the journal as small as it was asked to be."""

    def __init__(self, config: JournalConfig, checkpoints: CheckpointStore, recorder: JournalRecorder) -> None:
        self.config = config
        self.checkpoints = checkpoints
        self.recorder = recorder

    def after_checkpoint(self, step: int) -> None:
        """To be called once the checkpoint of this step is durable."""
        self.recorder.checkpointed(step)
        if self.config.keep == "checkpoints":
            self.recorder.forget_before(self.checkpoints.oldest_kept(step))
