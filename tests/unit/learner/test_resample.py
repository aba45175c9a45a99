"""Filled orders that are on disk and cannot be used: voided by a record, so that their steps are sampled again."""

from pathlib import Path

import pytest

from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import Index, JournalRecorder, RecordedOrders, pack_void
from learner.durable.resample import sample_again, with_way_back
from learner.orders.orders import step_of
from learner.update.mismatch import Mismatch
from protocol.codec import encode, pack
from protocol.messages import FilledOrder, Group
from shared.errors import ConfigError, RunDirError
from shared.run.run_dir import RunDir
from tests.support.fakes import filled, toy_orders, toy_policy
from tests.support.wire_examples import plain

STEPS = 6
SEGMENT_BYTES = 900
"""A record or two."""


def anything(group: Group) -> None:
    """Admits every group."""


def filled_of(step: int, policy: bytes | None = None) -> list[FilledOrder]:
    """Of both orders of a step; policy: other bytes give other samples."""
    return [filled(order, toy_policy(0, policy)) for order in toy_orders(step, count=2)]


def store_of(run: RunDir, *steps: int) -> CheckpointStore:
    """With checkpoints of these steps."""
    store = CheckpointStore(run.checkpoints, 3)
    for step in steps:
        store.save(Checkpoint(step=step, files={"state": b"x"}))
    return store


def recorded(folder: Path, steps: int, policy: bytes | None = None, first: int = 0) -> RunDir:
    """A run whose journal holds these steps, in small segments."""
    run = RunDir(folder)
    journal = Journal.open(run.journal, segment_bytes=SEGMENT_BYTES)
    recorder = JournalRecorder(journal, 0, anything)
    for step in range(first, steps):
        recorder.record(filled_of(step, policy))
    journal.close()
    return run


def found_steps(run: RunDir) -> list[int]:
    """Steps that a replay and a resumed run find filled orders of: the same ones."""
    index = Index(Journal.read(run.journal).segments).found
    journal = Journal.open(run.journal, segment_bytes=SEGMENT_BYTES)
    recorder = JournalRecorder(journal, 0, anything)
    journal.close()
    assert recorder.found == index and recorder.durable == set(index)
    return sorted({step_of(order_id) for order_id in index})


def test_the_step_and_later_ones_are_void_and_earlier_ones_stay(tmp_path: Path) -> None:
    run = recorded(tmp_path, STEPS)
    assert sample_again(run, store_of(run, 2), 4, STEPS) == 2 * (STEPS - 3)
    assert found_steps(run) == [0, 1, 2]


def test_what_is_recorded_afterwards_counts_for_a_resumed_run_and_for_a_replay(tmp_path: Path) -> None:
    run = recorded(tmp_path, STEPS)
    sample_again(run, store_of(run), 4, STEPS)
    recorded(tmp_path, STEPS, b"another", first=3)
    assert found_steps(run) == list(range(STEPS))
    filler = RecordedOrders(Journal.read(run.journal).segments)
    for step in range(STEPS):
        orders = toy_orders(step, count=2)
        filler.submit(orders)
        expected = filled_of(step, b"another" if step >= 3 else None)
        assert list(map(plain, filler.collect([order.order_id for order in orders]))) == list(map(plain, expected))


def test_doing_it_twice_is_doing_it_once(tmp_path: Path) -> None:
    run = recorded(tmp_path, STEPS)
    assert sample_again(run, store_of(run), 4, STEPS) > 0
    assert sample_again(run, store_of(run), 4, STEPS) == 0
    assert found_steps(run) == [0, 1, 2]


@pytest.mark.parametrize("num_bytes", range(1, 20 + len(pack_void(3))))
def test_a_void_that_was_cut_short_is_none(tmp_path: Path, num_bytes: int) -> None:
    run = recorded(tmp_path, 5)
    sample_again(run, store_of(run), 4, STEPS)
    tail = max(run.journal.glob("*.log"))
    tail.write_bytes(tail.read_bytes()[:-num_bytes])
    assert found_steps(run) == [0, 1, 2, 3, 4]
    assert sample_again(run, store_of(run), 4, STEPS) == 4
    assert found_steps(run) == [0, 1, 2]


@pytest.mark.parametrize("step", [1, 2, STEPS + 1])
def test_a_step_that_was_learned_from_or_never_comes_is_refused(tmp_path: Path, step: int) -> None:
    run = recorded(tmp_path, STEPS)
    before = [path.read_bytes() for path in sorted(run.journal.iterdir())]
    with pytest.raises(ConfigError, match=rf"--resample-step got {step}, .* give a step from 3 to {STEPS}"):
        sample_again(run, store_of(run, 1, 2), step, STEPS)
    assert [path.read_bytes() for path in sorted(run.journal.iterdir())] == before


def test_a_compacted_journal_gives_a_void_up_only_after_what_it_voids(tmp_path: Path) -> None:
    run = recorded(tmp_path, 4)
    sample_again(run, store_of(run), 3, STEPS)
    journal = Journal.open(run.journal, segment_bytes=SEGMENT_BYTES)
    recorder = JournalRecorder(journal, 0, anything)
    for step in range(2, STEPS):
        recorder.record(filled_of(step, b"another"))
        recorder.checkpointed(step)
        recorder.forget_before(step)
        found = Index(journal.reading().segments).found.values()
        kept = [place.read() for place in found]
        assert pack(encode(filled_of(step, b"another")[0])) in kept
        assert not any(pack(encode(filled_order)) in kept for filled_order in filled_of(step))
    journal.close()


def test_the_gate_and_a_crash_name_the_way_back_and_other_errors_do_not(tmp_path: Path) -> None:
    command = f"python -m launch resume {tmp_path} --resample-step 7"
    gate = with_way_back(Mismatch("Step 7: they differ."), tmp_path, 7)
    assert isinstance(gate, Mismatch) and str(gate).startswith("Step 7: they differ. ") and command in str(gate)
    crash = IndexError("index out of range in self")
    assert with_way_back(crash, tmp_path, 7) is crash and command in crash.__notes__[0]
    for error in (RunDirError("full"), OSError("gone"), KeyboardInterrupt()):
        assert with_way_back(error, tmp_path, 7) is error and not hasattr(error, "__notes__")
