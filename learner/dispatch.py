"""Orders out, groups in, each group applied exactly once.

    submit(order) -> queue -> peer with credit -> Groups -> check -> journal -> fsync -> Ack -> collect()

Delivery is at least once: whatever a peer held when it died is ordered again, what a slow peer holds for too long is
given to an idle one as well, and a group that comes twice is acknowledged and dropped. Nothing is acknowledged before
it is durable. Orders already in the journal (a resumed run) are answered from there and never sent. Every wait ends:
silence of all actors beyond the limit is an error that says what was awaited. `pump` is called wherever work is done,
so heartbeats prove progress.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from learner.orders import answers
from learner.peers import Peer, Peers
from learner.recorder import Recorder
from learner.sampling import Unanswered
from protocol.errors import MalformedMessage, PeerGone, PeerTimeout, ProtocolError, VersionMismatch
from protocol.limits import MAX_MESSAGES_A_PUMP
from protocol.messages import (
    Ack,
    AnyMessage,
    Bye,
    Drain,
    Groups,
    Heartbeat,
    Hello,
    Order,
    Policy,
    Refused,
    Welcome,
)
from protocol.transport import LearnerPort
from protocol.validate import check_groups
from shared.failpoints import reach

log = logging.getLogger("learner.dispatch")


class Dispatcher:
    """The learner's end of the wire."""

    def __init__(
        self,
        port: LearnerPort,
        recorder: Recorder,
        expected: Hello,
        welcome: Welcome,
        now: Callable[[], float] = time.monotonic,
        late_s: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """expected: what every actor must hold (its actor_id, engine and credits do not matter). now: the clock.
        late_s: an order unanswered for longer goes to another actor too. stop: whether the learner was asked to."""
        self.port = port
        self.recorder = recorder
        self.expected = expected
        self.welcome = welcome
        self.now = now
        self.late_s = late_s
        self.stop = stop
        self.peers = Peers(welcome.silence_s, now)
        self.policies: dict[int, Policy] = {}
        self.orders: dict[str, Order] = {}
        self.given_at: dict[str, float] = {}
        self.queue: deque[str] = deque()
        self.answers: dict[str, Groups] = {}
        self.draining = False
        self.said_at = self.now()

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

    def collect(self, order_ids: Sequence[str]) -> list[Groups]:
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
        delivered: list[tuple[Peer, Groups]] = []
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
            self.lose(peer, f"silent for {self.welcome.silence_s:.0f} s")
        self.send_queued()
        self.beat()

    def take(self, address: bytes, message: AnyMessage | ProtocolError) -> list[tuple[Peer, Groups]]:
        """One inbound message; a delivery is returned, to be made durable together with its neighbours."""
        if isinstance(message, ProtocolError):
            self.reject(address, message)
            return []
        if isinstance(message, Hello):
            self.greet(address, message)
            return []
        peer = self.peers.get(address)
        if peer and isinstance(message, Groups):
            return [(peer, message)]
        if peer and isinstance(message, Bye):
            self.lose(peer, f"it left: {message.reason}")
        return []

    def reject(self, address: bytes, fault: ProtocolError) -> None:
        """A stranger is told what is wrong. Whoever has joined can speak, so its message was damaged on its way: it is
        as good as lost, and the next Hello brings it again."""
        if address in self.peers.by_address and isinstance(fault, MalformedMessage | VersionMismatch):
            log.warning("dropped what is no message: %s", fault)
        else:
            self.refuse(address, str(fault))

    def greet(self, address: bytes, hello: Hello) -> None:
        """Welcome an actor that holds the same base, tokenizer and adapter layout; refuse others in words."""
        for field, what in (("base_digest", "base model"), ("tokenizer_digest", "tokenizer"), ("lora_digest", "LoRA")):
            if getattr(hello, field) != getattr(self.expected, field):
                self.refuse(
                    address,
                    f"Actor {hello.actor_id} holds another {what} than the learner"
                    f" ({getattr(hello, field)[:12]}, expected {getattr(self.expected, field)[:12]});"
                    " start it with this run's config.json and the same model files.",
                )
                return
        if self.contested(address, hello):
            return
        if address not in self.peers.by_address:
            log.info("actor %s joined (%s engine)", hello.actor_id, hello.engine)
        self.requeue(self.peers.join(address, hello))
        self.send(address, self.welcome)

    def contested(self, address: bytes, hello: Hello) -> bool:
        """Whether the id is taken by a peer that may be alive. The newcomer waits until that one is seen to be gone,
        and is refused once it spoke again: then there are two. Sending shows whether its connection stands."""
        holder = self.peers.contest(address, hello.actor_id)
        if holder is None:
            return False
        self.send(holder.address, Heartbeat(phase="learning"))
        if holder.address in self.peers.by_address and holder.heard_at > holder.rival_since:
            self.refuse(
                address,
                f"An actor {hello.actor_id} is here and alive; give this one a key of its own"
                " (python -m launch key RUN NAME), or stop the other first.",
            )
        return holder.address in self.peers.by_address

    def accept(self, delivered: Sequence[tuple[Peer, Groups]]) -> None:
        """Check, journal, fsync, then acknowledge: in this order."""
        fresh: dict[str, Groups] = {}
        for peer, groups in delivered:
            if groups.order_id not in fresh and self.wanted(peer, groups):
                fresh[groups.order_id] = groups
        self.recorder.record(list(fresh.values()))
        for order_id, groups in fresh.items():
            self.answers[order_id] = groups
            del self.orders[order_id]
            self.given_at.pop(order_id, None)
        for peer, groups in delivered:
            # After a restart an actor may be early: its order is not open yet, and its answer is on no disk.
            if groups.order_id not in self.orders and self.recorder.holds(groups.order_id):
                self.settle(peer, groups.order_id)

    def settle(self, peer: Peer, order_id: str) -> None:
        """The order is durable: the peer may forget it and has its credit back."""
        if order_id in peer.holding:
            peer.holding.remove(order_id)
        self.send(peer.address, Ack(order_id=order_id))

    def wanted(self, peer: Peer, groups: Groups) -> bool:
        """Whether this answers an open order, and rightly; a wrong answer costs the peer its place."""
        order = self.orders.get(groups.order_id)
        if order is None:
            log.debug("order %s of %s is not open and was dropped", groups.order_id, peer.hello.actor_id)
            return False
        fault = self.fault(order, groups)
        if fault:
            self.refuse(peer.address, fault)
            self.lose(peer, fault)
        return not fault

    def fault(self, order: Order, groups: Groups) -> str:
        """What is wrong with an answer; empty if nothing."""
        policy = self.policies[order.policy_version]
        if (groups.policy_version, groups.adapter_sha256) != (policy.version, policy.sha256):
            return (
                f"Order {order.order_id} was sampled from policy {groups.policy_version}"
                f" ({groups.adapter_sha256[:12]}), ordered was {policy.version} ({policy.sha256[:12]})."
            )
        if not answers(order, groups.groups):
            return f"The groups of order {order.order_id} are not the ones that were ordered."
        try:
            check_groups(groups)
        except ProtocolError as error:
            return str(error)
        return ""

    def send_queued(self) -> None:
        """Hand out orders while there are orders and credits; then what is late, to whoever has nothing else to do."""
        while self.queue and (peer := self.peers.next_free()):
            order_id = self.queue.popleft()
            if order_id in self.orders:
                self.give(peer, self.orders[order_id])
        for order in self.late():
            if idle := self.peers.idle():
                log.info("order %s is late and goes to actor %s too", order.order_id, idle.hello.actor_id)
                self.give(idle, order)

    def late(self) -> list[Order]:
        """What somebody has held for too long."""
        oldest = self.now() - self.late_s
        return [self.orders[order_id] for order_id, given_at in self.given_at.items() if given_at < oldest]

    def give(self, peer: Peer, order: Order) -> None:
        """Send an order, after the policy it names."""
        self.given_at[order.order_id] = self.now()
        peer.holding.append(order.order_id)
        if order.policy_version != peer.version:
            peer.version = order.policy_version
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
        """Send, or count the peer as gone."""
        try:
            reach("before learner sends", message)
            self.port.send(address, message)
            reach("after learner sends", message)
        except PeerGone as error:
            peer = self.peers.by_address.get(address)
            if peer:
                self.lose(peer, str(error))

    def refuse(self, address: bytes, reason: str) -> None:
        """Tell a peer why it is not let in, and the log."""
        log.warning("refused a peer: %s", reason)
        self.send(address, Refused(reason=reason))

    def lose(self, peer: Peer, why: str) -> None:
        """Forget a peer; what it held is ordered again."""
        log.info("actor %s is gone: %s", peer.hello.actor_id, why)
        self.requeue(self.peers.leave(peer.address))

    def requeue(self, order_ids: Sequence[str]) -> None:
        """Back to the front of the queue, in their old order, unless another peer has them too."""
        held = {order_id for peer in self.peers.by_address.values() for order_id in peer.holding}
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
