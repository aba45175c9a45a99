"""The real dispatcher and real actors' loops, each in its own thread: every order is filled once, by either actor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from actor.link import Link
from actor.loop import serve
from actor.rollout import Rollout
from learner.orders.dispatch import Dispatcher
from learner.orders.orders import NO_FRAMES
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.endpoint import local_endpoint
from protocol.errors import HandshakeRefused
from protocol.messages import FilledOrder, Order, Welcome
from protocol.transport import ActorPort, LearnerPort, ZmqActorPort, ZmqLearnerPort
from shared.process.lease import Lease
from tests.support.fakes import (
    CHECK,
    RULES,
    ScriptedEngine,
    ScriptedScorer,
    hello_of,
    scripted_identity,
    spelled,
    toy_orders,
    toy_policy,
)
from tests.support.memory_transport import MemoryHub

WELCOME = Welcome(run_id="run-1", heartbeat_s=0.2, silence_s=30.0, mark=0)
NUM_STEPS = 6
ORDERS_A_STEP = 8

DialPort = Callable[[str], ActorPort]


class MemoryRecorder:
    """Keeps what it is given; finds nothing."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def find(self, order: Order) -> FilledOrder | None:
        return None

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        self.recorded += [filled_order.order_id for filled_order in filled]

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        self.record(filled, frames)

    def is_durable(self, order_id: str) -> bool:
        return order_id in self.recorded


def act(dial: DialPort, actor_id: str, engine: ScriptedEngine, lease: Path) -> None:
    """One start of an actor."""
    port = dial(actor_id)
    try:
        link = Link(port, "the test", actor_id, engine.identity, credits=2, rules_digest=RULES)
        link.join(30.0)
        serve(link, Rollout(engine, ScriptedScorer(), Lease(lease), spelled))
    finally:
        port.close()


def train_by_hand(port: LearnerPort) -> tuple[list[FilledOrder], list[str]]:
    """Several steps of several orders, each from its own version; returns the filled orders and what was recorded."""
    recorder = MemoryRecorder()
    dispatcher = Dispatcher(port, recorder, hello_of(scripted_identity()), WELCOME, CHECK)
    filled: list[FilledOrder] = []
    for step in range(NUM_STEPS):
        dispatcher.publish(toy_policy(step), oldest_needed=step)
        orders = toy_orders(step, count=ORDERS_A_STEP, version=step)
        dispatcher.submit(orders)
        filled += dispatcher.collect([order.order_id for order in orders])
    dispatcher.end_run(30.0)
    assert dispatcher.peers.by_address == {}
    return filled, recorder.recorded


@contextmanager
def actors(dial: DialPort, engines: Sequence[ScriptedEngine], folder: Path) -> Iterator[list[Future[None]]]:
    """As many actors as engines, each in a thread."""
    with ThreadPoolExecutor(len(engines)) as pool:
        yield [pool.submit(act, dial, f"actor{n}", engine, folder / f"lease{n}") for n, engine in enumerate(engines)]


def over_memory(num_actors: int, folder: Path) -> tuple[list[FilledOrder], list[str], list[ScriptedEngine]]:
    """A whole run in memory."""
    hub, engines = MemoryHub(), [ScriptedEngine() for _ in range(num_actors)]
    with actors(hub.actor_port, engines, folder) as running:
        filled, recorded = train_by_hand(hub.learner_port())
        for one in running:
            one.result(30.0)
    return filled, recorded, engines


def content(filled: Sequence[FilledOrder]) -> list[tuple[str, int, str, list[int], list[float], tuple[float, ...]]]:
    """What a learner would train on."""
    return [
        (a.order_id, a.policy_version, g.group_id, g.completion_ids.tolist(), g.logprobs.tolist(), g.scores)
        for a in filled
        for g in a.groups
    ]


def test_many_orders_through_two_actors_are_filled_once_each(tmp_path: Path) -> None:
    filled, recorded, engines = over_memory(2, tmp_path)
    orders = [o for step in range(NUM_STEPS) for o in toy_orders(step, count=ORDERS_A_STEP, version=step)]
    wanted = [order.order_id for order in orders]
    assert [filled_order.order_id for filled_order in filled] == wanted
    assert sorted(recorded) == wanted
    # An actor that has not filled an order yet shares its order with an idle one; the second copy is dropped.
    filled_groups = {group_id for engine in engines for group_id in engine.filled}
    assert filled_groups == {group.group_id for order in orders for group in order.groups}
    assert {a.adapter_sha256 for a in filled} == {toy_policy(step).sha256 for step in range(NUM_STEPS)}


def test_who_fills_an_order_makes_no_difference(tmp_path: Path) -> None:
    one, _, _ = over_memory(1, tmp_path)
    three, _, _ = over_memory(3, tmp_path)
    assert content(one) == content(three)


def test_the_same_over_real_sockets_with_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    create_keys(keys, ["actor0", "actor1"])
    endpoint = local_endpoint(tmp_path)
    engines = [ScriptedEngine(), ScriptedEngine()]

    def dial(actor_id: str) -> ActorPort:
        return ZmqActorPort(endpoint, load_actor_key(keys / f"{actor_id}.json"))

    port = ZmqLearnerPort(endpoint, load_learner_keys(keys))
    try:
        with actors(dial, engines, tmp_path) as running:
            filled, recorded = train_by_hand(port)
            for one in running:
                one.result(30.0)
    finally:
        port.close()
    assert content(filled) == content(over_memory(1, tmp_path)[0])
    assert sorted(recorded) == [filled_order.order_id for filled_order in filled]


def test_an_actor_with_another_base_ends_with_the_learners_sentence(tmp_path: Path) -> None:
    hub = MemoryHub()
    another_base = ScriptedEngine(scripted_identity(base_digest="d" * 64))
    with actors(hub.actor_port, [another_base], tmp_path) as (one,):
        dispatcher = Dispatcher(hub.learner_port(), MemoryRecorder(), hello_of(scripted_identity()), WELCOME, CHECK)
        while not one.done():
            dispatcher.pump(0.05)
    with pytest.raises(HandshakeRefused, match="another base model than the learner"):
        one.result()
