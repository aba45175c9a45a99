"""Gives out filled orders that the audit lets through, and expels actors that it caught lying.

    collect -> audit -> no lie: the orders
                     -> a lie: refuse the actor, cut its connection, revoke its key; void its orders that no update has
                        used, have others fill them, and audit those
    mismatch gate refuses a step -> audit all of it -> a lie: the same, and the step is sampled again

An order says what is sampled, and not who samples it, so a run that expelled an actor ends with the same bits as one
that never had it: but for earlier groups of that actor that were not checked. Groups of an earlier round of the same
step (rollout.replacement_rounds) stay, since the later round depends on them.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from learner.orders.audit import Audit, Claim, Lie
from learner.orders.dispatch import Dispatcher
from protocol.messages import FilledOrder, Order, Policy

log = logging.getLogger("learner.orders.audited")
Revoke = Callable[[str, str], None]
"""Accept no key of this actor any more; with the reason."""
Void = Callable[[Iterable[str]], None]
"""Cancel the records of these orders, all or none."""


class AuditedOrders:
    """An OrderFiller over the dispatcher."""

    def __init__(self, link: Dispatcher, void: Void, revoke: Revoke) -> None:
        self.link = link
        self.void = void
        self.revoke = revoke
        self.audit: Audit | None = None
        """Set once the parts are there that it computes with."""
        self.orders: dict[str, Order] = {}
        self.policies: dict[int, Policy] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        self.link.publish(policy, oldest_needed)
        self.policies = dict(self.link.policies)
        self.orders = {name: order for name, order in self.orders.items() if order.policy_version >= oldest_needed}

    def submit(self, orders: Iterable[Order]) -> None:
        submitted = list(orders)
        self.orders |= {order.order_id: order for order in submitted}
        self.link.submit(submitted)

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        found: dict[str, FilledOrder] = {}
        while missing := [order_id for order_id in order_ids if order_id not in found]:
            found |= zip(missing, self.link.collect(missing), strict=True)
            for lie in self.lies({order_id: found[order_id] for order_id in missing}):
                self.expel(lie, found)
        return [found[order_id] for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        self.link.pump(timeout_s)

    def recheck(self, filled: Sequence[FilledOrder]) -> bool:
        """Whether somebody lied in these orders, which the mismatch gate did not let through: a check of all groups of
        actors that are checked at all. Then all of these orders are void, since some depend on others."""
        lies = self.audit.all_lies(self.claims({one.order_id: one for one in filled})) if self.audit else []
        if lies:
            order_ids = [one.order_id for one in filled]
            self.void(order_ids)
            for order_id in order_ids:
                self.link.filled_by.pop(order_id, None)
        for lie in lies:
            self.expel(lie, {})
        return bool(lies)

    def lies(self, filled: dict[str, FilledOrder]) -> list[Lie]:
        return self.audit.lies(self.claims(filled)) if self.audit else []

    def claims(self, filled: dict[str, FilledOrder]) -> list[Claim]:
        """Of orders that an actor has filled just now; the journal's were audited when they came."""
        return [
            Claim(
                actor_id=self.link.filled_by[order_id],
                order=self.orders[order_id],
                filled=one,
                policy=self.policies[one.policy_version],
            )
            for order_id, one in filled.items()
            if order_id in self.link.filled_by
        ]

    def expel(self, lie: Lie, found: dict[str, FilledOrder]) -> None:
        """Take all that this actor filled and no update has used out of `found`, and have others fill it."""
        sentence = f"Actor {lie.actor_id} lied and is expelled: {lie.evidence}."
        log.warning("%s", sentence)
        waiting = {**found, **self.link.filled}
        theirs = [
            name for name, actor_id in self.link.filled_by.items() if actor_id == lie.actor_id and name in waiting
        ]
        self.void(theirs)
        for order_id in theirs:
            found.pop(order_id, None)
            self.link.filled.pop(order_id, None)
            del self.link.filled_by[order_id]
        self.link.expelled[lie.actor_id] = sentence
        # First the reason and then the key: an actor without a key is sent nothing.
        for peer in [peer for peer in self.link.peers.by_address.values() if peer.actor_id == lie.actor_id]:
            self.link.refuse(peer.address, sentence)
            self.link.lose(peer, "was expelled")
        self.revoke(lie.actor_id, lie.evidence)
        self.link.submit([self.orders[order_id] for order_id in theirs])
