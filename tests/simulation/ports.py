"""Both ends of the wire and the journal: the places where a process can be killed and is watched."""

from collections.abc import Callable, Mapping
from typing import Any

from actor.link import Link
from learner.durable.journal import Journal
from learner.durable.journal_format import HEADER_BYTES
from learner.orders.dispatch import Dispatcher
from protocol.codec import encode
from protocol.errors import PeerGone
from protocol.messages import AnyMessage, Policy
from protocol.transport import Inbound
from shared.run.files import LineLog
from tests.simulation.disk import Disk, orders_of, tail_of
from tests.simulation.invariants import Watch
from tests.simulation.network import Mailbox, Network, Wire
from tests.simulation.trace import Trace
from tests.simulation.virtual_time import Killed

Point = Callable[[str], None]
"""Called with the name of a place; kills the process there if its schedule says so."""


class LearnerEnd:
    """LearnerPort."""

    def __init__(self, network: Network, mailbox: Mailbox, watch: Watch, point: Point, trace: Trace) -> None:
        self.network = network
        self.mailbox = mailbox
        self.watch = watch
        self.point = point
        self.trace = trace
        self.dispatcher: Dispatcher | None = None

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Out, unless it is found to be gone."""
        self.point("before the learner sends")
        self.trace.say("learner", f"to {peer.decode()}:", message)
        self.watch.learner_sends(peer, message)
        if isinstance(message, Policy) and not len(message.adapter):
            self.trace.count("passed on")
        try:
            self.network.to_actor(peer, message)
        except PeerGone:
            self.watch.connection_ended(peer)
            raise
        self.point("after the learner sent")

    def receive(self, timeout_s: float) -> Inbound | None:
        """In."""
        if self.dispatcher:
            self.watch.learner_rests(self.dispatcher, len(self.mailbox.messages))
        found = self.mailbox.get(timeout_s)
        if found:
            self.trace.say("learner", f"from {found[0].decode()}:", found[1])
            self.watch.learner_hears(*found)
            self.point("after the learner received")
        return found and Inbound(*found, frames=encode(found[1]))

    def close(self) -> None:
        """Nothing to close."""


class ActorEnd:
    """ActorPort."""

    def __init__(self, network: Network, wire: Wire, watch: Watch, point: Point, trace: Trace) -> None:
        self.network = network
        self.wire = wire
        self.name = wire.address.decode()
        self.watch = watch
        self.point = point
        self.trace = trace
        self.link: Link | None = None

    def send(self, message: AnyMessage) -> None:
        """Out."""
        self.point("before an actor sends")
        self.trace.say(self.name, "sends", message)
        self.network.carry(self.wire, message, to_learner=True)
        self.point("after an actor sent")

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """In."""
        if self.link:
            self.watch.actor_rests(self.link)
        found = self.wire.mailbox.get(timeout_s)
        if found is None:
            return None
        self.trace.say(self.name, "hears", found[1])
        self.point("after an actor received")
        return found[1]

    def bytes_received(self) -> int:
        """A message comes whole or not at all."""
        return 0

    def close(self) -> None:
        """Nothing to close."""


class WatchedLines:
    """The real lines of metrics.jsonl, and how far an fsync has covered them."""

    def __init__(self, lines: LineLog, disk: Disk) -> None:
        self.lines = lines
        self.disk = disk

    def append(self, row: Mapping[str, Any]) -> None:
        """Nothing is promised."""
        self.lines.append(row)

    def sync(self) -> None:
        """What is there stays."""
        self.lines.sync()
        self.disk.cover(self.lines.path)

    def truncate_from(self, step: int) -> None:
        """Written again, whole and durably."""
        self.lines.truncate_from(step)
        self.disk.cover(self.lines.path)

    def close(self) -> None:
        """Without a sync."""
        self.lines.close()


class WatchedJournal:
    """The real journal; every other thing that it can do passes through."""

    def __init__(self, journal: Journal, disk: Disk, watch: Watch, point: Point) -> None:
        self.journal = journal
        self.disk = disk
        self.watch = watch
        self.point = point

    def __getattr__(self, name: str) -> Any:
        """`tail`, `firsts`, `reading`, `begin_segment`, `drop_before`."""
        return getattr(self.journal, name)

    def append(self, *parts: bytes) -> None:
        """A death within the write leaves a part of it."""
        payload = b"".join(parts)
        self.point("before an append")
        folder = self.disk.run.journal
        before = tail_of(self.journal, folder)
        self.journal.append(*parts)
        path = tail_of(self.journal, folder)
        if path != before:
            self.disk.cover(before)  # a full segment is synced before the next is begun
        try:
            self.point("within an append")
        except Killed:
            self.disk.cut_short(path, path.stat().st_size - HEADER_BYTES - len(payload))
            raise
        for order_id in orders_of(payload):
            self.watch.appended(order_id)
        self.point("after an append")

    def sync(self) -> None:
        """From here on the bytes are safe."""
        self.point("before a sync")
        self.journal.sync()
        self.disk.cover(tail_of(self.journal, self.disk.run.journal))
        self.watch.synced()
        self.point("after a sync")
