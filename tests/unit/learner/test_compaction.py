"""The journal keeps what the kept checkpoints need, and no more when it was asked to."""

from pathlib import Path
from typing import Literal

import pytest

from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import Compaction, JournalRecorder, orders_in
from learner.orders.orders import step_of
from protocol.messages import Group, Order
from shared.config.processes import JournalConfig
from tests.support.fakes import filled, toy_orders, toy_policy

EVERY = 4
KEEP = 3


def anything(group: Group) -> None:
    """Admits every group."""


class Start:
    """One start of what writes checkpoints and journal, without a policy."""

    def __init__(
        self, run: Path, keep: Literal["all", "checkpoints"] = "checkpoints", segment_bytes: int = 2**20
    ) -> None:
        self.store = CheckpointStore(run / "checkpoints", KEEP)
        latest = self.store.load_latest()
        self.first_step = latest.step if latest else 0
        self.journal = Journal.open(run / "journal", segment_bytes=segment_bytes)
        self.recorder = JournalRecorder(self.journal, self.first_step, anything)
        self.compaction = Compaction(JournalConfig(keep=keep), self.store, self.recorder)

    def train(self, last: int, *, lag: int = 0, best: int | None = None) -> list[int]:
        """Steps up to `last`, each of two orders; gives the steps whose filled orders were found, not made."""
        found: list[int] = []
        ordered = self.first_step
        for step in range(self.first_step, last):
            while ordered <= min(step + lag, last - 1):
                found += self.fill(toy_orders(ordered, count=2))
                ordered += 1
            if (step + 1) % EVERY == 0:
                self.save(step + 1, best)
        return found

    def fill(self, orders: list[Order]) -> list[int]:
        known = [order for order in orders if self.recorder.find(order)]
        self.recorder.record([filled(order, toy_policy(0)) for order in orders if order not in known])
        return [step_of(order.order_id) for order in known]

    def save(self, step: int, best: int | None) -> None:
        self.store.save(Checkpoint(step=step, files={"state": b"%d" % step}), keep_also=() if best is None else {best})
        self.compaction.after_checkpoint(step)

    def steps(self) -> set[int]:
        """Those whose filled orders are in the journal."""
        return {step_of(order_id) for payload in self.journal.reading().records() for order_id in orders_in(payload)}

    def end(self) -> None:
        self.journal.close()


def test_all_is_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    assert JournalConfig().keep == "all"
    start = Start(tmp_path, "all")
    start.train(40)
    assert start.steps() == set(range(40)) and not (tmp_path / "journal" / "start").exists()
    start.end()


def test_nothing_goes_while_there_are_fewer_checkpoints_than_are_kept(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.train(EVERY * KEEP - 1)
    assert min(start.steps()) == 0
    start.end()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("segment_bytes", [1, 2**20])
def test_what_the_oldest_kept_checkpoint_needs_stays(tmp_path: Path, lag: int, segment_bytes: int) -> None:
    start = Start(tmp_path, segment_bytes=segment_bytes)
    start.train(40, lag=lag)
    oldest = 40 - EVERY * (KEEP - 1)
    assert set(range(oldest, 40)) <= start.steps()
    assert min(start.steps()) >= oldest - EVERY
    assert start.journal.reading().start.step == oldest == start.store.oldest_kept(40)
    start.end()


def test_segments_and_their_bookkeeping_do_not_grow(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.train(400)
    assert len(list((tmp_path / "journal").glob("*.log"))) == KEEP
    assert len(start.journal.firsts) == KEEP and len(start.recorder.last_steps) <= KEEP
    start.end()


def test_the_best_checkpoint_holds_nothing_back(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.train(40, best=4)
    assert start.store.load(4).step == 4
    assert min(start.steps()) > 4
    start.end()


@pytest.mark.parametrize("stopped", range(13, 21))
def test_a_resumed_life_finds_what_it_needs_and_gives_up_the_same(tmp_path: Path, stopped: int) -> None:
    whole = Start(tmp_path / "whole")
    whole.train(24)
    first = Start(tmp_path / "resumed")
    first.train(stopped)
    first.end()
    second = Start(tmp_path / "resumed")
    since = stopped - stopped % EVERY
    assert second.first_step == since
    found = second.train(24)
    assert sorted(set(found)) == list(range(since, stopped))
    assert second.steps() == whole.steps()
    second.end()
    whole.end()


def test_a_damaged_newest_checkpoint_finds_its_records(tmp_path: Path) -> None:
    first = Start(tmp_path)
    first.train(24)
    first.end()
    for step in (24, 20):
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "state").write_bytes(b"damaged")
    second = Start(tmp_path)
    assert second.first_step == 16
    assert sorted(set(second.train(24))) == list(range(16, 24))
    second.end()


def test_records_that_were_handed_out_are_not_kept(tmp_path: Path) -> None:
    first = Start(tmp_path, "all")
    first.train(EVERY * 2 + 3)
    first.end()
    second = Start(tmp_path, "all")
    assert {step_of(order_id) for order_id in second.recorder.found} == set(range(8, 11))
    second.train(40)
    assert second.recorder.found == {}
    second.end()
