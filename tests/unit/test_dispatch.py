"""Orders out, groups in, each applied exactly once: the dispatcher against actors that a test plays by hand."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.dispatch import Dispatcher
from protocol.errors import PeerTimeout, ProtocolError
from protocol.memory_transport import MemoryActorPort, MemoryHub
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AnyMessage,
    Bye,
    Drain,
    Group,
    Groups,
    Heartbeat,
    Order,
    Policy,
    Refused,
    Welcome,
)
from protocol.transport import LearnerPort
from tests.fakes import filled, hello_of, scripted_identity, toy_orders, toy_policy
from tests.wire_examples import forge

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

    def receive(self, timeout_s: float) -> tuple[bytes, AnyMessage | ProtocolError] | None:
        return self.port.receive(timeout_s)

    def close(self) -> None:
        self.port.close()


class NotedRecorder:
    """A recorder that notes what it is told, knows some answers, and may have a full disk."""

    def __init__(self, events: list[str], known: Sequence[Groups] = ()) -> None:
        self.events = events
        self.known = {groups.order_id: groups for groups in known}
        self.recorded: list[str] = []
        self.broken = False

    def find(self, order: Order) -> Groups | None:
        return self.known.get(order.order_id)

    def record(self, answers: Sequence[Groups]) -> None:
        if self.broken:
            raise OSError("disk full")
        self.recorded += [groups.order_id for groups in answers]
        self.events += [f"record {groups.order_id}" for groups in answers]


class Bench:
    """A dispatcher at one end of a wire in memory; `events` is what it sent and recorded, in order."""

    def __init__(
        self, known: Sequence[Groups] = (), *, heartbeat_s: float = FOREVER_S, silence_s: float = FOREVER_S
    ) -> None:
        self.hub = MemoryHub(send_timeout_s=0.05)
        self.events: list[str] = []
        self.recorder = NotedRecorder(self.events, known)
        self.dispatcher = Dispatcher(
            NotedPort(self.hub.learner_port(), self.events),
            self.recorder,
            expected=hello_of(scripted_identity()),
            welcome=Welcome(run_id="run-1", heartbeat_s=heartbeat_s, silence_s=silence_s),
        )
        self.dispatcher.publish(POLICY, oldest_needed=0)

    def actor(self, actor_id: str = "actor0", num_credits: int = 2) -> MemoryActorPort:
        """An actor that has been let in."""
        port = self.hub.actor_port(actor_id)
        port.send(hello_of(scripted_identity(), actor_id, num_credits))
        self.dispatcher.pump()
        assert isinstance(port.receive(0), Welcome)
        return port

    def deliver(self, port: MemoryActorPort, *answers: Groups) -> None:
        """Answers that arrive together."""
        for groups in answers:
            port.send(groups)
        self.dispatcher.pump()


def inbox(port: MemoryActorPort) -> list[AnyMessage]:
    """Everything that has come."""
    found: list[AnyMessage] = []
    while (message := port.receive(0)) is not None:
        found.append(message)
    return found


def orders_in(port: MemoryActorPort) -> list[str]:
    """Ids of the orders that have come."""
    return [message.order_id for message in inbox(port) if isinstance(message, Order)]


def ids(orders: Sequence[Order]) -> list[str]:
    return [order.order_id for order in orders]


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
    (answer,) = bench.dispatcher.collect(ids(orders))
    assert answer.groups[0].completion_ids.tolist() == filled(order, policy).groups[0].completion_ids.tolist()


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
    assert bench.dispatcher.answers == {}


def test_credits_bound_what_an_actor_holds() -> None:
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


def test_answers_come_in_the_order_asked_for() -> None:
    bench, orders = Bench(), toy_orders(count=3)
    actor = bench.actor(num_credits=3)
    bench.dispatcher.submit(orders)
    bench.deliver(actor, *[filled(order, POLICY) for order in reversed(orders)])
    assert [groups.order_id for groups in bench.dispatcher.collect(ids(orders))] == ids(orders)


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
    groups = filled(orders[0], POLICY)
    bench.deliver(actor, groups, groups)
    assert inbox(actor) == [Ack(order_id=groups.order_id)] * 2
    assert bench.recorder.recorded == [groups.order_id]


def test_a_duplicate_in_a_later_pump_is_acked_and_dropped() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    actor, second = bench.actor("a"), bench.actor("b")
    bench.dispatcher.submit(orders)
    groups = filled(orders[0], POLICY)
    bench.deliver(actor, groups)
    bench.deliver(second, groups)
    assert inbox(second) == [Ack(order_id=groups.order_id)]
    bench.dispatcher.collect(ids(orders))
    bench.deliver(actor, groups)
    assert inbox(actor)[-1] == Ack(order_id=groups.order_id)
    assert bench.recorder.recorded == [groups.order_id]
    assert bench.dispatcher.answers == {}


def test_an_order_that_nobody_gave_is_acked_and_dropped() -> None:
    """A learner that was restarted has not yet ordered again what an actor still holds for it."""
    bench = Bench()
    actor = bench.actor()
    bench.deliver(actor, filled(toy_orders(step=12)[0], POLICY))
    assert inbox(actor) == [Ack(order_id="train/000012/u0000")]
    assert bench.recorder.recorded == []


def test_what_an_uninvited_actor_sends_is_ignored() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    bench.dispatcher.submit(orders)
    stranger = bench.hub.actor_port("stranger")
    bench.deliver(stranger, filled(orders[0], POLICY))
    assert inbox(stranger) == []
    assert bench.recorder.recorded == []


def another_version(groups: Groups) -> Groups:
    return msgspec.structs.replace(groups, policy_version=3)


def another_adapter(groups: Groups) -> Groups:
    return msgspec.structs.replace(groups, adapter_sha256="f" * 64)


def another_prompt(groups: Groups) -> Groups:
    return with_group(groups, prompt_ids=np.array([5], np.int32))


def another_group(groups: Groups) -> Groups:
    return with_group(groups, group_id="train/000000/0009")


def a_group_too_many(groups: Groups) -> Groups:
    return msgspec.structs.replace(groups, groups=groups.groups * 2)


def a_sample_too_few(groups: Groups) -> Groups:
    group = groups.groups[0]
    num_tokens = group.lengths[0]
    return with_group(
        groups,
        completion_ids=group.completion_ids[:num_tokens],
        logprobs=group.logprobs[:num_tokens],
        lengths=group.lengths[:1],
        finishes=group.finishes[:1],
        outcomes=group.outcomes[:1],
        scores=group.scores[:1],
    )


def not_a_number(groups: Groups) -> Groups:
    logprobs = groups.groups[0].logprobs.copy()
    logprobs[-1] = np.nan
    return with_group(groups, logprobs=logprobs)


def with_group(groups: Groups, **changes: Any) -> Groups:
    group: Group = msgspec.structs.replace(groups.groups[0], **changes)
    return msgspec.structs.replace(groups, groups=(group,))


WRONG = {
    another_version: "policy 3 .*ordered was 0",
    another_adapter: "policy 0 .*ffffffffffff.*ordered was 0",
    another_prompt: "not the ones that were ordered",
    another_group: "not the ones that were ordered",
    a_group_too_many: "not the ones that were ordered",
    a_sample_too_few: "not the ones that were ordered",
    not_a_number: "not finite in logprobs",
}


@pytest.mark.parametrize(("change", "words"), [pytest.param(*case, id=case[0].__name__) for case in WRONG.items()])
def test_a_wrong_answer_is_refused_in_words_and_ordered_from_another(
    change: Callable[[Groups], Groups], words: str
) -> None:
    bench, orders = Bench(), toy_orders(count=1)
    faulty = bench.actor("faulty")
    bench.dispatcher.submit(orders)
    inbox(faulty)
    other = bench.actor("other")
    bench.deliver(faulty, change(filled(orders[0], POLICY)))
    (refusal,) = inbox(faulty)
    assert isinstance(refusal, Refused)
    assert "train/000000/" in refusal.reason
    assert re.search(words, refusal.reason), refusal.reason
    assert bench.recorder.recorded == []
    assert orders_in(other) == ids(orders)
    bench.deliver(other, filled(orders[0], POLICY))
    assert [groups.order_id for groups in bench.dispatcher.collect(ids(orders))] == ids(orders)


def test_a_right_answer_beside_a_wrong_one_counts() -> None:
    bench, orders = Bench(), toy_orders(count=1)
    faulty, other = bench.actor("faulty"), bench.actor("other")
    bench.dispatcher.submit(orders)
    right = filled(orders[0], POLICY)
    faulty.send(another_adapter(right))
    bench.deliver(other, right)
    assert bench.recorder.recorded == ids(orders)
    (answer,) = bench.dispatcher.collect(ids(orders))
    assert answer.adapter_sha256 == POLICY.sha256
    assert orders_in(other) == []


def test_what_a_leaving_actor_held_is_ordered_first() -> None:
    bench, orders = Bench(), toy_orders(count=4)
    actor = bench.actor("a", 2)
    bench.dispatcher.submit(orders)
    actor.send(Bye(reason="enough"))
    bench.dispatcher.pump()
    assert orders_in(bench.actor("b", 9)) == ids(orders)


def test_what_an_unreachable_actor_held_is_ordered_first() -> None:
    bench, orders = Bench(), toy_orders(count=3)
    actor = bench.actor("a", 2)
    bench.dispatcher.submit(orders[:1])
    actor.close()
    bench.dispatcher.submit(orders[1:])
    assert bench.dispatcher.peers.by_address == {}
    assert orders_in(bench.actor("b", 9)) == ids(orders)


def test_what_a_silent_actor_held_is_ordered_first() -> None:
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
    restarted = bench.actor("a", 3)
    policy, *sent = inbox(restarted)
    assert isinstance(policy, Policy)
    assert [message.order_id for message in sent if isinstance(message, Order)] == ids(orders)[:3]
    assert len(bench.dispatcher.peers.by_address) == 1


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
        (forge("Ack", {"order_id": 5}), "Ack message is not as agreed"),
        (forge("Ack", {"order_id": "x"}, version=PROTOCOL_VERSION + 1), "install the same release on both"),
    ],
)
def test_what_is_no_message_is_answered_with_refused(frames: list[bytes], words: str) -> None:
    bench = Bench()
    actor = bench.hub.actor_port("noisy")
    actor.send_frames(frames, "noise")
    bench.dispatcher.pump()
    (refusal,) = inbox(actor)
    assert isinstance(refusal, Refused) and words in refusal.reason


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


def test_an_order_that_the_journal_answers_is_never_sent() -> None:
    orders = toy_orders(count=2)
    bench = Bench(known=[filled(orders[0], POLICY)])
    actor = bench.actor()
    bench.dispatcher.submit(orders)
    assert orders_in(actor) == ids(orders)[1:]
    bench.deliver(actor, filled(orders[1], POLICY))
    assert [groups.order_id for groups in bench.dispatcher.collect(ids(orders))] == ids(orders)
    assert bench.recorder.recorded == ids(orders)[1:]


def test_farewell_drains_and_waits_for_goodbyes() -> None:
    bench = Bench(heartbeat_s=0.02)
    leaving, staying = bench.actor("leaving"), bench.actor("staying")
    leaving.send(Bye(reason="drained"))
    start = time.monotonic()
    bench.dispatcher.farewell(patience_s=0.2)
    assert time.monotonic() - start >= 0.2
    assert Drain() in inbox(leaving) and Drain() in inbox(staying)
    assert [peer.hello.actor_id for peer in bench.dispatcher.peers.by_address.values()] == ["staying"]


def test_farewell_is_short_when_all_have_left() -> None:
    bench = Bench(heartbeat_s=0.02)
    bench.actor().send(Bye(reason="drained"))
    start = time.monotonic()
    bench.dispatcher.farewell(patience_s=60.0)
    assert time.monotonic() - start < 30.0
