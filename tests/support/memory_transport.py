"""Both ends of the wire inside one process. Messages go through the codec, so it carries bytes.

Left out on purpose: keys and dead machines. A closed actor is gone at once, and what it had not read is lost, as with
ZeroMQ.
"""

import queue

from protocol.codec import decode, encode
from protocol.errors import PeerGone, PeerTimeout, ProtocolError
from protocol.limits import HIGH_WATER_MARK, SEND_TIMEOUT_S
from protocol.messages import AnyMessage
from protocol.transport import Inbound

Frames = list[bytes]


class MemoryHub:
    """Where ports of one wire meet."""

    def __init__(self, high_water_mark: int = HIGH_WATER_MARK, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self.high_water_mark = high_water_mark
        self.send_timeout_s = send_timeout_s
        self.to_learner: queue.Queue[tuple[bytes, Frames]] = queue.Queue(high_water_mark)
        self.to_actor: dict[bytes, queue.Queue[Frames]] = {}
        self.num_starts = 0

    def learner_port(self) -> "MemoryLearnerPort":
        """The learner's end."""
        return MemoryLearnerPort(self)

    def actor_port(self, name: str) -> "MemoryActorPort":
        """A new actor's end; the same name may be started again."""
        self.num_starts += 1
        peer = f"{name}-{self.num_starts:08x}".encode()
        self.to_actor[peer] = queue.Queue(self.high_water_mark)
        return MemoryActorPort(self, peer)


class MemoryLearnerPort:
    """LearnerPort of a hub."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Queue a message for one actor."""
        if peer not in self.hub.to_actor:
            raise PeerGone(f"Actor {peer.decode()} is not connected, so a {type(message).__name__} cannot reach it.")
        try:
            self.hub.to_actor[peer].put(encode(message), timeout=self.hub.send_timeout_s)
        except queue.Full:
            raise PeerGone(f"Actor {peer.decode()} read nothing for {self.hub.send_timeout_s} s.") from None

    def receive(self, timeout_s: float) -> Inbound | None:
        """The next message of any actor."""
        try:
            peer, frames = self.hub.to_learner.get(timeout=timeout_s)
        except queue.Empty:
            return None
        try:
            return Inbound(peer, decode(frames), frames)
        except ProtocolError as error:
            return Inbound(peer, error, frames)

    def close(self) -> None:
        """Nothing to close."""


class MemoryActorPort:
    """ActorPort of a hub."""

    def __init__(self, hub: MemoryHub, peer: bytes) -> None:
        self.hub = hub
        self.peer = peer
        self.inbox = hub.to_actor[peer]
        self.num_bytes = 0

    def send(self, message: AnyMessage) -> None:
        """Queue a message for the learner."""
        self.send_frames(encode(message), type(message).__name__)

    def send_frames(self, frames: Frames, what: str) -> None:
        """Queue any bytes, as a faulty peer would."""
        try:
            self.hub.to_learner.put((self.peer, frames), timeout=self.hub.send_timeout_s)
        except queue.Full:
            raise PeerTimeout("The learner", f"room for a {what}", self.hub.send_timeout_s) from None

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """The learner's next message."""
        try:
            return decode(self.inbox.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def bytes_received(self) -> int:
        """What a test says."""
        return self.num_bytes

    def close(self) -> None:
        """From now on the learner gets PeerGone."""
        self.hub.to_actor.pop(self.peer, None)
