"""Which actors are connected, which orders each one has, what each one has read, and who has left.

A peer is one process of an actor: a restarted actor has a new address and replaces its former peer. Its credits limit
the orders it has; too long a silence ends it. The orders of a peer that is gone return to the queue.

    read      A peer that names the mark of a Welcome has read all that was sent before it. A peer that fills an
              order correctly has read its policy. Before that the policy is not sent again, and at most two are on
              their way.
    machine   Of the actors that share one, one gets the adapter of a policy and passes it on (machines.py).
    trusted   The peer has filled the last order it was given. While any peer is trusted, others get one order at a
              time. Among equals the next order goes by measured speed (pace.py).

Nothing here looks at all peers for each message or order, since there may be thousands of both: only once for all that
came together.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heapreplace

from msgspec.structs import replace

from learner.orders.machines import Machines
from learner.orders.pace import Busy, Pace, Paces
from protocol.limits import MAX_CONNECTIONS
from protocol.messages import FilledOrder, Hello, Order, Policy
from shared.run.summary import ActorsReport

MAX_UNREAD_POLICIES = 2
"""One for the orders it works on, and one for the next."""
IDENTITIES = {
    "base_digest": "base model",
    "tokenizer_digest": "tokenizer",
    "lora_digest": "LoRA",
    "rules_digest": "[verifier], [rollout] or [environment] configuration",
}
"""Fields of a Hello that must match the run, with the words for them in a message."""


def difference(hello: Hello, expected: Hello) -> str:
    """One sentence about the first digest that does not match; empty if all do."""
    for field_name, what in IDENTITIES.items():
        got, wanted = getattr(hello, field_name), getattr(expected, field_name)
        if got != wanted:
            return (
                f"Actor {hello.actor_id} has another {what} than the learner ({got[:12]}, expected {wanted[:12]});"
                " start it with this run's config.json and the same model files."
            )
    return ""


@dataclass(kw_only=True)
class Peer:
    """One connected actor."""

    address: bytes
    """On the socket; new at every start."""
    hello: Hello
    """The last one it sent."""
    heard_at: float
    """When it last sent anything."""
    orders: list[str] = field(default_factory=list)
    """Ids of the orders it was given and has not filled."""
    doubted: set[str] = field(default_factory=set[str])
    """Those of `orders` that were sent before its last Hello. It waits, so it may never have received them."""
    version: int | None = None
    """Policy that was sent last. Of earlier ones it keeps only those that its orders name."""
    unread: set[int] = field(default_factory=set[int])
    """Policies that were sent and may not have been read."""
    num_unread: int = 0
    """Messages besides policies and orders that were sent since it last showed that it reads."""
    num_unread_orders: int = 0
    """Orders that were sent since then and did not come back."""
    mark: int = 0
    """Of the last Welcome."""
    marked: bool = False
    """Whether no policy and no order was sent after that mark."""
    rival: bytes = b""
    """Another address that says Hello with the same actor id."""
    rival_since: float = 0.0
    """When it first did so."""
    probed_at: float = -math.inf
    """When a message was last sent to test the connection."""
    began_at: float = 0.0
    """When it could begin the first of its orders."""
    is_full: bool = False
    """Whether its last order took its last credit."""

    @property
    def actor_id(self) -> str:
        return self.hello.actor_id

    @property
    def free(self) -> int:
        """How many orders it may be sent. Those of before it left count as well, until it shows that it reads."""
        return self.hello.credits - max(len(self.orders), self.num_unread_orders)

    def takes(self, version: int) -> bool:
        """Whether an order that names this policy may be sent to it."""
        return version == self.version or (version not in self.unread and len(self.unread) < MAX_UNREAD_POLICIES)

    def sent(self, version: int) -> None:
        self.version = version
        self.unread.add(version)

    def has_read(self, version: int | None = None) -> None:
        """It has read this policy, or everything that was sent."""
        self.num_unread = self.num_unread_orders = 0
        self.unread = set() if version is None else self.unread - {version}

    def sampled_before(self, filled: FilledOrder, policy: Policy) -> bool:
        """Whether this was sampled before the learner was restarted, from other bytes of this version. Then the peer
        has not yet read the policy that the order names now."""
        has_read = filled.order_id in self.orders and policy.version not in self.unread
        return not has_read and filled.policy_version == policy.version and filled.adapter_sha256 != policy.sha256

    def fresh_mark(self) -> int:
        """The mark for its next Welcome: a new one if something was sent after the last."""
        if not self.marked:
            self.mark, self.marked = 1 + secrets.randbits(62), True
        return self.mark


class Peers:
    """All connected actors, by address."""

    def __init__(self, silence_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.silence_s = silence_s
        self.now = now
        self.by_address: dict[bytes, Peer] = {}
        self.by_actor: dict[str, Peer] = {}
        """The same peers."""
        self.left: dict[bytes, Peer] = {}
        """Peers that have ended but may still be connected, so messages to them may still be on their way."""
        self.num_left = 0
        """Peers that have ended since the start."""
        self.given: dict[str, list[Peer]] = {}
        """Order id -> who was given it and has not filled it."""
        self.have_filled: set[str] = set()
        """Ids of actors that have filled an order."""
        self.owed: Counter[str] = Counter()
        """By actor id: orders it was given that others had to fill, since it last filled one itself."""
        self.heard_at = now()
        self.oldest = -math.inf
        """No peer was heard of before that for the last time."""
        self.machines = Machines()
        self.paces = Paces(self.heard_at)

    def get(self, address: bytes) -> Peer | None:
        """The peer at this address, which has just sent something."""
        peer = self.by_address.get(address)
        if peer:
            peer.heard_at = self.heard_at = self.now()
        return peer

    def known(self, address: bytes) -> Peer | None:
        """The peer at this address, even if it has left."""
        return self.by_address.get(address) or self.left.get(address)

    def join(self, address: bytes, hello: Hello) -> list[str]:
        """Add an actor; returns the orders of its former processes."""
        former = self.by_actor.get(hello.actor_id)
        orphaned = self.leave(former.address) if former else []
        again = self.left.pop(address, None)
        peer = again or Peer(address=address, hello=hello, heard_at=self.now())
        self.by_address[address] = self.by_actor[hello.actor_id] = peer
        self.paces.of.setdefault(hello.actor_id, Pace())
        return orphaned + self.greet_again(peer, hello)

    def greet_again(self, peer: Peer, hello: Hello) -> list[str]:
        """A peer says Hello. Returns its orders if it has read all that was sent, and so does not have them."""
        peer.heard_at = self.heard_at = self.now()
        if hello.machine != peer.hello.machine:
            self.machines.forget(peer.hello.machine, peer.address)
        peer.hello = hello
        if not (peer.marked and hello.mark == peer.mark):
            peer.doubted = set(peer.orders)
            return []
        peer.has_read()
        peer.version = hello.version
        self.machines.forget(hello.machine, peer.address)
        return self.take_back(peer)

    def take_back(self, peer: Peer) -> list[str]:
        """Its orders, which others will fill."""
        lost = list(peer.orders)
        for order_id in lost:
            self.took(peer, order_id)
        peer.doubted = set()
        self.owe(peer, len(lost))
        return lost

    def took(self, peer: Peer, order_id: str) -> None:
        """It has this order no longer."""
        peer.orders.remove(order_id)
        others = [other for other in self.with_order(order_id) if other is not peer]
        if others:
            self.given[order_id] = others
        else:
            self.given.pop(order_id, None)

    def contest(self, address: bytes, actor_id: str) -> Peer | None:
        """The peer that has this actor id at another address, if it is still there; the two are rivals from now on.

        A peer that left without reading a policy counts until it is silent. Otherwise each new connection of an actor
        would cost another policy.
        """
        found = self.by_actor.get(actor_id)
        if found is None or found.address == address:
            left = (peer for peer in self.left.values() if peer.actor_id == actor_id and peer.address != address)
            found = next((peer for peer in left if peer.unread and not self.is_silent(peer)), None)
        if found and found.rival != address:
            found.rival, found.rival_since = address, self.now()
        return found

    def leave(self, address: bytes, *, connected: bool = True) -> list[str]:
        """Remove a peer; returns its orders. connected: whether the connection may still be open."""
        self.heard_at = self.now()
        peer = self.by_address.pop(address, None)
        if peer is None:
            # It has left before. What is still on its way to it is not forgotten.
            return []
        self.num_left += 1
        self.machines.forget(peer.hello.machine, address)
        del self.by_actor[peer.actor_id]
        if connected:
            self.left[address] = peer
            while len(self.left) > MAX_CONNECTIONS:
                del self.left[next(iter(self.left))]
        return self.take_back(peer)

    def is_silent(self, peer: Peer) -> bool:
        return self.now() - peer.heard_at > self.silence_s

    def silent(self) -> list[Peer]:
        """All are looked at only if the oldest word of all may be too old."""
        now = self.now()
        if now - self.oldest <= self.silence_s:
            return []
        peers = self.by_address.values()
        self.oldest = min((peer.heard_at for peer in peers), default=now)
        return [peer for peer in peers if now - peer.heard_at > self.silence_s]

    def owe(self, peer: Peer, count: int) -> None:
        """Note that so many of its orders had to go to others."""
        if count:
            self.owed[peer.actor_id] += count
            self.paces.of[peer.actor_id].faults += count

    def look(self) -> None:
        """Count who had nothing to do since the last look. To be called before orders go or come."""
        idle = [peer.actor_id for peer in self.by_address.values() if not peer.orders]
        self.paces.look(self.now(), idle, busy=len(idle) < len(self.by_address))

    def gave(self, peer: Peer, order: Order) -> None:
        """It has one more order."""
        if not peer.orders:
            peer.began_at = self.now()
        peer.orders.append(order.order_id)
        self.given.setdefault(order.order_id, []).append(peer)
        peer.num_unread_orders += 1
        peer.is_full = peer.free <= 0
        self.paces.divisible = len(order.groups) > 1

    def measure(self, peer: Peer, filled: FilledOrder, *, more_wait: bool) -> None:
        """Note how long it had this order. more_wait: whether others wait at the learner."""
        if filled.order_id not in peer.orders:
            # It had it before it, or the learner, was restarted.
            return
        seconds, times, pace = self.now() - peer.began_at, filled.timings, self.paces.of[peer.actor_id]
        tokens = max(1, sum(len(group.completion_ids) for group in filled.groups))
        self.paces.measure(peer.actor_id, tokens, seconds, len(self.by_address))
        pace.version, peer.began_at = filled.policy_version, self.now()
        pace.waited_s += times.wait_s
        if more_wait and peer.is_full and len(peer.orders) == 1:
            on_the_way = seconds - times.wait_s - times.swap_s - times.rollout_s - times.verify_s
            self.paces.lost_s["link.credits"] += max(on_the_way, 0.0)

    def report(self) -> ActorsReport:
        """What the actors did since the last one."""
        self.look()
        return self.paces.report(self.now(), {peer.actor_id for peer in self.by_address.values()})

    def gave_policy(self, peer: Peer, policy: Policy) -> Policy:
        """It is sent this policy. Returns what is sent: no adapter, if another actor of its machine passes it on."""
        peer.sent(policy.version)
        is_idle = len(peer.orders) <= 1
        whole = self.machines.gets_adapter(peer.hello.machine, policy.version, peer.address, is_idle=is_idle)
        return policy if whole else replace(policy, adapter=policy.adapter[:0])

    def has_filled(self, peer: Peer, version: int) -> None:
        """Note that it correctly filled an order that names this policy."""
        self.have_filled.add(peer.actor_id)
        self.owed.pop(peer.actor_id, None)
        peer.has_read(version)
        self.machines.has_read(peer.hello.machine, version, peer.address)

    def trusted(self, peer: Peer) -> bool:
        """Whether it has filled the last orders it was given."""
        return peer.actor_id in self.have_filled and not self.owed[peer.actor_id]

    def is_preferred(self, peer: Peer) -> bool:
        """True for a trusted peer, and for every peer while none is trusted. Otherwise the first to connect could hold
        all orders and fill none."""
        return self.trusted(peer) or not any(map(self.trusted, self.by_address.values()))

    def rank(self, peer: Peer) -> tuple[int, bool, float, int]:
        """The peer with the lowest rank gets the next order."""
        return self.owed[peer.actor_id], peer.actor_id not in self.have_filled, self.finish(peer), -peer.free

    def finish(self, peer: Peer) -> float:
        """When it would have filled one more order."""
        return (len(peer.orders) + 1) / self.pace(peer)

    def pace(self, peer: Peer) -> float:
        return self.paces.pace(peer.actor_id, len(self.by_address))

    def working(self) -> list[Peer]:
        """The peers that are expected to fill their orders in the usual time."""
        now = self.now()
        busy = [peer for peer in self.by_address.values() if peer.orders and not peer.doubted and self.trusted(peer)]
        return [peer for peer in busy if not self.paces.of[peer.actor_id].is_overdue(now - peer.began_at)]

    def idle(self) -> list[Peer]:
        """Those that have no order and may get one, best first."""
        return sorted((peer for peer in self.by_address.values() if not peer.orders and peer.free > 0), key=self.rank)

    def unsure(self) -> set[str]:
        """Orders of peers that wait themselves, or have not filled their latest order."""
        peers = (peer for peer in self.by_address.values() if peer.doubted or not self.trusted(peer))
        return {order_id for peer in peers for order_id in peer.orders}

    def doubt(self, order_id: str, helper: Peer) -> str:
        """Why those who have this order may not fill it, so that the helper should; empty if they will."""
        peers = self.with_order(order_id)
        if all(order_id in peer.doubted for peer in peers):
            return "is with an actor that waits"
        if not any(map(self.trusted, peers)) and self.is_preferred(helper):
            return "is with an actor that has not filled its latest order"
        return ""

    def with_order(self, order_id: str) -> list[Peer]:
        return self.given.get(order_id, [])


class Takers:
    """Chooses a peer for each order of one version, in one round of sending. All peers are looked at once, so the cost
    does not grow with orders times peers."""

    def __init__(self, peers: Peers, version: int) -> None:
        self.peers = peers
        self.version = version
        self.num_left = peers.num_left
        self.nobody_trusted = not any(map(peers.trusted, peers.by_address.values()))
        free = (peer for peer in peers.by_address.values() if peer.takes(version) and self.may_take(peer))
        self.free = [(peers.rank(peer), place, peer) for place, peer in enumerate(free)]
        """A heap. Among equals the first that joined is the next."""
        heapify(self.free)

    def still_hold(self, version: int) -> bool:
        """Whether nobody has left meanwhile, and the next order names the same policy."""
        return (self.num_left, self.version) == (self.peers.num_left, version)

    def may_take(self, peer: Peer) -> bool:
        preferred = self.nobody_trusted or self.peers.trusted(peer)
        return peer.free > 0 and (preferred or not peer.orders)

    @cached_property
    def busy(self) -> Busy:
        peers = self.peers
        return Busy({peer.actor_id: (len(peer.orders), peers.pace(peer)) for peer in peers.working()})

    def next(self, waiting: int) -> Peer | None:
        """The peer for the next order; None if all are busy, or if those that are would fill it sooner. waiting: orders
        that nobody has."""
        while self.free and not self.may_take(self.free[0][-1]):
            heappop(self.free)
        if not self.free:
            return None
        found = self.free[0][-1]
        if not self.peers.trusted(found) or self.busy.is_worth(found.actor_id, self.peers.finish(found), waiting):
            return found
        return None

    def gave(self) -> None:
        """The next one has got its order."""
        if self.num_left != self.peers.num_left:
            return
        _, place, peer = self.free[0]
        heapreplace(self.free, (self.peers.rank(peer), place, peer))
        # One that is not counted on has orders already.
        if self.peers.trusted(peer) and (peer.actor_id in self.busy.has or len(peer.orders) == 1):
            self.busy.gave(peer.actor_id, self.peers.pace(peer))
