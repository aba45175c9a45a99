"""Actors that say Hello again: what was lost is sent again, what is on its way is not, and taking is not filling."""

import logging
import time

import pytest

from protocol.limits import HIGH_WATER_MARK
from protocol.messages import (
    Ack,
    AnyMessage,
    Bye,
    Heartbeat,
    Order,
    Policy,
    Welcome,
)
from tests.support.dispatch_bench import POLICY, Bench, ids, inbox, kinds, orders_in
from tests.support.fakes import filled, hello_of, scripted_identity, toy_orders, toy_policy
from tests.support.memory_transport import MemoryActorPort


def welcomed_again(
    bench: Bench, actor: MemoryActorPort, mark: int, version: int | None = None, num_credits: int = 2
) -> list[AnyMessage]:
    """What a further Hello brings, its Welcome first."""
    actor.send(hello_of(scripted_identity(), num_credits=num_credits, mark=mark, version=version))
    bench.dispatcher.pump()
    return inbox(actor)


def test_who_says_hello_again_gets_again_what_was_lost_once_it_has_read_the_rest() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    assert kinds(inbox(actor)) == [Policy, Order, Order]
    (welcome,) = welcomed_again(bench, actor, mark=0)
    assert isinstance(welcome, Welcome) and welcome.mark > 0
    sent = welcomed_again(bench, actor, mark=welcome.mark)
    assert kinds(sent) == [Welcome, Policy, Order, Order]
    bench.deliver(actor, *(filled(order, POLICY) for order in orders))
    assert bench.recorder.recorded == ids(orders)


def test_who_has_the_policy_gets_only_the_orders_again() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    inbox(actor)
    (welcome,) = welcomed_again(bench, actor, mark=0)
    assert isinstance(welcome, Welcome)
    assert kinds(welcomed_again(bench, actor, welcome.mark, version=0)) == [Welcome, Order, Order]


def test_a_hello_that_is_said_over_and_over_never_sends_the_policy_again() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    for number in range(3000):
        actor.send(hello_of(scripted_identity(), mark=number))
        bench.dispatcher.pump()
    sent = inbox(actor)
    assert [kind for kind in kinds(sent) if kind is not Welcome] == [Policy, Order, Order]
    assert len(sent) < HIGH_WATER_MARK / 2, "what is queued for one that does not read is bounded"


def test_leaving_and_coming_back_on_the_same_connection_brings_no_second_policy() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    for _ in range(100):
        actor.send(Bye(reason="again"))
        actor.send(hello_of(scripted_identity()))
        bench.dispatcher.pump()
    assert kinds(inbox(actor)).count(Policy) == 1


def test_leaving_and_coming_back_on_the_same_connection_brings_no_more_orders_than_credits() -> None:
    """What it did not read is in the learner's queue still, and a full queue would stop the learner."""
    bench, orders = Bench(), toy_orders(count=6)
    actor = bench.hub.actor_port("taker")
    bench.dispatcher.submit(orders)
    for _ in range(100):
        for message in (hello_of(scripted_identity(), "taker", 4), Bye(reason="again")):
            actor.send(message)
            bench.dispatcher.pump()
    assert kinds(inbox(actor)).count(Order) == 4
    honest = bench.actor("honest", 9)
    assert orders_in(honest) == ids(orders)


def test_one_that_came_back_has_its_credits_again_when_it_has_read() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    actor.send(Bye(reason="again"))
    bench.dispatcher.pump()
    (*sent, welcome) = [*inbox(actor), *welcomed_again(bench, actor, mark=0)]
    assert kinds(sent) == [Policy, Order, Order] and isinstance(welcome, Welcome)
    assert kinds(welcomed_again(bench, actor, welcome.mark, version=0)) == [Welcome, Order, Order]


def test_orders_that_others_filled_first_do_not_use_up_credits() -> None:
    bench, orders = Bench(late_s=0.0), toy_orders(count=3)
    slow, quick = bench.actor("slow", 1), bench.actor("quick", 1)
    for order in orders:
        bench.dispatcher.submit([order])
        bench.dispatcher.pump()
        assert orders_in(slow) == orders_in(quick) == [order.order_id]
        bench.deliver(quick, filled(order, POLICY))
        bench.deliver(slow, filled(order, POLICY))
        inbox(quick)
        assert [kinds(inbox(slow)), bench.recorder.recorded[-1]] == [[Ack], order.order_id]


def test_many_orders_that_were_lost_are_sent_again() -> None:
    """They are more than the other messages that a peer may have unread."""
    bench, orders = Bench(), toy_orders(count=HIGH_WATER_MARK // 3)
    actor = bench.actor("actor0", len(orders))
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders)
    (welcome,) = welcomed_again(bench, actor, mark=0, num_credits=len(orders))
    assert isinstance(welcome, Welcome)
    again = welcomed_again(bench, actor, welcome.mark, version=0, num_credits=len(orders))
    assert kinds(again) == [Welcome, *[Order] * len(orders)]


def test_another_connection_waits_while_the_first_has_not_read_its_policy() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    first = bench.actor()
    bench.dispatcher.submit(orders)
    first.send(Bye(reason="for a second policy"))
    second = bench.hub.actor_port("actor0")
    second.send(hello_of(scripted_identity()))
    bench.dispatcher.pump()
    assert inbox(second) == []
    first.close()
    second.send(hello_of(scripted_identity()))
    bench.dispatcher.pump()
    time.sleep(1.01)
    second.send(hello_of(scripted_identity()))
    bench.dispatcher.pump()
    assert Welcome in kinds(inbox(second))


def test_an_actor_that_takes_orders_and_fills_none_loses_them_to_an_honest_one() -> None:
    """However often it says Hello, and whether it reads or not."""
    bench, orders = Bench(late_s=1000.0), toy_orders(count=3)
    taker = bench.actor("taker", 9)
    bench.dispatcher.submit(orders)
    assert orders_in(taker) == ids(orders)
    honest = bench.actor("honest", 9)
    mark, given = 0, list[str]()
    for order in orders:
        taker.send(hello_of(scripted_identity(), "taker", 9, mark=mark))
        bench.dispatcher.pump()
        mark = next(message.mark for message in inbox(taker) if isinstance(message, Welcome))
        given += orders_in(honest)
        assert order.order_id in given
        bench.deliver(honest, filled(order, POLICY))
    assert [filled_order.order_id for filled_order in bench.dispatcher.collect(ids(orders))] == ids(orders)
    later = toy_orders(1, count=2)
    bench.dispatcher.submit(later)
    assert orders_in(honest) == ids(later) and orders_in(taker) == []


def test_an_actor_that_came_first_and_fills_nothing_delays_no_step() -> None:
    """It says that it makes progress, and nobody has filled an order yet."""
    bench, orders = Bench(late_s=1000.0), toy_orders(count=3)
    taker = bench.actor("taker", 9)
    bench.dispatcher.submit(orders)
    assert orders_in(taker) == ids(orders)
    honest, given = bench.actor("honest", 9), list[str]()
    for order in orders:
        taker.send(Heartbeat(phase="decoding"))
        bench.dispatcher.pump()
        given += orders_in(honest)
        assert order.order_id in given
        bench.deliver(honest, filled(order, POLICY))
    assert len(bench.dispatcher.collect(ids(orders))) == 3


def test_an_order_that_a_new_actor_does_not_fill_delays_no_step() -> None:
    bench, orders = Bench(late_s=1000.0), toy_orders(count=2)
    honest = bench.actor("honest", 1)
    bench.dispatcher.submit(orders[:1])
    bench.deliver(honest, filled(orders[0], POLICY))
    first, second = toy_orders(1, count=2)
    newcomer = bench.actor("newcomer", 9)
    bench.dispatcher.submit([first, second])
    inbox(honest)
    assert orders_in(newcomer) == ids([second])
    bench.deliver(honest, filled(first, POLICY))
    # It has nothing else to do.
    assert orders_in(honest) == ids([second])
    bench.deliver(honest, filled(second, POLICY))
    assert len(bench.dispatcher.collect(ids([first, second]))) == 2


def test_a_line_that_is_slower_than_three_heartbeats_an_adapter_catches_up() -> None:
    """What is under way is waited for: no Hello brings it once more behind itself."""
    bench = Bench(silence_s=1000.0)
    actor = bench.actor("slow", 1)
    for step in range(3):
        bench.dispatcher.publish(toy_policy(step), oldest_needed=0)
        orders = toy_orders(step, version=step)
        bench.dispatcher.submit(orders)
        for _ in range(20):
            actor.send(hello_of(scripted_identity(), "slow", 1))
            bench.dispatcher.pump()
        assert kinds(inbox(actor)).count(Policy) == 1
        bench.deliver(actor, filled(orders[0], toy_policy(step)))
        bench.dispatcher.collect(ids(orders))


FORGERY = "\nerror: the run is lost \x1b[2J\x1b]52;c;cm0gLXJm\x07" + "x" * 60_000


def test_what_a_peer_says_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    actor = bench.hub.actor_port("loud")
    actor.send(hello_of(scripted_identity(engine=FORGERY[:100]), "loud"))
    bench.dispatcher.pump()
    actor.send(Bye(reason=FORGERY))
    bench.dispatcher.pump()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and r"\nerror: the run is lost \x1b[2J" in said[1]
    for line in said:
        assert line.isprintable() and len(line) < 300


def test_coming_and_going_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    actor = bench.hub.actor_port("restless")
    for _ in range(500):
        actor.send(hello_of(scripted_identity(), "restless"))
        actor.send(Bye(reason="so long"))
        bench.dispatcher.pump()
    assert len(caplog.records) < 25
