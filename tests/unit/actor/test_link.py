"""The actor's end of the wire, against a learner that a test plays by hand."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from actor.link import Link
from actor.passed_on import PassedOn
from protocol.errors import HandshakeRefused, PeerTimeout
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AnyMessage,
    Bye,
    Drain,
    FilledOrder,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
)
from tests.support.fakes import RULES, filled, scripted_identity, toy_orders, toy_policy
from tests.support.memory_transport import MemoryActorPort, MemoryHub
from tests.support.wire_examples import forge

FOREVER_S = 3600.0
Now = Callable[[], float]


class Table:
    """A link at one end of a wire in memory, and the learner's end to play with."""

    def __init__(self, num_credits: int = 2, passed_on: PassedOn | None = None, now: Now = time.monotonic) -> None:
        self.hub = MemoryHub()
        self.learner = self.hub.learner_port()
        self.port: MemoryActorPort = self.hub.actor_port("actor0")
        self.link = Link(
            self.port, "ipc:///somewhere", "actor0", scripted_identity(), num_credits, RULES, now, passed_on
        )

    def say(self, *messages: AnyMessage) -> None:
        """What the learner sends."""
        for message in messages:
            self.learner.send(self.port.peer, message)

    def received(self) -> list[AnyMessage]:
        """What the learner received since the last call."""
        found: list[AnyMessage] = []
        while (inbound := self.learner.receive(0)) is not None:
            message = inbound[1]
            assert not isinstance(message, Exception)
            found.append(message)
        return found

    def join(self, *, heartbeat_s: float = FOREVER_S, silence_s: float = FOREVER_S) -> None:
        """A link that is in; its Hello was received."""
        self.say(Welcome(run_id="run-1", heartbeat_s=heartbeat_s, silence_s=silence_s, mark=0))
        self.link.join(60.0)
        self.received()


def kinds(messages: list[AnyMessage]) -> list[type]:
    return [type(message) for message in messages]


def delivered(table: Table, step: int = 0) -> FilledOrder:
    """An order taken, filled and delivered."""
    (order,) = toy_orders(step)
    table.say(toy_policy(0), order)
    table.link.next_order()
    groups = filled(order, toy_policy(0))
    table.link.deliver(groups)
    return groups


def test_joining_says_who_we_are_and_what_we_have() -> None:
    table = Table(num_credits=5)
    table.say(Welcome(run_id="run-1", heartbeat_s=2.0, silence_s=60.0, mark=0))
    assert table.link.join(60.0).run_id == "run-1"
    (hello,) = table.received()
    identity = scripted_identity()
    assert hello == Hello(
        actor_id="actor0",
        engine="scripted",
        base_digest=identity.base_digest,
        tokenizer_digest=identity.tokenizer_digest,
        lora_digest=identity.lora_digest,
        rules_digest=RULES,
        machine=None,
        mark=0,
        version=None,
        credits=5,
    )


def test_joining_repeats_hello_until_there_is_a_welcome() -> None:
    table = Table()
    joined = threading.Thread(target=table.link.join, args=(60.0,))
    joined.start()
    for _ in range(2):
        inbound = table.learner.receive(30.0)
        assert inbound is not None and isinstance(inbound[1], Hello)
    table.say(Welcome(run_id="run-1", heartbeat_s=2.0, silence_s=60.0, mark=0))
    joined.join(30.0)
    assert not joined.is_alive() and table.link.welcome is not None


def test_joining_ends_with_an_error_that_names_learner_and_wait() -> None:
    table = Table()
    with pytest.raises(PeerTimeout, match=r"The learner at ipc:///somewhere said nothing for 0.1 s while its Welcome"):
        table.link.join(0.1)


def test_a_refusal_is_raised_with_its_sentence() -> None:
    table = Table()
    table.say(Refused(reason="Another base model; use the run's."))
    with pytest.raises(HandshakeRefused, match=r"^Another base model; use the run's\.$"):
        table.link.join(60.0)


def test_an_order_comes_with_the_policy_it_names() -> None:
    table = Table()
    table.join()
    old, new = toy_orders(0, version=4)[0], toy_orders(1, version=5)[0]
    table.say(toy_policy(4), old, toy_policy(5), new)
    for order in (old, new):
        work = table.link.next_order()
        assert work is not None
        assert (work[0].order_id, work[1].version) == (order.order_id, order.policy_version)
        assert work[1].sha256 == toy_policy(order.policy_version).sha256


def test_a_delivery_is_kept_until_it_is_acked() -> None:
    table = Table()
    table.join()
    filled_order = delivered(table)
    assert kinds(table.received()) == [FilledOrder]
    assert list(table.link.unacknowledged) == [filled_order.order_id]
    table.say(Ack(order_id=filled_order.order_id))
    table.link.receive(0)
    assert table.link.unacknowledged == {}


def test_policies_are_kept_while_orders_name_them_and_the_last_one_beyond() -> None:
    table = Table(num_credits=4)
    table.join()
    orders = [toy_orders(step, version=version)[0] for step, version in enumerate((1, 2, 2, 3))]
    table.say(toy_policy(1), orders[0], toy_policy(2), orders[1], orders[2], toy_policy(3), orders[3])
    kept: list[set[int]] = []
    for order in orders:
        work = table.link.next_order()
        assert work is not None and work[0].order_id == order.order_id
        table.link.deliver(filled(*work))
        kept.append(set(table.link.policies))
    assert kept == [{2, 3}, {2, 3}, {3}, {3}]


def test_the_policy_that_came_last_is_kept_even_if_it_is_older() -> None:
    """The learner sends it once, and may name it in several orders."""
    table = Table()
    table.join()
    newer, older, again = (toy_orders(step, version=v)[0] for step, v in ((0, 2), (1, 1), (2, 1)))
    table.say(toy_policy(2), newer, toy_policy(1), older)
    for _ in range(2):
        work = table.link.next_order()
        assert work is not None
        table.link.deliver(filled(*work))
    table.say(again)
    work = table.link.next_order()
    assert work is not None and work[1].version == 1
    assert set(table.link.policies) == {1}


def test_silence_brings_a_new_hello_and_a_welcome_brings_the_deliveries_again() -> None:
    table = Table()
    table.join(heartbeat_s=0.05)
    filled_order = delivered(table)
    table.received()
    waiting = threading.Thread(target=table.link.next_order)
    waiting.start()
    awaited = hello_after(table)
    assert awaited
    table.say(Welcome(run_id="run-1", heartbeat_s=0.05, silence_s=FOREVER_S, mark=0))
    again = wait_for(table, FilledOrder)
    table.say(Drain())
    waiting.join(30.0)
    assert isinstance(again, FilledOrder) and again.order_id == filled_order.order_id
    assert not waiting.is_alive()


def test_an_order_that_comes_twice_is_filled_once() -> None:
    table = Table()
    table.join()
    filled_order = delivered(table)
    first, second = toy_orders(0)[0], toy_orders(1)[0]
    table.received()
    table.say(first, second, second, Drain())
    work = table.link.next_order()
    assert work is not None and work[0].order_id == second.order_id
    assert [message.order_id for message in table.received() if isinstance(message, FilledOrder)] == [
        filled_order.order_id
    ]
    assert table.link.next_order() is None


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_sampled_from_other_bytes_is_sampled_again(whole: bool, tmp_path: Path) -> None:
    """A learner that was restarted may use a version number again for other bytes."""
    passes = PassedOn(tmp_path / "adapters")
    table = Table(passed_on=passes)
    table.join()
    delivered(table)
    newer = toy_policy(0, b"other bytes")
    passes.keep(newer)
    table.received()
    table.say(newer if whole else replace(newer, adapter=newer.adapter[:0]), toy_orders(0)[0])
    table.link.wait_once("an order")
    assert len(table.link.orders) == 1 and table.link.policies[0].sha256 == newer.sha256
    assert FilledOrder not in kinds(table.received()) and not table.link.unacknowledged


def hello_after(table: Table) -> bool:
    return isinstance(wait_for(table, Hello), Hello)


def wait_for(table: Table, kind: type) -> AnyMessage:
    """The learner's next message of this kind."""
    while (inbound := table.learner.receive(30.0)) is not None:
        if isinstance(inbound.message, kind):
            assert not isinstance(inbound.message, Exception)
            return inbound.message
    raise AssertionError(f"no {kind.__name__} came")


def test_an_order_whose_policy_was_lost_is_taken_when_both_come_again() -> None:
    table = Table()
    table.join(heartbeat_s=0.04)
    (first,) = toy_orders(0, version=0)
    (second,) = toy_orders(1, version=1)
    for sent in ((second, toy_policy(0), first), (toy_policy(1), second)):
        table.say(*sent)
        taken = table.link.next_order()
        assert taken and (taken[0].order_id, taken[1].version) == (sent[-1].order_id, sent[-2].version)


def test_a_welcome_of_another_run_is_refused() -> None:
    table = Table()
    table.join()
    delivered(table)
    table.received()
    table.say(Welcome(run_id="run-2", heartbeat_s=2.0, silence_s=60.0, mark=0))
    with pytest.raises(HandshakeRefused, match="ipc:///somewhere now runs run-2; start this actor again"):
        table.link.next_order()
    assert table.received() == []


def test_a_long_silence_ends_the_wait_for_an_order() -> None:
    table = Table()
    table.join(heartbeat_s=0.02, silence_s=0.1)
    with pytest.raises(PeerTimeout, match=r"The learner at ipc:///somewhere said nothing .* an order was awaited"):
        table.link.next_order()


def test_a_message_on_its_way_is_no_silence_and_replies_to_pings_are() -> None:
    clock = iter(range(100))
    table = Table(now=lambda: float(next(clock)))
    table.join(heartbeat_s=0.02, silence_s=10.0)
    for _ in range(4):
        table.port.num_bytes += 50_000
        table.link.wait_once("an order")
    with pytest.raises(PeerTimeout):
        for _ in range(10):
            table.port.num_bytes += 60
            table.link.wait_once("an order")
    assert next(clock) > 20


def test_a_long_silence_ends_the_wait_for_an_acknowledgement() -> None:
    table = Table()
    table.join(heartbeat_s=0.02, silence_s=0.1)
    delivered(table)
    with pytest.raises(PeerTimeout, match="an acknowledgement was awaited"):
        table.link.leave("drained")
    assert not any(isinstance(message, Bye) for message in table.received())


def test_a_draining_actor_fills_what_it_holds_and_takes_leave() -> None:
    table = Table()
    table.join()
    orders = toy_orders(count=2)
    table.say(toy_policy(0), *orders, Drain())
    for order in orders:
        work = table.link.next_order()
        assert work is not None and work[0].order_id == order.order_id
        table.link.deliver(filled(*work))
    assert table.link.next_order() is None
    table.say(*[Ack(order_id=order.order_id) for order in orders])
    table.link.leave("drained")
    assert kinds(table.received()) == [FilledOrder, FilledOrder, Bye]


def test_progress_is_shown_at_most_once_an_interval() -> None:
    table = Table()
    table.join(heartbeat_s=0.5)
    start = time.monotonic()
    while time.monotonic() - start < 1.2:
        table.link.beat("decoding")
        time.sleep(0.01)
    beats = table.received()
    assert set(kinds(beats)) == {Heartbeat} and len(beats) in (1, 2)
    assert beats[0] == Heartbeat(phase="decoding")


def test_no_heartbeat_before_the_welcome() -> None:
    table = Table()
    table.link.beat("loading")
    assert table.received() == []


def test_a_waiting_actor_shows_progress() -> None:
    table = Table()
    table.join(heartbeat_s=0.05)
    waiting = threading.Thread(target=table.link.next_order)
    waiting.start()
    beat = wait_for(table, Heartbeat)
    table.say(Drain())
    waiting.join(30.0)
    assert beat == Heartbeat(phase="waiting for an order") and not waiting.is_alive()


def test_the_learners_heartbeat_ends_silence() -> None:
    table = Table()
    table.join(heartbeat_s=FOREVER_S, silence_s=FOREVER_S)
    before = table.link.received_at
    table.say(Heartbeat(phase="learning"))
    table.link.receive(0)
    assert table.link.received_at > before
    assert table.link.orders == type(table.link.orders)([])


def test_a_damaged_message_counts_as_lost_once_the_learner_is_known() -> None:
    table = Table()
    (order,) = toy_orders(0)
    noise = ([b"noise"], forge("Ack", {"order_id": "x"}, version=PROTOCOL_VERSION + 1))
    table.join()
    for frames in noise:
        table.port.inbox.put(frames)
    table.say(toy_policy(0), order)
    work = table.link.next_order()
    assert work is not None and work[0].order_id == order.order_id


def test_a_further_hello_tells_what_was_read_and_which_policy_came_last() -> None:
    table = Table()
    table.say(Welcome(run_id="run-1", heartbeat_s=0.02, silence_s=FOREVER_S, mark=77))
    table.link.join(60.0)
    table.say(toy_policy(3))
    waiting = threading.Thread(target=table.link.next_order)
    waiting.start()
    first, again = wait_for(table, Hello), wait_for(table, Hello)
    table.say(Drain())
    waiting.join(30.0)
    assert isinstance(first, Hello) and (first.mark, first.version) == (0, None)
    assert isinstance(again, Hello) and (again.mark, again.version) == (77, 3)
