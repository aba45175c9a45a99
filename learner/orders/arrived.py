"""The filled orders that come within one pump.

They are recorded together, because an fsync takes as long for many as for one. When enough for a record have come they
are checked and written, and the disk syncs them in a thread while others are still read (learner/durable/journal.py).
Nothing is acknowledged before all of them are durable (dispatch.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.orders.orders import RECORD_BYTES, Recorder
from learner.orders.peers import Peer
from protocol.messages import FilledOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """A filled order that has come."""

    peer: Peer
    """From whom."""
    filled: FilledOrder
    """The order."""
    frames: Sequence[bytes]
    """Its bytes, as they came."""


class Arrived:
    """What has come so far."""

    def __init__(self, wanted: Callable[[Peer, FilledOrder], bool], recorder: Recorder) -> None:
        """wanted: whether an order is open and correctly filled."""
        self.wanted = wanted
        self.recorder = recorder
        self.all: list[Delivered] = []
        self.fresh: dict[str, Delivered] = {}
        """Those that are wanted, by order id; of two the first."""
        self.unchecked: list[Delivered] = []
        self.unchecked_bytes = 0

    def add(self, one: Delivered) -> None:
        self.all.append(one)
        self.unchecked.append(one)
        self.unchecked_bytes += sum(map(len, one.frames))
        if self.unchecked_bytes >= RECORD_BYTES:
            self.recorder.begin(*self.checked())

    def record(self) -> None:
        """All of them are durable when this returns."""
        self.recorder.record(*self.checked())

    def checked(self) -> tuple[list[FilledOrder], dict[str, Sequence[bytes]]]:
        """Those of the unchecked that are wanted, and their bytes."""
        found: dict[str, Delivered] = {}
        for one in self.unchecked:
            order_id = one.filled.order_id
            if order_id not in self.fresh and self.wanted(one.peer, one.filled):
                self.fresh[order_id] = found[order_id] = one
        self.unchecked, self.unchecked_bytes = [], 0
        return [one.filled for one in found.values()], {order_id: one.frames for order_id, one in found.items()}
