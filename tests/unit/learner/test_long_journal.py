"""A journal of many steps: loaded soon, and left on disk until an order is asked for."""

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import Index, JournalRecorder, RecordedOrders
from learner.durable.repair_advice import repair_advice
from learner.durable.resample import sample_again
from protocol.codec import decode, encode, pack
from protocol.messages import FilledOrder, Group, Order
from shared.errors import DamageError
from shared.run.run_dir import RunDir
from tests.support.fakes import filled, toy_orders, toy_policy
from tests.support.wire_examples import forge, plain

STEPS = 16


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


def test_loading_decodes_the_ids_of_orders_and_nothing_else(journal: Journal) -> None:
    """Most of a long journal is behind a checkpoint, and nobody is answered until it is loaded."""
    (early,), (late,) = toy_orders(0), toy_orders(1)
    for order_id in (early.order_id, late.order_id):
        journal.append(pack(forge("FilledOrder", {"order_id": order_id, "groups": "none can be built of this"})))
    assert list(Index(journal.reading().segments).found) == [early.order_id, late.order_id]
    recorder = recorder_of(journal, 1)
    assert list(recorder.found) == [late.order_id]
    with pytest.raises(DamageError, match="Expected `array`"):
        recorder.find(late)


def test_whatever_is_accepted_can_be_loaded(journal: Journal) -> None:
    """Of two fields with one name the last counts, so the first may be anything that the parser takes."""
    (order,) = toy_orders()
    _, body, buffers = encode(fill(order))
    deep = b"\xa6groups" + b"\x91" * 1010 + b"\x90"
    spelled = forge("FilledOrder", bytes([body[0] + 1]) + deep + body[1:], buffers)
    assert plain(decode(spelled)) == plain(fill(order))
    recorder_of(journal).record([fill(order)], {order.order_id: spelled})
    found = recorder_of(journal).find(order)
    assert found is not None and plain(found) == plain(fill(order))


def record_long(run: RunDir) -> None:
    """Each step 1 MiB, in a segment of its own."""
    journal = Journal.open(run.journal, segment_bytes=1)
    ids = np.ones(2**17, np.int32)
    for step in range(STEPS):
        (group,) = (one := fill(toy_orders(step)[0])).groups
        whole = {"completion_ids": ids, "logprobs": -ids.astype(np.float32), "lengths": (1, len(ids) - 1)}
        group = msgspec.structs.replace(group, **whole, entropies=None)
        journal.append(pack(encode(msgspec.structs.replace(one, groups=(group,)))))
    journal.close()


def resampled(run: RunDir) -> object:
    assert sample_again(run, CheckpointStore(run.checkpoints, 1), 3, STEPS) == STEPS - 2


def advised(run: RunDir) -> object:
    newest = max(run.journal.glob("*.log"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"\1")
    with (
        pytest.raises(DamageError, match="up to order train/000014/u0000"),
        repair_advice(CheckpointStore(run.path, 1)),
    ):
        Journal.read(run.journal)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda run: RecordedOrders(Journal.read(run.journal).segments), id="replay"),
        pytest.param(lambda run: recorder_of(Journal.open(run.journal)), id="resume"),
        pytest.param(resampled, id="resample"),
        pytest.param(advised, id="repair advice"),
    ],
)
def test_a_long_journal_stays_on_disk(tmp_path: Path, work: Callable[[RunDir], object]) -> None:
    run = RunDir(tmp_path)
    record_long(run)
    tracemalloc.start()
    result = work(run)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2**18 and most < 6 * 2**20, (kept, most, result)


@pytest.mark.parametrize("size", [None, 100], ids=["gone", "shorter"])
def test_a_journal_that_changes_after_it_was_checked_is_one_sentence(journal: Journal, size: int | None) -> None:
    (order,) = toy_orders()
    recorder_of(journal).record([fill(order)])
    (segment,) = journal.reading().segments
    filler = RecordedOrders([segment])
    if size:
        segment.path.write_bytes(segment.path.read_bytes()[:size])
    else:
        segment.path.unlink()
    with pytest.raises(
        DamageError, match=r"000001\.log was whole when .* at byte 20 cannot be read .* start this command"
    ):
        filler.submit([order])
