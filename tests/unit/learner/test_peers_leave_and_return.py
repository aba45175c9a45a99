"""Actors that leave, fall silent, come back or should not be let in: what the dispatcher does about each."""

import time

import pytest

from learner.orders.dispatch import MAX_UNREAD_MESSAGES
from protocol.errors import PeerTimeout
from protocol.limits import MAX_MESSAGES_A_PUMP
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Bye,
    Drain,
    Heartbeat,
    Order,
    Policy,
    Refused,
    Welcome,
)
from tests.support.dispatch_bench import POLICY, Bench, ids, inbox, orders_in
from tests.support.fakes import filled, hello_of, scripted_identity, toy_orders
from tests.support.wire_examples import forge


def test_the_orders_of_a_leaving_actor_are_ordered_first() -> None:
    bench, orders = Bench(), toy_orders(count=4)
    actor = bench.actor("a", 2)
    bench.dispatcher.submit(orders)
    actor.send(Bye(reason="enough"))
    bench.dispatcher.pump()
    assert orders_in(bench.actor("b", 9)) == ids(orders)


def test_the_orders_of_an_unreachable_actor_are_ordered_first() -> None:
    bench, orders = Bench(), toy_orders(count=3)
    actor = bench.actor("a", 2)
    bench.dispatcher.submit(orders[:1])
    actor.close()
    bench.dispatcher.submit(orders[1:])
    assert bench.dispatcher.peers.by_address == {}
    assert orders_in(bench.actor("b", 9)) == ids(orders)


def test_the_orders_of_a_silent_actor_are_ordered_first() -> None:
    bench, orders = Bench(silence_s=0.1), toy_orders(count=3)
    bench.actor("a", 2)
    bench.dispatcher.submit(orders)
    time.sleep(0.15)
    bench.dispatcher.pump()
    assert bench.dispatcher.peers.by_address == {}
    assert orders_in(bench.actor("b", 9)) == ids(orders)


def test_a_restarted_actor_gets_its_former_orders_first() -> None:
    bench, orders = Bench(), toy_orders(count=4)
    former = bench.actor("a", 2)
    bench.dispatcher.submit(orders)
    assert orders_in(former) == ids(orders)[:2]
    former.close()
    restarted = bench.actor("a", 3)
    policy, *sent = inbox(restarted)
    assert isinstance(policy, Policy)
    assert [message.order_id for message in sent if isinstance(message, Order)] == ids(orders)[:3]
    assert len(bench.dispatcher.peers.by_address) == 1


def test_a_second_live_actor_of_one_id_is_refused_and_the_first_keeps_its_orders() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    first = bench.actor("a", 2)
    bench.dispatcher.submit(orders)
    second = bench.hub.actor_port("a")
    for _ in range(3):
        second.send(hello_of(scripted_identity(), "a"))
        bench.dispatcher.pump()
        assert inbox(second) == []
    first.send(Heartbeat(phase="decoding"))
    second.send(hello_of(scripted_identity(), "a"))
    bench.dispatcher.pump()
    bench.dispatcher.pump()
    second.send(hello_of(scripted_identity(), "a"))
    bench.dispatcher.pump()
    (refusal,) = inbox(second)[:1]
    assert isinstance(refusal, Refused) and "Actor a is already connected; make another key" in refusal.reason
    assert orders_in(first) == ids(orders)
    bench.deliver(first, *(filled(order, POLICY) for order in orders))
    assert bench.recorder.recorded == ids(orders)


def test_who_waits_behind_a_silent_life_gets_its_place() -> None:
    bench, orders = Bench(silence_s=0.1), toy_orders(count=2)
    bench.actor("a", 2)
    bench.dispatcher.submit(orders)
    second = bench.hub.actor_port("a")
    second.send(hello_of(scripted_identity(), "a"))
    bench.dispatcher.pump()
    assert inbox(second) == []
    time.sleep(0.15)
    bench.dispatcher.pump()
    second.send(hello_of(scripted_identity(), "a"))
    bench.dispatcher.pump()
    welcome, _, *sent = inbox(second)
    assert isinstance(welcome, Welcome)
    assert [message.order_id for message in sent if isinstance(message, Order)] == ids(orders)


def test_a_pump_ends_however_much_there_is() -> None:
    """An actor that sends without end does not keep the learner from its work."""
    bench = Bench()
    actor = bench.actor()
    for _ in range(MAX_MESSAGES_A_PUMP + 1):
        actor.send(Heartbeat(phase="talking"))
    bench.dispatcher.pump()
    assert bench.hub.to_learner.qsize() == 1


def test_a_word_ends_silence() -> None:
    bench = Bench(silence_s=0.2)
    actor = bench.actor()
    for _ in range(6):
        time.sleep(0.05)
        actor.send(Heartbeat(phase="decoding"))
        bench.dispatcher.pump()
    assert len(bench.dispatcher.peers.by_address) == 1


@pytest.mark.parametrize(
    ("field", "what"),
    [("base_digest", "base model"), ("tokenizer_digest", "tokenizer"), ("lora_digest", "LoRA")],
)
def test_an_actor_that_holds_something_else_is_refused_in_words(field: str, what: str) -> None:
    bench = Bench()
    actor = bench.hub.actor_port("odd")
    actor.send(hello_of(scripted_identity(**{field: "e" * 64}), "odd"))
    bench.dispatcher.submit(toy_orders())
    bench.dispatcher.pump()
    (refusal,) = inbox(actor)
    assert isinstance(refusal, Refused)
    expected = getattr(scripted_identity(), field)[:12]
    for part in ("odd", f"another {what}", "e" * 12, f"expected {expected}", "config.json", "same model files"):
        assert part in refusal.reason
    assert bench.dispatcher.peers.by_address == {}


def test_an_actor_of_another_verifier_configuration_is_refused_and_the_run_goes_on() -> None:
    bench = Bench()
    actor = bench.hub.actor_port("odd")
    actor.send(hello_of(scripted_identity(), "odd", rules_digest="e" * 64))
    bench.dispatcher.submit(toy_orders())
    bench.dispatcher.pump()
    (refusal,) = inbox(actor)
    assert isinstance(refusal, Refused)
    assert (
        "odd has another [verifier], [rollout] or [environment] configuration than the learner (eeeeeeeeeeee"
        in refusal.reason
    )
    assert "config.json" in refusal.reason
    assert orders_in(bench.actor("fine")) == ids(toy_orders())


def test_a_second_hello_is_welcomed_again() -> None:
    bench = Bench()
    actor = bench.actor()
    actor.send(hello_of(scripted_identity()))
    bench.dispatcher.pump()
    assert [type(message) for message in inbox(actor)] == [Welcome]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"noise"], "header"),
        (forge("Ack", {"order_id": 5}), "Ack message is invalid"),
        (forge("Ack", {"order_id": "x"}, version=PROTOCOL_VERSION + 1), "install the same release on both"),
    ],
)
def test_what_is_no_message_gets_refused_as_its_reply(frames: list[bytes], words: str) -> None:
    bench = Bench()
    actor = bench.hub.actor_port("noisy")
    actor.send_frames(frames, "noise")
    bench.dispatcher.pump()
    (refusal,) = inbox(actor)
    assert isinstance(refusal, Refused) and words in refusal.reason


@pytest.mark.parametrize("frames", [[b"noise"], forge("Ack", {"order_id": "x"}, version=PROTOCOL_VERSION + 1)])
def test_what_was_damaged_on_its_way_from_an_actor_that_has_joined_is_as_good_as_lost(frames: list[bytes]) -> None:
    bench, orders = Bench(), toy_orders()
    actor = bench.actor()
    actor.send_frames(frames, "noise")
    bench.dispatcher.pump()
    assert inbox(actor) == []
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders)


def test_noise_from_an_unreachable_peer_does_not_stop_the_learner() -> None:
    bench = Bench()
    actor = bench.hub.actor_port("noisy")
    actor.send_frames([b"noise"], "noise")
    actor.close()
    bench.dispatcher.pump()
    bench.actor("fine")


def test_waiting_ends_when_every_actor_is_silent() -> None:
    bench, orders = Bench(heartbeat_s=0.02, silence_s=0.1), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    bench.deliver(actor, filled(orders[0], POLICY))
    with pytest.raises(PeerTimeout, match=r"Every actor said nothing .* order train/000000/u0001 was awaited"):
        bench.dispatcher.collect(ids(orders))


def test_waiting_goes_on_while_an_actor_shows_progress() -> None:
    bench = Bench(heartbeat_s=0.02, silence_s=0.2)
    actor = bench.actor()
    orders = toy_orders()
    bench.dispatcher.submit(orders)
    for _ in range(8):
        actor.send(Heartbeat(phase="decoding"))
        bench.dispatcher.pump(0.05)
    bench.deliver(actor, filled(orders[0], POLICY))
    assert len(bench.dispatcher.collect(ids(orders))) == 1


def test_heartbeats_go_to_everyone_and_not_more_often_than_agreed() -> None:
    bench = Bench(heartbeat_s=0.5)
    actors = [bench.actor("a"), bench.actor("b")]
    time.sleep(0.51)
    for _ in range(5):
        bench.dispatcher.pump()
    for actor in actors:
        assert [m for m in inbox(actor) if isinstance(m, Heartbeat)] == [Heartbeat(phase="learning")]


def test_heartbeats_leave_room_for_what_an_actor_waits_for() -> None:
    seconds = [0.0]
    bench, orders = Bench(heartbeat_s=1.0, now=lambda: seconds[0]), toy_orders(count=1)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    for _ in range(2 * MAX_UNREAD_MESSAGES):
        seconds[0] += 1.0
        bench.dispatcher.pump()
    heartbeats = [message for message in inbox(actor) if isinstance(message, Heartbeat)]
    assert 0 < len(heartbeats) <= MAX_UNREAD_MESSAGES / 2
    bench.deliver(actor, filled(orders[0], POLICY))
    assert Ack(order_id=orders[0].order_id) in inbox(actor)


def test_an_order_that_the_journal_fills_is_never_sent() -> None:
    orders = toy_orders(count=2)
    bench = Bench(known=[filled(orders[0], POLICY)])
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders)[1:]
    bench.deliver(actor, filled(orders[1], POLICY))
    assert [filled_order.order_id for filled_order in bench.dispatcher.collect(ids(orders))] == ids(orders)
    assert bench.recorder.recorded == ids(orders)[1:]


def test_the_end_of_a_run_drains_and_waits_for_goodbyes() -> None:
    bench = Bench(heartbeat_s=0.02)
    leaving, staying = bench.actor("leaving"), bench.actor("staying")
    leaving.send(Bye(reason="drained"))
    start = time.monotonic()
    bench.dispatcher.end_run(wait_s=0.2)
    assert time.monotonic() - start >= 0.2
    assert Drain() in inbox(leaving) and Drain() in inbox(staying)
    assert [peer.hello.actor_id for peer in bench.dispatcher.peers.by_address.values()] == ["staying"]


def test_the_end_is_told_again_since_the_first_message_may_be_lost() -> None:
    bench = Bench(heartbeat_s=0.02)
    deaf = bench.actor()
    bench.dispatcher.end_run(wait_s=0.2)
    said = inbox(deaf)
    assert len(said) > 1 and set(map(type, said)) == {Drain}


def test_the_end_is_quick_when_all_have_left() -> None:
    bench = Bench(heartbeat_s=0.02)
    bench.actor().send(Bye(reason="drained"))
    start = time.monotonic()
    bench.dispatcher.end_run(wait_s=60.0)
    assert time.monotonic() - start < 30.0
