"""The actor's loop.

    Order ----> [ lease: install policy v, decode P x G ] ----> [ verify ] ----> FilledOrder
      ^                                                                            |
      '------------------------------- Ack, next Order <---------------------------'

produces      FilledOrder, one a filled Order
waits for     an Order (the learner's), its turn (whoever computes now)
unblocked by  the learner's next dispatch; the kernel, when the holder of the lease lets go or dies
"""

from actor.link import Link
from actor.rollout import Rollout


def serve(link: Link, rollout: Rollout) -> None:
    """Fill orders until the learner wants no more."""
    while (work := link.next_order()) is not None:
        order, policy = work
        groups = rollout.fill(order, policy, link.beat)
        link.deliver(groups)
    link.leave("drained")
