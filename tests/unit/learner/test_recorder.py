"""The journal as the dispatcher sees it: on real files."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.durable.journal import Journal
from learner.durable.recorder import (
    Index,
    JournalRecorder,
    RecordedOrders,
    orders_in,
    read,
    records_of,
)
from learner.orders.orders import NO_FRAMES, RECORD_BYTES, build_orders
from protocol.codec import encode, pack, to_msgpack
from protocol.messages import PROTOCOL_VERSION, FilledOrder, Group, Order, Sampling
from shared.errors import DamageError, RunDirError, TrainingStopped
from tests.support.disk_faults import failing
from tests.support.fakes import filled, toy_orders, toy_policy, toy_tasks
from tests.support.wire_examples import forge, plain

POLICY = toy_policy(0)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    yield journal
    journal.close()


def anything(group: Group) -> None:
    """Admits every group."""


def recorder_of(journal: Journal, first_step: int = 0) -> JournalRecorder:
    return JournalRecorder(journal, first_step, anything)


def fill(order: Order) -> FilledOrder:
    return filled(order, toy_policy(order.policy_version))


def test_what_is_recorded_is_found_by_the_next_life(journal: Journal) -> None:
    orders = toy_orders(count=2)
    recorder = recorder_of(journal)
    assert [recorder.find(order) for order in orders] == [None, None]
    recorder.record([fill(order) for order in orders])
    found = [recorder_of(journal).find(order) for order in orders]
    assert [plain(filled_order) for filled_order in found if filled_order] == [plain(fill(order)) for order in orders]


def test_recording_is_durable_when_it_returns(journal: Journal) -> None:
    recorder_of(journal).record([fill(order) for order in toy_orders(count=3)])
    found = Index(Journal.read(journal._folder).segments).found  # pyright: ignore[reportPrivateUsage]
    assert list(found) == [order.order_id for order in toy_orders(count=3)]


def test_it_holds_what_is_on_disk_or_in_a_checkpoint_and_nothing_to_come(journal: Journal) -> None:
    early, late = toy_orders(0)[0], toy_orders(1)[0]
    recorder = recorder_of(journal)
    assert not recorder.is_durable(early.order_id)
    recorder.record([fill(early)])
    assert recorder.is_durable(early.order_id) and not recorder.is_durable(late.order_id)
    assert recorder_of(journal).is_durable(early.order_id)
    next_life = recorder_of(journal, first_step=1)
    assert next_life.is_durable("train/000000/u0007") and not next_life.is_durable(late.order_id)
    assert next_life.is_durable(toy_orders(1, lane="eval")[0].order_id)


class NotedJournal(Journal):
    """Notes when it is written and when it is synced."""

    events: tuple[str, ...] = ()

    def append(self, *parts: bytes) -> None:
        super().append(*parts)
        self.events += ("append",)

    def sync(self) -> None:
        super().sync()
        self.events += ("sync",)


def large(order: Order) -> FilledOrder:
    """A quarter of a record that takes no further order, and a little more."""
    (group,) = (filled_order := fill(order)).groups
    ids = np.ones(RECORD_BYTES // 4 // 8, np.int32)
    whole = msgspec.structs.replace(
        group, completion_ids=ids, logprobs=-ids.astype(np.float32), lengths=(1, len(ids) - 1)
    )
    return msgspec.structs.replace(filled_order, groups=(whole,))


def test_what_came_together_is_one_record_and_one_sync(tmp_path: Path) -> None:
    journal = NotedJournal.open(tmp_path / "journal")
    recorder = recorder_of(journal)
    journal.events = ()
    recorder.record([fill(order) for order in toy_orders(count=20)])
    assert journal.events == ("append", "sync")
    assert len(orders_in(next(journal.reading().records()))) == 20
    recorder.record([])
    assert journal.events == ("append", "sync"), "nothing came"
    journal.close()


def test_each_record_is_synced_before_the_next_is_written(tmp_path: Path) -> None:
    """A crash may then tear one record at most, which is what recovery can tell from damage."""
    journal = NotedJournal.open(tmp_path / "journal")
    recorder = recorder_of(journal)
    journal.events = ()
    orders = [large(order) for order in toy_orders(count=6)]
    recorder.record(orders)
    assert journal.events == ("append", "sync", "append", "sync")
    packed = [orders_in(payload) for payload in journal.reading().records()]
    assert [len(record) for record in packed] == [4, 2]
    assert [plain(read(one)) for record in packed for one in record.values()] == [plain(order) for order in orders]
    journal.close()


def test_a_record_of_several_orders_that_was_torn_holds_none_of_them(journal: Journal) -> None:
    """None of them was acknowledged."""
    early, late = toy_orders(0, count=3), toy_orders(1, count=3)
    recorder = recorder_of(journal)
    recorder.record([fill(order) for order in early])
    whole = journal.reading().segments[0].records[0].end
    recorder.record([fill(order) for order in late])
    (segment,) = journal.reading().segments
    with segment.path.open("r+b") as file:
        file.truncate((whole + segment.path.stat().st_size) // 2)
    again = Journal.open(segment.path.parent)
    found = recorder_of(again)
    assert again.recovered and [found.find(order) is not None for order in (*early, *late)] == [True] * 3 + [False] * 3
    again.close()


def test_records_have_the_bytes_of_the_messages() -> None:
    orders = [fill(order) for order in toy_orders(count=3)]
    (record,) = records_of(orders, NO_FRAMES)
    assert [b"".join(parts) for parts in record.values()] == [pack(encode(order)) for order in orders]


def test_what_came_as_a_message_is_recorded_as_it_was_spelled(journal: Journal) -> None:
    """Another implementation need not produce our bytes."""
    ours, other = (fill(order) for order in toy_orders(count=2))
    _, body, buffers = encode(other)
    spelled = forge("FilledOrder", dict(reversed(msgspec.msgpack.decode(body).items())), buffers)
    assert spelled[1] != body
    recorder_of(journal).record([ours, other], {other.order_id: spelled})
    (record,) = journal.reading().records()
    assert record == pack([*encode(ours), *spelled])
    found = recorder_of(journal)
    assert [plain(filled_order) for order in toy_orders(count=2) if (filled_order := found.find(order))] == [
        plain(ours),
        plain(other),
    ]


def test_what_was_begun_is_durable_after_the_next_record(journal: Journal) -> None:
    first, second = toy_orders(count=2)
    recorder = recorder_of(journal)
    recorder.begin([fill(first)], NO_FRAMES)
    assert not recorder.is_durable(first.order_id)
    recorder.record([fill(second)])
    assert recorder.is_durable(first.order_id) and recorder.is_durable(second.order_id)
    assert [list(orders_in(payload)) for payload in journal.reading().records()] == [
        [first.order_id],
        [second.order_id],
    ]


def test_what_was_begun_is_not_durable_if_the_disk_fails(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    recorder, (order,) = recorder_of(journal), toy_orders(count=1)
    with failing("fsync", errno.EIO), pytest.raises(RunDirError, match="Input/output error"):
        recorder.begin([fill(order)], NO_FRAMES)
        recorder.record([])
    assert not recorder.is_durable(order.order_id)
    with pytest.raises(RunDirError, match="failed earlier"):
        journal.close()


def test_a_group_that_must_stop_the_run_is_not_recorded(journal: Journal) -> None:
    good, bad, later = (fill(order) for order in toy_orders(count=3))

    def admit(group: Group) -> None:
        if group.group_id == bad.groups[0].group_id:
            raise TrainingStopped("The verifier broke; fix it, then resume.")

    with pytest.raises(TrainingStopped):
        JournalRecorder(journal, 0, admit).record([good, bad, later])
    found = recorder_of(journal)
    orders = toy_orders(count=3)
    assert [found.find(order) is not None for order in orders] == [True, False, False]


def test_evaluations_are_not_recorded(journal: Journal) -> None:
    mixed = [*toy_orders(lane="eval-base-greedy"), *toy_orders(lane="train"), *toy_orders(lane="eval-final-sampled")]
    recorder_of(journal).record([fill(order) for order in mixed])
    assert journal.next_record == 1
    assert recorder_of(journal).find(mixed[1])


def test_steps_behind_a_checkpoint_are_not_kept(journal: Journal) -> None:
    orders = [toy_orders(step)[0] for step in range(4)]
    recorder_of(journal).record([fill(order) for order in orders])
    later = recorder_of(journal, 2)
    assert [later.find(order) is not None for order in orders] == [False, False, True, True]


def test_the_first_of_two_records_counts(journal: Journal) -> None:
    (order,) = toy_orders()
    first = fill(order)
    second = msgspec.structs.replace(first, adapter_sha256="f" * 64)
    journal.append(pack(encode(first)))
    journal.append(pack(encode(second)))
    found = recorder_of(journal).find(order)
    assert found is not None and found.adapter_sha256 == POLICY.sha256


def another(**changes: Any) -> Order:
    arguments: dict[str, Any] = {
        "seed": 0,
        "lane": "train",
        "step": 0,
        "first_slot": 0,
        "samples": 2,
        "version": 0,
        "sampling": Sampling(temperature=1.0, max_new_tokens=4),
        "groups_per_order": 1,
    }
    tasks = changes.pop("tasks", toy_tasks(1))
    return build_orders(tasks, **arguments | changes)[0]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(another(tasks=toy_tasks(1, first=5)), id="another task"),
        pytest.param(another(samples=3), id="another group size"),
        pytest.param(another(tasks=toy_tasks(2), groups_per_order=2), id="another cut"),
        pytest.param(another(version=1), id="another lag"),
    ],
)
def test_a_record_of_another_config_is_refused(journal: Journal, order: Order) -> None:
    recorder_of(journal).record([fill(toy_orders()[0])])
    with pytest.raises(DamageError, match=r"u0000 .* restore config.json, .*`resume --resample-step 1`"):
        recorder_of(journal).find(order)
    with pytest.raises(DamageError, match=r"order train/000000/u0000"):
        RecordedOrders(journal.reading().segments).submit([order])


def test_a_record_of_another_release_is_one_sentence(journal: Journal) -> None:
    journal.append(pack([to_msgpack({"version": PROTOCOL_VERSION + 1})]))
    with pytest.raises(DamageError, match=r"The journal is of another release; go on with the one that began"):
        RecordedOrders(journal.reading().segments)


def test_the_same_order_fits() -> None:
    assert plain(another()) == plain(toy_orders()[0])


def test_a_replay_fills_orders_from_the_journal(journal: Journal) -> None:
    orders = toy_orders(count=3)
    recorder_of(journal).record([fill(order) for order in reversed(orders)])
    filler = RecordedOrders(journal.reading().segments)
    filler.publish(POLICY, oldest_needed=0)
    filler.submit(orders)
    filler.pump()
    collected = filler.collect([order.order_id for order in orders])
    assert [plain(filled_order) for filled_order in collected] == [plain(fill(order)) for order in orders]


def test_a_replay_misses_an_order_only_when_it_is_collected(journal: Journal) -> None:
    """Orders ahead of the last step were never filled."""
    recorded, ahead = toy_orders(0)[0], toy_orders(1)[0]
    recorder_of(journal).record([fill(recorded)])
    filler = RecordedOrders(journal.reading().segments)
    filler.submit([recorded, ahead])
    assert len(filler.collect([recorded.order_id])) == 1
    with pytest.raises(DamageError, match="no filled order train/000001/u0000"):
        filler.collect([ahead.order_id])


def test_arrays_survive_the_journal_bit_for_bit(journal: Journal) -> None:
    (order,) = toy_orders()
    filled_order = fill(order)
    recorder_of(journal).record([filled_order])
    found = recorder_of(journal).find(order)
    assert found is not None
    assert np.array_equal(found.groups[0].logprobs.view(np.uint32), filled_order.groups[0].logprobs.view(np.uint32))


def test_orders_of_steps_that_a_checkpoint_holds_are_not_remembered_one_by_one(journal: Journal) -> None:
    recorder = recorder_of(journal)
    for step in range(4):
        recorder.record([fill(order) for order in toy_orders(step, count=2)])
    recorder.checkpointed(3)
    assert recorder.durable == {order.order_id for order in toy_orders(3, count=2)}
    # An actor that was slow still has its filled orders acknowledged; one that nobody has is not.
    assert all(recorder.is_durable(order.order_id) for step in range(4) for order in toy_orders(step, count=2))
    assert not recorder.is_durable(toy_orders(4, count=1)[0].order_id)


NOT_OURS = (
    "train",
    "train/x/y",
    "train/",
    "train//u0000",
    "train/000000",
    "train/-1/u0000",
    "train/\xb2/u0000",
    "",
)


@pytest.mark.parametrize("order_id", NOT_OURS)
def test_an_id_that_no_order_of_ours_can_have_counts_as_durable(journal: Journal, order_id: str) -> None:
    """It is acknowledged and dropped: nobody else need keep it, and nothing else happens."""
    assert recorder_of(journal).is_durable(order_id)
