"""The actor's loop.

    Order ----> [ lease: install policy v, decode P x G ] ----> [ verify ] ----> FilledOrder
      ^                                                                            |
      '------------------------------- Ack, next Order <---------------------------'

produces      FilledOrder, one for each Order
waits for     an Order (from the learner), the lease (while another process computes)
unblocked by  the learner's next dispatch; the kernel, when the process that has the lease releases it or dies
"""

from actor.link import Link
from actor.rollout import Rollout


def serve(link: Link, rollout: Rollout) -> None:
    """Fill orders until the learner sends Drain."""
    while (work := link.next_order()) is not None:
        order, policy = work
        filled_order = rollout.fill(order, policy, link.beat)
        link.deliver(filled_order)
    link.leave("drained")
