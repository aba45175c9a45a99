"""A dispatcher at one end of a wire in memory, and a list of what it does, in order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from learner.orders.dispatch import Dispatcher
from learner.orders.orders import NO_FRAMES
from protocol.messages import AnyMessage, FilledOrder, Group, Order, Refused, Welcome
from protocol.transport import Inbound, LearnerPort
from tests.support.fakes import CHECK, filled, hello_of, scripted_identity, toy_orders, toy_policy
from tests.support.memory_transport import MemoryActorPort, MemoryHub

FOREVER_S = 3600.0
POLICY = toy_policy(0)


class NotedPort:
    """A learner's port that notes what is sent."""

    def __init__(self, port: LearnerPort, events: list[str]) -> None:
        self.port = port
        self.events = events

    def send(self, peer: bytes, message: AnyMessage) -> None:
        self.port.send(peer, message)
        self.events.append(f"{type(message).__name__} {getattr(message, 'order_id', '')}".strip())

    def receive(self, timeout_s: float) -> Inbound | None:
        return self.port.receive(timeout_s)

    def close(self) -> None:
        self.port.close()


class NotedRecorder:
    """A recorder that notes what it is told, knows some filled orders, and may have a full disk."""

    def __init__(self, events: list[str], known: Sequence[FilledOrder] = ()) -> None:
        self.events = events
        self.known = {filled_order.order_id: filled_order for filled_order in known}
        self.recorded: list[str] = []
        self.broken = False

    def find(self, order: Order) -> FilledOrder | None:
        return self.known.get(order.order_id)

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        if self.broken:
            raise OSError("disk full")
        self.recorded += [filled_order.order_id for filled_order in filled]
        self.events += [f"record {filled_order.order_id}" for filled_order in filled]

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        self.recorded += [filled_order.order_id for filled_order in filled]
        self.events += [f"begin {filled_order.order_id}" for filled_order in filled]

    def is_durable(self, order_id: str) -> bool:
        return order_id in self.recorded or order_id in self.known


class Bench:
    """A dispatcher at one end of a wire in memory; `events` is what it sent and recorded, in order."""

    def __init__(
        self,
        known: Sequence[FilledOrder] = (),
        *,
        heartbeat_s: float = FOREVER_S,
        silence_s: float = FOREVER_S,
        **rest: Any,
    ) -> None:
        self.hub = MemoryHub(send_timeout_s=0.05)
        self.events: list[str] = []
        self.recorder = NotedRecorder(self.events, known)
        self.dispatcher = Dispatcher(
            NotedPort(self.hub.learner_port(), self.events),
            self.recorder,
            expected=hello_of(scripted_identity()),
            welcome=Welcome(run_id="run-1", heartbeat_s=heartbeat_s, silence_s=silence_s, mark=0),
            check=CHECK,
            **rest,
        )
        self.dispatcher.publish(POLICY, oldest_needed=0)

    def actor(self, actor_id: str = "actor0", num_credits: int = 2) -> MemoryActorPort:
        """An actor that has been let in."""
        port = self.hub.actor_port(actor_id)
        port.send(hello_of(scripted_identity(), actor_id, num_credits))
        self.dispatcher.pump()
        assert isinstance(port.receive(0), Welcome)
        return port

    def deliver(self, port: MemoryActorPort, *filled: FilledOrder) -> None:
        """Filled orders that arrive together."""
        for filled_order in filled:
            port.send(filled_order)
        self.dispatcher.pump()


def inbox(port: MemoryActorPort) -> list[AnyMessage]:
    """Everything that has come."""
    found: list[AnyMessage] = []
    while (message := port.receive(0)) is not None:
        found.append(message)
    return found


def kinds(messages: Sequence[AnyMessage]) -> list[type]:
    """What they are."""
    return [type(message) for message in messages]


def orders_in(port: MemoryActorPort) -> list[str]:
    """Ids of the orders that have come."""
    return [message.order_id for message in inbox(port) if isinstance(message, Order)]


def ids(orders: Sequence[Order]) -> list[str]:
    return [order.order_id for order in orders]


def with_group(filled: FilledOrder, **changes: Any) -> FilledOrder:
    """The same message with a changed group."""
    group: Group = msgspec.structs.replace(filled.groups[0], **changes)
    return msgspec.structs.replace(filled, groups=(group,))


def refused_and_ordered_again(change: Callable[[FilledOrder], FilledOrder]) -> str:
    """The reason why a changed answer is refused. It is not recorded, and another actor fills the order."""
    bench, orders = Bench(), toy_orders(count=1)
    faulty = bench.actor("faulty")
    bench.dispatcher.submit(orders)
    inbox(faulty)
    other = bench.actor("other")
    bench.deliver(faulty, change(filled(orders[0], POLICY)))
    (refusal,) = inbox(faulty)
    assert isinstance(refusal, Refused)
    assert bench.recorder.recorded == []
    assert orders_in(other) == ids(orders)
    bench.deliver(other, filled(orders[0], POLICY))
    assert [filled_order.order_id for filled_order in bench.dispatcher.collect(ids(orders))] == ids(orders)
    return refusal.reason
