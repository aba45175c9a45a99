"""The actor's side of the protocol: handshake, incoming orders, outgoing filled orders, heartbeats.

    join:     send Hello every second until Welcome or Refused comes
    orders:   keep each Policy while a queued order names it; queue each Order; drop a filled order when its Ack comes
    idle:     after three heartbeat intervals without an order or an Ack, send Hello again. The learner, perhaps
              restarted, replies with Welcome, and the actor sends its unacknowledged filled orders again. The Hello
              repeats the mark of the last Welcome, which shows that the actor read everything sent before it. What
              the learner still expects of the actor was then lost, and the learner sends it again. A policy that is
              still on its way over a slow line is not sent twice
    machine:  a Policy without its adapter comes from another actor of this machine (passed_on.py). Its orders wait. If
              it has not come after PATIENCE_S, they are forgotten, and with the next Hello, which names no machine, the
              learner sends them and the whole policy again. An actor that cannot write for the others names none either
    silence:  no message for `silence_s`, and none on its way over a slow line: PeerTimeout

An actor keeps nothing that a restart needs: the learner orders again what was not acknowledged.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from actor.engines.engine import Identity
from actor.passed_on import PassedOn
from protocol.errors import HandshakeRefused, MalformedMessage, PeerTimeout, WrongVersion
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
from protocol.transport import ActorPort
from shared.run.failpoints import reach

HELLO_EVERY_S = 1.0
LOOK_EVERY_S = 0.05
"""For an adapter that another actor passes on."""
PATIENCE_S = 60.0
"""For it to come: long enough for a slow line."""
COUNT_EVERY_S = 1.0
LEAST_BYTES_A_S = 1000
"""At a higher rate a message is arriving. ZeroMQ's replies to our pings are about 30 bytes a second, also from a
learner that hangs."""

log = logging.getLogger("actor.link")


class Link:
    """The connection to one learner."""

    def __init__(
        self,
        port: ActorPort,
        learner: str,
        actor_id: str,
        identity: Identity,
        credits: int,
        rules_digest: str,
        now: Callable[[], float] = time.monotonic,
        passed_on: PassedOn | None = None,
    ) -> None:
        """passed_on: where this actor and others of its machine pass adapters on."""
        self.port = port
        self.now = now
        self.learner = learner
        self.passed_on = passed_on
        self.hello = Hello(
            actor_id=actor_id,
            engine=identity.engine,
            base_digest=identity.base_digest,
            tokenizer_digest=identity.tokenizer_digest,
            lora_digest=identity.lora_digest,
            rules_digest=rules_digest,
            machine=passed_on.machine if passed_on else None,
            mark=0,
            version=None,
            credits=credits,
        )
        self.welcome: Welcome | None = None
        self.orders: deque[Order] = deque()
        self.policies: dict[int, Policy] = {}
        self.awaited: dict[int, tuple[Policy, float]] = {}
        """Version -> a policy whose adapter another actor passes on, and since when it is awaited."""
        self.last_version = -1
        self.unacknowledged: dict[str, FilledOrder] = {}
        self.draining = False
        self.received_at = self.sent_at = self.hello_at = self.counted_at = self.now()
        self.bytes_at_count = 0
        """What had come at `counted_at`."""

    def join(self, deadline_s: float) -> Welcome:
        """Send Hello until the learner replies. PeerTimeout after `deadline_s`."""
        start = self.now()
        while self.welcome is None:
            if self.now() - start > deadline_s:
                raise PeerTimeout(f"The learner at {self.learner}", "its Welcome", deadline_s)
            self.send_hello()
            self.receive(HELLO_EVERY_S)
        return self.welcome

    def send_hello(self) -> None:
        # One that awaits a policy has not read everything.
        mark = self.welcome.mark if self.welcome and not self.awaited else 0
        version = None if self.last_version < 0 or self.last_version in self.awaited else self.last_version
        self.send(replace(self.hello, mark=mark, version=version))

    def next_order(self) -> tuple[Order, Policy] | None:
        """The next order with the policy it names; None when the learner wants no more work."""
        self.hello_at = self.now()
        while not self.orders or self.orders[0].policy_version in self.awaited:
            if self.draining:
                # Nobody needs what waits for a policy any more.
                self.keep_orders_with_policies()
                if not self.orders:
                    return None
                continue
            self.wait_once("a policy" if self.orders else "an order")
        order = self.orders.popleft()
        policy = self.policies[order.policy_version]
        self.forget_policies()
        return order, policy

    def deliver(self, filled_order: FilledOrder) -> None:
        """Send a filled order, and keep it until it is acknowledged."""
        self.unacknowledged[filled_order.order_id] = filled_order
        self.send(filled_order)

    def beat(self, phase: str) -> None:
        """Send a heartbeat if one is due. Called where work is done, so that an actor that hangs falls silent."""
        if self.welcome and self.now() - self.sent_at >= self.welcome.heartbeat_s:
            self.send(Heartbeat(phase=phase))

    def leave(self, reason: str) -> None:
        """Wait until every filled order is acknowledged, then send Bye."""
        while self.unacknowledged:
            self.wait_once("an acknowledgement")
        self.send(Bye(reason=reason))

    def send(self, message: AnyMessage) -> None:
        reach("before actor sends", message)
        self.port.send(message)
        reach("after actor sends", message)
        self.sent_at = self.now()

    def receive(self, timeout_s: float) -> None:
        """Handle all messages that have come; wait at most `timeout_s` for the first."""
        reach("before actor receives")
        while (message := self.receive_one(timeout_s)) is not None:
            reach("after actor receives", message)
            self.received_at = self.now()
            self.handle(message)
            timeout_s = 0.0

    def receive_one(self, timeout_s: float) -> AnyMessage | None:
        """The next valid message, or None at the timeout."""
        while True:
            try:
                return self.port.receive(timeout_s)
            except (MalformedMessage, WrongVersion) as error:
                if self.welcome is None:
                    raise
                # Both sides speak one version, so the message was damaged on its way. The learner sends it again after
                # our next Hello, as if it had been lost.
                log.warning("dropped an invalid message: %s", error)

    def handle(self, message: AnyMessage) -> None:
        match message:
            case Order():
                self.queue_order(message)
            case Policy():
                self.take_policy(message)
            case Ack():
                self.unacknowledged.pop(message.order_id, None)
            case Welcome():
                self.on_welcome(message)
            case Refused():
                raise HandshakeRefused(message.reason)
            case Drain():
                self.draining = True
            case _:
                pass

    def take_policy(self, policy: Policy) -> None:
        """Keep a policy. One whose adapter another actor passes on is awaited, unless it is here already."""
        self.last_version = policy.version
        # A learner that was restarted may use a version number again for other bytes.
        self.unacknowledged = {
            order_id: filled
            for order_id, filled in self.unacknowledged.items()
            if filled.policy_version != policy.version or filled.adapter_sha256 == policy.sha256
        }
        held = self.policies.get(policy.version)
        if len(policy.adapter):
            self.have_policy(policy)
            if self.passed_on:
                # Where it cannot be written, other actors may have failed to write theirs, too.
                kept = self.passed_on.keep(policy)
                self.hello = replace(self.hello, machine=self.passed_on.machine if kept else None)
        elif held is None or held.sha256 != policy.sha256:
            self.policies.pop(policy.version, None)
            self.awaited[policy.version] = policy, self.now()

    def have_policy(self, policy: Policy) -> None:
        self.awaited.pop(policy.version, None)
        self.policies[policy.version] = policy

    def look_for_awaited(self) -> None:
        """Take what other actors have passed on meanwhile, or give up on it."""
        for policy, since in list(self.awaited.values()):
            if self.passed_on and (found := self.passed_on.find(policy)):
                log.log(
                    logging.DEBUG if self.policies else logging.INFO, "got policy %d from another actor", found.version
                )
                self.have_policy(found)
            elif self.now() - since > PATIENCE_S:
                self.stop_awaiting()
                return

    def stop_awaiting(self) -> None:
        """Get these from the learner, which sends them again after our next Hellos."""
        log.warning("no actor here passes policy %s on; the learner will send it to this one too", max(self.awaited))
        if self.last_version in self.awaited:
            self.last_version = -1
        self.awaited.clear()
        self.hello = replace(self.hello, machine=None)
        self.keep_orders_with_policies()

    def keep_orders_with_policies(self) -> None:
        self.orders = deque(order for order in self.orders if order.policy_version in self.policies)

    def on_welcome(self, welcome: Welcome) -> None:
        """The reply to a Hello: the first one, or a later one, perhaps of a learner that was restarted."""
        if self.welcome and self.welcome.run_id != welcome.run_id:
            raise HandshakeRefused(f"The learner at {self.learner} now runs {welcome.run_id}; start this actor again.")
        self.welcome = welcome
        for filled_order in self.unacknowledged.values():
            self.send(filled_order)

    def queue_order(self, order: Order) -> None:
        """Queue an order. One that comes again after a broken connection is not filled twice."""
        if order.order_id in self.unacknowledged:
            self.send(self.unacknowledged[order.order_id])
        elif order.policy_version not in self.policies.keys() | self.awaited.keys():
            # Its Policy was lost with a broken connection. The learner sends both again after our next Hello.
            log.info("ignored order %s, because policy %d did not come", order.order_id, order.policy_version)
        elif order.order_id not in {queued.order_id for queued in self.orders}:
            self.orders.append(order)

    def wait_once(self, awaited: str) -> None:
        """One round of waiting: receive, send what is due. PeerTimeout after `silence_s` without a sign of life."""
        assert self.welcome is not None
        self.receive(self.receive_timeout_s())
        self.notice_bytes()
        self.look_for_awaited()
        self.beat(f"waiting for {awaited}")
        now = self.now()
        if now - self.received_at > self.welcome.silence_s:
            raise PeerTimeout(f"The learner at {self.learner}", awaited, now - self.received_at)
        if now - self.hello_at > 3 * self.welcome.heartbeat_s:
            self.hello_at = now
            self.send_hello()

    def notice_bytes(self) -> None:
        """Take arriving bytes for a sign of life: ZeroMQ delivers a message when it is whole, an adapter may take
        longer than `silence_s`, and heartbeats wait behind it."""
        now = self.now()
        seconds = now - self.counted_at
        if seconds < COUNT_EVERY_S:
            return
        num_bytes = self.port.bytes_received()
        if num_bytes - self.bytes_at_count > LEAST_BYTES_A_S * seconds:
            self.received_at = now
        self.bytes_at_count, self.counted_at = num_bytes, now

    def receive_timeout_s(self) -> float:
        """Short enough that the next heartbeat or Hello is on time, and an adapter that is passed on is found soon."""
        if self.awaited:
            return LOOK_EVERY_S
        return self.welcome.heartbeat_s / 2 if self.welcome else HELLO_EVERY_S

    def forget_policies(self) -> None:
        # The newest is kept even if no order names it yet: the learner sends it once.
        named = {order.policy_version for order in self.orders} | {self.last_version}
        self.policies = {version: policy for version, policy in self.policies.items() if version in named}
