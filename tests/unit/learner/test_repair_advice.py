"""Damage in the middle of the journal: where, which steps before it are safe, and a way out that works."""

from pathlib import Path

import pytest

from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.journal import Journal
from learner.durable.repair_advice import repair_advice
from protocol.codec import encode, pack
from protocol.messages import FilledOrder
from shared.errors import DamageError
from tests.support.fakes import tiny_group
from tests.support.wire_examples import timings

STEPS = 4


def record_of(step: int) -> bytes:
    name = f"train/{step:06d}"
    group = tiny_group([1.0, 0.0], [3, 2], group_id=f"{name}/000", seed=step)
    filled_order = FilledOrder(
        order_id=f"{name}/u0000", policy_version=step, adapter_sha256="0" * 64, groups=(group,), timings=timings()
    )
    return pack(encode(filled_order))


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A journal of four steps, its first segment."""
    journal = Journal.open(tmp_path / "journal")
    for step in range(STEPS):
        journal.append(record_of(step))
        journal.sync()
    journal.close()
    return tmp_path / "journal" / "000001.log"


def damage(segment: Path, record: int) -> int:
    """Flip a bit in the middle of a record; where that record begins."""
    lengths = [len(record_of(step)) + 20 for step in range(STEPS)]
    data = bytearray(segment.read_bytes())
    start = sum(lengths[:record])
    data[start + lengths[record] // 2] ^= 1
    segment.write_bytes(data)
    return start


def sentence(folder: Path, store: CheckpointStore) -> str:
    with pytest.raises(DamageError) as caught, repair_advice(store):
        Journal.open(folder)
    return str(caught.value)


def test_it_says_which_steps_are_safe_and_what_the_cut_costs(tmp_path: Path, segment: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(Checkpoint(step=1, files={"a": b""}))
    start = damage(segment, 2)
    said = sentence(segment.parent, store)
    for part in (
        f"at byte {start}, record 2",
        f"`truncate -s {start} {segment}`",
        "The 2 records before it are whole, up to order train/000001/u0000 of step 2",
        "1 behind it in this file are whole too",
        "The newest checkpoint is of step 1",
    ):
        assert part in said


def test_the_first_record_has_nothing_before_it(tmp_path: Path, segment: Path) -> None:
    damage(segment, 0)
    said = sentence(segment.parent, CheckpointStore(tmp_path / "checkpoints", keep=1))
    assert "It is the first record; 3 behind it in this file are whole." in said
    assert "The newest checkpoint is of step 0" in said


def test_a_journal_that_is_whole_is_not_spoken_of(tmp_path: Path, segment: Path) -> None:
    with repair_advice(CheckpointStore(tmp_path / "checkpoints", keep=1)):
        assert Journal.open(segment.parent).next_record == STEPS
