"""Orders out, groups in, each group applied exactly once.

    submit(order) -> queue -> peer with credit -> Groups -> check -> journal -> fsync -> Ack -> collect()

Delivery is at least once: whatever a peer held when it died is ordered again, and a group that comes twice is
acknowledged and dropped. Nothing is acknowledged before it is durable. Orders already in the journal (a resumed run)
are answered from there and never sent. Every wait ends: silence of all actors beyond the limit is an error that says
what was awaited. `pump` is called wherever work is done, so heartbeats prove progress.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence

from learner.orders import answers
from learner.peers import Peer, Peers
from learner.recorder import Recorder
from protocol.errors import PeerGone, PeerTimeout, ProtocolError
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

log = logging.getLogger("learner.dispatch")


class Dispatcher:
    """The learner's end of the wire."""

    def __init__(self, port: LearnerPort, recorder: Recorder, expected: Hello, welcome: Welcome) -> None:
        """expected: what every actor must hold (its actor_id, engine and credits do not matter)."""
        self.port = port
        self.recorder = recorder
        self.expected = expected
        self.welcome = welcome
        self.peers = Peers(welcome.silence_s)
        self.policies: dict[int, Policy] = {}
        self.orders: dict[str, Order] = {}
        self.queue: deque[str] = deque()
        self.answers: dict[str, Groups] = {}
        self.said_at = time.monotonic()

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Make a version available; forget those that nothing names any more."""
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
        """Wait until all of these are answered; in the order asked for."""
        self.peers.heard_at = time.monotonic()
        while missing := [order_id for order_id in order_ids if order_id not in self.answers]:
            self.pump(self.welcome.heartbeat_s / 2)
            quiet = time.monotonic() - self.peers.heard_at
            if quiet > self.welcome.silence_s:
                raise PeerTimeout("Every actor", f"the answer to order {missing[0]}", quiet)
        return [self.answers.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Take in everything that has come, make it durable, acknowledge it, hand out work, show progress."""
        delivered: list[tuple[Peer, Groups]] = []
        while (inbound := self.port.receive(timeout_s)) is not None:
            address, message = inbound
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
            self.refuse(address, str(message))
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
        if address not in self.peers.by_address:
            log.info("actor %s joined (%s engine)", hello.actor_id, hello.engine)
        self.requeue(self.peers.join(address, hello))
        self.send(address, self.welcome)

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
        for peer, groups in delivered:
            if groups.order_id not in self.orders:
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
            log.info("order %s came again from %s and was dropped", groups.order_id, peer.hello.actor_id)
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
        """Hand out orders while there are orders and credits, each after the policy it names."""
        while self.queue and (peer := self.peers.next_free()):
            order_id = self.queue.popleft()
            if order_id not in self.orders:
                continue
            order = self.orders[order_id]
            peer.holding.append(order_id)
            if order.policy_version != peer.version:
                peer.version = order.policy_version
                self.send(peer.address, self.policies[order.policy_version])
            self.send(peer.address, order)

    def beat(self) -> None:
        """Show every peer that the learner makes progress."""
        if time.monotonic() - self.said_at < self.welcome.heartbeat_s:
            return
        self.said_at = time.monotonic()
        for address in list(self.peers.by_address):
            self.send(address, Heartbeat(phase="learning"))

    def send(self, address: bytes, message: AnyMessage) -> None:
        """Send, or count the peer as gone."""
        try:
            self.port.send(address, message)
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
        """Back to the front of the queue, in their old order."""
        self.queue.extendleft(reversed(order_ids))

    def farewell(self, patience_s: float) -> None:
        """No more orders: tell everyone and wait a little for their goodbyes."""
        for address in list(self.peers.by_address):
            self.send(address, Drain())
        deadline = time.monotonic() + patience_s
        while self.peers.by_address and time.monotonic() < deadline:
            self.pump(self.welcome.heartbeat_s / 8)
