"""Orders of a learner with several ranks: rank 0 has actors and journal, and tells the others what came of both.

    collect   filled orders of rank 0 -> all ranks; or that nobody fills them, so that the run stops here
    size_of   the size of a step as rank 0's journal has it -> all ranks, which so begin a step when rank 0 has its turn
    publish   all ranks compare digests of their adapters
    agreed    after a step, whether rank 0 was asked to stop -> all ranks, which so write the same checkpoints

Filled orders cross in the codec of the wire. Ranks see the same groups and compute the same, so digests differ only if
machines, libraries or memory do; the run ends then, before the version is sampled from or saved.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from learner.orders.plan import OrderFiller, Unfilled
from learner.update.budget import Notes, Size
from protocol.codec import decode, encode, pack, unpack
from protocol.messages import FilledOrder, Order, Policy
from shared.errors import TrainingStopped
from shared.run.failpoints import reach

STOPS = b""


class Others(Protocol):
    """What ranks tell each other (learner/update/placement/ranks.py)."""

    @property
    def rank(self) -> int: ...

    def from_first(self, data: bytes = b"") -> bytes: ...

    def gathered(self, data: bytes) -> list[bytes]: ...


class FirstRank:
    """Rank 0."""

    def __init__(self, others: Others, filler: OrderFiller, notes: Notes) -> None:
        """filler, notes: as for one rank alone."""
        self.others = others
        self.filler = filler
        self.notes = notes

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        compare(self.others, policy)
        self.filler.publish(policy, oldest_needed)

    def submit(self, orders: Iterable[Order]) -> None:
        self.filler.submit(orders)

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        filled = self.filler.collect(order_ids)
        reach("before rank 0 shares orders")
        self.others.from_first(pack([pack(encode(one)) for one in filled]))
        return filled

    def pump(self, timeout_s: float = 0.0) -> None:
        self.filler.pump(timeout_s)

    def size_of(self, step: int) -> Size | None:
        size = self.notes.size_of(step)
        self.others.from_first(b"%d %d" % (size.tokens, size.rows) if size else b"")
        return size

    def note_size(self, step: int, size: Size) -> None:
        self.notes.note_size(step, size)


class OtherRank:
    """Any other."""

    def __init__(self, others: Others, progress: Callable[[], None]) -> None:
        self.others = others
        self.progress = progress

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        compare(self.others, policy)

    def submit(self, orders: Iterable[Order]) -> None:
        """Rank 0 has submitted them."""

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        told = self.others.from_first()
        reach("after a rank has orders", str(self.others.rank))
        if told == STOPS:
            raise Unfilled
        return [filled_order(one) for one in unpack(told)]

    def pump(self, timeout_s: float = 0.0) -> None:
        self.progress()

    def size_of(self, step: int) -> Size | None:
        told = [int(word) for word in self.others.from_first().split()]
        return Size(tokens=told[0], rows=told[1]) if told else None

    def note_size(self, step: int, size: Size) -> None:
        """Rank 0 does."""


def agreed(others: Others, stop: Callable[[], bool]) -> bool:
    """stop: of rank 0; what others give does not count."""
    return bool(others.from_first(b"stop" if stop() else b""))


def filled_order(packed: bytes) -> FilledOrder:
    message = decode(unpack(packed))
    assert isinstance(message, FilledOrder)
    return message


def compare(others: Others, policy: Policy) -> None:
    """TrainingStopped if another rank has another adapter."""
    reach("before ranks compare adapters", str(others.rank))
    digests = others.gathered(policy.sha256.encode())
    reach("after ranks compare adapters", str(others.rank))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise TrainingStopped(
                f"After step {policy.version} rank {rank} of the learner has another adapter than rank 0"
                f" ({digest[:12].decode()}, {digests[0][:12].decode()}), so they compute differently; use one kind of"
                " processor and one installation for all ranks, then `resume`."
            )
