"""The number of ranks of each step in the journal: noted when it changes, found again, kept when old segments go."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.commands.replay import stretches
from learner.durable.checkpoint import Checkpoint, packed_checkpoint, unpacked_checkpoint
from learner.durable.journal import Journal
from learner.durable.recorder import Index, JournalRecorder, ranks_at
from tests.support.fakes import filled, toy_orders, toy_policy


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    yield journal
    journal.close()


def started(journal: Journal, first_step: int, ranks: int) -> JournalRecorder:
    """A start of the run from this step."""
    recorder = JournalRecorder(journal, first_step, lambda group: None)
    recorder.note_ranks(ranks)
    return recorder


def found(journal: Journal) -> dict[int, int]:
    return Index(journal.reading().segments).ranks


def test_one_rank_from_the_start_on_is_not_noted(journal: Journal) -> None:
    started(journal, 0, 1)
    started(journal, 4, 1)
    assert journal.next_record == 0 and found(journal) == {}


def test_every_change_is_noted_once(journal: Journal) -> None:
    for first_step, ranks in ((0, 2), (3, 2), (4, 4), (6, 4), (7, 1), (9, 1)):
        started(journal, first_step, ranks)
    assert journal.next_record == 3
    assert found(journal) == {0: 2, 4: 4, 7: 1}
    assert [ranks_at(found(journal), step) for step in (0, 3, 4, 6, 7, 99)] == [2, 2, 4, 4, 1, 1]


def test_a_start_from_an_earlier_step_computes_the_later_ones_again(journal: Journal) -> None:
    for first_step, ranks in ((0, 2), (4, 4), (2, 2)):
        started(journal, first_step, ranks)
    assert found(journal) == {0: 2, 2: 2}
    started(journal, 1, 1)
    assert found(journal) == {0: 2, 1: 1}


def test_orders_around_such_a_record_are_found(journal: Journal) -> None:
    (early,), (late,) = toy_orders(0), toy_orders(4)
    started(journal, 0, 2).record([filled(early, toy_policy(0))])
    started(journal, 4, 4).record([filled(late, toy_policy(0))])
    assert set(Index(journal.reading().segments).found) == {early.order_id, late.order_id}
    assert started(journal, 4, 4).find(late) is not None


def test_a_journal_that_forgets_its_beginning_still_knows_the_ranks(journal: Journal) -> None:
    recorder = started(journal, 0, 2)
    recorder.record([filled(order, toy_policy(0)) for step in range(3) for order in toy_orders(step)])
    recorder = started(journal, 3, 4)
    recorder.record([filled(order, toy_policy(0)) for order in toy_orders(3)])
    recorder.forget_before(2)
    recorder.forget_before(2)
    assert [ranks_at(found(journal), step) for step in (2, 3, 9)] == [2, 4, 4]
    recorder.forget_before(5)
    assert min(journal.firsts) > 1 and [ranks_at(found(journal), step) for step in (5, 9)] == [4, 4]


def test_the_ranks_are_kept_by_one_record_so_a_kill_loses_none(journal: Journal) -> None:
    recorder = started(journal, 20, 2)
    before = journal.next_record
    recorder.forget_before(10)
    assert journal.next_record == before + 1
    assert found(journal) == recorder.ranks == {10: 1, 20: 2}


def test_a_replay_goes_from_change_to_change() -> None:
    assert stretches({}, 0, 6) == [(0, 6)]
    assert stretches({0: 2, 3: 4, 6: 1}, 0, 6) == [(0, 3), (3, 6)]
    assert stretches({0: 2, 3: 4, 5: 1}, 4, 6) == [(4, 5), (5, 6)]
    assert ranks_at({}, 5) == 1 == ranks_at({3: 4}, 2)


@pytest.mark.parametrize("checkpoint", [None, Checkpoint(step=7, files={"a.json": b"{}", "empty": b"", "b": b"\0\1"})])
def test_a_checkpoint_crosses_as_it_is(checkpoint: Checkpoint | None) -> None:
    assert unpacked_checkpoint(packed_checkpoint(checkpoint)) == checkpoint
