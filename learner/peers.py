"""Which actors are there, what each holds, and who has gone.

A peer is one life of an actor: a restarted actor arrives under a new address and replaces its former life. Credits
bound what a peer holds; silence beyond the limit ends it. What a gone peer held goes back to the queue.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.messages import Hello


@dataclass(kw_only=True)
class Peer:
    """One connected actor."""

    address: bytes
    """Its address on the socket, new in every life."""
    hello: Hello
    """Who it said it is."""
    heard_at: float
    """When it last said anything."""
    holding: list[str] = field(default_factory=list)
    """Order ids it was given and has not answered."""
    version: int | None = None
    """Policy it was sent last; of earlier ones it keeps only those that its orders name."""
    rival: bytes = b""
    """Another address that says Hello under the same id."""
    rival_since: float = 0.0
    """When it first did."""

    @property
    def free(self) -> int:
        """Credits left."""
        return self.hello.credits - len(self.holding)


class Peers:
    """All connected actors, by address."""

    def __init__(self, silence_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.silence_s = silence_s
        self.now = now
        self.by_address: dict[bytes, Peer] = {}
        self.heard_at = now()

    def get(self, address: bytes) -> Peer | None:
        """The peer at this address, its silence ended."""
        peer = self.by_address.get(address)
        if peer:
            peer.heard_at = self.heard_at = self.now()
        return peer

    def join(self, address: bytes, hello: Hello) -> list[str]:
        """Let an actor in; returns what it held until now. Whoever says Hello waits, and may have lost its orders."""
        former = [peer for peer in self.by_address.values() if peer.hello.actor_id == hello.actor_id]
        orphaned = [order_id for peer in former for order_id in self.leave(peer.address)]
        self.heard_at = self.now()
        self.by_address[address] = Peer(address=address, hello=hello, heard_at=self.heard_at)
        return orphaned

    def contest(self, address: bytes, actor_id: str) -> Peer | None:
        """Who has this id at another address, if that peer is still here; from now on they are rivals."""
        for peer in self.by_address.values():
            if peer.hello.actor_id == actor_id and peer.address != address:
                if peer.rival != address:
                    peer.rival, peer.rival_since = address, self.now()
                return peer
        return None

    def leave(self, address: bytes) -> list[str]:
        """Forget a peer; returns the orders it held. Another in its place gets time to come."""
        self.heard_at = self.now()
        peer = self.by_address.pop(address, None)
        return peer.holding if peer else []

    def silent(self) -> list[Peer]:
        """Peers that have said nothing for too long."""
        now = self.now()
        return [peer for peer in self.by_address.values() if now - peer.heard_at > self.silence_s]

    def next_free(self) -> Peer | None:
        """The peer with most credits left, or None if all are busy."""
        free = [peer for peer in self.by_address.values() if peer.free > 0]
        return max(free, key=lambda peer: peer.free) if free else None

    def idle(self) -> Peer | None:
        """A peer that holds nothing."""
        return next((peer for peer in self.by_address.values() if not peer.holding), None)
