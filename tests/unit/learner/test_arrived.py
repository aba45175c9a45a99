"""What comes within one pump: written while others are read, durable once all are recorded, each order once."""

from learner.orders.arrived import Arrived, Delivered
from learner.orders.orders import RECORD_BYTES
from learner.orders.peers import Peer
from protocol.messages import Order
from tests.support.dispatch_bench import POLICY, NotedRecorder
from tests.support.fakes import filled, hello_of, scripted_identity, toy_orders

FIRST, SECOND = toy_orders(count=2)


def delivered(order: Order, num_bytes: int = 1, address: bytes = b"a-1") -> Delivered:
    """A filled order whose message had so many bytes."""
    peer = Peer(address=address, hello=hello_of(scripted_identity()), heard_at=0.0)
    return Delivered(peer=peer, filled=filled(order, POLICY), frames=(b"", b"", bytes(num_bytes)))


def arrived(events: list[str], *refused: str) -> Arrived:
    return Arrived(lambda peer, one: one.order_id not in refused, NotedRecorder(events))


def test_few_are_recorded_at_the_end_and_together() -> None:
    events: list[str] = []
    found = arrived(events)
    found.add(delivered(FIRST))
    found.add(delivered(SECOND))
    assert events == []
    found.record()
    assert events == [f"record {FIRST.order_id}", f"record {SECOND.order_id}"]


def test_enough_for_a_record_are_begun_while_others_come() -> None:
    events: list[str] = []
    found = arrived(events)
    found.add(delivered(FIRST, RECORD_BYTES))
    assert events == [f"begin {FIRST.order_id}"]
    found.add(delivered(SECOND))
    found.record()
    assert events == [f"begin {FIRST.order_id}", f"record {SECOND.order_id}"]
    assert list(found.fresh) == [FIRST.order_id, SECOND.order_id] and len(found.all) == 2


def test_an_order_that_comes_twice_is_recorded_once_even_after_it_was_begun() -> None:
    events: list[str] = []
    found = arrived(events)
    first, again, same = delivered(FIRST, RECORD_BYTES), delivered(FIRST, address=b"b-2"), delivered(FIRST)
    for one in (first, again, same):
        found.add(one)
    found.record()
    assert events == [f"begin {FIRST.order_id}"]
    assert found.fresh == {FIRST.order_id: first} and found.all == [first, again, same]


def test_what_is_not_wanted_is_not_recorded() -> None:
    events: list[str] = []
    found = arrived(events, FIRST.order_id)
    found.add(delivered(FIRST, RECORD_BYTES))
    found.add(delivered(SECOND))
    found.record()
    assert events == [f"record {SECOND.order_id}"] and list(found.fresh) == [SECOND.order_id]
