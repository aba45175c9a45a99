"""Sends orders to actors and collects them filled. Each filled order is used exactly once.

    submit(order) -> queue -> peer with credit -> FilledOrder -> check -> journal -> fsync -> Ack -> collect()

Delivery is at least once. The orders of a lost peer are ordered again. An order that is late, or whose peer waits for
something itself, goes to an idle peer as well. A filled order that arrives twice is acknowledged and dropped. Nothing
is acknowledged before it is durable, and nothing is recorded that an update could not learn from (order_check.py).

A peer that does not read gets at most two policies, the orders of its credits and MAX_UNREAD_MESSAGES other messages.
Orders that the journal can fill (in a resumed run) are never sent. Every wait ends: if all actors are silent for too
long, an error says what the learner waited for. The learner calls `pump` during all of its work, so its heartbeats show
real progress.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from learner.orders.arrived import Arrived, Delivered
from learner.orders.order_check import OrderCheck
from learner.orders.orders import Recorder, training_step
from learner.orders.peers import Peer, Peers, Takers, difference
from learner.orders.plan import Unfilled
from protocol.access.sparse_log import SparseLog
from protocol.errors import MalformedMessage, PeerGone, PeerTimeout, ProtocolError, WrongVersion
from protocol.limits import HIGH_WATER_MARK, MAX_MESSAGES_A_PUMP
from protocol.messages import (
    Ack,
    AnyMessage,
    Bye,
    Drain,
    FilledOrder,
    Heartbeat,
    Hello,
    Order,
    Policy,
    Refused,
    Welcome,
)
from protocol.plain_text import for_log
from protocol.transport import LearnerPort
from shared.run.failpoints import reach

MAX_UNREAD_MESSAGES = HIGH_WATER_MARK // 5
"""Twice as many fit into the queue of a peer's socket together with two policies and the orders of all credits: with
each Ack the peer may get another order."""
PROBE_EVERY_S = 1.0
"""An actor that waits says Hello at this interval."""
LOOK_EVERY_S = 0.05
"""After nothing but heartbeats, who should get an order is asked at this interval: it may take a look at all actors."""
MAX_REASON_CHARS = 400
"""Longest reason that is sent and logged, since it may quote a peer."""
log = logging.getLogger("learner.orders.dispatch")


class Dispatcher:
    """The learner's end of the wire."""

    def __init__(
        self,
        port: LearnerPort,
        recorder: Recorder,
        expected: Hello,
        welcome: Welcome,
        check: OrderCheck,
        now: Callable[[], float] = time.monotonic,
        late_s: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """expected: the digests that every actor must have. check: for filled orders. late_s: an order that is open for
        longer goes to another actor too. stop: whether the user asked the run to stop."""
        self.port = port
        self.recorder = recorder
        self.expected = expected
        self.welcome = welcome
        self.check = check
        self.now = now
        self.late_s = late_s
        self.stop = stop
        self.peers = Peers(welcome.silence_s, now)
        self.policies: dict[int, Policy] = {}
        self.orders: dict[str, Order] = {}
        self.helped: dict[str, Order] = {}
        """Those that went to a second actor; the first one may still fill them."""
        self.given_at: dict[str, float] = {}
        self.queue: deque[str] = deque()
        self.filled: dict[str, FilledOrder] = {}
        self.filled_by: dict[str, str] = {}
        """Order id -> actor id, until the next version; without those that the journal filled."""
        self.expelled: dict[str, str] = {}
        """Actor id -> why; its key is about to be revoked."""
        self.draining = False
        self.said_at = self.looked_at = self.now()
        self.sparse_log = SparseLog(log)

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Make a version available, and forget those before `oldest_needed`."""
        reach("before learner publishes", policy)
        self.policies[policy.version] = policy
        self.policies = {v: p for v, p in self.policies.items() if v >= oldest_needed}
        self.peers.machines.forget_before(oldest_needed)
        self.helped = {name: order for name, order in self.helped.items() if order.policy_version >= oldest_needed}
        self.filled_by = {name: actor_id for name, actor_id in self.filled_by.items() if name in self.filled}

    def submit(self, orders: Iterable[Order]) -> None:
        """Queue orders. The journal fills those that it has a record of."""
        for order in orders:
            recorded = self.recorder.find(order)
            if recorded:
                self.filled[order.order_id] = recorded
            else:
                self.orders[order.order_id] = order
                self.queue.append(order.order_id)
        self.send_queued()

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        """Wait until all of these are filled, and return them in the order asked for. Unfilled: the run should stop,
        and no actor is connected, or they are of an evaluation, which the next start makes."""
        self.peers.heard_at = self.now()
        for order_id in order_ids:
            while order_id not in self.filled:
                self.pump(self.welcome.heartbeat_s / 2)
                if self.stop() and (not self.peers.by_address or training_step(order_id) is None):
                    raise Unfilled
                quiet = self.now() - self.peers.heard_at
                if quiet > self.welcome.silence_s:
                    raise PeerTimeout("Every actor", f"filled order {order_id}", quiet)
        return [self.filled.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Receive messages, record and acknowledge filled orders, send orders, and send heartbeats.

        Reads at most MAX_MESSAGES_A_PUMP messages, so that a peer that floods the learner cannot stop its work.
        """
        arrived = Arrived(self.wanted, self.recorder)
        news = False
        reach("before learner receives")
        for _ in range(MAX_MESSAGES_A_PUMP):
            if (inbound := self.port.receive(timeout_s)) is None:
                break
            reach("after learner receives", inbound.message)
            if one := self.take(*inbound):
                arrived.add(one)
            news = news or not isinstance(inbound.message, Heartbeat)
            timeout_s = 0.0
        if arrived.all:
            self.accept(arrived)
        for peer in self.peers.silent():
            self.lose(peer, "was silent for too long")
        if not self.draining and (news or self.now() - self.looked_at >= LOOK_EVERY_S):
            self.send_queued()
        self.beat()

    def take(self, address: bytes, message: AnyMessage | ProtocolError, frames: Sequence[bytes]) -> Delivered | None:
        """Handle one message. A filled order is returned, since all that arrive together are recorded together."""
        if isinstance(message, ProtocolError):
            self.reject(address, message)
        elif isinstance(message, Hello):
            self.greet(address, message)
        elif peer := self.peers.get(address):
            if isinstance(message, FilledOrder):
                return Delivered(peer=peer, filled=message, frames=frames)
            if isinstance(message, Bye):
                self.lose(peer, "left", for_log(message.reason))
        return None

    def reject(self, address: bytes, fault: ProtocolError) -> None:
        """Tell an unknown peer what is wrong. The message of one that has joined was damaged on the way: it counts as
        lost, and is sent again after the next Hello."""
        if address in self.peers.by_address and isinstance(fault, MalformedMessage | WrongVersion):
            self.sparse_log.note("dropped what is no message", for_log(str(fault)))
        else:
            self.refuse(address, str(fault))

    def greet(self, address: bytes, hello: Hello) -> None:
        """Welcome an actor whose digests match, and refuse any other with a reason. The orders of an actor that says
        Hello again return to the queue once it has shown that it never got them."""
        if wrong := self.expelled.get(hello.actor_id) or difference(hello, self.expected):
            self.refuse(address, wrong)
            return
        if self.contested(address, hello):
            return
        if peer := self.peers.by_address.get(address):
            self.requeue(self.peers.greet_again(peer, hello))
        else:
            engine = f"{for_log(hello.engine)} engine"
            self.sparse_log.note(f"actor {for_log(hello.actor_id)} joined", engine, logging.INFO)
            self.requeue(self.peers.join(address, hello))
        mark = self.peers.by_address[address].fresh_mark()
        self.send(address, msgspec.structs.replace(self.welcome, mark=mark))

    def contested(self, address: bytes, hello: Hello) -> bool:
        """Whether another peer with this id may be alive.

        The new one waits until the other is known to be gone. It is refused if the other speaks again, since then there
        are two actors with one id. Sending a message shows whether the other's connection is still open.
        """
        other = self.peers.contest(address, hello.actor_id)
        if other is None:
            return False
        self.probe(other)
        if other.address in self.peers.by_address and other.heard_at > other.rival_since:
            self.refuse(
                address,
                f"Actor {hello.actor_id} is already connected; make another key for this one"
                " (python -m launch key RUN NAME), or stop the other first.",
            )
        return self.peers.known(other.address) is not None

    def probe(self, peer: Peer) -> None:
        """Send a message to learn whether the connection is open. Not too often: the peer may read nothing."""
        if self.now() - peer.probed_at >= PROBE_EVERY_S:
            peer.probed_at = self.now()
            self.put(peer.address, Heartbeat(phase="learning"))

    def accept(self, arrived: Arrived) -> None:
        """Check, record durably, then acknowledge, in this order."""
        self.peers.look()
        arrived.record()
        for order_id, one in arrived.fresh.items():
            peer, filled = one.peer, one.filled
            self.filled[order_id], self.filled_by[order_id] = filled, peer.actor_id
            del self.orders[order_id]
            self.given_at.pop(order_id, None)
            self.peers.measure(peer, filled, more_wait=bool(self.queue))
            self.peers.has_filled(peer, filled.policy_version)
        for one in arrived.all:
            order_id = one.filled.order_id
            # After a restart an actor may be early: its order is not open yet and is not recorded.
            if order_id not in self.orders and self.recorder.is_durable(order_id):
                first = arrived.fresh.get(order_id)
                if first is None or first.peer is not one.peer:
                    self.note_late(one.peer, one.filled)
                self.settle(one.peer, order_id)

    def note_late(self, peer: Peer, filled: FilledOrder) -> None:
        """It has filled an order that another one had filled before: it is slower, but it can be relied on."""
        order = self.helped.get(filled.order_id)
        if order is None or filled.order_id not in peer.orders or order.policy_version not in self.policies:
            return
        if not self.check.fault(order, self.policies[order.policy_version], filled):
            self.peers.measure(peer, filled, more_wait=bool(self.queue))
            self.peers.has_filled(peer, filled.policy_version)

    def settle(self, peer: Peer, order_id: str) -> None:
        """The order is durable: the peer may forget it and has its credit back."""
        was_given = order_id in peer.orders
        if was_given:
            self.peers.took(peer, order_id)
        peer.doubted.discard(order_id)
        if self.send(peer.address, Ack(order_id=order_id)) and was_given:
            peer.num_unread_orders = max(0, peer.num_unread_orders - 1)

    def wanted(self, peer: Peer, filled: FilledOrder) -> bool:
        """Whether this order is open and correctly filled. A peer that fills an order incorrectly is removed."""
        order = self.orders.get(filled.order_id)
        if order is None or peer.sampled_before(filled, self.policies[order.policy_version]):
            log.debug("order %s of %s is not open or was sampled before", for_log(filled.order_id), peer.actor_id)
            return False
        fault = self.check.fault(order, self.policies[order.policy_version], filled)
        if fault:
            self.refuse(peer.address, fault)
            self.lose(peer, "sent a wrong filled order")
        return not fault

    def send_queued(self) -> None:
        """Send orders while peers have credits; then give idle peers the orders that need a second actor."""
        self.looked_at = self.now()
        self.peers.look()
        takers: Takers | None = None
        while self.queue:
            if order := self.orders.get(self.queue[0]):
                if takers is None or not takers.still_hold(order.policy_version):
                    takers = Takers(self.peers, order.policy_version)
                if (peer := takers.next(len(self.queue))) is None:
                    break
                self.queue.popleft()
                self.give(peer, order)
                takers.gave()
            else:
                self.queue.popleft()
        self.send_to_helpers()

    def send_to_helpers(self) -> None:
        """Give idle peers the orders that need a second actor."""
        late, unsure = self.now() - self.late_s, self.peers.unsure()
        # First whether any needs it, since the idle ones are put in order, and there may be thousands.
        if not unsure and min(self.given_at.values(), default=late) >= late:
            return
        if not self.given_at or not (helpers := deque(self.peers.idle())):
            return
        for order_id, given_at in list(self.given_at.items()):
            why = self.needs_help(order_id, helpers[0]) if given_at < late or order_id in unsure else ""
            if why and helpers[0].takes(self.orders[order_id].policy_version):
                self.give_to_second(order_id, helpers.popleft(), why)
                unsure = self.peers.unsure()
                if not helpers:
                    break

    def give_to_second(self, order_id: str, helper: Peer, why: str) -> None:
        """The peers that have this order owe it from now on, because another one has to fill it."""
        to_whom = f"{order_id} to {helper.actor_id}"
        self.sparse_log.note(f"an order {why} and goes to another too", to_whom, logging.INFO)
        for peer in self.peers.with_order(order_id):
            self.peers.owe(peer, 1)
        del self.given_at[order_id]
        self.helped[order_id] = self.orders[order_id]
        self.give(helper, self.orders[order_id])

    def needs_help(self, order_id: str, helper: Peer) -> str:
        """Why an order that was sent should go to this peer too; empty if it should not."""
        if not self.peers.with_order(order_id):
            return ""
        is_late = self.given_at[order_id] < self.now() - self.late_s
        return "is late" if is_late else self.peers.doubt(order_id, helper)

    def give(self, peer: Peer, order: Order) -> None:
        """Send an order, after the policy it names."""
        self.given_at.setdefault(order.order_id, self.now())
        self.peers.gave(peer, order)
        if order.policy_version != peer.version:
            self.send(peer.address, self.peers.gave_policy(peer, self.policies[order.policy_version]))
        self.send(peer.address, order)

    def beat(self) -> None:
        """Tell every peer that the learner makes progress."""
        if self.now() - self.said_at < self.welcome.heartbeat_s:
            return
        self.said_at = self.now()
        for address in list(self.peers.by_address):
            # Again and again, since the first Drain may have been lost.
            self.send(address, Drain() if self.draining else Heartbeat(phase="learning"))

    def send(self, address: bytes, message: AnyMessage) -> bool:
        """Send, unless the peer reads nothing and the message can be repeated later. Returns whether it was sent."""
        peer = self.peers.known(address)
        has_room = peer is None or self.room_for(peer, message)
        if has_room:
            self.put(address, message)
        return has_room

    def put(self, address: bytes, message: AnyMessage) -> None:
        try:
            reach("before learner sends", message)
            self.port.send(address, message)
            reach("after learner sends", message)
        except PeerGone as error:
            self.gone(address, error)

    def room_for(self, peer: Peer, message: AnyMessage) -> bool:
        """Whether this message may be queued for a peer; if so, it is counted as unread."""
        bulk = isinstance(message, Policy | Order)
        # An actor that decodes for long gets many heartbeats; the other half of the room is for what it waits for.
        room = MAX_UNREAD_MESSAGES // (2 if isinstance(message, Heartbeat | Drain) else 1)
        if not bulk and not isinstance(message, Refused) and peer.num_unread >= room:
            return False
        if bulk:
            # Only a newer mark will show that the peer has read this.
            peer.marked = False
        else:
            peer.num_unread += 1
        return True

    def gone(self, address: bytes, error: PeerGone) -> None:
        """Forget a peer whose connection is closed. No message to it is on its way any more."""
        self.peers.left.pop(address, None)
        if peer := self.peers.by_address.get(address):
            self.sparse_log.note(f"actor {for_log(peer.actor_id)} cannot be reached", for_log(str(error)), logging.INFO)
            self.requeue(self.peers.leave(address, connected=False))

    def refuse(self, address: bytes, reason: str) -> None:
        """Log the reason and send it to the peer."""
        reason = for_log(reason, MAX_REASON_CHARS)
        self.sparse_log.note("refused a peer", reason)
        self.send(address, Refused(reason=reason))

    def lose(self, peer: Peer, why: str, detail: str = "") -> None:
        """Forget a peer. Its orders return to the queue."""
        self.sparse_log.note(f"actor {for_log(peer.actor_id)} {why}", detail, logging.INFO)
        self.requeue(self.peers.leave(peer.address))

    def requeue(self, order_ids: Sequence[str]) -> None:
        """Put orders back at the front of the queue, except those that another peer has too."""
        lost = [order_id for order_id in order_ids if not self.peers.with_order(order_id)]
        for order_id in lost:
            self.given_at.pop(order_id, None)
        self.queue.extendleft(reversed(lost))

    def end_run(self, wait_s: float) -> None:
        """Tell all actors that no more orders will come, and wait up to `wait_s` for them to leave."""
        self.draining = True
        for address in list(self.peers.by_address):
            self.send(address, Drain())
        deadline = self.now() + wait_s
        while self.peers.by_address and self.now() < deadline:
            self.pump(self.welcome.heartbeat_s / 8)
