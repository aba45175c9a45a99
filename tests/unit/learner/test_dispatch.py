"""Orders out, groups in, each applied exactly once: the dispatcher against actors that a test plays by hand."""

import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from learner.orders.plan import Unfilled
from protocol.messages import (
    Ack,
    Bye,
    FilledOrder,
    Order,
    Policy,
    Refused,
)
from tests.support.dispatch_bench import POLICY, Bench, ids, inbox, orders_in, refused_and_ordered_again, with_group
from tests.support.fakes import filled, toy_orders, toy_policy


def test_an_order_goes_out_is_recorded_acked_and_collected() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    policy, order = inbox(actor)
    assert isinstance(policy, Policy) and policy.sha256 == POLICY.sha256
    assert isinstance(order, Order) and order.order_id == orders[0].order_id
    bench.deliver(actor, filled(order, policy))
    (ack,) = inbox(actor)
    assert ack == Ack(order_id=order.order_id)
    (found,) = bench.dispatcher.collect(ids(orders))
    assert found.groups[0].completion_ids.tolist() == filled(order, policy).groups[0].completion_ids.tolist()


def test_nothing_is_acked_before_it_is_recorded() -> None:
    bench, orders = Bench(), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    bench.events.clear()
    bench.deliver(actor, *[filled(order, POLICY) for order in orders])
    first, second = ids(orders)
    assert bench.events == [f"record {first}", f"record {second}", f"Ack {first}", f"Ack {second}"]


def test_no_ack_if_recording_fails() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    bench.recorder.broken = True
    with pytest.raises(OSError, match="disk full"):
        bench.deliver(actor, filled(orders[0], POLICY))
    assert not any(isinstance(message, Ack) for message in inbox(actor))
    assert bench.dispatcher.filled == {}


def test_a_filled_order_that_comes_before_its_order_is_not_acked_and_not_lost() -> None:
    """A learner that was restarted has not yet ordered again what an actor still holds for it."""
    bench, orders = Bench(), toy_orders(count=1)
    actor = bench.actor()
    bench.deliver(actor, filled(orders[0], POLICY))
    assert inbox(actor) == []
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders)
    bench.deliver(actor, filled(orders[0], POLICY))
    assert inbox(actor) == [Ack(order_id=orders[0].order_id)]
    bench.deliver(actor, filled(orders[0], POLICY))
    assert inbox(actor) == [Ack(order_id=orders[0].order_id)]
    assert bench.recorder.recorded == ids(orders)


def test_credits_bound_the_orders_of_an_actor() -> None:
    bench, orders = Bench(), toy_orders(count=5)
    actor = bench.actor(num_credits=2)
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders)[:2]
    bench.dispatcher.pump()
    assert inbox(actor) == []
    bench.deliver(actor, filled(orders[1], POLICY))
    assert orders_in(actor) == ids(orders)[2:3]


def test_orders_are_shared_among_actors() -> None:
    bench, orders = Bench(), toy_orders(count=4)
    actors = [bench.actor("a"), bench.actor("b")]
    bench.dispatcher.submit(orders)
    assert sorted(orders_in(actors[0]) + orders_in(actors[1])) == ids(orders)
    assert [peer.free for peer in bench.dispatcher.peers.by_address.values()] == [0, 0]


def test_filled_orders_come_in_the_order_asked_for() -> None:
    bench, orders = Bench(), toy_orders(count=3)
    actor = bench.actor(num_credits=3)
    bench.dispatcher.submit(orders)
    bench.deliver(actor, *[filled(order, POLICY) for order in reversed(orders)])
    assert [filled_order.order_id for filled_order in bench.dispatcher.collect(ids(orders))] == ids(orders)


def test_a_policy_is_sent_once_and_before_the_first_order_that_names_it() -> None:
    bench = Bench()
    actor = bench.actor(num_credits=9)
    bench.dispatcher.publish(toy_policy(1), oldest_needed=0)
    bench.dispatcher.submit([*toy_orders(0, count=2), *toy_orders(1, count=2, version=1)])
    kinds = [
        ("policy", message.version) if isinstance(message, Policy) else ("order", message.policy_version)
        for message in inbox(actor)
        if isinstance(message, Policy | Order)
    ]
    assert kinds == [("policy", 0), ("order", 0), ("order", 0), ("policy", 1), ("order", 1), ("order", 1)]


def test_an_older_policy_is_sent_again_for_an_order_that_came_back() -> None:
    """An actor keeps the policy that came last and those its orders name: an older one may be gone there."""
    bench = Bench()
    lost, actor = bench.actor("lost", 1), bench.actor("actor", 1)
    bench.dispatcher.publish(toy_policy(1), oldest_needed=0)
    old, new = toy_orders(0, count=2), toy_orders(1, version=1)
    bench.dispatcher.submit([*old, *new])
    bench.deliver(actor, filled(old[1], POLICY))
    assert [m.version for m in inbox(actor) if isinstance(m, Policy)] == [0, 1]
    bench.deliver(actor, filled(new[0], toy_policy(1)))
    lost.send(Bye(reason="tired"))
    bench.dispatcher.pump()
    _, policy, order = inbox(actor)
    assert isinstance(policy, Policy) and policy.version == 0
    assert isinstance(order, Order) and order.order_id == old[0].order_id


def test_policies_that_nothing_names_are_forgotten() -> None:
    bench = Bench()
    for version in (1, 2, 3):
        bench.dispatcher.publish(toy_policy(version), oldest_needed=version - 1)
    assert sorted(bench.dispatcher.policies) == [2, 3]


def test_a_duplicate_in_one_pump_is_acked_and_recorded_once() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    inbox(actor)
    filled_order = filled(orders[0], POLICY)
    bench.deliver(actor, filled_order, filled_order)
    assert inbox(actor) == [Ack(order_id=filled_order.order_id)] * 2
    assert bench.recorder.recorded == [filled_order.order_id]


def test_a_duplicate_in_a_later_pump_is_acked_and_dropped() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    actor, second = bench.actor("a"), bench.actor("b")
    bench.dispatcher.submit(orders)
    filled_order = filled(orders[0], POLICY)
    bench.deliver(actor, filled_order)
    bench.deliver(second, filled_order)
    assert inbox(second)[-1] == Ack(order_id=filled_order.order_id)
    bench.dispatcher.collect(ids(orders))
    bench.deliver(actor, filled_order)
    assert inbox(actor)[-1] == Ack(order_id=filled_order.order_id)
    assert bench.recorder.recorded == [filled_order.order_id]
    assert bench.dispatcher.filled == {}


def test_what_an_uninvited_actor_sends_is_ignored() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    bench.dispatcher.submit(orders)
    uninvited = bench.hub.actor_port("uninvited")
    bench.deliver(uninvited, filled(orders[0], POLICY))
    assert inbox(uninvited) == []
    assert bench.recorder.recorded == []


def another_version(filled_order: FilledOrder) -> FilledOrder:
    return msgspec.structs.replace(filled_order, policy_version=3)


def another_adapter(filled_order: FilledOrder) -> FilledOrder:
    return msgspec.structs.replace(filled_order, adapter_sha256="f" * 64)


def another_prompt(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, prompt_ids=np.array([5], np.int32))


def another_group(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, group_id="train/000000/0009")


def a_group_too_many(filled_order: FilledOrder) -> FilledOrder:
    return msgspec.structs.replace(filled_order, groups=filled_order.groups * 2)


def a_completion_too_few(filled_order: FilledOrder) -> FilledOrder:
    group = filled_order.groups[0]
    num_tokens = group.lengths[0]
    return with_group(
        filled_order,
        completion_ids=group.completion_ids[:num_tokens],
        logprobs=group.logprobs[:num_tokens],
        lengths=group.lengths[:1],
        finishes=group.finishes[:1],
        outcomes=group.outcomes[:1],
        scores=group.scores[:1],
    )


def not_a_number(filled_order: FilledOrder) -> FilledOrder:
    logprobs = filled_order.groups[0].logprobs.copy()
    logprobs[-1] = np.nan
    return with_group(filled_order, logprobs=logprobs)


WRONG = {
    another_version: "policy 3 .*ordered was 0",
    another_prompt: "not the ones that were ordered",
    another_group: "not the ones that were ordered",
    a_group_too_many: "not the ones that were ordered",
    a_completion_too_few: "not the ones that were ordered",
    not_a_number: "not finite in logprobs",
}


@pytest.mark.parametrize(("change", "words"), [pytest.param(*case, id=case[0].__name__) for case in WRONG.items()])
def test_a_wrong_filled_order_is_refused_in_words_and_ordered_from_another(
    change: Callable[[FilledOrder], FilledOrder], words: str
) -> None:
    reason = refused_and_ordered_again(change)
    assert "train/000000/" in reason
    assert re.search(words, reason), reason


def test_what_was_sampled_from_other_bytes_before_a_restart_is_dropped_until_the_policy_was_read() -> None:
    bench, (first, second) = Bench(), toy_orders(count=2)
    actor = bench.actor(num_credits=1)
    bench.dispatcher.submit([first, second])
    inbox(actor)
    bench.deliver(actor, *[another_adapter(filled(order, POLICY)) for order in (first, second)])
    assert inbox(actor) == [] and bench.recorder.recorded == []
    bench.deliver(actor, filled(first, POLICY))
    assert orders_in(actor) == ids([second]) and bench.recorder.recorded == ids([first])
    bench.deliver(actor, another_adapter(filled(second, POLICY)))
    (refusal,) = inbox(actor)
    assert isinstance(refusal, Refused)
    assert re.search("policy 0 .*ffffffffffff.*ordered was 0", refusal.reason)


def test_a_right_filled_order_beside_a_wrong_one_counts() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    faulty, other = bench.actor("faulty"), bench.actor("other")
    bench.dispatcher.submit(orders)
    right = filled(orders[0], POLICY)
    faulty.send(another_prompt(right))
    bench.deliver(other, right)
    assert bench.recorder.recorded == ids(orders)
    (found,) = bench.dispatcher.collect(ids(orders))
    assert found.adapter_sha256 == POLICY.sha256
    # It was idle while nobody had filled an order yet.
    assert orders_in(other) == ids(orders)


# --- the long tail


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_late_order_goes_to_an_idle_actor_too_and_the_first_filled_order_counts() -> None:
    clock = Clock()
    bench, (order, other) = Bench(now=clock, late_s=10.0), toy_orders(count=2)
    slow, busy = bench.actor("slow", num_credits=1), bench.actor("busy", num_credits=1)
    bench.dispatcher.submit([order, other])
    assert orders_in(slow) + orders_in(busy) == ids([order, other])
    clock.time += 10.5
    bench.dispatcher.pump()
    assert orders_in(slow) == orders_in(busy) == []
    idle = bench.actor("idle")
    assert orders_in(idle) == ids([order])
    bench.dispatcher.pump()
    # One at a time: the idle one is idle no more.
    assert orders_in(idle) == orders_in(slow) == orders_in(busy) == []
    bench.events.clear()
    bench.deliver(idle, filled(order, POLICY))
    assert bench.events[:2] == [f"record {order.order_id}", f"Ack {order.order_id}"]
    # Now it can help with the other, which nobody has filled.
    assert orders_in(idle) == ids([other])
    bench.events.clear()
    bench.deliver(slow, filled(order, POLICY))
    assert bench.events == [f"Ack {order.order_id}"]
    bench.deliver(busy, filled(other, POLICY))
    assert len(bench.dispatcher.collect(ids([order, other]))) == 2
    assert bench.dispatcher.given_at == {} and bench.dispatcher.orders == {}


def test_an_order_that_was_given_again_is_not_late_again_at_once() -> None:
    clock = Clock()
    bench, early, (order,) = Bench(now=clock, late_s=10.0), toy_orders(count=3), toy_orders(1, count=1)
    actors = [bench.actor(name, num_credits=1) for name in ("a", "b", "c")]
    bench.dispatcher.submit(early)
    for actor, first in zip(actors, early, strict=True):
        assert orders_in(actor) == ids([first])
        actor.send(filled(first, POLICY))
    bench.dispatcher.pump()
    bench.dispatcher.submit([order])

    def who_gets_it(seconds: float) -> list[int]:
        clock.time += seconds
        bench.dispatcher.pump()
        return [number for number, actor in enumerate(actors) if order.order_id in orders_in(actor)]

    assert [who_gets_it(seconds) for seconds in (0.0, 10.5, 9.0, 1.5)] == [[0], [1], [], [2]]


def test_what_a_helper_loses_is_not_queued_while_the_first_still_has_it() -> None:
    clock = Clock()
    bench, (order,) = Bench(now=clock, late_s=10.0), toy_orders(count=1)
    slow = bench.actor("slow")
    bench.dispatcher.submit([order])
    clock.time += 10.5
    helper = bench.actor("helper")
    assert orders_in(slow) == orders_in(helper) == ids([order])
    helper.send(Bye(reason="restarting"))
    bench.dispatcher.pump()
    assert orders_in(slow) == [] and not bench.dispatcher.queue
    slow.send(Bye(reason="restarting"))
    bench.dispatcher.pump()
    assert list(bench.dispatcher.queue) == ids([order])
    assert orders_in(bench.actor("third")) == ids([order])


def test_who_helped_with_an_order_is_forgotten_with_its_version() -> None:
    clock = Clock()
    bench, (order,) = Bench(now=clock, late_s=10.0), toy_orders(count=1)
    bench.actor("slow")
    bench.dispatcher.submit([order])
    clock.time += 10.5
    idle = bench.actor("idle")
    assert orders_in(idle) == ids([order])
    bench.deliver(idle, filled(order, POLICY))
    bench.dispatcher.collect(ids([order]))
    bench.dispatcher.publish(toy_policy(1), oldest_needed=0)
    assert list(bench.dispatcher.helped) == ids([order]), "the slow one may still fill it"
    bench.dispatcher.publish(toy_policy(2), oldest_needed=1)
    assert not bench.dispatcher.helped


# --- asked to stop


def test_who_was_asked_to_stop_does_not_wait_for_somebody_to_come() -> None:
    bench, orders = Bench(heartbeat_s=0.01, stop=lambda: True), toy_orders(count=1)
    bench.dispatcher.submit(orders)
    with pytest.raises(Unfilled):
        bench.dispatcher.collect(ids(orders))


def test_who_was_asked_to_stop_waits_for_those_who_are_there() -> None:
    asked = [False]
    bench, orders = Bench(heartbeat_s=0.01, stop=lambda: asked[0]), toy_orders(count=2)
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    asked[0] = True
    actor.send(filled(orders[0], POLICY))
    actor.send(filled(orders[1], POLICY))
    assert [filled_order.order_id for filled_order in bench.dispatcher.collect(ids(orders))] == ids(orders)


def test_who_was_asked_to_stop_gives_up_an_evaluation_and_sends_no_more_of_it() -> None:
    asked = [False]
    bench, orders = Bench(heartbeat_s=0.01, stop=lambda: asked[0]), toy_orders(count=3, lane="eval-base-greedy")
    actor = bench.actor(num_credits=1)
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders[:1])
    asked[0] = True
    with pytest.raises(Unfilled):
        bench.dispatcher.collect(ids(orders))
    actor.send(filled(orders[0], POLICY))
    bench.dispatcher.end_run(0.05)
    assert orders_in(actor) == []


def test_what_is_filled_already_is_collected_though_nobody_is_there() -> None:
    orders = toy_orders(count=2)
    bench = Bench(known=[filled(order, POLICY) for order in orders], stop=lambda: True)
    bench.dispatcher.submit(orders)
    assert [filled_order.order_id for filled_order in bench.dispatcher.collect(ids(orders))] == ids(orders)
