"""Well-formed messages of a hostile actor, sent to a real Dispatcher: the result must be a working run.

    input      bytes; they seed the messages, so that a mutated input is another conversation
    messages   every type, fields at their bounds and beyond what makes sense; half of the filled orders are correct
               but for one thing
    expected   no exception; only right groups recorded, once each; a peer within its credits; no policy sent again to
               one that has not read it; an honest actor's groups collected in the end

The port is in memory, so that a conversation takes milliseconds; the codec is fuzzed elsewhere.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

from learner.orders.dispatch import MAX_UNREAD_MESSAGES, Dispatcher
from learner.orders.order_check import OrderCheck
from learner.orders.orders import NO_FRAMES, training_step
from learner.orders.peers import MAX_UNREAD_POLICIES
from protocol.access.sparse_log import SparseLog
from protocol.errors import MalformedMessage, ProtocolError
from protocol.limits import MAX_CREDITS, MAX_SEED
from protocol.messages import (
    Ack,
    AnyMessage,
    Bye,
    Drain,
    FilledOrder,
    Group,
    Heartbeat,
    KeyAdded,
    NewKey,
    Order,
    Outcome,
    Refused,
    Welcome,
)
from protocol.transport import Inbound
from tests.support.fakes import CHECK, filled, hello_of, scripted_identity, toy_orders, toy_policy

NUM_MESSAGES = 24
HONEST, HOSTILE = b"honest-1", (b"evil-1", b"evil-2", b"odd-1")
IDS = ("train", "train/x/y", "train/000000/u0000", "train/000001/u0001", "train/999999/u0000", "eval/0/u", "\x1b[2J\n")
TEXTS = ("", "tired", "\nerror: forged", "\x1b]0;x\x07", "x" * 65_536)


UNHEARD = logging.Logger("unheard", logging.CRITICAL)


class FuzzPort:
    """LearnerPort of messages that are there already; keeps count of what is sent."""

    def __init__(self) -> None:
        self.inbox: list[tuple[bytes, AnyMessage | ProtocolError]] = []
        self.sent: dict[bytes, list[AnyMessage]] = {}

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Nobody reads it."""
        self.sent.setdefault(peer, []).append(message)

    def receive(self, timeout_s: float) -> Inbound | None:
        """The oldest."""
        return Inbound(*self.inbox.pop(0), frames=()) if self.inbox else None

    def close(self) -> None:
        """Nothing to close."""


class FuzzRecorder:
    """Keeps what it is given; knows ids as the real one does."""

    def __init__(self) -> None:
        self.recorded: dict[str, FilledOrder] = {}

    def find(self, order: Order) -> FilledOrder | None:
        """A new run."""
        return None

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        """Once each."""
        for filled_order in filled:
            assert filled_order.order_id not in self.recorded, "recorded twice"
            self.recorded[filled_order.order_id] = filled_order

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        """At once."""
        self.record(filled, frames)

    def is_durable(self, order_id: str) -> bool:
        """By its name."""
        return training_step(order_id) is None or order_id in self.recorded


def converse(data: bytes, check: OrderCheck = CHECK) -> None:
    """One conversation; an AssertionError or any other exception is a finding."""
    random, port, recorder = Random(data), FuzzPort(), FuzzRecorder()
    clock = [0.0]
    welcome = Welcome(run_id="run", heartbeat_s=2.0, silence_s=60.0, mark=0)
    dispatcher = Dispatcher(
        port, recorder, hello_of(scripted_identity()), welcome, check, lambda: clock[0], late_s=10.0
    )
    dispatcher.sparse_log = SparseLog(UNHEARD)
    orders: list[Order] = []
    for version in range(2):
        dispatcher.publish(toy_policy(version), oldest_needed=0)
        orders += toy_orders(version, count=2, version=version)
    port.inbox.append((HOSTILE[0], hello_of(scripted_identity(), "evil", MAX_CREDITS)))
    dispatcher.submit(orders)
    for _ in range(NUM_MESSAGES):
        sender = random.choice(HOSTILE)
        port.inbox.append((sender, random.choice(SAYINGS)(random, sender, port)))
        clock[0] += random.choice((0.0, 0.1, 5.0))
        dispatcher.pump()
        check_accounts(dispatcher, port)
    finish(dispatcher, port, clock, orders)
    for order in orders:
        policy = toy_policy(order.policy_version)
        assert not CHECK.fault(order, policy, recorder.recorded[order.order_id]), "recorded though wrong"
    assert recorder.recorded.keys() == {order.order_id for order in orders}, "another order was recorded"


def finish(dispatcher: Dispatcher, port: FuzzPort, clock: list[float], orders: list[Order]) -> None:
    """An honest actor comes, fills what it is given, and is given everything that is open."""
    open_orders = {order.order_id: order for order in orders}
    port.inbox.append((HONEST, hello_of(scripted_identity(), "honest", 2)))
    for _ in range(60):
        dispatcher.pump()
        check_accounts(dispatcher, port)
        given = [message for message in port.sent.pop(HONEST, []) if isinstance(message, Order)]
        port.inbox += [(HONEST, filled(order, toy_policy(order.policy_version))) for order in given]
        clock[0] += 2.0
        port.inbox.append((HONEST, Heartbeat(phase="decoding")))
    assert open_orders.keys() == dispatcher.filled.keys(), "an honest actor was not given what was open"


def check_accounts(dispatcher: Dispatcher, port: FuzzPort) -> None:
    """Between two messages."""
    for peer in dispatcher.peers.by_address.values():
        assert len(peer.orders) == len(set(peer.orders)), "has an order twice"
        assert len(peer.unread) <= MAX_UNREAD_POLICIES, "too many policies unread"
    for sent in port.sent.values():
        told = [message for message in sent if isinstance(message, Refused)]
        assert all(message.reason.isprintable() for message in told), "a reason that is no line"
        assert len(sent) < MAX_UNREAD_MESSAGES, "more was queued than is bounded"


def say_hello(random: Random, sender: bytes, port: FuzzPort) -> AnyMessage:
    """Now and then with the mark that was told, or of somebody else."""
    marks = [message.mark for message in port.sent.get(sender, []) if isinstance(message, Welcome)]
    hello = hello_of(
        scripted_identity(engine=random.choice(TEXTS)[:128] or "x"),
        sender.partition(b"-")[0].decode(),
        random.choice((1, 2, MAX_CREDITS)),
        mark=random.choice([*marks[-1:], 0, MAX_SEED]),
        version=random.choice((None, 0, 1, 7)),
    )
    return msgspec.structs.replace(hello, rules_digest="e" * 64) if random.random() < 0.1 else hello


def say_filled_order(random: Random, sender: bytes, port: FuzzPort) -> AnyMessage:
    """A right one with one thing wrong."""
    version = random.randrange(2)
    order = random.choice(toy_orders(version, count=2, version=version))
    right = filled(order, toy_policy(version))
    return random.choice(SPOILS)(random, right)


def group_with(filled_order: FilledOrder, **changes: Any) -> FilledOrder:
    """Its only group changed."""
    group: Group = msgspec.structs.replace(filled_order.groups[0], **changes)
    return msgspec.structs.replace(filled_order, groups=(group,))


def with_numbers(name: str, values: Sequence[float]) -> Callable[[Random, FilledOrder], FilledOrder]:
    """One number of an array is another."""

    def spoil(random: Random, filled_order: FilledOrder) -> FilledOrder:
        array = getattr(filled_order.groups[0], name).copy()
        array[random.randrange(len(array))] = random.choice(values)
        return group_with(filled_order, **{name: array})

    return spoil


def with_lengths(random: Random, filled_order: FilledOrder) -> FilledOrder:
    """Samples of other lengths, with tokens to match."""
    lengths = random.choice(((0, 2), (0, 0), (1, 5000), (3,), (2**31 - 1, 1)))
    total = min(sum(lengths), 6000)
    ones = np.ones(total, np.int32)
    return group_with(filled_order, lengths=lengths, completion_ids=ones, logprobs=-ones.astype(np.float32))


SPOILS: tuple[Callable[[Random, FilledOrder], FilledOrder], ...] = (
    with_numbers("completion_ids", (2**20, -1, 2**31 - 1, -(2**31))),
    with_numbers("logprobs", (np.nan, np.inf, -np.inf, 1.0, -3e38)),
    with_lengths,
    lambda random, groups: group_with(groups, scores=(random.choice((0.5, -1e9, 1e9)), 0.0)),
    lambda random, groups: group_with(groups, outcomes=(Outcome.ERROR,)),
    lambda random, groups: group_with(groups, rewards={random.choice(TEXTS)[:128] or "x": (1.0,)}),
    lambda random, groups: group_with(groups, group_id=random.choice(IDS)),
    lambda random, groups: group_with(groups, entropies=np.full(1, np.nan, np.float32)),
    lambda random, filled_order: msgspec.structs.replace(
        filled_order, groups=filled_order.groups * random.randint(2, 9)
    ),
    lambda random, groups: msgspec.structs.replace(groups, order_id=random.choice((*IDS[:2], *IDS[4:]))),
    lambda random, groups: msgspec.structs.replace(groups, policy_version=random.choice((5, 2**31 - 1))),
    lambda random, groups: msgspec.structs.replace(groups, adapter_sha256="f" * 64),
)
SAYINGS: tuple[Callable[[Random, bytes, FuzzPort], AnyMessage | ProtocolError], ...] = (
    say_hello,
    say_hello,
    say_filled_order,
    say_filled_order,
    say_filled_order,
    lambda random, sender, port: Bye(reason=random.choice(TEXTS)),
    lambda random, sender, port: Heartbeat(phase=random.choice(TEXTS)[:128] or "x"),
    lambda random, sender, port: random.choice((Drain(), Ack(order_id=random.choice(IDS)), toy_policy(0))),
    lambda random, sender, port: Refused(reason="no"),
    lambda random, sender, port: random.choice((NewKey(public=random.choice("aZ") * 40), KeyAdded())),
    lambda random, sender, port: MalformedMessage(random.choice(TEXTS)),
)
