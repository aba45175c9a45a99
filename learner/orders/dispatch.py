"""Orders out, groups in, each group applied exactly once.

    submit(order) -> queue -> peer with credit -> FilledOrder -> check -> journal -> fsync -> Ack -> collect()

Delivery is at least once: whatever a peer held when it died is ordered again, what a peer holds for too long, or waits
for itself, is given to an idle one as well, and a group that comes twice is acknowledged and dropped. Nothing is
acknowledged before it is durable, and nothing is made durable that an update could not learn from (order_check.py). A
peer that does not read is sent two policies, the orders of its credits and MAX_UNREAD_MESSAGES others at most.
 Orders already in the journal (a resumed run) are answered from there and never sent. Every wait ends:
silence of all actors beyond the limit is an error that says what was awaited. `pump` is called wherever work is done,
so heartbeats prove progress.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from learner.orders.order_check import OrderCheck
from learner.orders.orders import Recorder
from learner.orders.peers import Peer, Peers
from learner.orders.plan import Unanswered
from protocol.access.sparse_log import Tally
from protocol.errors import MalformedMessage, PeerGone, PeerTimeout, ProtocolError, VersionMismatch
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
from protocol.plain_text import one_line
from protocol.transport import LearnerPort
from shared.run.failpoints import reach

MAX_UNREAD_MESSAGES = HIGH_WATER_MARK // 4
"""A socket's queue for one peer has room for these, for the orders of all credits, and for policies."""
PROBE_EVERY_S = 1.0
"""As often as an actor that waits says Hello."""
MAX_REASON_CHARS = 400
"""Of a sentence of ours that quotes a peer."""
IDENTITIES = {
    "base_digest": "base model",
    "tokenizer_digest": "tokenizer",
    "lora_digest": "LoRA",
    "rules_digest": "[verifier] or [rollout] configuration",
}
"""Fields of a Hello that must be those of the run, and what they stand for."""

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
        """expected: what every actor must hold (its digests alone matter). check: what every answer must fit. now: the
        clock. late_s: an order unanswered for longer goes to another actor too. stop: whether a stop was asked for."""
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
        self.given_at: dict[str, float] = {}
        self.queue: deque[str] = deque()
        self.answers: dict[str, FilledOrder] = {}
        self.draining = False
        self.said_at = self.now()
        self.tally = Tally(log)

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Make a version available; forget those that nothing names any more."""
        reach("before learner publishes", policy)
        self.policies[policy.version] = policy
        self.policies = {v: p for v, p in self.policies.items() if v >= oldest_needed}

    def submit(self, orders: Iterable[Order]) -> None:
        """Queue orders; those that the journal can answer are answered now."""
        for order in orders:
            recorded = self.recorder.find(order)
            if recorded:
                self.answers[order.order_id] = recorded
            else:
                self.orders[order.order_id] = order
                self.queue.append(order.order_id)
        self.send_queued()

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        """Wait until all of these are answered; in the order asked for. A learner that was asked to stop waits for
        those who are there, and for nobody to come."""
        self.peers.heard_at = self.now()
        while missing := [order_id for order_id in order_ids if order_id not in self.answers]:
            self.pump(self.welcome.heartbeat_s / 2)
            if self.stop() and not self.peers.by_address:
                raise Unanswered
            quiet = self.now() - self.peers.heard_at
            if quiet > self.welcome.silence_s:
                raise PeerTimeout("Every actor", f"the answer to order {missing[0]}", quiet)
        return [self.answers.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Take in what has come, make it durable, acknowledge it, hand out work, show progress. Who talks without end
        cannot keep the learner from its work: the rest waits for the next time."""
        delivered: list[tuple[Peer, FilledOrder]] = []
        reach("before learner receives")
        for _ in range(MAX_MESSAGES_A_PUMP):
            if (inbound := self.port.receive(timeout_s)) is None:
                break
            address, message = inbound
            reach("after learner receives", message)
            delivered += self.take(address, message)
            timeout_s = 0.0
        if delivered:
            self.accept(delivered)
        for peer in self.peers.silent():
            self.lose(peer, "was silent for too long")
        self.send_queued()
        self.beat()

    def take(self, address: bytes, message: AnyMessage | ProtocolError) -> list[tuple[Peer, FilledOrder]]:
        """One inbound message; a delivery is returned, to be made durable together with its neighbours."""
        if isinstance(message, ProtocolError):
            self.reject(address, message)
            return []
        if isinstance(message, Hello):
            self.greet(address, message)
            return []
        peer = self.peers.get(address)
        if peer and isinstance(message, FilledOrder):
            return [(peer, message)]
        if peer and isinstance(message, Bye):
            self.lose(peer, "left", one_line(message.reason))
        return []

    def reject(self, address: bytes, fault: ProtocolError) -> None:
        """A stranger is told what is wrong. Whoever has joined can speak, so its message was damaged on its way: it is
        as good as lost, and the next Hello brings it again."""
        if address in self.peers.by_address and isinstance(fault, MalformedMessage | VersionMismatch):
            self.tally.note("dropped what is no message", one_line(str(fault)))
        else:
            self.refuse(address, str(fault))

    def greet(self, address: bytes, hello: Hello) -> None:
        """Welcome an actor that holds what this run is about; refuse others in words. One that says Hello again gets
        its orders back once it has shown that they were lost."""
        if wrong := self.difference(hello):
            self.refuse(address, wrong)
            return
        if self.contested(address, hello):
            return
        if peer := self.peers.by_address.get(address):
            self.requeue(self.peers.greet_again(peer, hello))
        else:
            self.tally.note(
                f"actor {one_line(hello.actor_id)} joined", f"{one_line(hello.engine)} engine", logging.INFO
            )
            self.requeue(self.peers.join(address, hello))
        mark = self.peers.by_address[address].fresh_mark()
        self.send(address, msgspec.structs.replace(self.welcome, mark=mark))

    def difference(self, hello: Hello) -> str:
        """What an actor holds that this run does not, in a sentence; empty if nothing."""
        for field, what in IDENTITIES.items():
            got, expected = getattr(hello, field), getattr(self.expected, field)
            if got != expected:
                return (
                    f"Actor {hello.actor_id} holds another {what} than the learner ({got[:12]}, expected"
                    f" {expected[:12]}); start it with this run's config.json and the same model files."
                )
        return ""

    def contested(self, address: bytes, hello: Hello) -> bool:
        """Whether the id is taken by a peer that may be alive. The newcomer waits until that one is seen to be gone,
        and is refused once it spoke again: then there are two. Sending shows whether its connection stands."""
        holder = self.peers.contest(address, hello.actor_id)
        if holder is None:
            return False
        self.probe(holder)
        if holder.address in self.peers.by_address and holder.heard_at > holder.rival_since:
            self.refuse(
                address,
                f"An actor {hello.actor_id} is here and alive; give this one a key of its own"
                " (python -m launch key RUN NAME), or stop the other first.",
            )
        return self.peers.known(holder.address) is not None

    def probe(self, holder: Peer) -> None:
        """See whether its connection stands, however much it has not read; once in a while, for that is more."""
        if self.now() - holder.probed_at >= PROBE_EVERY_S:
            holder.probed_at = self.now()
            self.put(holder.address, Heartbeat(phase="learning"))

    def accept(self, delivered: Sequence[tuple[Peer, FilledOrder]]) -> None:
        """Check, journal, fsync, then acknowledge: in this order."""
        fresh: dict[str, tuple[Peer, FilledOrder]] = {}
        for peer, groups in delivered:
            if groups.order_id not in fresh and self.wanted(peer, groups):
                fresh[groups.order_id] = (peer, groups)
        self.recorder.record([groups for _, groups in fresh.values()])
        for order_id, (peer, groups) in fresh.items():
            self.answers[order_id] = groups
            del self.orders[order_id]
            self.given_at.pop(order_id, None)
            self.peers.has_answered(peer, groups.policy_version)
        for peer, groups in delivered:
            # After a restart an actor may be early: its order is not open yet, and its answer is on no disk.
            if groups.order_id not in self.orders and self.recorder.is_durable(groups.order_id):
                self.settle(peer, groups.order_id)

    def settle(self, peer: Peer, order_id: str) -> None:
        """The order is durable: the peer may forget it and has its credit back."""
        if order_id in peer.orders:
            peer.orders.remove(order_id)
        peer.doubted.discard(order_id)
        self.send(peer.address, Ack(order_id=order_id))

    def wanted(self, peer: Peer, groups: FilledOrder) -> bool:
        """Whether this answers an open order, and rightly; a wrong answer costs the peer its place."""
        order = self.orders.get(groups.order_id)
        if order is None:
            log.debug("order %s of %s is not open and was dropped", one_line(groups.order_id), peer.actor_id)
            return False
        fault = self.check.fault(order, self.policies[order.policy_version], groups)
        if fault:
            self.refuse(peer.address, fault)
            self.lose(peer, "answered wrongly")
        return not fault

    def send_queued(self) -> None:
        """Hand out orders while there are orders and credits; then what others should answer too, to whoever has
        nothing else to do."""
        while self.queue:
            order = self.orders.get(self.queue[0])
            peer = self.peers.next_free(order.policy_version) if order else None
            if order and peer is None:
                break
            self.queue.popleft()
            if order and peer:
                self.give(peer, order)
        for order_id in list(self.given_at):
            helper = self.peers.idle()
            if helper is None:
                break
            if (why := self.needs_help(order_id, helper)) and helper.takes(self.orders[order_id].policy_version):
                self.tally.note(
                    f"an order {why} and goes to another too", f"{order_id} to {helper.actor_id}", logging.INFO
                )
                for holder in self.peers.holders(order_id):
                    self.peers.owe(holder, 1)
                del self.given_at[order_id]
                self.give(helper, self.orders[order_id])

    def needs_help(self, order_id: str, helper: Peer) -> str:
        """Why an order that is out should be answered by this peer too; empty if it need not be."""
        holders = self.peers.holders(order_id)
        if holders and self.given_at[order_id] < self.now() - self.late_s:
            return "is late"
        if holders and all(order_id in peer.doubted for peer in holders):
            return "is with an actor that waits"
        if holders and self.peers.trusted(helper) and not any(map(self.peers.trusted, holders)):
            return "is with an actor that has not shown yet that it answers"
        return ""

    def give(self, peer: Peer, order: Order) -> None:
        """Send an order, after the policy it names."""
        self.given_at.setdefault(order.order_id, self.now())
        peer.orders.append(order.order_id)
        if order.policy_version != peer.version:
            peer.sent(order.policy_version)
            self.send(peer.address, self.policies[order.policy_version])
        self.send(peer.address, order)

    def beat(self) -> None:
        """Show every peer that the learner makes progress."""
        if self.now() - self.said_at < self.welcome.heartbeat_s:
            return
        self.said_at = self.now()
        for address in list(self.peers.by_address):
            # The first Drain may have been lost.
            self.send(address, Drain() if self.draining else Heartbeat(phase="learning"))

    def send(self, address: bytes, message: AnyMessage) -> None:
        """Send, or count the peer as gone. Of what can be said again, one that does not read is not sent more."""
        peer = self.peers.known(address)
        if peer is None or self.room_for(peer, message):
            self.put(address, message)

    def put(self, address: bytes, message: AnyMessage) -> None:
        """Into the socket's queue."""
        try:
            reach("before learner sends", message)
            self.port.send(address, message)
            reach("after learner sends", message)
        except PeerGone as error:
            self.gone(address, error)

    def room_for(self, peer: Peer, message: AnyMessage) -> bool:
        """Whether this may be queued for a peer; from then on it is."""
        bulk = isinstance(message, Policy | Order)
        # Half of the room is for what an actor waits for: one that decodes for long has many heartbeats to read.
        room = MAX_UNREAD_MESSAGES // (2 if isinstance(message, Heartbeat | Drain) else 1)
        if not bulk and not isinstance(message, Refused) and peer.num_unread >= room:
            return False
        peer.num_unread += 1
        # Whoever can name a later mark has read this.
        peer.marked = peer.marked and not bulk
        return True

    def gone(self, address: bytes, error: PeerGone) -> None:
        """Its connection is no more, so nothing is on its way to it."""
        self.peers.left.pop(address, None)
        if peer := self.peers.by_address.get(address):
            self.tally.note(f"actor {one_line(peer.actor_id)} cannot be reached", one_line(str(error)), logging.INFO)
            self.requeue(self.peers.leave(address, connected=False))

    def refuse(self, address: bytes, reason: str) -> None:
        """Tell a peer why it is not let in, and the log."""
        reason = one_line(reason, MAX_REASON_CHARS)
        self.tally.note("refused a peer", reason)
        self.send(address, Refused(reason=reason))

    def lose(self, peer: Peer, why: str, detail: str = "") -> None:
        """Forget a peer; what it held is ordered again."""
        self.tally.note(f"actor {one_line(peer.actor_id)} {why}", detail, logging.INFO)
        self.requeue(self.peers.leave(peer.address))

    def requeue(self, order_ids: Sequence[str]) -> None:
        """Back to the front of the queue, in their old order, unless another peer has them too."""
        held = {order_id for peer in self.peers.by_address.values() for order_id in peer.orders}
        lost = [order_id for order_id in order_ids if order_id not in held]
        for order_id in lost:
            self.given_at.pop(order_id, None)
        self.queue.extendleft(reversed(lost))

    def farewell(self, patience_s: float) -> None:
        """No more orders: tell everyone and wait a little for their goodbyes."""
        self.draining = True
        for address in list(self.peers.by_address):
            self.send(address, Drain())
        deadline = self.now() + patience_s
        while self.peers.by_address and self.now() < deadline:
            self.pump(self.welcome.heartbeat_s / 8)
