"""What must hold at every moment of every simulated run.

    final value      equals that of the undisturbed run
    exactly once     groups are consumed in the undisturbed run's order, none twice, none missing; recorded once
    acked durable    an Ack leaves only for what an fsync has covered
    acked kept       what was acked is in the journal that a later start opens, and is never ordered again
    metrics          one row a step
    credits          a peer never has more open orders than its Hello offered, and the learner counts them correctly
    policy version   what is sampled, delivered and consumed comes from the version ordered, and that one is right
    memory           queues stay within what the run's shape allows; no policy is sent to a peer with unread ones
    liveness         the run ends within a bounded time after the last fault
    no error         no process ends with an exception but those that mean a peer was away

A Watch sees what passes between the parts of the simulation; it never changes anything.
"""

from dataclasses import dataclass

from actor.link import Link
from learner.orders.dispatch import Dispatcher
from learner.orders.orders import step_of, training_step
from learner.update.mismatch import Mismatch
from protocol.errors import HandshakeRefused, PeerTimeout
from protocol.messages import Ack, AnyMessage, FilledOrder, Hello, Order, Policy, Welcome
from shared.config.tree import Config

STILL_HERE = "is already connected"
"""In the learner's refusal of an actor whose id another one has."""


INBOX = 500
"""Messages that may wait while the learner computes."""


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


def is_expected(error: BaseException) -> bool:
    """Whether a process may end with this: its peers were away for long, or late messages made its former process
    seem alive, or the gate found the groups of a stale adapter. It is then started again."""
    refused = isinstance(error, HandshakeRefused) and STILL_HERE in str(error)
    return refused or isinstance(error, PeerTimeout | Mismatch)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to."""

    value: str
    """sha256 of the final adapter."""
    consumed: tuple[str, ...]
    """Group ids in order."""
    policies: tuple[str, ...]
    """sha256 of each version."""


class Watch:
    """Keeps account of one simulated run."""

    def __init__(self, config: Config, expected: Outcome | None) -> None:
        """expected: of the undisturbed run; None while that one is made."""
        self.expected = expected
        self.acked: set[str] = set()
        self.durable: set[str] = set()
        self.recorded: list[str] = []
        self.open: dict[bytes, set[str]] = {}
        self.hellos: dict[bytes, Hello] = {}
        self.marks: dict[bytes, int] = {}
        self.has_voided = False
        self.last_step = -1
        self.unread: dict[bytes, set[int]] = {}
        self.policies: dict[int, str] = {}
        size = config.rollout.groups_per_order or config.rollout.prompts
        orders = -(-config.rollout.prompts // size) * (1 + config.rollout.replacement_rounds)
        self.room = 2 * (config.pipeline.max_lag + 2) * orders
        self.lag = config.pipeline.max_lag

    def check(self, holds: bool, invariant: str, what: str) -> None:
        """Raise unless it holds."""
        if not holds:
            raise Violation(invariant, what)

    def learner_sends(self, peer: bytes, message: AnyMessage) -> None:
        """Acks, orders and policies. A peer that is new, or has read all messages, starts with no open orders, and so
        does its former process."""
        if isinstance(message, Welcome):
            if peer not in self.open or self.hellos[peer].mark == self.marks.get(peer):
                same = [known for known, hello in self.hellos.items() if hello.actor_id == self.hellos[peer].actor_id]
                self.open |= {known: set() for known in same}
            if self.hellos[peer].mark == self.marks.get(peer):
                self.unread.pop(peer, None)
            self.marks[peer] = message.mark
        elif isinstance(message, Ack) and training_step(message.order_id) is not None:
            # A replacement that a step needed no more when it was sampled again: nobody waits for it.
            unneeded = self.has_voided and step_of(message.order_id) <= self.last_step
            on_disk = message.order_id in self.durable
            self.check(on_disk or unneeded, "acked durable", f"{message.order_id} is on no disk")
            self.acked.add(message.order_id)
            self.open.setdefault(peer, set()).discard(message.order_id)
        elif isinstance(message, Order):
            self.check(message.order_id not in self.acked, "acked kept", f"{message.order_id} is ordered again")
            self.open.setdefault(peer, set()).add(message.order_id)
            self.marks.pop(peer, None)
            offered = self.hellos[peer].credits
            orders = self.open[peer]
            self.check(len(orders) <= offered, "credits", f"{peer.decode()} offered {offered} and has {sorted(orders)}")
        elif isinstance(message, Policy):
            self.published(message.version, message.sha256)
            unread = self.unread.setdefault(peer, set())
            self.check(message.version not in unread, "memory", f"{peer.decode()} has {message.version} still to read")
            unread.add(message.version)
            self.marks.pop(peer, None)

    def connection_ended(self, peer: bytes) -> None:
        """The learner was told so: what was on its way is lost."""
        self.unread.pop(peer, None)
        self.marks.pop(peer, None)

    def learner_hears(self, peer: bytes, message: AnyMessage) -> None:
        """What a peer offers."""
        if isinstance(message, Hello):
            self.hellos[peer] = message
        elif isinstance(message, FilledOrder):
            self.unread.get(peer, set()).discard(message.policy_version)

    def learner_is_new(self, recorded: list[str], first_step: int) -> None:
        """A start of the learner has opened its journal; all that the fsync of `open` covered counts as durable."""
        for seen in (self.open, self.hellos, self.marks, self.unread):
            seen.clear()
        self.recorded = recorded
        self.durable |= set(recorded)
        self.check(len(set(recorded)) == len(recorded), "exactly once", "an order was recorded twice")
        lost = {order_id for order_id in self.acked if step_of(order_id) >= first_step} - set(recorded)
        self.check(not lost, "acked kept", f"{sorted(lost)} are in no journal and no checkpoint")

    def appended(self, order_id: str) -> None:
        """To the journal, not yet durable."""
        self.check(order_id not in self.recorded, "exactly once", f"{order_id} is recorded twice")
        self.recorded.append(order_id)

    def voided(self, step: int) -> None:
        """What was recorded of this step (from 0) and later ones is to be sampled again."""
        self.has_voided = True
        self.acked = {order_id for order_id in self.acked if step_of(order_id) < step}
        self.durable = {order_id for order_id in self.durable if step_of(order_id) < step}

    def synced(self) -> None:
        """All that was appended is durable."""
        self.durable.update(self.recorded)

    def learner_rests(self, dispatcher: Dispatcher, queued: int) -> None:
        """Between two messages: the accounts of the dispatcher, and how much it holds."""
        self.open = {address: orders for address, orders in self.open.items() if address in dispatcher.peers.by_address}
        for peer in dispatcher.peers.by_address.values():
            open_orders = self.open.get(peer.address, set())
            if set(peer.orders) != open_orders:
                told = f"{peer.address.decode()} has {sorted(open_orders)} open, the learner counts {peer.orders}"
                raise Violation("credits", told)
        sizes = {"orders": len(dispatcher.orders), "queue": len(dispatcher.queue), "filled": len(dispatcher.filled)}
        if max(sizes.values()) > self.room or queued > INBOX or len(dispatcher.policies) > self.lag + 2:
            raise Violation(
                "memory", f"the learner holds {sizes} and {len(dispatcher.policies)} policies, inbox {queued}"
            )

    def actor_rests(self, link: Link) -> None:
        """How much an actor holds."""
        sizes = len(link.orders), len(link.policies), len(link.unacknowledged)
        if max(sizes) > self.room:
            raise Violation("memory", f"an actor holds orders, policies and deliveries: {sizes}")

    def actor_filled(self, order: Order, filled_order: FilledOrder, holds: str) -> None:
        """From the version ordered, which the engine must really hold."""
        same = filled_order.policy_version == order.policy_version
        self.check(same, "policy version", f"{order.order_id} is filled from {filled_order.policy_version}")
        self.right_policy(
            filled_order.policy_version, filled_order.adapter_sha256, f"order {filled_order.order_id} delivered"
        )
        self.check(
            holds == filled_order.adapter_sha256,
            "policy version",
            f"{filled_order.order_id}: the engine holds {holds[:12]}",
        )

    def published(self, version: int, sha256: str) -> None:
        """By the learner, in any of its starts."""
        known = self.policies.setdefault(version, sha256)
        right = self.expected.policies[version] if self.expected else known
        self.check(known == right == sha256, "final value", f"version {version} came out as {sha256[:12]}")

    def right_policy(self, version: int, sha256: str, what: str) -> None:
        """The undisturbed run's bytes of that version."""
        if self.expected:
            right = version < len(self.expected.policies) and self.expected.policies[version] == sha256
            self.check(right, "policy version", f"{what} from {version} ({sha256[:12]}), which is another")

    def consumed(self, step: int, filled: list[FilledOrder], all_groups: list[str]) -> None:
        """By an update."""
        self.last_step = max(self.last_step, step)
        for filled_order in filled:
            wanted = max(0, step - self.lag)
            self.check(
                filled_order.policy_version == wanted, "policy version", f"step {step} consumes {filled_order.order_id}"
            )
        self.check(len(set(all_groups)) == len(all_groups), "exactly once", f"step {step} consumes a group again")
        if self.expected:
            same = tuple(all_groups) == self.expected.consumed[: len(all_groups)]
            self.check(same, "exactly once", f"step {step} has consumed {all_groups}")

    def ended(self, outcome: Outcome, rows: list[int], steps: int) -> None:
        """When the run is done."""
        self.check(rows == list(range(1, steps + 1)), "metrics", f"rows of steps {rows}")
        if self.expected:
            self.check(outcome.consumed == self.expected.consumed, "exactly once", f"consumed {outcome.consumed}")
            self.check(outcome.value == self.expected.value, "final value", f"{outcome.value[:12]} came out")
