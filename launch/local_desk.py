"""Orders filled in this process: engine and verifier of the actor, no wire, no journal. For `eval` and the tests."""

from collections.abc import Iterable, Sequence

from actor.rollout import Rollout
from protocol.messages import Groups, Order, Policy


class LocalDesk:
    """An order desk that is its own actor."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.policies: dict[int, Policy] = {}
        self.answers: dict[str, Groups] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Keep it for the orders that name it."""
        self.policies[policy.version] = policy

    def submit(self, orders: Iterable[Order]) -> None:
        """Fill them now."""
        for order in orders:
            policy = self.policies[order.policy_version]
            self.answers[order.order_id] = self.rollout.fill(order, policy, lambda phase: None)

    def collect(self, order_ids: Sequence[str]) -> list[Groups]:
        """They are there."""
        return [self.answers.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Nobody to keep awake."""
