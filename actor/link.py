"""The actor's end of the wire: handshake, orders in, groups out, and proof of progress in between.

    join:     Hello, again every second ................... until Welcome or Refused
    orders:   Policy is kept until no queued order names it, Order is queued, Ack forgets a delivery
    idle:     three heartbeats without an order or an acknowledgement: Hello again. The learner, perhaps restarted,
              welcomes us and gets the unacknowledged deliveries once more. The mark of its last Welcome shows that we
              have read what came before it: then what it thinks we hold is lost, and is sent again. A policy that is
              still on a slow line is waited for
    silence:  `silence_s` without a word: PeerTimeout

An actor keeps nothing that a restart needs: what was not acknowledged is simply ordered again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from actor.engines.engine import Identity
from protocol.errors import HandshakeRefused, MalformedMessage, PeerTimeout, VersionMismatch
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

log = logging.getLogger("actor.link")


class Link:
    """Speaks to one learner."""

    def __init__(
        self,
        port: ActorPort,
        learner: str,
        actor_id: str,
        identity: Identity,
        credits: int,
        rules_digest: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = port
        self.now = now
        self.learner = learner
        self.hello = Hello(
            actor_id=actor_id,
            engine=identity.engine,
            base_digest=identity.base_digest,
            tokenizer_digest=identity.tokenizer_digest,
            lora_digest=identity.lora_digest,
            rules_digest=rules_digest,
            mark=0,
            version=None,
            credits=credits,
        )
        self.welcome: Welcome | None = None
        self.orders: deque[Order] = deque()
        self.policies: dict[int, Policy] = {}
        self.last_version = -1
        self.unacknowledged: dict[str, FilledOrder] = {}
        self.draining = False
        self.heard_at = self.said_at = self.hello_at = now()

    def join(self, deadline_s: float) -> Welcome:
        """Say Hello until the learner answers."""
        start = self.now()
        while self.welcome is None:
            if self.now() - start > deadline_s:
                raise PeerTimeout(f"The learner at {self.learner}", "its Welcome", deadline_s)
            self.greet()
            self.receive(HELLO_EVERY_S)
        return self.welcome

    def greet(self) -> None:
        """Say who we are, what we have read, and which policy came last."""
        mark = self.welcome.mark if self.welcome else 0
        version = None if self.last_version < 0 else self.last_version
        self.say(replace(self.hello, mark=mark, version=version))

    def next_order(self) -> tuple[Order, Policy] | None:
        """The next order with the policy it names; None when the learner wants no more."""
        self.hello_at = self.now()
        while not self.orders:
            if self.draining:
                return None
            self.wait("an order")
        order = self.orders.popleft()
        return order, self.policies[order.policy_version]

    def deliver(self, groups: FilledOrder) -> None:
        """Hand over a filled order; kept until it is acknowledged."""
        self.unacknowledged[groups.order_id] = groups
        self.say(groups)
        self.forget_policies()

    def beat(self, phase: str) -> None:
        """Show progress, at most once a heartbeat interval. Called from the places where work is done."""
        if self.welcome and self.now() - self.said_at >= self.welcome.heartbeat_s:
            self.say(Heartbeat(phase=phase))

    def leave(self, reason: str) -> None:
        """Wait for the last acknowledgements, then say goodbye."""
        while self.unacknowledged:
            self.wait("an acknowledgement")
        self.say(Bye(reason=reason))

    def say(self, message: AnyMessage) -> None:
        """Send and remember when."""
        reach("before actor sends", message)
        self.port.send(message)
        reach("after actor sends", message)
        self.said_at = self.now()

    def receive(self, timeout_s: float) -> None:
        """Take in what has come, waiting at most this long for the first message."""
        reach("before actor receives")
        while (message := self.hear(timeout_s)) is not None:
            reach("after actor receives", message)
            self.heard_at = self.now()
            self.take(message)
            timeout_s = 0.0

    def hear(self, timeout_s: float) -> AnyMessage | None:
        """The next message. What was damaged on its way is as good as lost, once it is known that both sides speak the
        same version: our next Hello has the learner say it again."""
        while True:
            try:
                return self.port.receive(timeout_s)
            except (MalformedMessage, VersionMismatch) as error:
                if self.welcome is None:
                    raise
                log.warning("dropped what is no message: %s", error)

    def take(self, message: AnyMessage) -> None:
        """One message from the learner."""
        match message:
            case Order():
                self.queue(message)
            case Policy():
                self.policies[message.version] = message
                self.last_version = message.version
            case Ack():
                self.unacknowledged.pop(message.order_id, None)
            case Welcome():
                self.welcomed(message)
            case Refused():
                raise HandshakeRefused(message.reason)
            case Drain():
                self.draining = True
            case _:
                pass

    def welcomed(self, welcome: Welcome) -> None:
        """The first time, or again after the learner was restarted; another run is not ours to serve."""
        if self.welcome and self.welcome.run_id != welcome.run_id:
            raise HandshakeRefused(f"The learner at {self.learner} now runs {welcome.run_id}; start this actor anew.")
        self.welcome = welcome
        for groups in self.unacknowledged.values():
            self.say(groups)

    def queue(self, order: Order) -> None:
        """An order that comes twice, because a link broke in between, is filled once.

        One whose policy a broken link has swallowed is as good as lost itself: the next Hello has both sent anew.
        """
        if order.order_id in self.unacknowledged:
            self.say(self.unacknowledged[order.order_id])
        elif order.policy_version not in self.policies:
            log.info("order %s came without policy %d and waits for it", order.order_id, order.policy_version)
        elif order.order_id not in {queued.order_id for queued in self.orders}:
            self.orders.append(order)

    def wait(self, awaited: str) -> None:
        """Receive for a while; ask again after a longer one, give up after a long one."""
        assert self.welcome is not None
        self.receive(self.patience())
        self.beat(f"waiting for {awaited}")
        now = self.now()
        if now - self.heard_at > self.welcome.silence_s:
            raise PeerTimeout(f"The learner at {self.learner}", awaited, now - self.heard_at)
        if now - self.hello_at > 3 * self.welcome.heartbeat_s:
            self.hello_at = now
            self.greet()

    def patience(self) -> float:
        """How long one wait may last before something has to be said."""
        return self.welcome.heartbeat_s / 2 if self.welcome else HELLO_EVERY_S

    def forget_policies(self) -> None:
        """Keep the version that came last, for the learner sends it once, and those that queued orders name."""
        named = {order.policy_version for order in self.orders} | {self.last_version}
        self.policies = {version: policy for version, policy in self.policies.items() if version in named}
