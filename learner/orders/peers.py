"""Which actors are there, what each holds, what each has read, and who has gone.

A peer is one life of an actor: a restarted actor arrives under a new address and replaces its former life. Credits
bound what a peer holds; silence beyond the limit ends it. What a gone peer held goes back to the queue.

    read      whoever names the mark of a Welcome has read what was sent before it, and whoever answers an order rightly
              has read its policy. Until then no policy is sent to it again, and two at most are under way
    trusted   the last order it was given was answered. While somebody is trusted, others hold one order at a time
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.limits import MAX_CONNECTIONS
from protocol.messages import Hello

MAX_UNREAD_POLICIES = 2
"""That of the orders it works on and that of the next."""


@dataclass(kw_only=True)
class Peer:
    """One connected actor."""

    address: bytes
    """Its address on the socket, new in every life."""
    hello: Hello
    """Who it said it is."""
    heard_at: float
    """When it last said anything."""
    orders: list[str] = field(default_factory=list)
    """Order ids it was given and has not answered."""
    doubted: set[str] = field(default_factory=set[str])
    """Those of them that it said Hello after: it waits, so it may never have got them."""
    version: int | None = None
    """Policy it was sent last; of earlier ones it keeps only those that its orders name."""
    unread: set[int] = field(default_factory=set[int])
    """Policies that were sent and that it may not have read."""
    num_unread: int = 0
    """Messages that were sent since it last showed that it reads."""
    mark: int = 0
    """Of the last Welcome."""
    marked: bool = False
    """Neither policy nor order was sent since that mark was made up."""
    rival: bytes = b""
    """Another address that says Hello under the same id."""
    rival_since: float = 0.0
    """When it first did."""
    probed_at: float = -math.inf
    """When a message was last sent to see whether its connection stands."""

    @property
    def actor_id(self) -> str:
        """Whose life it is."""
        return self.hello.actor_id

    @property
    def free(self) -> int:
        """Credits left."""
        return self.hello.credits - len(self.orders)

    def takes(self, version: int) -> bool:
        """Whether an order that names this policy may be sent to it."""
        return version == self.version or (version not in self.unread and len(self.unread) < MAX_UNREAD_POLICIES)

    def sent(self, version: int) -> None:
        """It was sent this policy."""
        self.version = version
        self.unread.add(version)

    def has_read(self, version: int | None = None) -> None:
        """It has read this policy, or everything."""
        self.num_unread = 0
        self.unread = set() if version is None else self.unread - {version}

    def fresh_mark(self) -> int:
        """For its next Welcome."""
        if not self.marked:
            self.mark, self.marked = 1 + secrets.randbits(62), True
        return self.mark


class Peers:
    """All connected actors, by address."""

    def __init__(self, silence_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.silence_s = silence_s
        self.now = now
        self.by_address: dict[bytes, Peer] = {}
        self.left: dict[bytes, Peer] = {}
        """Lives that have ended, though their connection may go on: what they have not read is still on its way."""
        self.answered: set[str] = set()
        """Actors that have answered an order."""
        self.owed: Counter[str] = Counter()
        """By actor: orders that it was given and that others had to be given since its last answer."""
        self.heard_at = now()

    def get(self, address: bytes) -> Peer | None:
        """The peer at this address, its silence ended."""
        peer = self.by_address.get(address)
        if peer:
            peer.heard_at = self.heard_at = self.now()
        return peer

    def known(self, address: bytes) -> Peer | None:
        """The peer at this address, whether it is in or has left."""
        return self.by_address.get(address) or self.left.get(address)

    def join(self, address: bytes, hello: Hello) -> list[str]:
        """Let an actor in; returns what its former lives held until now."""
        former = [peer for peer in self.by_address.values() if peer.actor_id == hello.actor_id]
        orphaned = [order_id for peer in former for order_id in self.leave(peer.address)]
        again = self.left.pop(address, None)
        self.by_address[address] = again or Peer(address=address, hello=hello, heard_at=self.now())
        return orphaned + self.greet_again(self.by_address[address], hello)

    def greet_again(self, peer: Peer, hello: Hello) -> list[str]:
        """A peer says Hello; returns what it held, if it has read all that was sent to it and still waits."""
        peer.heard_at = self.heard_at = self.now()
        peer.hello = hello
        if not (peer.marked and hello.mark == peer.mark):
            peer.doubted = set(peer.orders)
            return []
        peer.has_read()
        peer.version = hello.version
        return self.take_back(peer)

    def take_back(self, peer: Peer) -> list[str]:
        """What it held; others will answer it."""
        lost, peer.orders, peer.doubted = peer.orders, [], set()
        self.owe(peer, len(lost))
        return lost

    def contest(self, address: bytes, actor_id: str) -> Peer | None:
        """Who has this id at another address, if that peer is still here; from now on they are rivals. A life that has
        left with a policy unread counts as well, until it is silent: else each new connection would cost a policy."""
        unread = (peer for peer in self.left.values() if peer.unread and not self.is_silent(peer))
        for peer in (*self.by_address.values(), *unread):
            if peer.actor_id == actor_id and peer.address != address:
                if peer.rival != address:
                    peer.rival, peer.rival_since = address, self.now()
                return peer
        return None

    def leave(self, address: bytes, *, connected: bool = True) -> list[str]:
        """End a life; returns the orders it held. Another in its place gets time to come. connected: perhaps still."""
        self.heard_at = self.now()
        peer = self.by_address.pop(address, None)
        self.left.pop(address, None)
        if peer is None:
            return []
        if connected:
            self.left[address] = peer
            while len(self.left) > MAX_CONNECTIONS:
                del self.left[next(iter(self.left))]
        return self.take_back(peer)

    def is_silent(self, peer: Peer) -> bool:
        """Whether it has said nothing for too long."""
        return self.now() - peer.heard_at > self.silence_s

    def silent(self) -> list[Peer]:
        """Peers that have said nothing for too long."""
        return [peer for peer in self.by_address.values() if self.is_silent(peer)]

    def owe(self, peer: Peer, count: int) -> None:
        """So many of its orders had to be given to others."""
        if count:
            self.owed[peer.actor_id] += count

    def has_answered(self, peer: Peer, version: int) -> None:
        """Rightly, an order that named this policy."""
        self.answered.add(peer.actor_id)
        self.owed.pop(peer.actor_id, None)
        peer.has_read(version)

    def trusted(self, peer: Peer) -> bool:
        """Whether it answers what it is given, as far as is known."""
        return peer.actor_id in self.answered and not self.owed[peer.actor_id]

    def rank(self, peer: Peer) -> tuple[int, bool, int]:
        """The lower the sooner it is given an order."""
        return self.owed[peer.actor_id], peer.actor_id not in self.answered, -peer.free

    def next_free(self, version: int) -> Peer | None:
        """Who is given the next order, which names this policy; None if all are busy."""
        peers = [peer for peer in self.by_address.values() if peer.free > 0 and peer.takes(version)]
        if any(self.trusted(peer) for peer in self.by_address.values()):
            peers = [peer for peer in peers if self.trusted(peer) or not peer.orders]
        return min(peers, key=self.rank, default=None)

    def idle(self) -> Peer | None:
        """The best peer that holds nothing."""
        return min((peer for peer in self.by_address.values() if not peer.orders), key=self.rank, default=None)

    def with_order(self, order_id: str) -> list[Peer]:
        """Who has this order."""
        return [peer for peer in self.by_address.values() if order_id in peer.orders]
