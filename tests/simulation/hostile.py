"""A hostile actor of the run: it reads its messages, and sends messages that are well formed and wrong.

Its filled orders are correct but for one thing, so none of them may ever reach the journal. False groups without an
error in form are left out, because they cannot be told from true ones.
"""

import random
from collections.abc import Callable

from benchmarks.fuzz_dispatcher import SPOILS, TEXTS
from protocol.messages import AnyMessage, Bye, Drain, Heartbeat, Hello, NewKey, Order, Policy, Welcome
from tests.simulation.ports import ActorEnd
from tests.simulation.toy import IDENTITY
from tests.simulation.trace import Trace
from tests.support.fakes import filled, hello_of


class Known:
    """What it was told."""

    def __init__(self) -> None:
        self.mark = 0
        self.orders: dict[str, Order] = {}
        self.policies: dict[int, Policy] = {}

    def hear(self, message: AnyMessage | None) -> None:
        """One message more."""
        if isinstance(message, Welcome):
            self.mark = message.mark
        elif isinstance(message, Order):
            self.orders[message.order_id] = message
        elif isinstance(message, Policy):
            self.policies[message.version] = message


def run_as_hostile(port: ActorEnd, rng: random.Random, trace: Trace, *, over: Callable[[], bool]) -> None:
    """From its first Hello to its end, without a goodbye."""
    known = Known()
    port.send(hello(known, rng))
    while not over():
        known.hear(port.receive(rng.uniform(0.01, 0.6)))
        trace.count("nonsense")
        port.send(nonsense(known, rng))


def nonsense(known: Known, rng: random.Random) -> AnyMessage:
    """To say next."""
    orders = [order for order in known.orders.values() if order.policy_version in known.policies]
    if orders and rng.random() < 0.4:
        order = rng.choice(orders)
        return rng.choice(SPOILS)(rng, filled(order, known.policies[order.policy_version]))
    return rng.choice(
        (
            hello(known, rng),
            hello(known, rng),
            Heartbeat(phase="x"),
            Bye(reason=rng.choice(TEXTS)),
            Drain(),
            NewKey(public="k" * 40),
        )
    )


def hello(known: Known, rng: random.Random) -> Hello:
    """True or not in what it has read."""
    mark, version = rng.choice((known.mark, 0)), rng.choice((None, *known.policies))
    return hello_of(IDENTITY, "evil", rng.choice((1, 2, 9)), mark=mark, version=version)
